"""Known ways to be wrong: what the real rules do there, and that the enumeration sees the wrong."""

from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.draws import draw_slots
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import chain
from draftsmith.eval.history import History
from draftsmith.eval.rules import RULES
from draftsmith.eval.verify import Laws
from tests.coins import EnumeratedCoins, distance, law_of
from tests.one_node import drawn, one_node
from tests.toy import TREES, ToyModel, laws_of, output_law, propose, target_law, whole_law

PLAIN = Sampling(1.0)
RATIO_RULES = ("token", "block", "multi_step", "without_replacement", "k_sequential", "lenient")
P, Q = whole_law(21, 6), whole_law(22, 6)


def top_3(law):
    kept = torch.zeros_like(law)
    best = law.argsort(descending=True, stable=True)[:3]
    kept[best] = law[best]
    return kept / kept.sum()


def claimed(q):
    """A child drawn from one law that claims another q."""
    return lambda proposal: replace(proposal, q=q.expand_as(proposal.q))


def off_by(p, law, q):
    """Total variation of token rejection where drafts are drawn from `law` and claim q."""
    out, _ = one_node(p, lambda coins: claimed(q)(drawn(law, 1, "chain", coins)), RULES["token"])
    return float((out - p).abs().sum() / 2)


def test_p_and_q_need_not_be_filtered_alike():
    p = top_3(P)
    assert off_by(p, Q, Q) < 1e-12 and off_by(p, top_3(Q), top_3(Q)) < 1e-12
    shares = [
        one_node(p, lambda coins, q=q: drawn(q, 1, "chain", coins), RULES["token"])[1]
        for q in (Q, top_3(Q))
    ]
    assert shares == pytest.approx([0.448, 0.545], abs=6e-4)


def test_a_q_that_drew_nothing_is_biased():
    """Other filters, another temperature, or a greedy draft with the q of a softmax."""
    squared = Q**2 / (Q**2).sum()
    greedy = torch.nn.functional.one_hot(Q.argmax(), 6).double()
    assert off_by(top_3(P), top_3(Q), Q) == pytest.approx(0.099, abs=6e-4)
    assert off_by(P, squared, Q) == pytest.approx(0.146, abs=6e-4)
    assert off_by(P, greedy, Q) == pytest.approx(0.524, abs=6e-4)


def test_a_draft_that_q_excludes_is_a_bug_and_said_so():
    tokens = torch.tensor([[2]])
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    proposal = Proposal(tokens, torch.zeros_like(tokens), tokens > 0, q, "chain")
    for name in RATIO_RULES:
        with pytest.raises(AssertionError, match="another law than q"):
            RULES[name](Laws(torch.zeros(1, 2, 3), PLAIN), proposal, SeededCoins([0]))


class LowestCoins(SeededCoins):
    """Every random number is the lowest one that can come."""

    def uniform(self, rows):
        return torch.zeros(len(rows), dtype=torch.float64)


@pytest.mark.parametrize("name", RATIO_RULES)
def test_a_draft_that_the_target_excludes_is_never_accepted(name):
    tokens = torch.tensor([[2, 1]])
    q = torch.full((1, 2, 3), 1 / 3)
    proposal = Proposal(tokens, torch.tensor([[0, 1]]), tokens > 0, q, "chain")
    logits = torch.zeros(1, 3, 3)
    logits[..., 2] = float("-inf")
    verdict = RULES[name](Laws(logits, PLAIN), proposal, LowestCoins([0]))
    assert verdict.length.tolist() == [0] and verdict.next.tolist() != [2]


class OneNumber(EnumeratedCoins):
    """Flips that all compare one number, as of a generator that is seeded again inside the loop."""

    bounds = (0.0, 1.0)

    def flip(self, p, q, rows):
        low, high = self.bounds
        cut = min(max(float(p / q), low), high)
        yes = self.pick([(cut - low) / (high - low), (high - cut) / (high - low)]) == 0
        self.bounds = (low, cut) if yes else (cut, high)
        return torch.tensor([yes])


def test_one_number_for_all_flips_is_biased(monkeypatch):
    model = ToyModel(1, PLAIN)

    def run(coins):
        coins.bounds = (0.0, 1.0)
        proposal = propose(model, (), chain(2), "chain", coins)
        verdict = RULES["token"](laws_of(model, (), proposal), proposal, coins)
        tokens = proposal.tokens[0, : int(verdict.length)].tolist()
        return (*tokens, int(verdict.next))[:2]

    monkeypatch.setattr("tests.coins.EnumeratedCoins", OneNumber)
    short = law_of(run)
    out, want = {}, target_law(model, 2, ())
    for tokens, share in short.items():
        for token, p in enumerate(model.law(tokens) if len(tokens) == 1 else [1.0]):
            key = (*tokens, token) if len(tokens) == 1 else tokens
            out[key] = out.get(key, 0.0) + share * p
    assert sum(out.values()) == pytest.approx(1.0)
    assert distance(out, want) > 0.01


def test_every_flip_of_a_row_has_a_number_of_its_own():
    coins = SeededCoins([0])
    numbers = [float(coins.uniform(torch.tensor([0]))) for _ in range(100)]
    assert len(set(numbers)) == 100


def corrected_from_p(laws, proposal, coins):
    """Wrong: after a miss it draws from p instead of from the residual."""
    verdict = RULES["token"](laws, proposal, coins)
    if int(verdict.length) == proposal.tokens.shape[1]:
        return verdict
    again = coins.draw(laws.at(torch.tensor([0]), verdict.length), torch.tensor([0]))
    return replace(verdict, next=again)


def bonus_of_the_row_before(laws, proposal, coins):
    """Wrong: after full acceptance it draws from the law that verified the last draft."""
    verdict = RULES["token"](laws, proposal, coins)
    if int(verdict.length) < proposal.tokens.shape[1]:
        return verdict
    again = coins.draw(laws.at(torch.tensor([0]), verdict.length - 1), torch.tensor([0]))
    return replace(verdict, next=again)


@pytest.mark.parametrize("wrong", [corrected_from_p, bonus_of_the_row_before])
def test_a_wrong_correction_or_bonus_is_seen(wrong):
    model = ToyModel(0, PLAIN)
    out = output_law(model, chain(1), wrong, "chain", length=2)
    assert distance(out, target_law(model, 2)) > 0.02


class Misses:
    """Flips that never come up; draws from a law that must be one."""

    def flip(self, p, q, rows):
        return torch.zeros_like(rows).bool()

    def draw(self, law, rows):
        assert law.isfinite().all() and (law >= 0).all() and (law.sum(dim=1) > 0).all()
        return law.argmax(dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", RATIO_RULES)
def test_where_nothing_is_left_of_p_the_correction_comes_from_p(name, dtype):
    logits = torch.randn(4, 3, 7, dtype=dtype)
    proposal = draw_slots(logits[:, :2].softmax(-1), chain(2), "chain", SeededCoins(range(4)))
    rule = RULES[name].given(lenience=1.0) if name == "lenient" else RULES[name]
    verdict = rule(Laws(logits, PLAIN), proposal, Misses())
    assert torch.equal(verdict.next, logits[:, 0].argmax(dim=1))


class Biased(ToyModel):
    def logits(self, context):
        return torch.tensor([0.7, 0.3], dtype=torch.float64).log()

    def q(self, context):
        return torch.full((1, 2), 0.5, dtype=torch.float64)


def test_what_is_verified_may_not_depend_on_the_token_drawn():
    """A length chosen by the draft's own confidence (DSpark, 2607.05147, appendix A): the target's
    (.7, .3) becomes (.85, .15).
    """
    model = Biased(0, PLAIN, vocab=2)

    def run(coins):
        proposal = propose(model, (), chain(1), "chain", coins)
        proposal = replace(proposal, valid=proposal.tokens == 0)
        verdict = RULES["token"](laws_of(model, (), proposal), proposal, coins)
        return 0 if int(verdict.length) else int(verdict.next)

    law = law_of(run)
    assert [law[0], law[1]] == pytest.approx([0.85, 0.15])


class ContextOnly(History):
    """Wrong: a penalty that sees the context and not the node's own path."""

    def before(self, proposal, rows, node):
        return super().before(None, rows, node)


@pytest.mark.parametrize(("name", "draw"), [("token", "chain"), ("point_mass", "point")])
def test_a_penalty_must_see_every_nodes_own_path(name, draw):
    model = ToyModel(0, Sampling(1.0, repetition_penalty=2.5))

    def careless(laws, proposal, coins):
        laws.history.__class__ = ContextOnly
        return RULES[name](laws, proposal, coins)

    want = target_law(model, 2)
    assert distance(output_law(model, TREES["chain2"], RULES[name], draw, length=2), want) < 1e-12
    assert distance(output_law(model, TREES["chain2"], careless, draw, length=2), want) > 0.02
