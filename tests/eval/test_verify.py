"""Exactness by enumeration: every draw of the rule, weighted, against the target's own law."""

from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling
from draftsmith.eval.verify import Laws, point_mass
from draftsmith.recipes.errors import UserError
from tests.coins import distance, law_of
from tests.toy import SAMPLINGS, START, TREES, ToyModel, output_law, play_round, target_law

LENGTH = 3
ALL = {"greedy": Sampling(), **SAMPLINGS}


def answer(model, tree, coins, rule):
    """LENGTH tokens by rounds of draft and verify, all of one script of coins."""
    context = START
    while len(context) < LENGTH + 1:
        context += play_round(model, context, tree, rule, "point", coins)
    return context[1 : LENGTH + 1]


@pytest.mark.parametrize("sampling", ALL.values(), ids=ALL)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_output_law_is_the_targets(tree, sampling):
    model = ToyModel(0, sampling)
    out = output_law(model, tree, point_mass, length=LENGTH)
    assert distance(out, target_law(model, LENGTH)) < 1e-12


def test_rounds_of_one_answer_share_their_coins():
    """The law of whole answers, without taking rounds apart."""
    model = ToyModel(1, SAMPLINGS["penalty"])
    out = law_of(lambda coins: answer(model, TREES["sparse"], coins, point_mass))
    assert distance(out, target_law(model, LENGTH)) < 1e-12


def redrawing(laws, proposal, coins):
    """A wrong rule: after a miss it draws anew instead of emitting the token that was drawn."""
    verdict = point_mass(laws, proposal, coins)
    last = int(verdict.path[0, -1]) if int(verdict.length) else 0
    zero = torch.zeros(1, dtype=torch.long)
    return replace(verdict, next=laws.token(zero, zero + last, coins))


@pytest.mark.parametrize("name", ["chain1", "chain2", "siblings"])
def test_redrawing_after_a_miss_is_biased_and_the_enumeration_sees_it(name):
    model = ToyModel(0, Sampling(1.0))
    out = output_law(model, TREES[name], redrawing, length=LENGTH)
    assert distance(out, target_law(model, LENGTH)) > 0.05


def proposal_of(tokens, parent, valid=None):
    tokens = torch.tensor(tokens)
    valid = torch.ones_like(tokens).bool() if valid is None else torch.tensor(valid).bool()
    return Proposal(tokens, torch.tensor(parent), valid)


def verify(proposal, chosen):
    """Greedy verification where the argmax of every node is as given."""
    logits = torch.nn.functional.one_hot(chosen, 10).double()
    return point_mass(Laws(logits, Sampling()), proposal, SeededCoins([0] * len(chosen)))


def test_a_match_after_a_miss_is_not_accepted():
    proposal = proposal_of([[1, 9, 3, 4]], [[0, 1, 2, 3]])
    verdict = verify(proposal, torch.tensor([[1, 2, 3, 4, 5]]))
    assert verdict.length.tolist() == [1] and verdict.next.tolist() == [2]


def test_full_acceptance_takes_the_bonus_of_the_last_node():
    verdict = verify(proposal_of([[1, 2]], [[0, 1]]), torch.tensor([[1, 2, 7]]))
    assert verdict.path.tolist() == [[1, 2]] and verdict.next.tolist() == [7]


def test_rows_of_a_batch_are_accepted_on_their_own():
    proposal = proposal_of([[1, 2], [1, 2], [5, 6]], [[0, 1], [0, 0], [0, 1]])
    chosen = torch.tensor([[1, 2, 7], [2, 8, 9], [0, 6, 3]])
    verdict = verify(proposal, chosen)
    assert verdict.length.tolist() == [2, 1, 0]
    assert verdict.next.tolist() == [7, 9, 0]
    assert verdict.path.tolist() == [[1, 2], [2, 0], [0, 0]]


def test_padding_that_equals_the_chosen_token_is_not_accepted():
    verdict = verify(proposal_of([[0, 0]], [[0, 1]], [[0, 0]]), torch.tensor([[0, 0, 0]]))
    assert verdict.length.tolist() == [0] and verdict.next.tolist() == [0]


@pytest.mark.parametrize("draw", ["chain", "iid", "without_replacement"])
def test_draws_that_the_rule_is_not_exact_for_are_refused(draw):
    tokens = torch.tensor([[1]])
    q = torch.ones(1, 1, 4) / 4
    proposal = Proposal(tokens, torch.zeros_like(tokens), tokens.bool(), q, draw)
    with pytest.raises(UserError, match="point_mass is for draw 'point', not for"):
        point_mass(Laws(torch.zeros(1, 2, 4), Sampling(1.0)), proposal, SeededCoins([0]))
    verdict = verify(proposal, torch.tensor([[1, 2]]))  # greedy decoding weighs nothing by q
    assert verdict.length.tolist() == [1] and verdict.next.tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_greedy_choice_takes_the_lowest_id_of_a_tie(dtype):
    logits = torch.randint(0, 4, (1, 5, 3000)).to(dtype)
    first = [row.index(max(row)) for row in logits[0].tolist()]
    assert Laws(logits, Sampling()).best[0].tolist() == first
