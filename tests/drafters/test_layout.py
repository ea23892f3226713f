import pytest
import torch

from draftsmith.drafters.layout import ancestors, lay_out, padded
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.tree import Tree, chain

TREES = [chain(1), chain(5), Tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2)))]


def proposal_of(parent, valid=None):
    parent = torch.tensor(parent)
    valid = torch.ones_like(parent).bool() if valid is None else torch.tensor(valid).bool()
    return Proposal(torch.where(valid, 7, 10**9), parent, valid)


@pytest.mark.parametrize("tree", TREES)
def test_depths_and_ancestors_are_the_trees_whether_it_is_known_or_read_off(tree):
    proposal = proposal_of([tree.parent.tolist()] * 2)
    depth = [[0, *tree.depth.tolist()]]
    for shape in (tree, chain(63)):  # the plan's tree, and another one
        fed, nodes = lay_out(proposal, shape)
        assert torch.equal(fed.tokens, proposal.tokens)
        assert nodes.depth.expand(2, -1).tolist() == depth * 2
        if tree.is_chain:
            assert nodes.visible is None
        else:
            assert torch.equal(nodes.visible.expand(2, -1, -1), tree.visible.expand(2, -1, -1))
    assert torch.equal(ancestors(proposal.parent)[0], tree.visible)


def test_rows_have_trees_of_their_own():
    fed, nodes = lay_out(proposal_of([[0, 1, 2], [0, 0, 1]]), chain(3))
    assert nodes.depth.tolist() == [[0, 1, 2, 3], [0, 1, 1, 2]]
    assert nodes.visible[1, 3].tolist() == [True, True, False, True]
    assert fed.tokens.shape == (2, 3)


def test_what_no_row_has_is_cut_off_and_what_one_row_lacks_is_token_0():
    chained = [[0, 1, 2, 3]] * 2
    fed, nodes = lay_out(proposal_of(chained, [[1, 1, 0, 0], [1, 0, 0, 0]]), chain(4))
    assert fed.tokens.tolist() == [[7, 7], [7, 0]] and fed.valid.tolist() == [[1, 1], [1, 0]]
    assert nodes.visible is None and nodes.depth.tolist() == [[0, 1, 2]]
    fed, nodes = lay_out(proposal_of(chained, [[0] * 4] * 2), chain(4))
    assert fed.tokens.shape == (2, 0) and nodes.depth.tolist() == [[0]]


def test_valid_nodes_do_not_see_invalid_ones():
    fed, nodes = lay_out(proposal_of([[0, 0, 1, 2]], [[1, 0, 1, 0]]), chain(4))
    assert fed.tokens.tolist() == [[7, 0, 7]]
    assert nodes.visible[0, :, 2].tolist() == [False, False, True, False]


def test_q_is_cut_with_its_nodes():
    proposal = proposal_of([[0, 1, 2]], [[1, 0, 0]])
    q = torch.rand(1, 3, 5)
    fed, _ = lay_out(
        Proposal(proposal.tokens, proposal.parent, proposal.valid, q, "chain"), TREES[0]
    )
    assert torch.equal(fed.q, q[:, :1]) and fed.draw == "chain"


def test_prompts_are_padded_at_the_end():
    ids, lengths = padded([[1, 2, 3], [4]], torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]] and lengths.tolist() == [3, 1]
