"""Exactness by enumeration: every draw of the rule, weighted, against the target's own law."""

import random
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.verify import Laws, point_mass
from draftsmith.recipes.errors import UserError
from tests.coins import distance, law_of

V, LENGTH = 3, 3

TREES = {
    "chain1": chain(1),
    "chain2": chain(2),
    "siblings": Tree(((0,), (1,))),
    "all": Tree(((0,), (1,), (2,))),
    "sparse": Tree(((0,), (1,), (0, 0), (1, 0))),
    "deep": Tree(((0,), (1,), (0, 1), (0, 1, 0))),
}
SAMPLINGS = {
    "greedy": Sampling(),
    "plain": Sampling(1.0),
    "cold": Sampling(0.5),
    "top_k": Sampling(1.0, top_k=2),
    "top_p": Sampling(1.3, top_p=0.7),
    "both": Sampling(0.8, top_k=2, top_p=0.9),
}


class ToyModel:
    """Random logits per context, and random guesses of a drafter per context and slot."""

    def __init__(self, seed, sampling):
        self.seed, self.sampling = seed, sampling

    def logits(self, context):
        noise = random.Random(f"{self.seed} {context}")
        return torch.tensor([noise.gauss(0, 1) for _ in range(V)], dtype=torch.float64)

    def law(self, context):
        return standardise(self.logits(context), self.sampling).tolist()

    def guesses(self, context, depth):
        """Ranked tokens of one slot: a permutation, as top-k of a head gives distinct tokens."""
        noise = random.Random(f"draft {self.seed} {context} {depth}")
        return noise.sample(range(V), V)


def propose(model, context, tree):
    tokens = [model.guesses(context, len(path))[path[-1]] for path in tree.paths]
    tokens = torch.tensor([tokens])
    return Proposal(tokens, tree.parent[None], torch.ones_like(tokens).bool())


def node_contexts(context, proposal):
    """The context at every node: the committed one, then the drafted path to the node."""
    contexts = [context]
    for token, parent in zip(proposal.tokens[0].tolist(), proposal.parent[0].tolist(), strict=True):
        contexts.append((*contexts[parent], token))
    return contexts


def answer(model, tree, coins, rule=point_mass):
    """LENGTH tokens by rounds of draft and verify."""
    context = ()
    while len(context) < LENGTH:
        proposal = propose(model, context, tree)
        logits = torch.stack([model.logits(c) for c in node_contexts(context, proposal)])
        verdict = rule(Laws(logits[None], model.sampling), proposal, coins)
        path = verdict.path[0, : int(verdict.length)]
        context = (*context, *proposal.tokens[0, path - 1].tolist(), int(verdict.next))
    return context[:LENGTH]


def target_law(model, context, left):
    if left == 0:
        return {(): 1.0}
    return {
        (token, *rest): p * share
        for token, p in enumerate(model.law(context))
        for rest, share in target_law(model, (*context, token), left - 1).items()
    }


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_output_law_is_the_targets(tree, sampling):
    for seed in range(2):
        model = ToyModel(seed, sampling)
        out = law_of(lambda coins, model=model: answer(model, tree, coins))
        assert distance(out, target_law(model, (), LENGTH)) < 1e-12


def redrawing(laws, proposal, coins):
    """A wrong rule: after a miss it draws anew instead of emitting the token that was drawn."""
    verdict = point_mass(laws, proposal, coins)
    last = int(verdict.path[0, -1]) if int(verdict.length) else 0
    zero = torch.zeros(1, dtype=torch.long)
    return replace(verdict, next=laws.token(zero, zero + last, coins))


@pytest.mark.parametrize("name", ["chain1", "chain2", "siblings"])
def test_redrawing_after_a_miss_is_biased_and_the_enumeration_sees_it(name):
    model, tree = ToyModel(0, Sampling(1.0)), TREES[name]
    want = target_law(model, (), LENGTH)
    assert distance(law_of(lambda coins: answer(model, tree, coins, redrawing)), want) > 0.05


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
