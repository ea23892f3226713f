"""The closed forms against the published tables, simulation, and each other."""

import random

import pytest

from draftsmith.eval.theory import (
    RoundCost,
    best_gamma,
    chain_tau,
    choose_nodes,
    expected_tokens,
    operations_factor,
    predicted_speedup,
    walltime_bound,
    walltime_factor,
)

TABLE_1 = [  # Leviathan et al., table 1: alpha, gamma, operations, speed at zero draft cost
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
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


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_published_table(alpha: float, gamma: int, operations: float, speed: float) -> None:
    assert round(operations_factor(alpha, gamma, 0.0), 2) == pytest.approx(operations, abs=0.011)
    assert round(walltime_factor(alpha, gamma, 0.0), 2) == pytest.approx(speed, abs=0.011)


@pytest.mark.parametrize(("alpha", "cost", "gamma", "factor"), BEST)
def test_published_best_gamma(alpha: float, cost: float, gamma: int, factor: float) -> None:
    assert best_gamma(alpha, cost) == gamma
    assert walltime_factor(alpha, gamma, cost) == pytest.approx(factor, abs=5e-4)


def test_closed_form_of_expected_tokens() -> None:
    for alpha in (0.0, 0.3, 0.95):
        for gamma in (0, 1, 7):
            closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
            assert expected_tokens(alpha, gamma) == pytest.approx(closed)
    assert expected_tokens(1.0, 4) == 5  # the closed form divides by zero here


def test_bound_holds_whenever_alpha_beats_cost() -> None:
    for alpha in (0.2, 0.5, 0.9):
        for cost in (0.01, 0.1, 0.19):
            reached = walltime_factor(alpha, best_gamma(alpha, cost), cost)
            assert reached >= walltime_bound(alpha, cost) - 1e-12 > 1


def test_no_gamma_pays_when_the_drafter_is_too_dear() -> None:
    assert best_gamma(0.3, 0.4) == 0
    assert walltime_factor(0.3, 0, 0.4) == 1


def test_chain_tau_is_the_mean_of_simulated_rounds() -> None:
    conditional = [0.7, 0.5, 0.9]
    draw = random.Random(0)
    rounds = 40_000
    tokens = 0
    for _ in range(rounds):
        tokens += 1
        for rate in conditional:
            if draw.random() >= rate:
                break
            tokens += 1
    assert chain_tau(conditional) == pytest.approx(tokens / rounds, abs=0.02)


def test_prediction_agrees_with_theorem_where_its_assumption_holds() -> None:
    cost = RoundCost(plain=2.0, draft=4 * 0.1 * 2.0, verify=2.0, overhead=0.0)
    predicted = predicted_speedup(expected_tokens(0.8, 4), cost)
    assert predicted == pytest.approx(walltime_factor(0.8, 4, 0.1))


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
