"""Targets with an adapter: made for training, and loaded with the drafter that was trained beside
it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.drafters.adapter import FOLDER, Adapter, fresh, stored
from draftsmith.drafters.fingerprint import NONE
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import AdapterConfig, TargetConfig


def adapt(target: Target, config: AdapterConfig) -> Adapter:
    """Wrap a target's layers and head in new adapters. Raises UserError."""
    adapter = fresh(target.model, config)
    if config.checkpointing:
        adapter.checkpoint(target.decoder_layers())
    target.adapter = adapter
    return adapter


def load_target(config: TargetConfig, folder: Path, meta: Mapping[str, Any]) -> Target:
    """The target of the drafter in a folder, with the adapter that the folder holds, if any.

    meta: its draftsmith.json. Raises UserError.
    """
    target = Target.load(config)
    digest = meta["target"].get("adapter", NONE)
    if digest != NONE:
        take_on(target, folder / FOLDER, digest)
    return target


def take_on(target: Target, folder: Path, digest: str) -> None:
    """Change a target into the adapted one. Raises UserError where the adapter is another.

    Plain weights take the adapter up; quantised ones stay as they are, with the adapter beside
    them, as they were in training.
    """
    adapter = stored(target.model, folder)
    if adapter.digest() != digest:
        raise UserError(
            f"{folder}: this is not the adapter that its drafter was trained with; restore the "
            "folder"
        )
    target.fingerprint = {**target.fingerprint, "adapter": digest}
    if target.fingerprint["quantisation"] == NONE:
        target.served_head = adapter.merge()
    else:
        target.adapter = adapter
    target.check_head()
