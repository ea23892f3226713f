"""Costs measured alone, and the tree that they choose."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from draftsmith.drafters.methods import build
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import Tree, chain, search_tree
from draftsmith.eval import tune
from draftsmith.eval.costs import measure_costs
from draftsmith.eval.theory import RoundCost
from draftsmith.eval.tune import calibrate, choice_from, choose_tree, from_json, to_json
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MedusaConfig, Recipe, TargetConfig
from tests.eval.test_bench import drafter_of
from tests.eval.test_report import documents
from tests.tiny import tiny_target

RECIPE = Recipe(name="tiny", target=TargetConfig(model="tiny"))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return drafter_of(target)


def test_every_tree_gets_its_three_costs(target, drafter):
    """Also trees without the best guess, and one whose first node has no child."""
    trees = [
        chain(1),
        chain(3),
        Tree(((1,),)),
        Tree(((0,), (1,), (1, 0))),
        search_tree([[0.5, 0.4, 0.3], [0.3, 0.2]], 8),
    ]
    costs = measure_costs(target, drafter, trees, context=10, sampling=Sampling(0.7), turns=2)
    assert len(costs) == len(trees)
    assert all(min(asdict(cost).values()) > 0 for cost in costs)
    assert len({cost.plain for cost in costs}) == 1  # one baseline for all


def test_measuring_leaves_the_cached_context_as_it_was(target, drafter, monkeypatch):
    lengths = []
    original = target.step

    def spy(ids, cache, nodes=None, **taps):
        lengths.append(max(cache.lengths, default=0))
        return original(ids, cache, nodes, **taps)

    monkeypatch.setattr(target, "step", spy)
    measure_costs(target, drafter, [chain(2)], context=9, sampling=Sampling(), turns=3)
    assert lengths[0] == 0
    assert set(lengths[1:]) == {9}


def test_calibration_walks_greedy_answers_where_there_are_any(target, drafter):
    greedy = documents(target)
    sampled = [replace(document, greedy=False) for document in greedy]
    found = calibrate(RECIPE, target, drafter, [*greedy, *sampled[:1]])
    assert found.documents == len(greedy)
    assert found.greedy
    only = calibrate(RECIPE, target, drafter, sampled)
    assert not only.greedy
    assert only.tau == found.tau
    with pytest.raises(UserError, match="held-out"):
        calibrate(RECIPE, target, drafter, [])


def test_longer_trees_of_one_search_never_walk_shorter(target, drafter):
    """Every searched tree holds the smaller ones, so its walk accepts at least as much."""
    found = calibrate(RECIPE, target, drafter, documents(target))
    assert found.sizes == sorted(found.sizes)
    assert found.tau == sorted(found.tau)
    assert [found.tree(nodes).nodes for nodes in found.sizes] == found.sizes


def test_the_best_quotient_wins_and_a_fixed_size_is_obeyed(target, drafter, monkeypatch):
    calibration = replace(
        calibrate(RECIPE, target, drafter, documents(target)), sizes=[1, 2, 4], tau=[1.2, 1.5, 1.6]
    )
    rounds = {1: 1.0, 2: 1.1, 4: 1.5}

    def fake(target, drafter, trees, *, context, sampling):
        return [RoundCost(1.0, 0.0, rounds[tree.nodes], 0.0) for tree in trees]

    monkeypatch.setattr(tune, "measure_costs", fake)
    choice = choose_tree(target, drafter, calibration, nodes=None, context=8)
    assert len(choice.paths) == 2
    assert choice.cost.verify == 1.1
    assert choice_from(json.loads(json.dumps(asdict(choice)))) == choice
    fixed = choose_tree(target, drafter, calibration, nodes=4, context=8)
    assert len(fixed.paths) == 4
    assert fixed.sizes == [4]


def test_calibration_survives_its_file(target, drafter):
    found = calibrate(RECIPE, target, drafter, documents(target))
    assert from_json(json.loads(json.dumps(to_json(found))), Path("folder"), depth=3) == found
    with pytest.raises(UserError, match=r"damaged .* the drafter 2"):
        from_json(to_json(found), Path("folder"), depth=2)


DAMAGE = {
    "accuracy": ([], "ab", 3, [3], [[]], [[0.5], [0.5, 0.1]], [[2.0]], [["0.5"]], [[True]]),
    "sizes": ([], [0, 1], [2, 1], [1, 10**9], [1.0], {}),
    "tau": ([1.0], [math.nan] * 9, None),
    "tau_micro": (math.nan, math.inf, "1", 10**400, -1.0),
    "tau_by_category": ([], {"a": None}),
    "hit": ([1], [0.5] * 3, "123"),
    "documents": (None, True, -1),
    "greedy": (1, "yes"),
    "more": (1,),
}


@pytest.mark.parametrize(
    "change", [{key: value} for key, values in DAMAGE.items() for value in values], ids=str
)
def test_a_calibration_that_is_damaged_is_one_clear_line(target, drafter, change):
    good = to_json(calibrate(RECIPE, target, drafter, documents(target)))
    with pytest.raises(UserError, match="its calibration is damaged") as caught:
        from_json(good | change, Path("folder"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [[], "x", 3, {"documents": 1}])
def test_a_calibration_that_is_none_is_one_clear_line(value):
    with pytest.raises(UserError, match="its calibration is damaged"):
        from_json(value, Path("folder"))


def test_a_small_draft_vocabulary_is_not_asked_for_more_guesses_than_it_has(target):
    few = build(MedusaConfig(heads=3), target, torch.tensor([0, 5, 9]))
    found = calibrate(RECIPE, target, few, documents(target))
    assert [len(row) for row in found.accuracy] == [3, 3, 3]
    assert found.tree(63).nodes == 3 + 9 + 27
    older = replace(found, accuracy=[[*row, *[0.0] * 7] for row in found.accuracy])
    for calibration in (found, older):
        choice = choose_tree(target, few, calibration, nodes=63, context=8)
        assert Tree(choice.paths).width == 3 and len(choice.paths) == 39
