"""The chunked projection against brute force, and what it must never do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.drafters.chunked import Law, Need, Rows, projected_sum
from draftsmith.drafters.projection import draft_index, slot_logits
from draftsmith.drafters.slots import Batch, Head, SlotStates, TargetStates, all_roots, label_slots

V, D, R, K = 23, 6, 2, 3
IDS = torch.tensor([1, 4, 5, 9, 16, 20, 22])
KINDS = ["shared", "own", "low_rank"]


class TinyHead:
    """A target's head, which remembers how many positions it projected."""

    def __init__(self, weight: Tensor, cap: float | None = None) -> None:
        self.head_weight, self.cap, self.projected = weight, cap, 0

    def adjust(self, raw: Tensor) -> Tensor:
        self.projected += len(raw) if raw.shape[-1] == V else 0
        return raw if self.cap is None else torch.tanh(raw / self.cap) * self.cap


class CrossEntropy:
    """Cross-entropy with equal weights."""

    reads_label = True

    def __init__(self, *, full: bool = False) -> None:
        self.need, self.static_weights = Need(full=full), torch.ones(K)

    def rows(self, logits: Tensor, label: Tensor, law: Law | None, spare: Tensor) -> Rows:
        q = torch.softmax(logits, -1)
        at = torch.arange(len(label))
        value = -q[at, label].log()
        overlap = None
        if law is not None and law.full is not None:
            overlap = torch.minimum(q, law.full).sum(-1)
        q[at, label] -= 1
        return Rows(value, q, overlap)

    def weigh(self, value: Tensor, counted: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        return (value * counted).sum(), counted.to(value.dtype)


def make_head(kind: str, ids: Tensor | None, weight: Tensor, seed: int = 3) -> Head:
    generator = torch.Generator().manual_seed(seed)
    shared = weight if ids is None else weight[ids]
    if kind == "shared":
        return Head(shared, ids=ids)
    rank = D if kind == "own" else R
    own = torch.randn(K, len(shared), rank, generator=generator, dtype=weight.dtype)
    return Head(shared if kind == "low_rank" else None, own.requires_grad_(), ids)


def make_slots(
    kind: str = "shared",
    ids: Tensor | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[SlotStates, TargetStates, TinyHead]:
    """Two packed rows, three documents, padding, and an unsupervised stretch."""
    generator = torch.Generator().manual_seed(seed)
    length = 12
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 9 + [-1] * 3])
    supervised = torch.rand(2, length, generator=generator) < 0.85
    supervised &= documents >= 0
    batch = Batch(
        torch.randint(V, (2, length), generator=generator),
        torch.zeros(2, length, dtype=torch.int64),
        documents,
        supervised,
    )
    weight = torch.randn(V, D, generator=generator, dtype=dtype)
    roots = all_roots(batch)
    width = D + (R if kind == "low_rank" else 0)
    hidden = torch.randn(len(roots.row), K, width, generator=generator, dtype=dtype)
    states = TargetStates(torch.randn(2, length, D, generator=generator, dtype=dtype))
    slots = SlotStates(
        hidden.requires_grad_(), make_head(kind, ids, weight), label_slots(batch, roots, K)
    )
    return slots, states, TinyHead(weight)


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "reduced"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_by_hand_whatever_the_chunk(kind: str, ids: Tensor | None) -> None:
    slots, states, target = make_slots(kind, ids)
    labels, own = slots.labels, slots.head.own
    label, inside = draft_index(labels.label, ids)
    counted = labels.valid & inside
    logits = slot_logits(slots.hidden, slots.head)
    want = torch.nn.functional.cross_entropy(logits[counted], label[counted], reduction="sum")
    inputs = [slots.hidden] + ([] if own is None else [own])
    gradients = torch.autograd.grad(2.5 * want, inputs)
    for chunk in (1, 4, 100):
        loss, sums = projected_sum(slots, states, target, CrossEntropy(), chunk=chunk)
        assert_close(loss, want)
        for have, gradient in zip(torch.autograd.grad(2.5 * loss, inputs), gradients, strict=True):
            assert_close(have, gradient)
        hit = (logits.argmax(-1) == label) & counted
        assert torch.equal(sums["hits"], hit.sum(0))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_through_a_soft_cap(kind: str) -> None:
    slots, states, target = make_slots(kind, IDS, dtype=torch.float64)
    target.cap = 2.0

    def loss(hidden: Tensor, own: Tensor | None) -> Tensor:
        changed = replace(slots, hidden=hidden, head=replace(slots.head, own=own))
        return projected_sum(changed, states, target, CrossEntropy(), chunk=3)[0]

    assert torch.autograd.gradcheck(loss, (slots.hidden, slots.head.own), fast_mode=True)


def test_slots_without_a_label_are_never_read() -> None:
    slots, states, target = make_slots()
    clean = projected_sum(slots, states, target, CrossEntropy(full=True), chunk=4)[0]
    spoiled = slots.hidden.detach().clone()
    spoiled[~slots.labels.valid] = float("nan")
    spoiled.requires_grad_()
    changed = replace(slots, hidden=spoiled)
    loss, _ = projected_sum(changed, states, target, CrossEntropy(full=True), chunk=4)
    loss.backward()
    assert_close(loss, clean)
    assert spoiled.grad is not None and spoiled.grad.isfinite().all()
    assert (spoiled.grad[~slots.labels.valid] == 0).all()


def test_a_teacher_is_projected_once_per_position() -> None:
    slots, states, target = make_slots(ids=IDS)
    labels = slots.labels
    positions = (labels.teacher_row * 100 + labels.teacher_position)[labels.valid]
    projected_sum(slots, states, target, CrossEntropy(full=True), chunk=1000)
    assert target.projected == len(positions.unique()) < len(positions)
    target.projected = 0
    projected_sum(slots, states, target, CrossEntropy(), chunk=1000)
    assert target.projected == 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_groups_give_a_zero_that_backward_accepts(kind: str) -> None:
    slots, states, target = make_slots(kind)
    nothing = replace(slots.labels, valid=torch.zeros_like(slots.labels.valid))
    for labels, hidden in (
        (nothing, slots.hidden),
        (
            replace(
                nothing,
                **{
                    name: getattr(nothing, name)[:0]
                    for name in ("label", "teacher_row", "teacher_position", "valid")
                },
            ),
            slots.hidden[:0],
        ),
    ):
        changed = SlotStates(hidden, slots.head, labels)
        loss, sums = projected_sum(changed, states, target, CrossEntropy(full=True), chunk=4)
        slots.hidden.grad = None
        loss.backward()
        assert loss.item() == 0 and sums["groups"] == 0
        grad: Any = slots.hidden.grad
        assert grad is not None and (grad == 0).all()
        if slots.head.own is not None:
            assert slots.head.own.grad is not None and (slots.head.own.grad == 0).all()


def test_without_gradients_the_sums_are_the_same() -> None:
    slots, states, target = make_slots()
    want, sums = projected_sum(slots, states, target, CrossEntropy(full=True), chunk=4)
    with torch.no_grad():
        loss, again = projected_sum(slots, states, target, CrossEntropy(full=True), chunk=4)
    assert want.requires_grad and not loss.requires_grad
    assert_close(loss, want.detach())
    assert_close(again, sums)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation returned."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self.size = max(self.size, part.numel())
        return out


def test_no_tensor_is_larger_than_one_chunk_of_one_slot() -> None:
    slots, states, target = make_slots()
    with Largest() as largest:
        loss, _ = projected_sum(slots, states, target, CrossEntropy(), chunk=2)
        loss.backward()
    assert largest.size <= max(2 * V, slots.hidden.numel(), V * D)
    with Largest() as largest:
        slot_logits(slots.hidden, slots.head)
    assert largest.size == len(slots.hidden) * K * V
