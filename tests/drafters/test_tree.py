import itertools
import math

import pytest
import torch

from draftsmith.drafters.tree import Tree, chain, search_tree
from draftsmith.recipes.errors import UserError

ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.1, 0.05], [0.3, 0.1, 0.0]]


def expected_length(tree):
    """Expected accepted nodes when slots hit independently: the sum of node values."""
    return sum(
        math.prod(ACCURACY[depth][rank] for depth, rank in enumerate(path)) for path in tree.paths
    )


def test_a_chain_is_a_causal_tree():
    tree = chain(3)
    assert tree.is_chain and tree.nodes == 3 and tree.width == 1
    assert tree.parent.tolist() == [0, 1, 2] and tree.depth.tolist() == [1, 2, 3]
    assert torch.equal(tree.visible, torch.ones(4, 4).tril().bool())


def test_nodes_see_themselves_and_their_ancestors_only():
    tree = Tree(((1,), (0,), (0, 0), (0, 1), (0, 0, 2)))
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (0, 0, 2))
    for node, path in enumerate(tree.paths, start=1):
        seen = [tree.paths[j - 1] for j in range(1, 6) if tree.visible[node, j]]
        assert seen == [path[:d] for d in range(1, len(path) + 1)]
        assert tree.visible[node, 0]
    assert not tree.is_chain
    assert tree.width == tree.to(torch.device("cpu")).width == 3


@pytest.mark.parametrize(
    "paths", [(), ((0, 0),), ((0,), (0,)), ((-1,),)], ids=["empty", "orphan", "twice", "negative"]
)
def test_what_is_no_tree_is_refused(paths):
    with pytest.raises(UserError):
        Tree(paths)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_search_is_optimal(nodes):
    """Against every tree of that many nodes over ranks 0..2 and depth 3."""
    every = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    closed = (
        paths
        for paths in itertools.combinations(every, nodes)
        if all(len(p) == 1 or p[:-1] in paths for p in paths)
    )
    best = max(expected_length(Tree(paths)) for paths in closed)
    found = search_tree(ACCURACY, nodes)
    assert found.nodes == nodes
    assert expected_length(found) == pytest.approx(best)


def test_search_stops_when_there_are_no_more_nodes():
    assert search_tree([[0.5, 0.1]], 9).paths == ((0,), (1,))
