"""From logits to the law that decoding asks for: temperature, then top-k, then top-p, then
renormalise.

Leviathan et al. (2211.17192, section 2.2): greedy, top-k and nucleus decoding all sample from an
adjusted distribution. Everything here works on the last dimension, in the dtype of the logits (fp32
or fp64).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUCLEUS_FIRST = 1024  # tokens looked at before all of them are sorted


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token (lowest id on ties) is always taken."""
        return self.temperature == 0.0


def standardise(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [..., V] that decoding under `sampling` draws from."""
    if sampling.greedy:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        best = logits.topk(sampling.top_k, dim=-1).indices
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)
        logits = logits.masked_fill(~kept, float("-inf"))
    p = logits.softmax(dim=-1)
    return nucleus(p, sampling.top_p) if sampling.top_p < 1.0 else p


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


def inverse(law: Tensor, uniform: Tensor) -> Tensor:
    """The token [s] at which the cumulated law [s, V] passes a uniform number [s] in [0, 1)."""
    cumulated = law.double().cumsum(dim=-1)  # fp32 sums of 100,000 terms would favour some tokens
    height = uniform[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, height, right=True)[:, 0]
