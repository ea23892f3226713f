"""Children of a node: their law, and the q that they carry, by enumeration of all draws."""

import pytest
import torch

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.draws import draw_children, draw_slots
from draftsmith.drafters.tree import Tree, chain
from tests.coins import law_of

LAW = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
ROW = torch.tensor([0])


def drawn_law(draw, count, law=LAW):
    """The law of (tokens, valid) over all coins."""

    def run(coins):
        children = draw_children(law, count, draw, coins, ROW)
        return tuple(children.tokens[0].tolist()), tuple(children.valid[0].tolist())

    return law_of(run)


def test_iid_children_are_independent_and_may_be_equal():
    found = drawn_law("iid", 2)
    assert found[(0, 0), (True, True)] == pytest.approx(0.25)
    assert found[(1, 2), (True, True)] == pytest.approx(0.06)
    assert len(found) == 9


def test_children_without_replacement_differ_and_carry_the_law_that_drew_them():
    found = drawn_law("without_replacement", 2)
    assert found[(0, 1), (True, True)] == pytest.approx(0.5 * 0.3 / 0.5)
    assert found[(2, 0), (True, True)] == pytest.approx(0.2 * 0.5 / 0.8)
    assert len(found) == 6
    children = draw_children(LAW, 2, "without_replacement", SeededCoins([3]), ROW)
    first = int(children.tokens[0, 0])
    rest = LAW[0].clone()
    rest[first] = 0
    torch.testing.assert_close(children.q[0, 0], LAW[0])
    torch.testing.assert_close(children.q[0, 1], rest / rest.sum())


def test_a_law_that_runs_out_leaves_invalid_children():
    found = drawn_law("without_replacement", 4)
    assert {valid for _, valid in found} == {(True, True, True, False)}
    assert sum(found.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("draw", ["chain", "iid", "without_replacement"])
def test_the_probability_of_the_tokens_is_the_product_of_their_q(draw):
    law, count = LAW, 1 if draw == "chain" else 3
    seen = {}

    def run(coins):
        children = draw_children(law, count, draw, coins, ROW)
        mine = children.q[0].gather(1, children.tokens[0][:, None])
        seen[tuple(children.tokens[0].tolist())] = float(mine.prod())
        return tuple(children.tokens[0].tolist())

    for tokens, share in law_of(run).items():
        assert share == pytest.approx(seen[tokens])


def test_what_draws_nothing_is_refused():
    for count, draw in ((1, "point"), (2, "chain")):
        with pytest.raises(ValueError, match="children are drawn by"):
            draw_children(LAW, count, draw, SeededCoins([0]), ROW)


def test_slots_are_laid_out_as_the_tree_with_target_ids():
    tree, ids = Tree(((0,), (1,), (0, 0), (1, 0), (1, 1))), torch.tensor([3, 5, 8, 9])
    laws = torch.stack([LAW[0], LAW[0].flip(0)]).expand(6, 2, 4)
    proposal = draw_slots(laws, tree, "iid", SeededCoins(range(6)), ids)
    assert proposal.parent.tolist() == [[0, 0, 1, 2, 2]] * 6
    assert proposal.valid.all() and proposal.draw == "iid"
    torch.testing.assert_close(proposal.q[:, :2], laws[:, :1].expand(-1, 2, -1))
    torch.testing.assert_close(proposal.q[:, 2:], laws[:, 1:].expand(-1, 3, -1))
    column = torch.searchsorted(ids, proposal.tokens)
    assert torch.equal(ids[column], proposal.tokens)
    assert (proposal.q.gather(2, column[..., None]) > 0).all()
    wide = proposal.law(torch.tensor([0, 1]), torch.tensor([1, 3]), 10)
    assert wide.shape == (2, 10) and wide[0, ids].tolist() == LAW[0].tolist()
    assert wide.sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_a_rows_drafts_do_not_depend_on_its_neighbours():
    laws = torch.rand(2, 3, 7).softmax(-1)
    both = draw_slots(laws, chain(3), "chain", SeededCoins([1, 2]))
    alone = draw_slots(laws[1:], chain(3), "chain", SeededCoins([2]))
    assert torch.equal(both.tokens[1], alone.tokens[0])
