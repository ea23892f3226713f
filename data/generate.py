"""Batched generation by the target: the transformers backend of distillation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftsmith.drafters.layout import last_of, padded
from draftsmith.drafters.sampler import Sampling, inverse, standardise
from draftsmith.drafters.target import Target

STEPS_PER_LOOK = 4  # between looks at which rows have ended: each look waits for the device

Progress = Callable[[float], None]  # answered prompts of the batch so far, in parts


@dataclass(frozen=True)
class Request:
    """A prompt as the target sees it, how it is answered, and the seed of its random numbers."""

    key: str
    ids: list[int]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Answer:
    """What the target said, its end token included when it stopped by itself."""

    ids: list[int]
    finish_reason: Literal["stop", "length"]
    logprobs: list[float] | None = None  # of every id, where a server told them


@torch.inference_mode()
def answer(
    target: Target, batch: Sequence[Request], max_new_tokens: int, progress: Progress
) -> list[Answer]:
    """Generate for a whole batch. Rows that ended leave it once a quarter of them has."""
    rows = torch.arange(len(batch), device=target.device)  # [b] who is still generating
    picks = Picks(batch, max_new_tokens, target.device)
    ends = torch.tensor(target.eos_ids, dtype=torch.int64, device=target.device)
    tokens = torch.zeros((len(batch), max_new_tokens), dtype=torch.int64, device=target.device)
    ended = torch.zeros(len(batch), dtype=torch.bool, device=target.device)
    state = Decoding(target, [request.ids for request in batch])
    hidden = state.prefill()  # [b, D]
    for step in range(max_new_tokens):
        picked = picks(target.logits(hidden), rows, step)  # [b]
        tokens[rows, step] = picked
        ended[rows] |= torch.isin(picked, ends)
        if step + 1 == max_new_tokens:
            break
        if (step + 1) % STEPS_PER_LOOK == 0:
            live = (~ended[rows]).nonzero()[:, 0]
            progress(len(batch) - len(live) * (1 - (step + 1) / max_new_tokens))
            if not len(live):
                break
            if len(live) <= 0.75 * len(rows):
                rows, picked = rows[live], picked[live]
                state.select(live)
        hidden = state.feed(picked)
    return [until_end(row, target.eos_ids) for row in tokens.tolist()]


class Decoding:
    """Rows of unequal prompts in one cache."""

    def __init__(self, target: Target, prompts: Sequence[list[int]]) -> None:
        self.target, self.cache = target, target.new_cache()
        self.ids, self.lengths = padded(prompts, target.device)

    def prefill(self) -> Tensor:
        """Feed the prompts; the states [B, D] of their last tokens."""
        states = self.target.prefill(self.ids, self.lengths, self.cache)
        return last_of(states.final, self.lengths)

    def feed(self, tokens: Tensor) -> Tensor:
        """Feed one token [b] of every row; their states [b, D]."""
        return self.target.step(tokens[:, None], self.cache).final[:, 0]

    def select(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.cache.select(rows)


class Picks:
    """Chooses the next token of every row; sampled rows use random numbers of their own.

    One uniform number per row and step, through the inverse of the cumulated law: a row's tokens
    depend on its key, and not on who else is in the batch.
    """

    def __init__(self, batch: Sequence[Request], steps: int, device: torch.device) -> None:
        self.sampling = next((r.sampling for r in batch if not r.sampling.greedy), Sampling())
        self.sampled = torch.tensor([not r.sampling.greedy for r in batch], device=device)
        self.uniform = torch.zeros((len(batch), steps), dtype=torch.float64)
        for i, request in enumerate(batch):
            if not request.sampling.greedy:
                generator = torch.Generator().manual_seed(request.seed)
                self.uniform[i] = torch.rand(steps, generator=generator, dtype=torch.float64)
        self.uniform = self.uniform.to(device)

    def __call__(self, logits: Tensor, rows: Tensor, step: int) -> Tensor:
        """Next tokens [b] for logits [b, V] of these rows of the batch."""
        best = logits.max(dim=-1).indices  # argmax of bf16 is four times slower on CPUs
        if self.sampling.greedy:
            return best
        at = self.sampled[rows].nonzero()[:, 0]
        law = standardise(logits[at].float(), self.sampling)  # [s, V]
        return best.index_put((at,), inverse(law, self.uniform[rows[at], step]))


def until_end(tokens: list[int], ends: Sequence[int]) -> Answer:
    """The answer up to its end token; what a row generated after it is not part of it."""
    for i, token in enumerate(tokens):
        if token in ends:
            return Answer(tokens[: i + 1], "stop")
    return Answer(tokens, "length")
