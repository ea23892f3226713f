"""Drafters of every kind on a tiny target, random weights, in folders as training writes them."""

from pathlib import Path
from typing import Any, cast

import torch

from draftsmith.drafters.checkpoint import save_drafter, target_metadata
from draftsmith.drafters.methods import CONFIGS, Drafter, Untrained, build
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import Recipe

KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "heads": 5},
    "medusa low rank": {"kind": "medusa", "heads": 5, "projection": "low_rank", "rank": 4},
    "medusa own": {"kind": "medusa", "heads": 5, "projection": "own"},
    "mtp": {"kind": "mtp", "draft_tokens": 3, "start": "random"},
    "mtp hidden first": {"kind": "mtp", "draft_tokens": 2, "order": "hidden_first"},
    "dflash": {"kind": "dflash", "block_size": 4, "layers": 1, "taps": [0]},
    "draft_model": {"kind": "draft_model", "layers": 1, "draft_tokens": 3},
    "ngram": {"kind": "ngram", "draft_tokens": 3},
    "prompt_lookup": {"kind": "prompt_lookup", "draft_tokens": 3},
}


def make_drafter(
    target: Target, knobs: dict[str, Any], *, draft_ids: torch.Tensor | None = None, seed: int = 0
) -> Drafter:
    """A drafter of this kind, its weights moved at random."""
    config = CONFIGS[knobs["kind"]].model_validate(knobs)
    torch.manual_seed(seed)
    drafter = build(config, target, draft_ids)
    if config.trained_slots:
        with torch.no_grad():
            for value in cast(torch.nn.Module, drafter).parameters():
                if value.requires_grad:
                    value.add_(0.1 * torch.randn_like(value))
    else:
        text = [1, 20, 30, 40, 20, 30, 41, 20, 30, 40] * 3
        cast(Untrained, drafter).count([(text, [True] * len(text))])
    return drafter


def write_drafter(target: Target, folder: Path, knobs: dict[str, Any], **more: Any) -> Path:
    """Its folder, with what training writes into it. `more`: entries of draftsmith.json."""
    ids = more.pop("draft_ids", None)
    recipe = Recipe.model_validate(
        {
            "name": "mine",
            "target": {"model": target.name, "dtype": "float32", "device": "cpu"},
            "drafter": knobs,
        }
    ).model_dump(mode="json")
    drafter = make_drafter(target, knobs, draft_ids=ids)
    metadata = {"target": target_metadata(target), "recipe": recipe, "steps": 3, **more}
    save_drafter(drafter, folder, metadata)
    return folder
