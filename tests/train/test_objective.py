"""The objective: fast against reference, denominators, accumulation, and who reaches loss 0."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from draftsmith.drafters.projection import Sums
from draftsmith.drafters.slots import (
    Batch,
    Head,
    SlotLabels,
    SlotStates,
    TargetStates,
    all_roots,
    label_slots,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import ObjectiveConfig
from draftsmith.train.objective import Objective, slot_weights

V, D, R, K = 19, 8, 3, 4
IDS = torch.tensor([0, 3, 4, 8, 9, 13, 17, 18])
LOSSES: dict[str, dict[str, Any]] = {
    "ce": {},
    "dpace": {"weights": "dpace"},
    "kl": {"loss": "kl"},
    "kl-hot": {"loss": "kl", "temperature": 2.0},
    "tv": {"loss": "tv"},
    "lk": {"loss": "lk"},
    "e2e_tv": {"loss": "e2e_tv"},
}


class TinyHead:
    """A target's head, whose logits are squashed or not.

    Nothing follows the tanh, whose backward reads its own output: nobody may overwrite that.
    """

    def __init__(self, weight: Tensor, cap: float | None = None) -> None:
        self.head_weight, self.cap = weight, cap

    def adjust(self, raw: Tensor) -> Tensor:
        return raw if self.cap is None else torch.tanh(raw / self.cap)


Case = tuple[SlotStates, TargetStates, TinyHead]


def make_case(
    kind: str = "shared",
    *,
    reduced: bool = False,
    spread: float = 1.0,
    dtype: torch.dtype = torch.float32,
    cap: float | None = None,
) -> Case:
    """Packed rows with borders, padding and unsupervised stretches, under a random drafter."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    length, documents = 16, torch.tensor([[0] * 10 + [1] * 6, [0] * 12 + [-1] * 4])
    supervised = (torch.rand(2, length, generator=generator) < 0.9) & (documents >= 0)
    ids = torch.randint(V, (2, length), generator=generator)
    batch = Batch(ids, torch.zeros_like(ids), documents, supervised)
    roots = all_roots(batch)
    weight, subset = normal(V, D), IDS if reduced else None
    rows = weight if subset is None else weight[subset]
    own = None
    if kind != "shared":
        own = torch.randn(K, len(rows), D if kind == "own" else R, generator=generator)
        own.requires_grad_()
    head = Head(None if kind == "own" else rows, own, subset)
    hidden = spread * normal(len(roots.row), K, D + (R if kind == "low_rank" else 0))
    slots = SlotStates(hidden.requires_grad_(), head, label_slots(batch, roots, K))
    return slots, TargetStates(spread * normal(2, length, D)), TinyHead(weight, cap)


def make_objective(name: str, **knobs: Any) -> Objective:
    return Objective(ObjectiveConfig(**{**LOSSES[name], **knobs}), K)


def gradients(loss: Tensor, slots: SlotStates) -> list[Tensor]:
    inputs = [slots.hidden] + ([] if slots.head.own is None else [slots.head.own])
    return list(torch.autograd.grad(loss, inputs, retain_graph=True))


def check_equal(objective: Objective, case: Case, *, rtol: float, atol: float) -> None:
    """Value, gradient and sums, in chunks that divide the groups and that do not."""
    slots = case[0]
    for metrics in (False, True):
        want, want_sums = objective.reference(*case, metrics=metrics)
        for chunk in (5, 64):
            have, sums = objective(*case, chunk=chunk, metrics=metrics)
            assert_close(have, want, rtol=rtol, atol=atol)
            for mine, theirs in zip(gradients(have, slots), gradients(want, slots), strict=True):
                scale = float(theirs.abs().max())
                assert_close(mine, theirs, rtol=rtol, atol=atol * max(scale, 1e-3))
            assert_close(sums, want_sums, rtol=rtol, atol=atol)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("kind", ["shared", "own", "low_rank"])
@pytest.mark.parametrize("name", LOSSES)
def test_fast_equals_reference(name: str, kind: str, reduced: bool) -> None:
    case = make_case(kind, reduced=reduced)
    check_equal(make_objective(name), case, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("spread", "rtol"), [(30.0, 1e-4), (1000.0, 2e-3)])
@pytest.mark.parametrize("name", LOSSES)
def test_fast_equals_reference_when_saturated(name: str, spread: float, rtol: float) -> None:
    """Logits in the thousands are rounded by 1e-4, and probabilities by as much of themselves."""
    case = make_case("low_rank", reduced=True, spread=spread)
    check_equal(make_objective(name), case, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("kind", ["shared", "own", "low_rank"])
@pytest.mark.parametrize("name", LOSSES)
def test_fast_equals_reference_in_bf16(name: str, kind: str) -> None:
    case = make_case(kind, reduced=True, dtype=torch.bfloat16)
    slots, objective = case[0], make_objective(name)
    with torch.autocast("cpu", torch.bfloat16):
        have, sums = objective(*case, chunk=5)
        want, want_sums = objective.reference(*case)
    assert_close(have, want, rtol=1e-3, atol=1e-3)
    assert torch.equal(sums["joint_hits"], want_sums["joint_hits"])
    for mine, theirs in zip(gradients(have, slots), gradients(want, slots), strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()


@pytest.mark.parametrize(
    "knobs",
    [
        {"weights": "geometric", "decay": 0.5},
        {"weights": "exponential", "gamma": 2.0},
        {"weights": "list", "slot_weights": (1.0, 0.0, 2.0, 0.5)},
    ],
    ids=["geometric", "exponential", "list"],
)
@pytest.mark.parametrize("name", ["ce", "kl", "tv", "lk"])
def test_static_weights_enter_loss_and_gradient(name: str, knobs: dict[str, Any]) -> None:
    check_equal(make_objective(name, **knobs), make_case(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_nonlinear_adjustment_is_differentiated(name: str) -> None:
    check_equal(make_objective(name), make_case("low_rank", cap=1.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["ce", "kl", "tv", "e2e_tv"])
def test_gradcheck(name: str) -> None:
    case = make_case(reduced=True, dtype=torch.float64)
    slots, states, target = part_of(case, slice(0, 4))
    objective = make_objective(name)

    def loss(hidden: Tensor) -> Tensor:
        return objective(replace(slots, hidden=hidden), states, target, chunk=3)[0]

    assert slots.labels.valid.sum() > 8
    assert torch.autograd.gradcheck(loss, (slots.hidden.detach().requires_grad_(),))


def test_slot_weights_closed_forms() -> None:
    geometric = slot_weights(ObjectiveConfig(), 3)
    assert_close(geometric, torch.tensor([0.8, 0.64, 0.512]))
    exponential = slot_weights(ObjectiveConfig(weights="exponential", gamma=4.0), 3)
    assert_close(exponential, torch.tensor([0.0, -0.25, -0.5]).exp())
    for block, gamma in ((8, 4.0), (10, 5.0), (16, 7.0)):  # DFlash's table
        published = slot_weights(ObjectiveConfig(weights="exponential"), block - 1)
        given = slot_weights(ObjectiveConfig(weights="exponential", gamma=gamma), block - 1)
        assert torch.equal(published, given)
    listed = ObjectiveConfig(weights="list", slot_weights=(1.0, 0.0))
    assert slot_weights(listed, 2).tolist() == [1.0, 0.0]
    with pytest.raises(UserError, match="slot_weights: 2 given for 3 slots"):
        slot_weights(listed, 3)


def test_denominators_come_from_labels_alone() -> None:
    label = torch.tensor([[0, 3, 1], [8, 0, 0], [0, 0, 0]])
    valid = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    labels = SlotLabels(label, label, label, valid)
    full, reduced = Head(torch.zeros(V, D)), Head(torch.zeros(len(IDS), D), ids=IDS)
    ones = {"weights": "list", "slot_weights": (1.0, 10.0, 100.0)}

    def share(head: Head, **knobs: Any) -> float:
        return float(Objective(ObjectiveConfig(**knobs), 3).denominator(labels, head))

    assert share(full, **ones) == 112
    assert share(reduced, **ones) == 12  # 1 is outside the draft's vocabulary: no loss
    for loss in ("kl", "tv", "lk"):
        assert share(reduced, loss=loss, **ones) == 112
    assert share(reduced, weights="dpace") == share(reduced, loss="e2e_tv") == 2


def part_of(case: Case, groups: slice) -> Case:
    """These groups alone, as a micro-batch or another rank would hold them."""
    slots, states, target = case
    labels = slots.labels
    parts = (labels.label, labels.teacher_row, labels.teacher_position, labels.valid)
    cut = SlotLabels(*(part[groups] for part in parts))
    return SlotStates(slots.hidden[groups], slots.head, cut), states, target


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name: str) -> None:
    case, objective = make_case("low_rank", reduced=True), make_objective(name)
    slots = case[0]
    whole, sums = objective(*case, chunk=100, metrics=True)
    pieces = [part_of(case, part) for part in (slice(0, 3), slice(3, 4), slice(4, None))]
    outcomes = [objective(*piece, chunk=100, metrics=True) for piece in pieces]
    loss = torch.stack([piece for piece, _ in outcomes]).sum()
    assert_close(loss, whole)
    assert_close(gradients(loss, slots), gradients(whole, slots))
    added: Sums = {key: torch.stack([part[key] for _, part in outcomes]).sum(0) for key in sums}
    assert_close(added, sums)
    shares = [objective.denominator(piece[0].labels, slots.head) for piece in pieces]
    assert_close(torch.stack(shares).sum(), objective.denominator(slots.labels, slots.head))


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_supervised_is_a_finite_zero_on_the_graph(name: str) -> None:
    slots, states, target = make_case("low_rank")
    labels = replace(slots.labels, valid=torch.zeros_like(slots.labels.valid))
    case = replace(slots, labels=labels), states, target
    objective = make_objective(name)
    for loss, sums in (objective(*case, chunk=4, metrics=True), objective.reference(*case)):
        assert loss.item() == 0 and sums["groups"] == 0
        assert all((gradient == 0).all() for gradient in gradients(loss, slots))
    assert objective.denominator(labels, slots.head) == 0


def test_labels_outside_the_draft_vocabulary_are_misses_without_a_loss() -> None:
    slots, states, target = make_case(reduced=True)
    outside = torch.isin(slots.labels.label, IDS, invert=True) & slots.labels.valid
    assert outside.any()
    loss, sums = make_objective("ce")(slots, states, target, chunk=5)
    (grad,) = gradients(loss, slots)
    assert (grad[outside] == 0).all() and (sums["hits"] <= sums["valid"]).all()
    only = replace(slots.labels, valid=torch.zeros_like(outside))
    only.valid[:, 0] = outside[:, 0]
    loss, sums = make_objective("ce")(replace(slots, labels=only), states, target, chunk=5)
    assert loss.item() == 0 and sums["valid"][0] > 0 and sums["hits"].sum() == 0


def counting_case(shift: int) -> Case:
    """x[t+1] = x[t] + 1 with a target that knows it, and a drafter that says x[r+k+shift]."""
    ids = torch.arange(12)[None] % V
    batch = Batch(ids, ids, torch.zeros_like(ids), ids >= 4)
    roots = all_roots(batch)
    target = TinyHead(torch.eye(V))
    surely = 200.0 * torch.eye(V)
    said = ids[roots.row, roots.position][:, None] + torch.arange(1, K + 1) + shift
    hidden = surely[said % V].requires_grad_()
    slots = SlotStates(hidden, Head(target.head_weight), label_slots(batch, roots, K))
    return slots, TargetStates(surely[(ids + 1) % V]), target


@pytest.mark.parametrize("name", LOSSES)
def test_only_a_perfect_drafter_of_a_counting_language_reaches_zero(name: str) -> None:
    objective = make_objective(name)
    loss, sums = objective(*counting_case(0), chunk=3, metrics=True)
    assert loss.abs() < 1e-5
    assert sums["groups"] == 7 and sums["valid"].tolist() == [7, 6, 5, 4]
    for key in ("hits", "joint_hits", "reached", "overlap", "joint_overlap"):
        assert_close(sums[key].float(), sums["valid"].float())
    for shift in (-1, 1):
        loss, sums = objective(*counting_case(shift), chunk=3, metrics=True)
        assert loss > 1 and sums["hits"].sum() == 0 and sums["overlap"].sum() < 1e-5


def test_metrics_by_hand() -> None:
    """Three groups: hit hit miss hit; miss hit (then cut); hit hit hit hit."""
    label = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 10]])
    said = torch.tensor([[1, 2, 0, 4], [0, 6, 0, 0], [7, 8, 9, 10]])
    valid = torch.tensor([[True] * 4, [True, True, False, False], [True] * 4])
    labels = SlotLabels(label, torch.zeros_like(label), torch.zeros_like(label), valid)
    slots = SlotStates(10 * torch.eye(V)[said], Head(torch.eye(V)), labels)
    states, target = TargetStates(torch.zeros(1, 1, V)), TinyHead(torch.eye(V))
    _, sums = make_objective("ce")(slots, states, target, chunk=2)
    assert sums["valid"].tolist() == [3, 3, 2, 2]
    assert sums["hits"].tolist() == [2, 3, 1, 2]
    assert sums["reached"].tolist() == [3, 2, 2, 1]
    assert sums["joint_hits"].tolist() == [2, 2, 1, 1]


def test_the_same_text_split_over_documents_is_not_learned_across_the_border() -> None:
    """What a drafter says past its document's end is nobody's label."""
    ids = torch.arange(10)[None]
    documents = torch.tensor([[0] * 5 + [1] * 5])
    batch = Batch(ids, ids % 5, documents, torch.ones_like(ids, dtype=torch.bool))
    roots = all_roots(batch)
    labels = label_slots(batch, roots, K)
    crossing = roots.position[:, None] + torch.arange(1, K + 1) >= torch.tensor([[5]])
    crossing &= (roots.position < 5)[:, None]
    assert not labels.valid[crossing].any()
    slots = SlotStates(torch.randn(len(roots.row), K, D).requires_grad_(), make_head(), labels)
    loss, _ = make_objective("ce")(
        slots, TargetStates(torch.zeros(1, 10, D)), TinyHead(torch.ones(V, D)), chunk=3
    )
    (grad,) = gradients(loss, slots)
    assert (grad[crossing] == 0).all() and (grad[labels.valid] != 0).any()


def make_head() -> Head:
    return Head(torch.randn(V, D, generator=torch.Generator().manual_seed(0)))


def test_roots_may_come_in_any_order() -> None:
    """Sampled anchors need not ascend, and may repeat."""
    slots, states, target = make_case(reduced=True)
    order = torch.randperm(len(slots.hidden), generator=torch.Generator().manual_seed(2))
    order = torch.cat([order, order[:3]])
    labels = slots.labels
    parts = (labels.label, labels.teacher_row, labels.teacher_position, labels.valid)
    moved = SlotLabels(*(part[order] for part in parts))
    for name in LOSSES:
        case = SlotStates(slots.hidden[order], slots.head, moved), states, target
        have, want = make_objective(name)(*case, chunk=5), make_objective(name).reference(*case)
        assert_close(have[0], want[0])
        assert_close(gradients(have[0], slots), gradients(want[0], slots))
