"""Prompt lookup (Saxena, github.com/apoorvumang/prompt-lookup-decoding): the text is its own
drafter.

The last few tokens are looked for earlier in the prompt and the answer; what followed them there is
drafted, a point mass. The longest suffix that occurs is taken, and its first occurrence, as
transformers' PromptLookupCandidateGenerator does. (That one also ends drafts before an end token,
since its loop would read past it.) Without an occurrence nothing is drafted.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.context import Context, chains
from draftsmith.drafters.proposal import Draw, Plan, Proposal, Verdict
from draftsmith.drafters.slots import NO_GUESS, Batch, Roots, TargetStates, texts_to_roots
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import PromptLookupConfig


class PromptLookup(nn.Module):
    """Nothing trained, nothing kept but the text."""

    native_file = None
    width = 1
    draws: tuple[Draw, ...] = ()
    taps: tuple[int, ...] = ()
    draft_ids = None

    def __init__(
        self, config: PromptLookupConfig, target: Target, draft_ids: Tensor | None
    ) -> None:
        super().__init__()
        self.config, self.depth = config, config.draft_tokens

    def count(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> None:
        """Answers teach nothing here."""

    def find(self, text: Tensor, count: int) -> Tensor:
        """At most `count` drafts after a text [T]."""
        sizes = self.config.max_ngram, self.config.min_ngram
        return continuation(text, longest=sizes[0], shortest=sizes[1])[:count]

    def start(self, ids: Tensor, lengths: Tensor, states: TargetStates) -> Context:
        """After prefill: the prompts are the text so far."""
        return Context.of(ids, lengths)

    def propose(self, state: Context, root: Tensor, plan: Plan) -> Proposal:
        """A chain as deep as the plan's tree, or as long as the text goes on."""
        count = len(plan.tree.paths[-1])
        return chains([self.find(text, count) for text in state.texts(root)], root.device)

    def commit(
        self, state: Context, proposal: Proposal, verdict: Verdict, states: TargetStates
    ) -> Context:
        """The text grows."""
        return state.after(proposal, verdict)

    def select(self, state: Context, rows: Tensor) -> Context:
        """These rows of the batch."""
        return state.select(rows)

    def guesses(
        self,
        batch: Batch,
        states: TargetStates,
        roots: Roots,
        *,
        slots: int,
        count: int,
        chunk: int,
    ) -> Tensor:
        """The drafts after every root, [N, slots, 1]; NO_GUESS where there is none."""
        found = torch.full((len(roots.row), slots, 1), NO_GUESS)
        for group, text in enumerate(texts_to_roots(batch, roots)):
            drafts = self.find(text, slots)
            found[group, : len(drafts), 0] = drafts
        return found.to(batch.ids.device)

    def assistance(self) -> dict[str, Any] | None:
        """What transformers calls the same; it always goes down to single tokens."""
        return {
            "prompt_lookup_num_tokens": self.config.draft_tokens,
            "max_matching_ngram_size": self.config.max_ngram,
        }

    def cache_bytes_per_token(self) -> int:
        """One id."""
        return 8

    def native_tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def load_native(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to load."""

    def native_config(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """config.json: under transformers' names for the same."""
        return {
            "model_type": "prompt_lookup",
            "prompt_lookup_num_tokens": self.config.draft_tokens,
            "max_matching_ngram_size": self.config.max_ngram,
        }

    def native_extras(self, folder: Path) -> None:
        """None."""


def continuation(text: Tensor, *, longest: int, shortest: int) -> Tensor:
    """What followed the longest suffix of a text [T] at its first earlier occurrence; maybe empty.

    Suffixes of `longest` down to `shortest` tokens are tried.
    """
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        windows = text[:-1].unfold(0, size, 1)  # every window with a token behind it
        found = (windows == text[-size:]).all(dim=1).nonzero()
        if len(found):
            return text[int(found[0]) + size :]
    return text[:0]
