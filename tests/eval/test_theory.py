"""The prediction and the choice against the published tables, which assume equal acceptance."""

import pytest

from draftsmith.eval.theory import RoundCost, choose_nodes, predicted_speedup

TABLE_1 = [  # Leviathan et al. (2211.17192), table 1: alpha, gamma, speedup at zero draft cost
    (0.6, 2, 1.96),
    (0.7, 3, 2.53),
    (0.8, 2, 2.44),
    (0.8, 5, 3.69),
    (0.9, 2, 2.71),
    (0.9, 10, 6.86),
]

BEST = [  # alpha, cost, best gamma, its factor
    (0.6, 0.01, 7, 2.297),
    (0.6, 0.02, 6, 2.170),
    (0.6, 0.05, 4, 1.921),
    (0.6, 0.1, 3, 1.674),
    (0.6, 0.2, 2, 1.400),
    (0.8, 0.01, 14, 4.232),
    (0.8, 0.02, 11, 3.817),
    (0.8, 0.05, 8, 3.092),
    (0.8, 0.1, 6, 2.470),
    (0.8, 0.2, 4, 1.868),
    (0.9, 0.05, 13, 4.674),
    (0.9, 0.1, 10, 3.431),
]


def tokens(alpha: float, gamma: int) -> float:
    """Tokens of a round of gamma drafts, each accepted with probability alpha."""
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def chain_cost(gamma: int, cost: float) -> RoundCost:
    """A draft step costs `cost` of a target step; scoring all drafts costs one (theorem 3.8)."""
    return RoundCost(plain=2.0, draft=2.0 * gamma * cost, verify=2.0, overhead=0.0)


@pytest.mark.parametrize(("alpha", "gamma", "speed"), TABLE_1)
def test_published_table(alpha: float, gamma: int, speed: float) -> None:
    predicted = predicted_speedup(tokens(alpha, gamma), chain_cost(gamma, 0.0))
    assert round(predicted, 2) == pytest.approx(speed, abs=0.011)


@pytest.mark.parametrize(("alpha", "cost", "gamma", "factor"), BEST)
def test_published_best_gamma(alpha: float, cost: float, gamma: int, factor: float) -> None:
    tau = {drafts: tokens(alpha, drafts) for drafts in range(64)}
    seconds = {drafts: chain_cost(drafts, cost).round for drafts in tau}
    assert choose_nodes(tau, seconds) == gamma
    predicted = predicted_speedup(tau[gamma], chain_cost(gamma, cost))
    assert predicted == pytest.approx(factor, abs=5e-4)


def test_no_draft_pays_when_the_drafter_is_too_dear() -> None:
    tau = {drafts: tokens(0.3, drafts) for drafts in range(64)}
    assert choose_nodes(tau, {drafts: chain_cost(drafts, 0.4).round for drafts in tau}) == 0


def test_overhead_slows_the_prediction() -> None:
    assert predicted_speedup(2.0, RoundCost(1.0, 0.0, 1.0, 1.0)) == 1.0


def test_choose_nodes_maximises_tokens_per_second() -> None:
    tau = {1: 1.5, 4: 1.9, 16: 2.1, 63: 2.2}
    assert choose_nodes(tau, {1: 1.0, 4: 1.1, 16: 1.3, 63: 2.0}) == 4
    assert choose_nodes(tau, dict.fromkeys(tau, 1.0)) == 63
    assert choose_nodes({3: 1.0, 2: 1.0}, {2: 1.0, 3: 1.0}) == 2  # equals: the smaller
    assert choose_nodes(tau, {4: 1.0}) == 4  # only sizes that were measured
    with pytest.raises(ValueError, match="no tree size"):
        choose_nodes(tau, {})
