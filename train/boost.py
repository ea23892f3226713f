"""Boost-tuning (SpecInfer, 2305.09781, section 3): a further draft model learns what the first one
misses.

There whole samples are left out that the first model already matches; here it is single tokens,
which is the same for samples of one token.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftsmith.data.dataset import Document, PackedRows
from draftsmith.drafters.draft_model import load_ready, ready_writer
from draftsmith.drafters.projection import top_tokens
from draftsmith.drafters.slots import guessed
from draftsmith.drafters.target import Target
from draftsmith.drafters.writer import Writer
from draftsmith.recipes.schema import DraftModelConfig, Recipe


def without_known(recipe: Recipe, target: Target, documents: list[Document]) -> list[Document]:
    """The documents, tokens that the boosted drafter guesses marked as known, if it boosts one."""
    match recipe.drafter:
        case DraftModelConfig(models=(), boosts=str(name)):
            model = load_ready(name, target, knob="drafter.boosts")
            first = ready_writer(model, target.vocab_size)
            rows = recipe.train.rows_per_micro_batch
            return mark_known(documents, first, recipe.data.max_length, rows, recipe.train.chunk)
    return documents


@torch.no_grad()
def mark_known(
    documents: Sequence[Document], first: Writer, max_length: int, rows: int, chunk: int
) -> list[Document]:
    """Mark every token that is the model's likeliest one after the text before it."""
    packed, marked = PackedRows(documents, max_length), list(documents)
    device, adjust = first.model.device, first.model.adjust
    for start in range(0, len(packed), rows):
        index = list(range(start, min(start + rows, len(packed))))
        batch = packed.batch(index).to(device)
        states = first.states(batch).flatten(0, 1)[:, None]  # [B * T, 1, D]
        best = top_tokens(states, first.as_head(), 1, chunk=chunk, adjust=adjust)
        known = guessed(batch, best.view(batch.ids.shape)).cpu()
        for place, row in enumerate(index):
            for number, i in enumerate(packed.rows[row]):
                own = known[place, (batch.documents[place] == number).cpu()]
                marked[i] = replace(documents[i], known=tuple(own.tolist()))
    return marked
