"""From rounds to figures: acceptance, tau, intervals; and the interleaved measurement itself."""

import random

import pytest
import torch

from draftsmith.drafters.methods import build
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import chain, search_tree
from draftsmith.eval import bench
from draftsmith.eval.bench import Arm, BenchPrompt, generate, greedy_arms, measure, sampled_arms
from draftsmith.eval.decode import Decoded, decode
from draftsmith.eval.rows import Round
from draftsmith.eval.summary import (
    PromptTotals,
    Trial,
    acceptance,
    judged,
    percentiles,
    prompt_totals,
    speedup,
    speedup_interval,
    tau_by_category,
    tau_macro,
    tau_micro,
    token_seconds,
    tokens_per_second,
)
from draftsmith.recipes.schema import MedusaConfig
from tests.tiny import tiny_target

PROMPTS = [
    BenchPrompt(f"p{number}", "ab"[number % 2], [20 + number, 60, 90 - number], f"prompt {number}")
    for number in range(3)
]


def answer(*rounds: tuple[int, int], seconds: float = 1.0, prompt: int = 0, category: str = "a"):
    """A trial of rounds (accepted, emitted), each of three drafts and `seconds` seconds."""
    turns = [Round(3, a, e, seconds / 4, seconds / 2, seconds / 4) for a, e in rounds]
    tokens = list(range(1 + sum(e for _, e in rounds)))
    return Trial(
        prompt, category, Decoded(tokens, turns, 10.0, seconds * max(1, len(turns)), "length")
    )


def drafter_of(target, heads=3):
    """Medusa heads with random weights: they guess, mostly wrong."""
    drafter = build(MedusaConfig(heads=heads), target, None)
    with torch.no_grad():
        drafter.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    return drafter


def test_tau_counts_what_was_emitted():
    trials = [answer((3, 4), (0, 1), (3, 2)), answer((1, 2), prompt=1, category="b")]
    assert tau_micro(trials) == pytest.approx((4 + 1 + 2 + 2) / 4)
    assert tau_macro(trials) == pytest.approx((7 / 3 + 2) / 2)
    assert tau_by_category(trials) == {"a": pytest.approx(7 / 3), "b": 2.0}


def test_answers_that_end_with_prefill_have_no_rounds():
    trials = [answer(), answer((1, 2), prompt=1)]
    assert tau_micro(trials) == 2.0
    assert tau_macro(trials) == 2.0
    assert tau_micro([answer()]) is None
    assert tau_by_category([answer()]) == {}


@pytest.mark.parametrize(
    ("accepted", "emitted", "want"),
    [
        (0, 1, (0, 1)),  # slot 1 missed
        (2, 3, (2, 3)),  # slot 3 missed
        (3, 4, (3, 3)),  # all accepted: there is no slot 4
        (3, 2, (2, 2)),  # cut after two drafts: slot 3 was not judged by the text
        (2, 2, (2, 2)),  # the end token was the second draft
        (1, 1, (1, 1)),
    ],
)
def test_slots_past_the_end_of_the_text_were_not_reached(accepted, emitted, want):
    assert judged(Round(3, accepted, emitted, 0.0, 0.0, 0.0), depth=3) == want


def test_conditional_and_joint_acceptance():
    trials = [answer((0, 1), (1, 2), (2, 3), (3, 4))]
    found = acceptance(trials, 3)
    assert found.reached == [4, 3, 2]
    assert found.conditional == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert found.joint == pytest.approx([3 / 4, 1 / 2, 1 / 4])
    # Without cut rounds the mean acceptance length follows from the joint rates.
    assert tau_micro(trials) == pytest.approx(1 + sum(found.joint))


def test_unreached_slots_have_no_rate():
    found = acceptance([answer((0, 1), (1, 2))], 3)
    assert found.conditional == [0.5, 0.0, None]
    assert found.joint == [0.5, 0.0, None]


def test_accepting_a_prefix_only():
    """A match vector 1, 0, 1, 1 is one accepted draft, whatever comes behind the miss."""
    assert acceptance([answer((1, 2))], 3).reached == [1, 1, 0]


def test_latency_of_a_token_is_its_share_of_the_round():
    seconds = token_seconds([answer((3, 4), (0, 1), seconds=0.2)])
    assert seconds == pytest.approx([0.05] * 4 + [0.2])
    found = percentiles(seconds)
    assert found is not None
    assert found.p50 == pytest.approx(50.0)
    assert found.p50 <= found.p95 <= found.p99 <= 200.0
    assert percentiles([]) is None


def test_speedup_is_over_time_per_emitted_token():
    plain = [answer(*[(0, 1)] * 8, seconds=1.0)]
    # Asked for eight tokens too, it stopped after two: these two are what it is credited with.
    short = [answer((1, 2), seconds=1.0)]
    assert speedup(
        prompt_totals(plain, prefill=False), prompt_totals(short, prefill=False)
    ) == pytest.approx(2.0)
    with_prefill = speedup(prompt_totals(plain, prefill=True), prompt_totals(short, prefill=True))
    assert with_prefill == pytest.approx((18 / 9) / (11 / 3))


def test_repeats_add_up_per_prompt():
    totals = prompt_totals(
        [answer((0, 1)), answer((0, 1)), answer((1, 2), prompt=1)], prefill=False
    )
    assert totals.seconds.tolist() == [2.0, 1.0]
    assert totals.tokens.tolist() == [2.0, 2.0]


def totals_of(seconds: list[float]) -> PromptTotals:
    """Ten tokens per prompt."""
    values = torch.tensor(seconds, dtype=torch.float64)
    return PromptTotals(values, torch.full_like(values, 10.0))


def test_interval_is_paired():
    """Prompts differ tenfold in time, the speedup is the same on each: nothing is uncertain."""
    plain = totals_of([1.0, 10.0, 3.0, 7.0, 2.0])
    low, high = speedup_interval(plain, totals_of([s / 1.5 for s in plain.seconds.tolist()]))
    assert low == pytest.approx(1.5)
    assert high == pytest.approx(1.5)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """Of 200 experiments with a known ratio, 95 % should hold it; 88 % is 4 standard errors off."""
    draw = random.Random(0)
    held = 0
    for _ in range(200):
        fast = [draw.gauss(1.0, 0.2) for _ in range(30)]
        slow = [draw.gauss(1.3, 0.2) for _ in range(30)]
        low, high = speedup_interval(totals_of(slow), totals_of(fast), draws=400)
        held += low <= 1.3 <= high
    assert 0.88 <= held / 200 <= 0.995


def test_interval_narrows_with_prompts_and_needs_two():
    draw = random.Random(1)
    widths = []
    for count in (10, 1000):
        plain = totals_of([draw.uniform(1, 2) for _ in range(count)])
        low, high = speedup_interval(plain, totals_of([draw.uniform(1, 2) for _ in range(count)]))
        widths.append(high - low)
    assert widths[1] < widths[0] / 3
    assert speedup_interval(totals_of([1.0]), totals_of([2.0])) is None


def test_without_a_timed_token_there_is_no_speed():
    none = prompt_totals([answer(), answer(prompt=1)], prefill=False)
    some = prompt_totals([answer((0, 1)), answer(prompt=1)], prefill=False)
    assert tokens_per_second(none) is None and tokens_per_second(some) == 0.5
    assert speedup(none, none) is speedup(some, none) is speedup(none, some) is None
    assert speedup_interval(none, none) is None
    assert speedup_interval(some, some) == (1.0, 1.0)  # draws of the empty answer only are left out


def test_every_prompt_is_decoded_by_every_arm_in_rotated_order(monkeypatch):
    calls: list[tuple[str, tuple[int, ...]]] = []

    def fake(target, arm, prompt_ids, *, max_new_tokens, seed):
        calls.append((arm.name, tuple(prompt_ids)))
        return answer((0, 1)).decoded

    monkeypatch.setattr(bench, "run_arm", fake)
    arms = [Arm(name, "a", Sampling()) for name in "abc"]
    trials = measure(None, arms, PROMPTS, max_new_tokens=4, repeats=2, seed=0)
    assert {name: len(of) for name, of in trials.items()} == {"a": 6, "b": 6, "c": 6}
    warm_up, timed = calls[:3], calls[3:]
    assert [name for name, _ in warm_up] == ["a", "b", "c"]
    assert [name for name, _ in timed[:9]] == list("abc" + "bca" + "cab")
    for start in range(0, len(timed), 3):  # the three arms share a prompt before the next one
        assert len({ids for _, ids in timed[start : start + 3]}) == 1


def test_arms_name_their_baseline_and_merge_a_tree_that_is_the_chain():
    target = tiny_target()
    drafter = drafter_of(target)
    wide = search_tree([[0.5, 0.4], [0.3, 0.2], [0.1, 0.05]], 5)
    names = [arm.name for arm in greedy_arms(drafter, "medusa", chain(3), wide)]
    assert names == ["plain", "transformers.generate", "medusa chain", "medusa tree"]
    assert len(greedy_arms(drafter, "medusa", chain(3), chain(3))) == 3
    arms = sampled_arms(drafter, "medusa", chain(3), wide, Sampling(0.7))
    assert {arm.baseline for arm in arms} == {"plain T=0.7"}
    assert arms[0].name == "plain T=0.7"


def test_generate_is_greedy_decoding_with_honest_counts():
    target = tiny_target()
    mine = decode(target, None, PROMPTS[0].ids, sampling=Sampling(), max_new_tokens=12)
    theirs = generate(target, PROMPTS[0].ids, max_new_tokens=12)
    assert theirs.tokens == mine.tokens
    assert theirs.finish == mine.finish
    assert sum(turn.emitted for turn in theirs.rounds) == len(theirs.tokens) - 1
    assert theirs.decode_s == pytest.approx(sum(turn.verify_s for turn in theirs.rounds))
    assert theirs.prefill_s > 0


def test_generate_stops_where_plain_decoding_stops():
    free = tiny_target()
    tokens = decode(free, None, [30, 31], sampling=Sampling(), max_new_tokens=8).tokens
    target = tiny_target(eos=(tokens[3],))
    theirs = generate(target, [30, 31], max_new_tokens=8)
    assert theirs.tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert theirs.finish == "stop"
