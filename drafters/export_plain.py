"""Drafters whose native folder is what engines read: block drafters and small draft models."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantModel

from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dflash_format import check_folder
from draftsmith.drafters.dflash_import import import_dflash
from draftsmith.drafters.dflash_speculators import check_speculators, export_speculators
from draftsmith.drafters.draft_model import DraftModel
from draftsmith.drafters.engine_files import Source, copy_files, read_config, refuse
from draftsmith.drafters.export import RENAMED, assistant_config, export_assistant
from draftsmith.drafters.methods import build
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DFlashConfig, DraftModelConfig

OURS = ("draftsmith.json", "README.md")


# --- block drafters ---


def write_dflash(source: Source, folder: Path) -> None:
    """z-lab's layout: config.json and model.safetensors."""
    copy_files(source.folder, folder, without=OURS)


def read_dflash(folder: Path, source: Source) -> DFlash:
    """The drafter of z-lab's layout, from all tokens. Raises ValueError."""
    check_folder(folder)
    try:
        found = import_dflash(folder, source.target)
    except UserError as error:
        raise ValueError(str(error)) from error
    return found.to(source.target.dtype).eval()


def write_speculators(source: Source, folder: Path) -> None:
    """speculators' layout; the target as the drafter was trained for it."""
    made = source.meta["target"]
    verifier, architectures = made["model"], [made["architecture"]]
    export_speculators(source.folder, folder, verifier=verifier, architectures=architectures)


def read_speculators(folder: Path, source: Source) -> DFlash:
    """The drafter of speculators' layout, from all tokens. Raises ValueError."""
    check_speculators(folder)
    try:
        found = import_dflash(folder, source.target)
    except UserError as error:
        raise ValueError(str(error)) from error
    return found.to(source.target.dtype).eval()


def write_assistant(source: Source, folder: Path) -> None:
    """The layout of transformers' own class."""
    export_assistant(source.folder, folder)


def read_assistant(folder: Path, source: Source) -> DFlash:
    """The drafter of transformers' layout. Raises ValueError."""
    native = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    if read_config(folder) != json.loads(json.dumps(assistant_config(native))):
        raise ValueError("config.json does not say what the drafter's own says")
    back = {theirs: mine for mine, theirs in RENAMED.items()}
    tensors = load_file(folder / "model.safetensors")
    given = source.drafter.config
    assert isinstance(given, DFlashConfig)
    config = given.model_copy(update={"draft_vocab": None})
    made = DFlash(config, source.target, None)
    made.load_native({back.get(name, name): value for name, value in tensors.items()})
    return made.to(source.target.device).to(source.target.dtype).eval()


def run_assistant(folder: Path, source: Source, prompt: Tensor, count: int) -> Tensor:
    """`generate(assistant_model=.., speculation_type="dflash")`. Raises ValueError for tensors that
    the class misses or leaves over.
    """
    target = source.target
    load: Any = MuseGlimmerAssistantModel.from_pretrained
    model, found = load(folder, output_loading_info=True, dtype=target.dtype)
    if found["missing_keys"] or found["unexpected_keys"]:
        raise ValueError(f"transformers loads it otherwise: {found}")
    return generate(
        source, prompt, count, assistant_model=model.to(target.device), speculation_type="dflash"
    )


# --- small draft models ---


def write_draft_model(source: Source, folder: Path) -> None:
    """A plain Hugging Face folder."""
    models = source.meta["drafter"]["models"]
    if models:
        raise refuse(
            "An engine",
            f"it is made of ready models, which are files already: name {', '.join(models)}",
        )
    copy_files(source.folder, folder, without=OURS)


def read_draft_model(folder: Path, source: Source) -> DraftModel:
    """The model as a ready one: vocabulary and token ids must be the target's. ValueError."""
    size = read_config(folder).get("vocab_size")
    if size != source.target.vocab_size:
        raise ValueError(f"vocab_size is {size}, and the target's is {source.target.vocab_size}")
    config = DraftModelConfig(
        kind="draft_model", models=(str(folder),), draft_tokens=source.drafter.depth
    )
    try:
        made = build(config, source.target, None)
    except UserError as error:
        raise ValueError(str(error)) from error
    assert isinstance(made, DraftModel)
    return made.to(source.target.dtype).eval()


def run_draft_model(folder: Path, source: Source, prompt: Tensor, count: int) -> Tensor:
    """`generate(assistant_model=..)`."""
    target = source.target
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
    return generate(source, prompt, count, assistant_model=model.to(target.device))


@torch.no_grad()
def generate(source: Source, prompt: Tensor, count: int, **how: object) -> Tensor:
    """The target's own `generate`, greedily."""
    target = source.target
    found: Tensor = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
        **how,
    )
    return found
