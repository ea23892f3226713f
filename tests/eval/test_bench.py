"""From rounds to figures: acceptance, tau, intervals; and the interleaved measurement itself."""

import random

import pytest
import torch

from draftsmith.drafters.methods import build
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import chain, search_tree
from draftsmith.eval import bench
from draftsmith.eval.arms import Arm, Candidate, greedy_arms, make_grid
from draftsmith.eval.bench import BenchPrompt, measure
from draftsmith.eval.decode import Decoded, decode
from draftsmith.eval.reference import generate, generate_batch
from draftsmith.eval.results import NAME, Results
from draftsmith.eval.rows import Round
from draftsmith.eval.summary import (
    PromptTotals,
    Trial,
    acceptance,
    batch_rounds,
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
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import EvalConfig, MedusaConfig, NgramConfig
from tests.tiny import tiny_target

PROMPTS = [
    BenchPrompt(f"p{number}", "ab"[number % 2], [20 + number, 60, 90 - number], f"prompt {number}")
    for number in range(3)
]


def answer(
    *rounds: tuple[int, int], seconds: float = 1.0, prompt: int = 0, category: str = "a", **where
):
    """A trial of rounds (accepted, emitted), each of three drafts and `seconds` seconds."""
    turns = [Round(3, a, e, seconds / 4, seconds / 2, seconds / 4) for a, e in rounds]
    tokens = list(range(1 + sum(e for _, e in rounds)))
    decoded = Decoded(tokens, turns, 10.0, seconds * max(1, len(turns)), "length")
    return Trial(prompt, category, decoded, **where)


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
        [answer((0, 1)), answer((0, 1), repeat=1), answer((1, 2), prompt=1)], prefill=False
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


def test_a_batch_takes_as_long_as_its_longest_answer():
    together = [
        answer((0, 1), (0, 1), (0, 1), unit=0),
        answer((2, 3), prompt=1, unit=0),
        answer((0, 1), prompt=2, unit=1),
        answer((0, 1), prompt=3, unit=1),
    ]
    totals = prompt_totals(together, prefill=False)
    assert totals.seconds.tolist() == [3.0, 1.0]
    assert totals.tokens.tolist() == [6.0, 2.0]
    assert len(batch_rounds(together)) == 3 + 1  # every round of a batch once


def recorded(monkeypatch) -> list[tuple[str, list[list[int]]]]:
    """What is decoded from here on, by arm and prompts, instead of decoding."""
    calls: list[tuple[str, list[list[int]]]] = []

    def fake(target, arm, prompts, *, max_new_tokens, seeds):
        calls.append((arm.name, list(prompts)))
        assert len(seeds) == len(prompts)
        return [answer((0, 1)).decoded for _ in prompts]

    monkeypatch.setattr(bench, "run_arm", fake)
    return calls


OPTIONS = dict(max_new_tokens=4, repeats=2, seed=0)


def test_every_prompt_is_decoded_by_every_arm_in_rotated_order(monkeypatch):
    calls = recorded(monkeypatch)
    arms = [Arm(name, "a", Sampling()) for name in "abc"]
    trials = measure(None, arms, PROMPTS, Results(None, {}), **OPTIONS)
    assert {name: len(of) for name, of in trials.items()} == {"a": 6, "b": 6, "c": 6}
    warm_up, timed = calls[:3], calls[3:]
    assert [name for name, _ in warm_up] == ["a", "b", "c"]
    assert [name for name, _ in timed[:9]] == list("abc" + "bca" + "cab")
    for start in range(0, len(timed), 3):  # the three arms share a prompt before the next one
        assert len({str(ids) for _, ids in timed[start : start + 3]}) == 1


def test_batches_are_whole_and_arms_of_one_size_share_them(monkeypatch):
    calls = recorded(monkeypatch)
    arms = [Arm(f"{name} {size}", "a", Sampling(), batch=size) for size in (1, 2) for name in "ab"]
    trials = measure(None, arms, PROMPTS, Results(None, {}), **OPTIONS)
    assert {name: len(of) for name, of in trials.items()} == {
        "a 1": 6,
        "b 1": 6,
        "a 2": 4,
        "b 2": 4,
    }
    assert {len(ids) for name, ids in calls if name.endswith("2")} == {2}
    assert [trial.prompt for trial in trials["a 2"]] == [0, 1, 0, 1]


def test_a_killed_measurement_goes_on_where_it_was(monkeypatch, tmp_path):
    arms, path = [Arm(name, "a", Sampling()) for name in "ab"], tmp_path / NAME
    calls = recorded(monkeypatch)
    whole = measure(None, arms, PROMPTS, Results(path, {"seed": 0}), **OPTIONS)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 12
    for cut in (lines[5][: len(lines[5]) // 2], lines[5], "[]\n", ""):
        path.write_text("".join(lines[:5]) + cut)
        calls.clear()
        known = 5 if cut == lines[5] else 4
        assert measure(None, arms, PROMPTS, Results(path, {"seed": 0}), **OPTIONS) == whole
        warm_up = 2
        assert len(calls) == warm_up + 12 - known
        assert sorted(path.read_text().splitlines()) == sorted(map(str.strip, lines))


def test_finished_or_other_measurements_are_not_gone_on_with(tmp_path):
    path = tmp_path / NAME
    results = Results(path, {"seed": 0})
    assert results.once(("a",), lambda: 1) == 1 and results.once(("a",), lambda: 2) == 1
    assert Results(path, {"seed": 0}).resumed == 1
    assert Results(path, {"seed": 1}).resumed == 0
    assert Results(path, {"seed": 0}).resumed == 0  # the file is now the other one's
    results = Results(path, {"seed": 0})
    results.once(("a",), lambda: 1)
    results.finish()
    assert Results(path, {"seed": 0}).resumed == 0


WIDE = search_tree([[0.5, 0.4], [0.3, 0.2], [0.1, 0.05]], 5)
EVERY = (
    *("point_mass", "token", "block", "multi_step", "without_replacement", "k_sequential"),
    *("typical", "lenient"),
)


def test_arms_name_their_baseline_and_merge_a_tree_that_is_the_chain():
    drafter = drafter_of(tiny_target())
    names = [arm.name for arm in greedy_arms(Candidate("medusa", drafter, chain(3), WIDE))]
    assert names == ["plain", "transformers.generate", "medusa chain", "medusa tree"]
    assert len(greedy_arms(Candidate("medusa", drafter, chain(3), chain(3)))) == 3


def grid_of(candidates, prompts=4, **knobs):
    return make_grid(candidates, EvalConfig(**knobs), prompts=prompts)


def test_guesses_are_never_weighed_by_a_law_and_the_report_says_why():
    heads = drafter_of(tiny_target())
    heads.draws = ()
    medusa = Candidate("medusa", heads, chain(3), WIDE)
    grid = grid_of([medusa], temperature=0.7, rules=EVERY)
    sampled = [arm for arm in grid.arms if not arm.sampling.greedy]
    assert sampled[0].name == "plain T=0.7" and {arm.baseline for arm in sampled} == {"plain T=0.7"}
    rules = {arm.rule.name for arm in sampled if arm.drafter is not None}
    assert rules == {"point_mass", "typical"} and {arm.draw for arm in sampled} == {"point"}
    assert "not drawn" in grid.skipped["medusa chain, token T=0.7"]
    greedy = [arm.name for arm in grid.arms if arm.sampling.greedy and arm.drafter is not None]
    assert greedy == [
        *("medusa chain", "medusa chain, lenient", "medusa tree", "medusa tree, lenient")
    ]


def test_every_rule_gets_drafts_as_it_needs_them():
    target = tiny_target()
    ngram = build(NgramConfig(kind="ngram", draft_tokens=3), target, None)
    grid = grid_of([Candidate("ngram", ngram, chain(3), WIDE)], temperature=1.0, rules=EVERY)
    draws = {
        (arm.rule.name, arm.tree.is_chain): arm.draw
        for arm in grid.arms
        if arm.drafter is not None and not arm.sampling.greedy
    }
    assert draws == {
        ("point_mass", True): "point",
        ("point_mass", False): "point",
        ("token", True): "chain",
        ("block", True): "chain",
        ("lenient", True): "chain",
        ("multi_step", False): "iid",
        ("without_replacement", False): "without_replacement",
        ("k_sequential", False): "iid",
        ("typical", True): "point",
        ("typical", False): "point",
    }
    assert grid.skipped["ngram tree, block T=1"] == "the rule is for chains"
    assert "token rejection" in grid.skipped["ngram chain, k_sequential T=1"]
    for arm in grid.arms:
        for rule in EVERY[:6]:
            assert arm.rule.name != rule or arm.rule.lossless


def test_batch_sizes_have_baselines_of_their_own():
    medusa = Candidate("medusa", drafter_of(tiny_target()), chain(3), WIDE)
    grid = grid_of([medusa], batches=(1, 2, 8), temperature=1.0)
    assert "every arm B=8" in grid.skipped
    by_name = {arm.name: arm for arm in grid.arms}
    assert len(by_name) == len(grid.arms)
    for arm in grid.arms:
        baseline = by_name[arm.baseline]
        assert baseline.drafter is None and baseline.batch == arm.batch
        assert baseline.sampling == arm.sampling and baseline.engine == "draftsmith"
    with pytest.raises(UserError, match="all more than the 4 prompts"):
        grid_of([medusa], batches=(8,))


def test_a_comparison_always_has_transformers_prompt_lookup():
    target = tiny_target()
    medusa = Candidate("medusa", drafter_of(target), chain(3), WIDE)
    ngram = build(NgramConfig(kind="ngram"), target, None)
    alone, both = (
        {arm.name: arm for arm in grid_of(candidates, batches=(1, 2)).arms}
        for candidates in ([medusa], [medusa, Candidate("ngram", ngram, chain(3), chain(3))])
    )
    assert "transformers prompt lookup" not in alone
    assert both["transformers prompt lookup"].assistance["prompt_lookup_num_tokens"] == 10
    assert "transformers.generate B=2" in alone and "transformers prompt lookup B=2" not in both


def test_generate_answers_a_batch_as_it_answers_alone():
    target = tiny_target()
    prompts = [PROMPTS[0].ids, [7], [20, 21, 22, 23, 24, 25]]
    free = [generate(target, ids, max_new_tokens=9).tokens for ids in prompts]
    for eos in ((), (free[0][3],)):
        target.eos_ids = eos
        alone = [generate(target, ids, max_new_tokens=9) for ids in prompts]
        together = generate_batch(target, prompts, max_new_tokens=9)
        assert [one.tokens for one in together] == [one.tokens for one in alone]
        assert [one.finish for one in together] == [one.finish for one in alone]
        for one in together:
            assert sum(turn.emitted for turn in one.rounds) == len(one.tokens) - 1


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
