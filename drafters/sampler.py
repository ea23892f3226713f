"""From logits to the law that decoding asks for: logit bias, repetition penalty, temperature, then
top-k, top-p and min-p, then renormalise (the processors and the order of `transformers`).

Leviathan et al. (2211.17192, section 2.2): greedy, top-k and nucleus decoding all sample from an
adjusted distribution. Everything here works on the last dimension, in the dtype of the logits (fp32
or fp64).
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

NUCLEUS_FIRST = 1024  # tokens looked at before all of them are sorted


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; every other default is off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # tokens below this share of the likeliest one's probability are left out
    repetition_penalty: float = 1.0  # logits of tokens seen before: divided, or if negative, times
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token (lowest id on ties) is always taken."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the law depends on which tokens stand before."""
        return self.repetition_penalty != 1.0

    @property
    def adjusted(self) -> bool:
        """Whether the argmax may be another one than that of the logits."""
        return self.penalised or bool(self.logit_bias)

    def for_drafts(self) -> Self:
        """Without bias and penalty, which need the whole vocabulary and every node's path.

        Drafts stay exact: only the target's law p must hold them, not the drafts' q.
        """
        return replace(self, repetition_penalty=1.0, logit_bias=()) if self.adjusted else self


def standardise(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """The distribution [..., V] that decoding under `sampling` draws from.

    seen [..., V] bool: the tokens before this one; a repetition penalty needs it.
    """
    logits = adjust(logits, sampling, seen)
    if sampling.greedy:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        best = logits.topk(sampling.top_k, dim=-1).indices
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)
        logits = logits.masked_fill(~kept, float("-inf"))
    p = logits.softmax(dim=-1)
    p = nucleus(p, sampling.top_p) if sampling.top_p < 1.0 else p
    return likely_enough(p, sampling.min_p) if sampling.min_p > 0.0 else p


def adjust(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """Logits [..., V] under the bias, then the repetition penalty (CTRL, 1909.05858, section 4.1;
    negative logits are multiplied, as in `transformers`).
    """
    if sampling.logit_bias:
        tokens, bias = zip(*sampling.logit_bias, strict=True)
        at = torch.tensor(tokens, device=logits.device)
        logits = logits.index_add(-1, at, logits.new_tensor(bias).expand(*logits.shape[:-1], -1))
    if not sampling.penalised:
        return logits
    assert seen is not None, "a repetition penalty needs the tokens before"
    penalty = sampling.repetition_penalty
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """The smallest set of likely tokens whose mass reaches top_p (never empty), renormalised.

    Sorting a whole vocabulary is slow; the likeliest tokens nearly always hold the mass.
    """
    ordered, index = p.topk(min(NUCLEUS_FIRST, p.shape[-1]), dim=-1)
    if bool((ordered.sum(dim=-1) < top_p).any()):
        ordered, index = p.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(p).scatter_(-1, index, ordered)
    return kept / kept.sum(dim=-1, keepdim=True)


def likely_enough(p: Tensor, min_p: float) -> Tensor:
    """The tokens whose share of the likeliest one's probability is at least min_p, renormalised."""
    kept = p.masked_fill(p < min_p * p.amax(dim=-1, keepdim=True), 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def inverse(law: Tensor, uniform: Tensor) -> Tensor:
    """The token [s] at which the cumulated law [s, V] passes a uniform number [s] in [0, 1)."""
    cumulated = law.double().cumsum(dim=-1)  # fp32 sums of 100,000 terms would favour some tokens
    height = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, height, right=True)[:, 0]
