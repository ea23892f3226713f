"""The native checkpoint of a drafter: a folder that says everything about itself.

Medusa keeps FasterDecoding's layout: `medusa_lm_head.safetensors` with `{i}.0.linear.weight`,
`{i}.0.linear.bias` and, for own full-vocabulary heads, `{i}.1.weight`; `config.json` is the
superset that vLLM <= 0.32 reads. What that layout cannot say (draft vocabulary, low-rank factors,
tree, target, recipe) lies in `draftsmith.json` and under key names of our own.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafters.card import model_card
from draftsmith.drafters.medusa import MedusaHeads
from draftsmith.drafters.methods import CONFIGS, build
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import sync, write_text

WEIGHTS, CONFIG, META, CARD = (
    "medusa_lm_head.safetensors",
    "config.json",
    "draftsmith.json",
    "README.md",
)
FORMAT = 1


def save_drafter(drafter: MedusaHeads, folder: Path, metadata: dict[str, Any]) -> None:
    """Write the folder whole or not at all, re-open it and compare every tensor.

    metadata: JSON values kept under their names (recipe, target fingerprint, tree, calibration,
    ...).
    """
    tensors = to_native(drafter)
    meta = {
        "format": FORMAT,
        "drafter": drafter.config.model_dump(mode="json"),
        "draft_vocab": None if drafter.draft_ids is None else drafter.draft_ids.tolist(),
        **metadata,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        sync(temporary / WEIGHTS)
        write_json(temporary / CONFIG, native_config(drafter, meta))
        write_json(temporary / META, meta)
        write_text(temporary / CARD, model_card(meta))
        compare(load_file(temporary / WEIGHTS), tensors)
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def to_native(drafter: MedusaHeads) -> dict[str, Tensor]:
    """Tensors under their file names."""
    tensors: dict[str, Tensor] = {}
    for i in range(drafter.depth):
        tensors[f"{i}.0.linear.weight"] = drafter.weight[i].detach()
        tensors[f"{i}.0.linear.bias"] = drafter.bias[i].detach()
        if drafter.own is not None:
            tensors[own_key(drafter, i)] = drafter.own[i].detach()
        if drafter.down is not None:
            tensors[f"{i}.low_rank.down"] = drafter.down[i].detach()
    return {name: value.contiguous().cpu() for name, value in tensors.items()}


def own_key(drafter: MedusaHeads, i: int) -> str:
    """`{i}.1.weight` only for what that name means elsewhere: a whole [V, D] projection."""
    if drafter.config.projection == "low_rank":
        return f"{i}.low_rank.up"
    return f"{i}.1.weight" if drafter.draft_ids is None else f"{i}.draft_rows.weight"


def native_config(drafter: MedusaHeads, meta: dict[str, Any]) -> dict[str, Any]:
    """config.json: what FasterDecoding and vLLM <= 0.32 read."""
    own = drafter.config.projection == "own" and drafter.draft_ids is None
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "medusa_num_heads": drafter.depth,
        "medusa_num_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": not own,
        "hidden_size": drafter.weight.shape[-1],
        "vocab_size": meta["target"]["vocab_size"],
        "base_model_name_or_path": meta["target"]["model"],
        "version": "2",
    }


def load_drafter(folder: Path, target: Target) -> MedusaHeads:
    """Rebuild a drafter to decode with, in the target's dtype.

    Raises UserError for a broken folder or another target.
    """
    meta = read_metadata(folder)
    check_target(meta, target, folder)
    try:
        config = CONFIGS[meta["drafter"]["kind"]].model_validate(meta["drafter"])
        tensors = load_file(folder / WEIGHTS)
    except (KeyError, ValidationError, SafetensorError, OSError) as error:
        raise broken(folder, error) from error
    ids = None if meta["draft_vocab"] is None else torch.tensor(meta["draft_vocab"])
    drafter = build(config, target, ids)
    expected = to_native(drafter)
    if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in tensors.items()}:
        raise broken(folder, ValueError(f"{WEIGHTS} holds other tensors than {META} describes"))
    if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
        raise broken(folder, ValueError(f"{WEIGHTS} holds NaN or infinite values"))
    with torch.no_grad():
        for i in range(drafter.depth):
            drafter.weight[i].copy_(tensors[f"{i}.0.linear.weight"])
            drafter.bias[i].copy_(tensors[f"{i}.0.linear.bias"])
            if drafter.own is not None:
                drafter.own[i].copy_(tensors[own_key(drafter, i)])
            if drafter.down is not None:
                drafter.down[i].copy_(tensors[f"{i}.low_rank.down"])
    return drafter.to(target.dtype).eval()


def read_metadata(folder: Path) -> dict[str, Any]:
    """draftsmith.json of a drafter's folder."""
    if not (folder / META).is_file():
        raise UserError(
            f"{folder} is no drafter: it has no {META}; give the `drafter` folder of a run"
        )
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except ValueError as error:
        raise broken(folder, error) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(
            f"{folder}/{META}: format {FORMAT} is read here; the file does not say it is one"
        )
    return meta


def update_metadata(folder: Path, changes: dict[str, Any]) -> None:
    """Change entries of draftsmith.json, atomically. The model card names none that change."""
    write_json(folder / META, {**read_metadata(folder), **changes})


def check_target(meta: dict[str, Any], target: Target, folder: Path) -> None:
    """A drafter reads one target's states; shapes and template must agree (dtype may differ)."""
    trained = meta["target"]
    same = ("architecture", "template", "hidden_size", "vocab_size")
    now = {**target.fingerprint, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    differing = [
        f"{key} {trained.get(key)} / {now[key]}" for key in same if trained.get(key) != now[key]
    ]
    if differing:
        raise UserError(
            f"{folder} was trained for target {trained.get('model')!r}, which differs from "
            f"{target.name!r} in {', '.join(differing)} (trained / given); evaluate it with the "
            "target that it was trained for"
        )


def target_metadata(target: Target) -> dict[str, Any]:
    """The `target` entry of draftsmith.json."""
    return {
        **target.fingerprint,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }


def broken(folder: Path, error: Exception) -> UserError:
    """One line for a folder that cannot be read."""
    return UserError(
        f"{folder}: broken drafter checkpoint ({error}); train again or restore the folder"
    )


def compare(written: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """What was read back must be what was meant."""
    if written.keys() != wanted.keys() or any(
        not torch.equal(written[k], wanted[k]) for k in wanted
    ):
        raise OSError(f"{WEIGHTS} read back differs from what was written; is the disk failing?")


def write_json(path: Path, value: Any) -> None:
    """Atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` where `folder` is; the old one is whole until the new one is."""
    os.chmod(new, 0o755)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(new, folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
