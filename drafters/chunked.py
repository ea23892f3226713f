"""The chunked projection: losses over the vocabulary without a [N, K, V] tensor.

The gradient with respect to the slot states (and a trained head) is computed in the forward pass,
chunk by chunk, and only scaled in backward. With a frozen head a step is two projections; a teacher
adds a third, of one row per distinct target position. Chunks run along N, never inside a group, so
that a loss may couple the slots of a group; inside a chunk the slots go one by one, and slots
without a loss are not projected at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from draftsmith.drafters.projection import (
    Adjust,
    Sums,
    Table,
    TargetHead,
    compute_dtype,
    draft_index,
    hits,
    slot_sums,
    wide,
)
from draftsmith.drafters.slots import Head, SlotStates, TargetStates


@dataclass(frozen=True)
class Need:
    """Which teacher laws a loss reads."""

    full: bool = False  # p under the softmax over the whole vocabulary
    temperature: float | None = None  # p at this temperature, renormalised over the draft's

    def any(self) -> bool:
        """Whether a teacher is needed at all."""
        return self.full or self.temperature is not None


@dataclass(frozen=True)
class Law:
    """The teacher's law at U positions, on the draft's vocabulary; what was not needed is None."""

    full: Tensor | None  # [U, Vq]; sums to less than 1 where the draft's vocabulary is reduced
    kept: Tensor | None  # [U, Vq]; tempered, renormalised: sums to 1
    negentropy: Tensor | None  # [U], sum of kept * log kept

    def take(self, index: Tensor, scratch: "Scratch") -> "Law":
        """The law at these positions, in scratch memory."""

        def rows(part: Tensor | None, name: str) -> Tensor | None:
            if part is None:
                return None
            out = scratch.take(name, (len(index), part.shape[1]), part.dtype)
            return torch.index_select(part, 0, index, out=out)

        full = rows(self.full, "full")
        kept = full if self.kept is self.full else rows(self.kept, "kept")
        return Law(full, kept, None if self.negentropy is None else self.negentropy[index])


class Scratch:
    """Memory that every slot of every chunk reuses: of this size, fresh memory is slow to touch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A buffer of this shape with whatever is in it, until the name is taken again."""
        held = self.held.get(name)
        if held is None or len(held) < shape[0]:
            held = self.held[name] = torch.empty(shape, dtype=dtype, device=self.device)
        return held[: shape[0]]


class Rows(NamedTuple):
    """A loss on n positions, unweighted."""

    value: Tensor  # [n]
    grad: Tensor  # [n, Vq], of value with respect to the logits
    overlap: Tensor | None  # [n], sum of min(p, q); None where the whole law was not given


class ChunkLoss(Protocol):
    """A loss as `projected_sum` needs it."""

    need: Need
    reads_label: bool  # a slot whose label the draft's vocabulary lacks has no loss
    static_weights: Tensor | None  # [K]; None where weights depend on a whole group's values

    def rows(self, logits: Tensor, label: Tensor, law: Law | None, spare: Tensor) -> Rows:
        """Logits [n, Vq], labels [n] as draft indices, the law at each.

        `logits` and `spare` [n, Vq] are free to be overwritten and returned as the gradient.
        """

    def weigh(self, value: Tensor, counted: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Values [n, K] of whole groups -> (their loss, summed; weight of each gradient [n, K])."""


def teacher_law(final: Tensor, target: TargetHead, head: Head, need: Need) -> Law:
    """The target's law after final states [U, D], on the draft's vocabulary.

    Only the rows that the draft has are projected where the law is renormalised over them anyway.
    """
    weight, ids = target.head_weight, head.ids
    if not need.full and ids is not None:
        weight, ids = (weight[ids] if head.shared is None else head.shared), None
    logits = target.adjust(wide(F.linear(final.to(weight.dtype), weight)))  # [U, V or Vq]
    full = kept = negentropy = None
    if need.full:
        full = torch.softmax(logits, -1)
        full = full if ids is None else full[:, ids]
    if need.temperature is not None:
        scaled = (logits if ids is None else logits[:, ids]) / need.temperature
        # Shifted first, so that the sum below does not cancel between large numbers.
        scaled -= scaled.amax(-1, keepdim=True)
        same = full is not None and ids is None and need.temperature == 1.0
        kept = full if same else torch.softmax(scaled, -1)
        assert kept is not None
        negentropy = torch.linalg.vecdot(kept, scaled) + kept.amax(-1).log()
    return Law(full, kept, negentropy)


class DraftHead:
    """One slot at a time: forward, and back with the gradient of a trained part collected."""

    def __init__(
        self, head: Head, adjust: Adjust, scratch: Scratch, *, dtype: torch.dtype, gradient: bool
    ) -> None:
        self.dtype, self.adjust, self.gradient, self.scratch = dtype, adjust, gradient, scratch
        self.shared, self.width = head.shared, 0 if head.shared is None else head.shared.shape[1]
        self.own = None if head.own is None else head.own.detach().to(dtype)
        self.own_grad: Tensor | None = None
        if gradient and head.own is not None and head.own.requires_grad:
            self.own_grad = torch.zeros_like(head.own)

    def logits(self, hidden: Tensor, slot: int) -> tuple[Tensor, Adjust | None]:
        """States [n, D (+ R)] -> logits [n, Vq], and how a gradient goes back through `adjust`."""
        hidden = hidden.to(self.dtype)
        first = self.shared if self.own is None or self.shared is not None else self.own[slot]
        assert first is not None
        size, wider = (len(hidden), len(first)), torch.promote_types(self.dtype, torch.float32)
        raw = self.scratch.take(str(self.dtype), size, self.dtype)
        torch.mm(hidden[:, : first.shape[1]], first.T, out=raw)
        if self.shared is not None and self.own is not None:
            raw.addmm_(hidden[:, self.width :], self.own[slot].T)
        if wider != self.dtype:
            raw = self.scratch.take(str(wider), size, wider).copy_(raw)
        return adjusted(raw, self.adjust) if self.gradient else (self.adjust(raw), None)

    def back(self, hidden: Tensor, slot: int, grad: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the logits [n, Vq], its weight [n] -> gradient of the states [n, D (+ R)]."""
        if grad.dtype != self.dtype:
            size = (len(grad), grad.shape[1])
            grad = self.scratch.take(str(self.dtype), size, self.dtype).copy_(grad)
        parts = []
        if self.shared is not None:
            parts.append(grad @ self.shared)
        if self.own is not None:
            parts.append(grad @ self.own[slot])
        if self.own_grad is not None:
            tail = (wide(hidden[:, self.width :]) * weight[:, None]).to(self.dtype)
            self.own_grad[slot] += grad.T @ tail
        pulled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return wide(pulled) * weight[:, None]


def adjusted(raw: Tensor, adjust: Adjust) -> tuple[Tensor, Adjust | None]:
    """Adjusted logits, free to be overwritten, and the adjustment's vector-Jacobian product."""
    leaf = raw.detach()
    with torch.enable_grad():
        leaf.requires_grad_()
        out = adjust(leaf)
    if out is leaf:
        return raw, None
    return out.detach().clone(), lambda grad: torch.autograd.grad(out, leaf, grad)[0]


class _WithGradient(torch.autograd.Function):
    """A loss whose gradient is known already."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        hidden: Tensor,
        own: Tensor | None,
        hidden_grad: Tensor,
        own_grad: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden_grad, own_grad)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, Tensor | None, Tensor | None, None, None]:
        hidden_grad, own_grad = ctx.saved_tensors
        return (
            None,
            hidden_grad * scale if ctx.needs_input_grad[1] else None,
            None if own_grad is None else own_grad * scale,
            None,
            None,
        )


def projected_sum(
    slots: SlotStates, states: TargetStates, target: TargetHead, loss: ChunkLoss, *, chunk: int
) -> tuple[Tensor, Sums]:
    """The loss summed over groups, on the graph, and `slot_sums`; 0 where nothing is supervised.

    `chunk` groups are projected at once. Under `torch.no_grad` only the forward projections run.
    """
    hidden, own = slots.hidden, slots.head.own
    gradient = torch.is_grad_enabled() and (
        hidden.requires_grad or (own is not None and own.requires_grad)
    )
    dtype = compute_dtype(hidden, slots.head)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        run = _Run(slots, states, target, loss, dtype=dtype, gradient=gradient)
        for groups in torch.split(slots.labels.valid.any(dim=1).nonzero()[:, 0], chunk):
            run.chunk(groups)
        sums = slot_sums(run.table, slots.labels.valid, run.loss)
    if run.hidden_grad is None:
        return run.loss, sums
    return _WithGradient.apply(run.loss, hidden, own, run.hidden_grad, run.head.own_grad), sums  # type: ignore[no-untyped-call]


class _Run:
    """The state of one `projected_sum`."""

    def __init__(
        self,
        slots: SlotStates,
        states: TargetStates,
        target: TargetHead,
        loss: ChunkLoss,
        *,
        dtype: torch.dtype,
        gradient: bool,
    ) -> None:
        self.slots, self.states, self.target, self.objective = slots, states, target, loss
        labels = slots.labels
        self.label, self.inside = draft_index(labels.label, slots.head.ids)
        self.counted = labels.valid & self.inside if loss.reads_label else labels.valid
        # Without a teacher's law, a slot that has no loss is a miss: known without projecting it.
        self.wanted = labels.valid if loss.need.full else self.counted
        # Target positions as one number; every distinct one is projected once per chunk.
        self.teacher_at = labels.teacher_row * states.final.shape[1] + labels.teacher_position
        self.scratch = Scratch(slots.hidden.device)
        self.head = DraftHead(
            slots.head, target.adjust, self.scratch, dtype=dtype, gradient=gradient
        )
        self.hidden_grad = torch.zeros_like(slots.hidden) if gradient else None
        values = torch.promote_types(dtype, torch.float32)
        self.table = Table.empty(labels.valid, values, overlap=loss.need.full)
        self.loss = torch.zeros((), dtype=values, device=labels.valid.device)

    def chunk(self, groups: Tensor) -> None:
        """Add these groups."""
        taught = self.teacher_of_chunk(groups)
        weights = self.objective.static_weights
        waiting: list[tuple[Tensor, int, Tensor]] = []
        for slot, rows in self.slot_rows(groups):
            grad = self.forward(rows, slot, taught)
            if self.hidden_grad is None:
                continue
            if weights is not None:
                self.backward(rows, slot, grad, weights[slot].expand(len(rows)))
            else:
                waiting.append((rows, slot, grad.to(self.head.dtype, copy=True)))
        value, counted = self.table.value[groups], self.counted[groups]
        summed, dynamic = self.objective.weigh(value, counted, self.slots.labels.valid[groups])
        self.loss += summed
        for rows, slot, grad in waiting:
            self.backward(rows, slot, grad, dynamic[torch.searchsorted(groups, rows), slot])

    def slot_rows(self, groups: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every slot, and those of the groups that have it."""
        wanted = self.wanted[groups]
        for slot in range(wanted.shape[1]):
            rows = groups[wanted[:, slot]]
            if len(rows):
                yield slot, rows

    def teacher_of_chunk(self, groups: Tensor) -> tuple[Tensor, Law] | None:
        """What teaches these groups, where groups share positions, as neighbouring roots do.

        Otherwise every slot asks for its own, which costs no more and holds less at once.
        """
        if not self.objective.need.any():
            return None
        at = torch.unique(self.teacher_at[groups][self.wanted[groups]])
        return self.teacher(at) if len(at) <= 2 * len(groups) else None

    def teacher(self, at: Tensor) -> tuple[Tensor, Law]:
        """Distinct target positions, ascending, and the law at each."""
        final = self.states.final.flatten(0, 1)[at]
        return at, teacher_law(final, self.target, self.slots.head, self.objective.need)

    def law(self, rows: Tensor, slot: int, taught: tuple[Tensor, Law] | None) -> Law | None:
        """The law for one slot of these groups."""
        if not self.objective.need.any():
            return None
        mine = self.teacher_at[rows, slot]
        at, law = taught or self.teacher(torch.unique(mine))
        return law.take(torch.searchsorted(at, mine), self.scratch)

    def forward(self, rows: Tensor, slot: int, taught: tuple[Tensor, Law] | None) -> Tensor:
        """Fill the table for one slot of these groups; returns the gradient of the raw logits."""
        logits, pull = self.head.logits(self.slots.hidden[rows, slot], slot)
        label = self.label[rows, slot]
        self.table.hit[rows, slot] = hits(logits, label, self.inside[rows, slot])
        spare = self.scratch.take("spare", (len(rows), logits.shape[1]), logits.dtype)
        result = self.objective.rows(logits, label, self.law(rows, slot, taught), spare)
        self.table.value[rows, slot] = result.value
        if self.table.overlap is not None and result.overlap is not None:
            self.table.overlap[rows, slot] = result.overlap
        return result.grad if pull is None else pull(result.grad)

    def backward(self, rows: Tensor, slot: int, grad: Tensor, weight: Tensor) -> None:
        """Write the gradient of the states of one slot of these groups."""
        assert self.hidden_grad is not None
        weight = torch.where(self.counted[rows, slot], weight, 0.0)
        pulled = self.head.back(self.slots.hidden[rows, slot], slot, grad, weight)
        self.hidden_grad[rows, slot] = pulled.to(self.hidden_grad.dtype)
