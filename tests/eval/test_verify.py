"""Exactness by enumeration: every draw of the rule, weighted, against the target's own law."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.verify import choose, verify

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

    def law(self, context):
        noise = random.Random(f"{self.seed} {context}")
        logits = torch.tensor([noise.gauss(0, 1) for _ in range(V)], dtype=torch.float64)
        return standardise(logits, self.sampling).tolist()

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


def output_law(model, context, tree, left, rule=verify, draws=1):
    """Law of the next `left` tokens under rounds of draft and verify, over every choice.

    The rule sees `draws` independent draws of every node, one after the other.
    """
    if left <= 0:
        return {(): 1.0}
    proposal = propose(model, context, tree)
    laws = torch.tensor(
        [model.law(c) for c in node_contexts(context, proposal)], dtype=torch.float64
    ).repeat(draws, 1)  # [draws * (M+1), V]
    chosen = torch.cartesian_prod(*[torch.arange(V)] * len(laws)).reshape(-1, len(laws))
    weight = laws[torch.arange(len(laws)), chosen].prod(dim=1)
    rows = chosen.shape[0]
    many = Proposal(
        *(part.expand(rows, -1) for part in (proposal.tokens, proposal.parent)),
        proposal.valid.expand(rows, -1),
    )
    verdict = rule(many, chosen)
    first = Counter()
    for row in weight.nonzero()[:, 0].tolist():
        path = verdict.path[row, : int(verdict.length[row])]
        new = (*proposal.tokens[0, path - 1].tolist(), int(verdict.next[row]))[:left]
        first[new] += float(weight[row])
    out = Counter()
    for new, share in first.items():
        for rest, more in output_law(
            model, (*context, *new), tree, left - len(new), rule, draws
        ).items():
            out[(*new, *rest)] += share * more
    return out


def target_law(model, context, left):
    if left == 0:
        return {(): 1.0}
    return {
        (token, *rest): p * share
        for token, p in enumerate(model.law(context))
        for rest, share in target_law(model, (*context, token), left - 1).items()
    }


def distance(out, want):
    """Total variation."""
    return sum(abs(out.get(k, 0.0) - want.get(k, 0.0)) for k in {*out, *want}) / 2


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_the_output_law_is_the_targets(tree, sampling):
    for seed in range(2):
        model = ToyModel(seed, sampling)
        out, want = output_law(model, (), tree, LENGTH), target_law(model, (), LENGTH)
        assert distance(out, want) < 1e-12


def redrawing(proposal, chosen):
    """A wrong rule: after a miss it draws anew instead of emitting the token that was drawn."""
    first, again = chosen.chunk(2, dim=1)
    verdict = verify(proposal, first)
    nodes = torch.cat([torch.zeros_like(verdict.path[:, :1]), verdict.path], dim=1)
    last = nodes.gather(1, verdict.length[:, None])
    return replace(verdict, next=again.gather(1, last)[:, 0])


@pytest.mark.parametrize("name", ["chain1", "chain2", "siblings"])
def test_redrawing_after_a_miss_is_biased_and_the_enumeration_sees_it(name):
    model, tree = ToyModel(0, Sampling(1.0)), TREES[name]
    want = target_law(model, (), 2)
    assert distance(output_law(model, (), tree, 2, redrawing, draws=2), want) > 0.05
    ignoring = output_law(model, (), tree, 2, lambda p, chosen: verify(p, chosen.chunk(2, 1)[0]), 2)
    assert distance(ignoring, want) < 1e-12  # the second draws alone change nothing


def proposal_of(tokens, parent, valid=None):
    tokens = torch.tensor(tokens)
    valid = torch.ones_like(tokens).bool() if valid is None else torch.tensor(valid).bool()
    return Proposal(tokens, torch.tensor(parent), valid)


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
    with pytest.raises(ValueError, match="exact for draw 'point'"):
        verify(proposal, torch.tensor([[1, 1]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_greedy_choice_takes_the_lowest_id_of_a_tie(dtype):
    logits = torch.randint(0, 4, (1, 5, 3000)).to(dtype)
    first = [row.index(max(row)) for row in logits[0].tolist()]
    assert choose(logits, Sampling(), None)[0].tolist() == first
