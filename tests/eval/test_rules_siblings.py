"""Several drafts at one node: which pairs of draw and rule are exact, and how much they accept.

Laws of small whole numbers over five tokens; the figures are those of an independent enumeration
in exact fractions.
"""

from dataclasses import replace
from itertools import chain, combinations

import pytest
import torch

from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling
from draftsmith.eval.rules import RULES
from draftsmith.eval.rules_rejection import covered, smallest_scale
from draftsmith.eval.verify import Laws, match
from draftsmith.recipes.errors import UserError
from tests.coins import law_of
from tests.one_node import all_proposals, drawn, one_node
from tests.toy import committed, whole_law

SIZE = 5


def pair(seed):
    return whole_law(seed, SIZE), whole_law(50 + seed, SIZE)


def top_k(q, count, draw):
    """The likeliest tokens, said to be drawn from q (or guessed)."""
    tokens = q.argsort(descending=True, stable=True)[None, :count]
    law = None if draw == "point" else q.expand(1, count, -1)
    return Proposal(tokens, torch.zeros_like(tokens), tokens >= 0, law, draw)


def merged(proposal):
    """Equal siblings as one."""
    tokens = proposal.tokens[0].tolist()
    first = torch.tensor([[token not in tokens[:i] for i, token in enumerate(tokens)]])
    return replace(proposal, valid=first)


def with_plain_q(proposal):
    """Draws without replacement that all claim to come from the whole q."""
    return replace(proposal, q=proposal.q[:, :1].expand_as(proposal.q))


def by_match(p, propose):
    """The same for the rule that draws from p and looks whether a child holds the draw."""
    proposal, weights = all_proposals(propose)
    held = (proposal.tokens[:, :, None] == torch.arange(SIZE)).any(dim=1)

    def run(coins):
        verdict = match(Laws(logits, Sampling(1.0)), one, coins)
        return committed(one, verdict)[0], int(verdict.length)

    out, accepted = torch.zeros(SIZE, dtype=torch.float64), 0.0
    for row, weight in enumerate(weights.tolist()):
        one = replace(proposal, tokens=proposal.tokens[row : row + 1], parent=proposal.parent[:1])
        one = replace(one, valid=proposal.valid[row : row + 1])
        logits = torch.full((1, one.tokens.shape[1] + 1, SIZE), float("-inf"), dtype=torch.float64)
        logits[0, 0], logits[0, 1:, 0] = p.log(), 0.0  # what follows a draft is of no interest
        for (token, length), share in law_of(run).items():
            assert bool(length) == bool(held[row, token])
            out[token] += weight * share
            accepted += weight * share * length
    return out, accepted


def iid(q, count, coins):
    return drawn(q, count, "iid", coins)


def distinct(q, count, coins):
    return drawn(q, count, "without_replacement", coins)


def by(name):
    return lambda p, propose: one_node(p, propose, RULES[name])


# How children come about, and the rule; mean share of accepted drafts for 2 and 3 children.
EXACT = {
    "iid": (iid, by("multi_step"), (0.792, 0.848)),
    "without replacement": (distinct, by("without_replacement"), (0.829, 0.897)),
    "top-k as point mass": (lambda q, k, _: top_k(q, k, "point"), by_match, (0.413, 0.550)),
    "iid by one draw of p": (iid, by_match, (0.348, 0.465)),
}
# The same for pairs that a rule refuses or that break its contract; largest total variation.
BIASED = {
    "iid, duplicates merged": (
        lambda q, k, coins: merged(iid(q, k, coins)),
        by("multi_step"),
        (0.030, 0.043),
    ),
    "draws without replacement, plain q": (
        lambda q, k, coins: with_plain_q(distinct(q, k, coins)),
        by("without_replacement"),
        (0.054, 0.057),
    ),
    "top-k with a softmax q": (
        lambda q, k, _: top_k(q, k, "iid"),
        by("multi_step"),
        (0.600, 0.600),
    ),
}


def distances_and_shares(propose, judge, count):
    found = []
    for seed in range(6):
        p, q = pair(seed)
        out, accepted = judge(p, lambda coins, q=q: propose(q, count, coins))
        found.append((float((out - p).abs().sum() / 2), accepted))
    return zip(*found, strict=True)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("propose", "judge", "means"), EXACT.values(), ids=EXACT)
def test_children_that_carry_the_law_that_drew_them_are_exact(propose, judge, means, count):
    distances, shares = distances_and_shares(propose, judge, count)
    assert max(distances) < 1e-12
    assert sum(shares) / 6 == pytest.approx(means[count - 2], abs=6e-4)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("propose", "judge", "worst"), BIASED.values(), ids=BIASED)
def test_children_with_another_law_are_biased(propose, judge, worst, count):
    distances, _ = distances_and_shares(propose, judge, count)
    assert max(distances) == pytest.approx(worst[count - 2], abs=6e-4)


def subsets():
    return chain.from_iterable(combinations(range(SIZE), n) for n in range(SIZE + 1))


def all_inside(q, inside, count, replacement):
    """The probability that `count` draws from q all fall inside a set."""
    if count == 0:
        return 1.0
    total = 0.0
    for token in inside:
        if q[token] > 0:
            rest = q
            if not replacement:
                rest = q.clone()
                rest[token] = 0
                rest = rest / rest.sum()
            total += float(q[token]) * all_inside(rest, inside, count - 1, replacement)
    return total


def best_possible(p, q, count, *, replacement):
    """min over H of 1 - Q(all drafts in H) + p(H): what no rule can exceed (max-flow, min-cut)."""
    return min(
        1 - all_inside(q, inside, count, replacement) + float(p[list(inside)].sum())
        for inside in subsets()
    )


# Mean over 12 pairs: recursive rejection, K-SEQ, without replacement, and the two optima.
MEANS = {2: (0.798, 0.826, 0.833, 0.895, 0.935), 3: (0.851, 0.885, 0.902, 0.965, 0.995)}
RULE_OF_DRAW = (("multi_step", "iid"), ("k_sequential", "iid"), ("without_replacement",) * 2)


@pytest.mark.parametrize("count", MEANS)
def test_no_rule_accepts_more_than_the_optimum_and_their_order_holds(count):
    totals = [0.0] * 5
    for seed in range(12):
        p, q = pair(seed)
        limits = [best_possible(p, q, count, replacement=iid) for iid in (True, False)]
        for place, (name, draw) in enumerate(RULE_OF_DRAW):

            def propose(coins, q=q, draw=draw):
                return drawn(q, count, draw, coins)

            out, accepted = one_node(p, propose, RULES[name])
            assert float((out - p).abs().max()) < 1e-12
            assert accepted <= limits[draw != "iid"] + 1e-12
            totals[place] += accepted / 12
        totals[3] += limits[0] / 12
        totals[4] += limits[1] / 12
    assert totals == pytest.approx(MEANS[count], abs=6e-4)
    assert totals == sorted(totals)


def of_two_drafters(q, other, draw):
    """Two children by one drafter, then one by another, as one family."""

    def propose(coins):
        one, two = drawn(q, 2, draw, coins), drawn(other, 1, draw, coins)
        parts = (
            torch.cat([getattr(one, name), getattr(two, name)], dim=1)
            for name in ("tokens", "parent", "valid", "q")
        )
        return Proposal(*parts, draw)

    return propose


@pytest.mark.parametrize("name", ["multi_step", "without_replacement"])
def test_siblings_of_several_drafters_each_carry_their_own_law(name):
    """SpecInfer's merged trees: exact for recursive rejection, refused by K-SEQ."""
    (p, q), (_, other) = pair(1), pair(4)
    draw = dict(RULE_OF_DRAW)[name]
    out, _ = one_node(p, of_two_drafters(q, other, draw), RULES[name])
    assert float((out - p).abs().max()) < 1e-12
    with pytest.raises(UserError, match="come from several drafters"):
        one_node(p, of_two_drafters(q, other, "iid"), RULES["k_sequential"])


@pytest.mark.parametrize(("name", "draw"), RULE_OF_DRAW)
def test_single_precision_is_exact_to_its_rounding(name, draw):
    p, q = pair(0)
    out, _ = one_node(p.float(), lambda coins: drawn(q.float(), 3, draw, coins), RULES[name])
    assert float((out - p).abs().max()) < 1e-6


def test_recursive_rejection_accepts_what_its_closed_form_says():
    """1 - prod(1 - alpha_i), alpha_i = sum min(P_i, q) with P_i the residual of round i."""
    p, q = pair(3)
    accepted = one_node(p, lambda coins: drawn(q, 3, "iid", coins), RULES["multi_step"])[1]
    missed, left = 1.0, p
    for _ in range(3):
        missed *= 1 - float(torch.minimum(left, q).sum())
        left = (left - q).clamp(min=0)
        left = left / left.sum()
    assert accepted == pytest.approx(1 - missed)


def test_the_scale_of_k_sequential_solves_its_equation_for_every_row():
    p = torch.stack([pair(seed)[0] for seed in range(12)])
    q = torch.stack([pair(seed)[1] for seed in range(12)])
    count = torch.tensor([1, 2, 3, 4] * 3)
    scale = smallest_scale(p, q, count, 1.0)
    assert (scale[count == 1] == 1).all()
    assert (scale <= count).all()
    assert (covered(p, q, count, scale) <= scale).all()
    several = count > 1
    below = covered(p, q, count, scale - 1e-5) > scale - 1e-5
    assert (below | ~several).all()
    disjoint = smallest_scale(torch.eye(2)[:1], torch.eye(2)[1:], torch.tensor([3]), 1.0)
    assert disjoint.tolist() == [3.0]
