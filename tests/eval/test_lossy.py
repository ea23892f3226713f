"""What a lossy rule costs: against exact laws, and with nothing to find where nothing is lost."""

import math

import pytest
import torch

from draftsmith.drafters.methods import build
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import chain
from draftsmith.eval import decode as loop
from draftsmith.eval.arms import Arm
from draftsmith.eval.check import Answer
from draftsmith.eval.decode import decode
from draftsmith.eval.lossy import (
    agreement,
    estimate,
    lenient_law,
    log_likelihoods,
    measure_quality,
    token_kl,
)
from draftsmith.eval.rules import RULES
from draftsmith.recipes.schema import NgramConfig
from tests.coins import law_of
from tests.tiny import tiny_target


def table(target, text):
    drafter = build(NgramConfig(kind="ngram"), target, None)
    drafter.count([(text, [True] * len(text))])
    return drafter


SAMPLED = Sampling(1.0)


def arm_of(drafter, rule, draw, sampling=SAMPLED):
    return Arm("a", "plain", sampling, drafter=drafter, tree=chain(1), rule=RULES[rule], draw=draw)


def divergence(out, p):
    return sum(share * math.log(share / p[token]) for token, share in out.items() if share > 0)


@pytest.mark.parametrize(("rule", "draw"), [("lenient", "chain"), ("typical", "point")])
def test_token_kl_is_that_of_the_law_that_the_real_loop_emits(monkeypatch, rule, draw):
    """The second token, enumerated after every first one; the first comes from prefill."""
    target = tiny_target(3, hidden=16, eos=(), spread=0.3)
    target.eos_ids = ()
    drafter = table(target, [0, 1, 2, 2, 0, 1, 1, 0])
    arm = arm_of(drafter, rule, draw)

    def run(coins):
        monkeypatch.setattr(loop, "SeededCoins", lambda seeds: coins)
        options = dict(sampling=arm.sampling, max_new_tokens=2, tree=arm.tree)
        out = decode(target, drafter, [0, 1], rule=arm.rule, draw=draw, **options)
        return tuple(out.tokens)

    law = law_of(run)
    for first in range(3):
        pairs = {second: law.get((first, second), 0.0) for second in range(3)}
        whole = sum(pairs.values())
        out = {second: share / whole for second, share in pairs.items()}
        final = target.base(input_ids=torch.tensor([[0, 1, first]])).last_hidden_state[0, -1]
        p = target.logits(final).double().softmax(-1).tolist()
        want = divergence(out, p)
        second = max(out, key=out.get)
        found = token_kl(target, arm, [Answer([0, 1], [first, second])])[0]
        # Of typical acceptance the mean is over two tokens, the first of which is exact.
        assert found * (2 if draw == "point" else 1) == pytest.approx(want, abs=1e-5)


def test_lenience_one_loses_nothing():
    p, q = torch.rand(4, 6).double().softmax(-1), torch.rand(4, 6).double().softmax(-1)
    torch.testing.assert_close(lenient_law(p, q, 1.0), p)
    lenient = lenient_law(p, q, 0.5)
    torch.testing.assert_close(lenient.sum(-1), torch.ones(4).double())
    assert bool((lenient <= p / 0.5 + 1e-12).all())  # Leviathan's bound


def test_plain_answers_beside_themselves():
    target = tiny_target(eos=())
    answers = [
        Answer(
            [20 + n, 7],
            decode(target, None, [20 + n, 7], sampling=Sampling(), max_new_tokens=6).tokens,
        )
        for n in range(4)
    ]
    arm = arm_of(table(target, [1, 2]), "lenient", "point", Sampling())
    found = measure_quality(target, arm, answers, answers)
    assert found.identical.mean == found.agreement.mean == 1.0
    assert found.log_likelihood_change.mean == 0.0 and found.token_kl is None
    ids = torch.tensor([[*answers[0].prompt, *answers[0].output]])
    logits = target.model(ids).logits[0, 1:-1].log_softmax(-1)
    want = logits.gather(1, ids[0, 2:, None]).mean()
    assert log_likelihoods(target, answers)[0] == pytest.approx(float(want), abs=1e-5)


def test_agreement_counts_common_blocks():
    assert agreement([1, 2, 3], [1, 2, 3]) == 1.0
    assert agreement([1, 2, 3, 4], [9, 2, 3, 9]) == 0.5
    assert agreement([1], [2]) == 0.0


def test_an_interval_needs_two_prompts_and_covers_the_mean():
    assert estimate([1.0]).interval is None
    found = estimate([0.0, 1.0, 2.0, 3.0])
    low, high = found.interval
    assert low < found.mean == 1.5 < high
