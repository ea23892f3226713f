"""From slot states to the draft's vocabulary: logits, likeliest tokens, hits and their sums.

`chunked.py` does the same for training without a [N, K, V] tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.drafters.slots import Head

Adjust = Callable[[Tensor], Tensor]
Sums = dict[str, Tensor]  # sums and counts, never means: they add up over micro-batches and ranks


class TargetHead(Protocol):
    """What this file needs from a target: its head, and its logit scale and soft-cap."""

    @property
    def head_weight(self) -> Tensor:
        """[V, D]."""

    @property
    def adjust(self) -> Adjust:
        """Raw logits -> logits; its very argument where there is neither scale nor soft-cap."""


def draft_index(label: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Target ids -> (rows of the draft's head, whether it has that row); 0 where it has not."""
    if ids is None:
        return label, torch.ones_like(label, dtype=torch.bool)
    at = torch.searchsorted(ids, label).clamp(max=len(ids) - 1)
    inside = ids[at] == label
    return torch.where(inside, at, 0), inside


def wide(logits: Tensor) -> Tensor:
    """At least fp32 (fp64 stays)."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def compute_dtype(hidden: Tensor, head: Head) -> torch.dtype:
    """Projections run in the frozen weight's dtype; without one, as autocast or the states say."""
    if head.shared is not None:
        return head.shared.dtype
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def slot_logits(hidden: Tensor, head: Head, adjust: Adjust | None = None) -> Tensor:
    """Slot states [n, K, D (+ R)] -> logits [n, K, Vq] in fp32, differentiable, all at once."""
    dtype = compute_dtype(hidden, head)
    width = 0 if head.shared is None else head.shared.shape[1]
    terms = []
    if head.shared is not None:
        terms.append(F.linear(hidden[..., :width].to(dtype), head.shared))
    if head.own is not None:
        own = head.own.to(dtype).transpose(1, 2)  # [K, R, Vq]
        terms.append((hidden[..., width:].to(dtype).transpose(0, 1) @ own).transpose(0, 1))
    raw = wide(terms[0] if len(terms) == 1 else terms[0] + terms[1])
    return raw if adjust is None else adjust(raw)


@torch.no_grad()
def top_tokens(
    hidden: Tensor, head: Head, count: int, *, chunk: int = 128, adjust: Adjust | None = None
) -> Tensor:
    """The `count` likeliest tokens of every slot, best first, as target ids: [N, K, count].

    `chunk` slots are projected at once. With count 1 a tie goes to the lowest id, as in greedy
    decoding.
    """
    found = [hidden.new_empty((0, hidden.shape[1], count), dtype=torch.int64)]
    for part in torch.split(hidden, max(1, chunk // hidden.shape[1])):
        logits = slot_logits(part, head, adjust)
        best = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count).indices
        found.append(best if head.ids is None else head.ids[best])
    return torch.cat(found)


def hits(logits: Tensor, label: Tensor, inside: Tensor) -> Tensor:
    """Whether greedy drafting says the label, ties to the lowest id, [n] bool."""
    if logits.device.type != "cpu":
        return (logits.argmax(-1) == label) & inside
    hit = (logits.gather(-1, label[:, None])[:, 0] == logits.amax(-1)) & inside
    # argmax is slow on CPU, so it only sees the rows where a tie could change the answer.
    some = hit.nonzero()[:, 0]
    hit[some] = logits.index_select(0, some).argmax(-1) == label[some]
    return hit


@dataclass
class Table:
    """What is known about every slot of every group, [N, K] each."""

    value: Tensor
    hit: Tensor  # bool
    overlap: Tensor | None

    @staticmethod
    def empty(valid: Tensor, dtype: torch.dtype, *, overlap: bool) -> "Table":
        """All zero."""
        value = torch.zeros(valid.shape, dtype=dtype, device=valid.device)
        return Table(value, torch.zeros_like(valid), value.clone() if overlap else None)


def slot_sums(table: Table, valid: Tensor, loss: Tensor) -> Sums:
    """Sums over groups, [K] per slot (`loss` and `groups` are scalars).

    `hits` counts a slot whatever came before it, `reached` the groups whose earlier slots all hit,
    `joint_hits` those that hit as well: the conditional hit rate is joint_hits / reached.
    """
    hit = table.hit & valid
    run = hit.cumprod(dim=1).bool()
    before = torch.cat([torch.ones_like(run[:, :1]), run[:, :-1]], dim=1)
    sums = {
        "loss": loss.detach(),
        "groups": valid[:, 0].sum(),
        "valid": valid.sum(0),
        "hits": hit.sum(0),
        "reached": (valid & before).sum(0),
        "joint_hits": run.sum(0),
    }
    if table.overlap is not None:
        overlap = table.overlap * valid
        sums |= {"overlap": overlap.sum(0), "joint_overlap": overlap.cumprod(dim=1).sum(0)}
    return sums
