"""The native checkpoint of a drafter: a folder that says everything about itself.

The drafter names its tensors' file and gives its tensors and `config.json` in the layout that its
method has elsewhere. What such a layout cannot say (draft vocabulary, tree, target, recipe) lies
in `draftsmith.json`.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafters.card import model_card
from draftsmith.drafters.fingerprint import remembered
from draftsmith.drafters.hub import fetch
from draftsmith.drafters.hub_name import hub_name
from draftsmith.drafters.methods import CONFIGS, Drafter, build
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import sync, write_text
from draftsmith.recipes.schema import DrafterConfig

CONFIG, META, CARD = "config.json", "draftsmith.json", "README.md"
FORMAT = 1

log = logging.getLogger(__name__)


def save_drafter(
    drafter: Drafter,
    folder: Path,
    metadata: dict[str, Any],
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write the folder whole or not at all, re-open it and compare every tensor.

    metadata: JSON values kept under their names (recipe, target fingerprint, tree, calibration,
    ...). beside: writes what else belongs into it.
    """
    meta = {
        "format": FORMAT,
        "drafter": drafter.config.model_dump(mode="json"),
        "draft_vocab": None if drafter.draft_ids is None else drafter.draft_ids.tolist(),
        **metadata,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write_weights(temporary, drafter)
        drafter.native_extras(temporary)
        if beside is not None:
            beside(temporary)
        write_json(temporary / CONFIG, drafter.native_config(meta))
        write_json(temporary / META, meta)
        write_text(temporary / CARD, model_card(meta))
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_weights(folder: Path, drafter: Drafter) -> None:
    """The drafter's tensors, if it has any, read back and compared."""
    if drafter.native_file is None:
        return
    weights, tensors = folder / drafter.native_file, drafter.native_tensors()
    save_file(tensors, weights, metadata={"format": "pt"})
    sync(weights)
    compare(load_file(weights), tensors, weights.name)


def load_drafter(place: Path | str, target: Target) -> Drafter:
    """Rebuild a drafter to decode with, in the target's dtype, from its folder or its name on the
    Hub (`org/name`, `org/name@revision`).

    Raises UserError for a broken folder, another target, or what the Hub does not give.
    """
    remote = hub_name(place) if isinstance(place, str) else None
    folder = Path(place) if remote is None else fetch(remote)
    meta = read_metadata(folder)
    check_target(meta, target, folder)
    config = drafter_config(meta)
    ids = None if meta["draft_vocab"] is None else torch.tensor(meta["draft_vocab"])
    drafter = build(config, target, ids)
    tensors = read_weights(folder, drafter.native_file)
    try:
        drafter.load_native(tensors)
    except ValueError as error:
        raise broken(folder, error) from error
    return drafter.to(target.dtype).eval()


def read_weights(folder: Path, name: str | None) -> dict[str, Tensor]:
    """The tensors of a drafter's file; none where it has no file. Raises UserError."""
    if name is None:
        return {}
    try:
        tensors = load_file(folder / name)
    except (SafetensorError, OSError) as error:
        raise broken(folder, error) from error
    if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
        raise broken(folder, ValueError(f"{name} holds NaN or infinite values"))
    return tensors


def read_metadata(folder: Path) -> dict[str, Any]:
    """draftsmith.json of a drafter's folder; UserError where it is missing or damaged."""
    with contextlib.suppress(OSError):  # then it says below what is missing
        restore(folder)
    if not (folder / META).is_file():
        raise UserError(
            f"{folder} is no drafter: it has no {META}; give the `drafter` folder of a run"
        )
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
        form = read_format(meta)
        if form == FORMAT:
            check_metadata(meta)
    except (OSError, ValueError, RecursionError) as error:
        raise broken(folder, error) from error
    if form != FORMAT:
        raise UserError(f"{folder}/{META}: format {FORMAT} is read here, the file is of {form}")
    return meta


def read_format(meta: Any) -> int:
    """The format that a file says it is of. Raises ValueError where it says nothing."""
    form = meta.get("format") if isinstance(meta, dict) else None
    if type(form) is not int:
        raise ValueError(f"{META} does not say which format it is of")
    return form


def check_metadata(meta: dict[str, Any]) -> None:
    """Raises ValueError for what `save_drafter` did not write."""
    target = meta.get("target")
    size = target.get("vocab_size") if isinstance(target, dict) else None
    if type(size) is not int or size < 1:
        raise ValueError(f"{META} does not describe the target")
    config, ids = drafter_config(meta), check_draft_ids(meta, size)
    if meta.get("tree") is not None:
        check_tree(meta["tree"], depth=config.depth, rows=size if ids is None else len(ids))


def drafter_config(meta: dict[str, Any]) -> DrafterConfig:
    """The drafter's knobs. Raises ValueError for what is none."""
    given = meta.get("drafter")
    kind = given.get("kind") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise ValueError(f"{META} does not describe a drafter")
    try:
        return CONFIGS[kind].model_validate(given)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, ("drafter", *detail["loc"])))
        raise ValueError(f"{META}: {key}: {detail['msg']}") from error


def check_draft_ids(meta: dict[str, Any], vocab_size: int) -> list[int] | None:
    """The draft vocabulary. Raises ValueError unless it is null or ascending target ids."""
    ids = meta.get("draft_vocab", ())
    if ids is None:
        return None
    whole = isinstance(ids, list) and len(ids) > 0 and all(type(token) is int for token in ids)
    if not whole or ids[0] < 0 or ids[-1] >= vocab_size or any(a >= b for a, b in pairwise(ids)):
        raise ValueError(f"{META}: draft_vocab is not null or ascending ids below {vocab_size}")
    return list(ids)


def check_tree(paths: Any, *, depth: int, rows: int) -> None:
    """Raises ValueError unless these are a tree's nodes, within the drafter's slots and guesses."""
    listed = isinstance(paths, list) and all(isinstance(path, list) for path in paths)
    if not listed or not all(type(rank) is int for path in paths for rank in path):
        raise ValueError(f"{META}: tree is not a list of nodes, each a list of ranks")
    tree = Tree(tuple(map(tuple, paths)))
    if max(map(len, paths)) > depth or tree.width > rows:
        raise ValueError(f"{META}: its tree is deeper or wider than the drafter")


def update_metadata(folder: Path, changes: dict[str, Any]) -> None:
    """Change entries of draftsmith.json, atomically. The model card names none that change."""
    write_json(folder / META, {**read_metadata(folder), **changes})


def check_target(meta: dict[str, Any], target: Target, folder: Path) -> None:
    """A drafter reads one target's states; shapes must agree, and the template where there is a
    tokenizer (dtype may differ).

    A warning where it looks like another model of the same shape: drafts would be poor.
    """
    same = ["architecture", "hidden_size", "vocab_size"]
    if target.tokenizer is not None:
        same.append("template")
    now = {**target.fingerprint, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    trained = remembered(meta["target"], target.fingerprint)
    differing = [
        f"{key} {trained.get(key)} / {now[key]}" for key in same if trained.get(key) != now[key]
    ]
    if trained["adapter"] != now["adapter"]:
        raise UserError(
            f"{folder} was trained with the adapter {trained['adapter']} on its target, and the "
            f"target has {now['adapter']}; evaluate the drafter's own folder, which holds its "
            "adapter"
        )
    if differing:
        raise UserError(
            f"{folder} was trained for target {trained.get('model')!r}, which differs from "
            f"{target.name!r} in {', '.join(differing)} (trained / given); evaluate it with the "
            "target that it was trained for"
        )
    unlike = [
        f"{key} {trained.get(key)} / {now[key]}"
        for key in ("model", "revision", "origin", "content")
        if trained.get(key) != now[key] != "none"  # a model in memory does not say it all
    ]
    if trained["quantisation"] != now["quantisation"]:
        unlike.append(f"quantisation {trained['quantisation']} / {now['quantisation']}")
    if unlike:
        log.warning(
            "%s was trained for another target (%s; trained / given); its drafts may be poor",
            folder,
            ", ".join(unlike),
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
    reason = " ".join(str(error).split())
    return UserError(
        f"{folder}: broken drafter checkpoint ({reason}); train again or restore the folder"
    )


def compare(written: dict[str, Tensor], wanted: dict[str, Tensor], name: str) -> None:
    """What was read back must be what was meant."""
    if written.keys() != wanted.keys() or any(
        not torch.equal(written[k], wanted[k]) for k in wanted
    ):
        raise OSError(f"{name} read back differs from what was written; is the disk failing?")


def write_json(path: Path, value: Any) -> None:
    """Atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` where `folder` is; the old one is whole until the new one is."""
    os.chmod(new, 0o755)
    restore(folder)
    old = backup(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    try:
        os.rename(new, folder)
    except BaseException:
        restore(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def backup(folder: Path) -> Path:
    """Where the old folder waits for the new one."""
    return folder.with_name(f".{folder.name}.old")


def restore(folder: Path) -> None:
    """Put the old folder back where a process died (or failed) between the two renames."""
    if not folder.exists() and backup(folder).is_dir():
        os.rename(backup(folder), folder)


def sweep(folder: Path) -> None:
    """Remove the temporaries that killed processes left beside a folder. One process saves it."""
    name = re.compile(rf"\.{re.escape(folder.name)}-[a-z0-9_]{{8}}")  # as mkdtemp names them
    for path in folder.parent.iterdir():
        if name.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
