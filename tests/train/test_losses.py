"""Losses: closed forms, brute force, and the hand-made gradients against autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from draftsmith.drafters.chunked import Law, Need, Rows, teacher_law
from draftsmith.drafters.slots import Head
from draftsmith.train import losses

V = 11
IDS = torch.tensor([0, 2, 3, 7, 10])


class Identity:
    """A target whose head is the identity: its final states are its logits."""

    head_weight = torch.eye(V)

    @staticmethod
    def adjust(raw: Tensor) -> Tensor:
        return raw


def draw(rows: int, columns: int, spread: float = 1.5, seed: int = 0) -> Tensor:
    return spread * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def law_of(teacher: Tensor, need: Need, ids: Tensor | None) -> Law:
    shared = Identity.head_weight if ids is None else Identity.head_weight[ids]
    return teacher_law(teacher, Identity(), Head(shared, ids=ids), need)


def padded_laws(logits: Tensor, teacher: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """p and q over the whole vocabulary, q zero outside the draft's."""
    q = torch.zeros_like(teacher)
    q[:, torch.arange(V) if ids is None else ids] = torch.softmax(logits, -1)
    return torch.softmax(teacher, -1), q


def test_ce_is_minus_log_probability() -> None:
    logits = torch.tensor([[0.0, 3.0], [1.0, 1.0]]).log1p()
    assert_close(losses.ce(logits, torch.tensor([1, 0])), torch.tensor([5 / 4, 2.0]).log())


def test_kl_closed_form_and_temperature() -> None:
    teacher, logits = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.5, 0.5]]).log()
    want = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    assert_close(losses.kl(logits, teacher), want[None])
    # Logits and temperature doubled together: the laws stay, T^2 is 4.
    assert_close(losses.kl(2 * logits, 2 * teacher, temperature=2.0), 4 * want[None])


def test_kl_renormalises_the_teacher_over_a_reduced_vocabulary() -> None:
    teacher, logits = draw(6, V), draw(6, len(IDS), seed=1)
    assert_close(losses.kl(teacher[:, IDS], teacher, ids=IDS), torch.zeros(6))
    p = torch.softmax(teacher, -1)[:, IDS]
    p = p / p.sum(-1, keepdim=True)
    q = torch.softmax(logits, -1)
    assert_close(losses.kl(logits, teacher, ids=IDS), (p * (p / q).log()).sum(-1))


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "reduced"])
def test_tv_is_half_the_absolute_difference_over_the_whole_vocabulary(ids: Tensor | None) -> None:
    teacher, logits = draw(6, V), draw(6, V if ids is None else len(ids), seed=1)
    p, q = padded_laws(logits, teacher, ids)
    assert_close(losses.tv(logits, teacher, ids=ids), (p - q).abs().sum(-1) / 2)
    assert_close(losses.overlap(logits, teacher, ids=ids), torch.minimum(p, q).sum(-1))


def test_lk_goes_from_kl_to_tv_as_the_overlap_counts() -> None:
    teacher, logits = draw(6, V), draw(6, V, seed=1)
    kl, tv = losses.kl(logits, teacher), losses.tv(logits, teacher)
    assert_close(losses.lk_hybrid(logits, teacher, eta=0.0), kl)
    assert_close(losses.lk_hybrid(logits, teacher, eta=1e4), tv)
    mix = torch.exp(-3.0 * (1 - tv))
    assert_close(losses.lk_hybrid(logits, teacher, eta=3.0), mix * kl + (1 - mix) * tv)


def label_of(logits: Tensor) -> Tensor:
    return torch.arange(len(logits)) % logits.shape[1]


Reference = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Fast = Callable[[Tensor, Law], Rows]
PAIRS: dict[str, tuple[Reference, Fast, Need]] = {
    "ce": (
        lambda z, t, ids: losses.ce(z, label_of(z)),
        lambda z, law: losses.ce_rows(z, label_of(z), law, torch.empty_like(z)),
        Need(full=True),
    ),
    "kl": (
        lambda z, t, ids: losses.kl(z, t, ids=ids),
        lambda z, law: losses.kl_rows(z, law, 1.0, torch.empty_like(z)),
        Need(full=True, temperature=1.0),
    ),
    "kl-hot": (
        lambda z, t, ids: losses.kl(z, t, temperature=2.5, ids=ids),
        lambda z, law: losses.kl_rows(z, law, 2.5, torch.empty_like(z)),
        Need(full=True, temperature=2.5),
    ),
    "tv": (
        lambda z, t, ids: losses.tv(z, t, ids=ids),
        lambda z, law: losses.tv_rows(z, law, torch.empty_like(z)),
        Need(full=True),
    ),
    "lk": (
        lambda z, t, ids: losses.lk_hybrid(z, t, eta=3.0, ids=ids),
        lambda z, law: losses.lk_rows(z, law, 3.0, torch.empty_like(z)),
        Need(full=True, temperature=1.0),
    ),
}


@pytest.mark.parametrize("ids", [None, IDS], ids=["full", "reduced"])
@pytest.mark.parametrize("spread", [1.5, 300.0], ids=["plain", "saturated"])
@pytest.mark.parametrize("name", PAIRS)
def test_closed_form_gradients_equal_autograd(name: str, spread: float, ids: Tensor | None) -> None:
    reference, fast, need = PAIRS[name]
    teacher = draw(12, V, spread)
    logits = draw(12, V if ids is None else len(ids), spread, seed=1).requires_grad_()
    want = reference(logits, teacher, ids)
    (grad,) = torch.autograd.grad(want.sum(), logits)
    rows = fast(logits.detach().clone(), law_of(teacher, need, ids))
    assert_close(rows.value, want.detach(), rtol=1e-5, atol=1e-6 * spread)
    assert_close(rows.grad, grad, rtol=1e-5, atol=2e-6)
    assert rows.overlap is not None
    assert_close(rows.overlap, losses.overlap(logits, teacher, ids=ids).detach())


def test_a_reduced_teacher_may_be_projected_alone_for_kl() -> None:
    teacher, logits = draw(12, V), draw(12, len(IDS), seed=1)
    whole = law_of(teacher, Need(full=True, temperature=2.0), IDS)
    alone = law_of(teacher, Need(temperature=2.0), IDS)
    assert alone.full is None
    for law in (whole, alone):
        rows = losses.kl_rows(logits.clone(), law, 2.0, torch.empty_like(logits))
        assert_close(rows.value, losses.kl(logits, teacher, temperature=2.0, ids=IDS))


def test_tv_gradient_stays_bounded() -> None:
    law = law_of(draw(64, V, 8.0, seed=1), Need(full=True), None)
    rows = losses.tv_rows(draw(64, V, 8.0), law, torch.empty(64, V))
    assert rows.grad.abs().max() <= 1


def slots(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Values in (0, 1) [n, K], and prefixes of valid slots of every length."""
    generator = torch.Generator().manual_seed(seed)
    depth = 5
    valid = torch.arange(depth) < torch.arange(depth + 1)[:, None]
    return torch.rand(depth + 1, depth, generator=generator), valid


def test_e2e_tv_by_hand() -> None:
    alpha, valid = slots()
    want = torch.zeros(len(alpha))
    for group in range(len(alpha)):
        product = 1.0
        for slot in range(int(valid[group].sum())):
            product *= float(alpha[group, slot])
            want[group] += (1 - product) / alpha.shape[1]
    assert_close(losses.e2e_tv(alpha, valid), want)
    assert_close(losses.e2e_tv(torch.ones_like(alpha), valid), torch.zeros(len(alpha)))


def test_e2e_tv_has_the_gradient_of_its_detached_weights() -> None:
    alpha, valid = slots()
    alpha.requires_grad_()
    (want,) = torch.autograd.grad(losses.e2e_tv(alpha, valid).sum(), alpha)
    weights = losses.e2e_tv_weights(alpha.detach(), valid)
    (have,) = torch.autograd.grad((weights * (1 - alpha)).sum(), alpha)
    assert_close(have, want)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_are_the_log_gradient_of_the_smoothed_length(alpha: float) -> None:
    q_label, valid = slots()
    log_s = ((1 - alpha) * q_label + alpha).log().requires_grad_()
    length = (log_s.cumsum(1).exp() * valid).sum()
    (want,) = torch.autograd.grad(length, log_s)
    assert_close(losses.dpace_weights(q_label, valid, alpha), want)
