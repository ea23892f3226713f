"""The checks pass what is exact and catch what is not."""

import pytest
import torch

from draftsmith.drafters.methods import build
from draftsmith.drafters.sampler import Sampling, inverse, standardise
from draftsmith.drafters.tree import chain, search_tree
from draftsmith.eval import exact
from draftsmith.eval.arms import Candidate, greedy_arms
from draftsmith.eval.assemble import judge_greedy
from draftsmith.eval.check import (
    Answer,
    Divergence,
    beyond_support,
    first_slot_alpha,
    greedy_divergences,
    grouped,
    law_score,
    score_tokens,
)
from draftsmith.eval.decode import decode
from draftsmith.eval.exact import examine
from draftsmith.recipes.schema import DataConfig, EvalConfig, MedusaConfig, Recipe, TargetConfig
from tests.eval.test_bench import PROMPTS, drafter_of
from tests.tiny import tiny_target

TREE = search_tree([[0.5, 0.4, 0.3], [0.3, 0.2], [0.1, 0.05]], 8)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def answers_of(target, sampling=None, count=3, seed=0):
    """Plain answers to the prompts."""
    return [
        Answer(
            prompt.ids,
            decode(
                target,
                None,
                prompt.ids,
                sampling=sampling or Sampling(),
                max_new_tokens=10 + 7 * number,
                seed=seed + number,
            ).tokens,
        )
        for number, prompt in enumerate(PROMPTS[:count])
    ]


def test_greedy_output_has_no_divergence_in_any_batch(target, monkeypatch):
    answers = answers_of(target)
    assert greedy_divergences(target, answers) == [[], [], []]
    monkeypatch.setattr("draftsmith.eval.check.TOKENS_AT_ONCE", 20)
    monkeypatch.setattr("draftsmith.eval.check.LOGITS_AT_ONCE", 3)
    assert greedy_divergences(target, answers) == [[], [], []]


def test_a_wrong_token_is_found_once_with_its_margin(target):
    answer = answers_of(target, count=1)[0]
    for position in (0, 4, len(answer.output) - 1):
        wrong = [*answer.output]
        wrong[position] = (wrong[position] + 1) % 200
        # What follows is decoded anew, so that only this token is not the target's choice.
        prefix = answer.prompt + wrong[: position + 1]
        rest = decode(target, None, prefix, sampling=Sampling(), max_new_tokens=5).tokens
        found = greedy_divergences(target, [Answer(answer.prompt, wrong[: position + 1] + rest)])[0]
        assert [divergence.position for divergence in found] == [position]
        assert found[0].margin > 0


def test_margin_is_the_distance_to_the_best_logit(target):
    prompt = PROMPTS[0].ids
    logits = target.model(torch.tensor([prompt])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    found = greedy_divergences(target, [Answer(prompt, [second])])[0]
    assert found[0].margin == pytest.approx(float(logits.max() - logits[second]), abs=1e-5)
    assert found[0].best == pytest.approx(float(logits.max()), abs=1e-5)


def test_half_precision_forgives_rounding_and_nothing_else():
    small = Divergence(0, margin=0.05, best=20.0)
    large = Divergence(0, margin=5.0, best=20.0)
    assert judge_greedy([], 10, torch.float32)[0]
    assert not judge_greedy([small], 10, torch.float32)[0]
    assert judge_greedy([small], 10, torch.bfloat16)[0]
    passed, sentence = judge_greedy([small, large], 10, torch.bfloat16)
    assert not passed
    assert "1 beyond bfloat16 rounding" in sentence


def test_groups_hold_every_answer_once_within_the_budget(monkeypatch):
    monkeypatch.setattr("draftsmith.eval.check.TOKENS_AT_ONCE", 30)
    answers = [Answer([1] * n, [2] * n) for n in (9, 1, 4, 20, 4)]
    groups = list(grouped(answers))
    assert sorted(index for group in groups for index in group) == [0, 1, 2, 3, 4]
    for group in groups:
        padded = len(group) * max(2 * len(answers[index].prompt) for index in group)
        assert padded <= 30 or len(group) == 1


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.3, 0, 0.8)])
def test_law_score_accepts_the_target_s_own_draws(target, sampling):
    score = law_score(target, answers_of(target, sampling), sampling)
    assert score.impossible == 0
    assert abs(score.z) < 4


def test_law_score_finds_tokens_outside_the_support(target):
    sampling = Sampling(1.0)
    answers = answers_of(target, sampling)
    assert law_score(target, answers, Sampling(1.0, top_k=1)).impossible > 0


@pytest.mark.parametrize(
    ("sampling", "token", "dtype", "beyond"),
    [
        (Sampling(1.0, top_k=1), 0, torch.float32, 0),
        (Sampling(1.0, top_k=1), 1, torch.float32, 1),
        (Sampling(1.0, top_k=1), 1, torch.bfloat16, 0),  # a tie that rounding may have broken
        (Sampling(1.0, top_k=1), 2, torch.bfloat16, 1),
        (Sampling(1.0, top_p=0.5), 0, torch.float32, 0),
        (Sampling(1.0, top_p=0.5), 1, torch.float32, 1),  # 0.524 lies before it
        (Sampling(1.0, top_p=0.53), 1, torch.float32, 0),
        (Sampling(1.0, top_p=0.5), 1, torch.bfloat16, 0),
        (Sampling(1.0, top_p=0.99), 2, torch.float32, 1),  # 0.99998 lies before it
        (Sampling(1.0, top_p=0.99), 2, torch.bfloat16, 1),
        (Sampling(1.0), 2, torch.float32, 0),
    ],
)
def test_support_is_judged_as_sharply_as_the_dtype_allows(sampling, token, dtype, beyond):
    logits = torch.tensor([[10.0, 9.9, 0.0]], dtype=torch.float64)
    assert beyond_support(logits, torch.tensor([token]), sampling, dtype) == beyond


def test_support_agrees_with_the_sampler_where_rounding_is_small():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 30, generator=generator, dtype=torch.float64)
    tokens = torch.randint(30, (200,), generator=generator)
    for sampling in (Sampling(0.7, 5), Sampling(1.3, 0, 0.8), Sampling(1.0, 8, 0.9)):
        inside = standardise(logits, sampling).gather(1, tokens[:, None]) > 0
        assert beyond_support(logits, tokens, sampling, torch.float64) == int((~inside).sum()) > 0


def test_law_score_is_standard_normal_under_the_law_and_catches_bias():
    """The release bug of redrawing on a miss favours likely tokens: the score must see that."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 12, generator=generator, dtype=torch.float64)
    p = standardise(logits, Sampling(1.0))
    fair = [score_tokens(p, inverse(p, torch.rand(4000, generator=generator))).z for _ in range(40)]
    assert abs(sum(fair) / 40) < 4 / 40**0.5
    assert 0.6 < torch.tensor(fair).std() < 1.5
    best, again = p.argmax(-1), inverse(p, torch.rand(4000, generator=generator))
    tokens = inverse(p, torch.rand(4000, generator=generator))
    biased = torch.where(tokens == best, tokens, again)
    assert score_tokens(p, biased).z > 4


def test_alpha_is_the_probability_of_the_first_guess(target):
    """Against a loop over contexts, one forward each."""
    drafter, sampling = drafter_of(target), Sampling(0.9, top_k=20)
    answers = answers_of(target, sampling, count=2)
    want = []
    for answer in answers:
        ids = answer.prompt + answer.output
        for root in range(len(answer.prompt), len(ids) - 1):
            with torch.no_grad():
                output = target.base(torch.tensor([ids[: root + 1]]))
                state = output.last_hidden_state[0]  # [T, D]
                root_id = torch.tensor(ids[root : root + 1])
                guess = int(
                    target.logits(drafter.states(state[root - 1 : root], root_id)[0, 0]).argmax()
                )
                p = standardise(target.logits(state[root]).float(), sampling)
            want.append(float(p[guess]))
    assert first_slot_alpha(target, drafter, answers, sampling) == pytest.approx(
        sum(want) / len(want), abs=1e-6
    )


def recipe_of(max_new_tokens):
    return Recipe(
        name="tiny",
        target=TargetConfig(model="tiny"),
        eval=EvalConfig(max_new_tokens=max_new_tokens),
    )


def test_every_arm_is_exact_and_the_walk_counts_its_rounds(target):
    drafter = drafter_of(target)
    arms = greedy_arms(Candidate("medusa", drafter, chain(3), TREE))
    findings = examine(recipe_of(25), target, arms, PROMPTS)
    assert [finding.exact for finding in findings] == [True] * 4
    assert findings[-1].walked == findings[-1].decoded
    assert findings[-1].decoded[0] > findings[-1].decoded[1]  # drafts were accepted at all


def test_a_decoder_that_emits_drafts_unseen_is_caught(target, monkeypatch):
    """The check can fail: let the loop emit one wrong token."""
    drafter = drafter_of(target)
    honest = exact.run_arm

    def sloppy(target, arm, prompts, *, max_new_tokens, seeds):
        (found,) = honest(target, arm, prompts, max_new_tokens=max_new_tokens, seeds=seeds)
        if arm.tree is not None:
            found.tokens[2] = (found.tokens[2] + 1) % 200
        return [found]

    monkeypatch.setattr(exact, "run_arm", sloppy)
    arms = greedy_arms(Candidate("medusa", drafter, chain(3), TREE))
    findings = examine(recipe_of(12), target, arms, PROMPTS)
    assert [finding.exact for finding in findings] == [True, True, False, False]
    assert findings[2].differing == 3
    assert findings[2].divergences
    assert not findings[2].passed(torch.float32)


@pytest.mark.parametrize(("rows", "nodes"), [(None, 9), (2, 6)])
def test_bushy_tree_is_a_tree_of_guesses_that_the_drafter_has(target, rows, nodes):
    ids = None if rows is None else torch.arange(rows)
    drafter = build(MedusaConfig(heads=3), target, ids)
    assert exact.bushy_tree(drafter).nodes == nodes


def test_command_line_exits_with_one_when_not_exact(target, monkeypatch, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Explain tides."}\n{"prompt": "Sort 3 1 2"}')
    recipe = Recipe(
        name="tiny",
        target=TargetConfig(model="tiny", dtype="float32"),
        data=DataConfig(eval_prompts=str(path)),
        eval=EvalConfig(max_new_tokens=8),
    )
    subject = exact.Subject(recipe, target, drafter_of(target), TREE)
    monkeypatch.setattr(exact, "open_subject", lambda arguments, dtype: subject)
    assert exact.main(["--dtype", "float32"]) == 0
    assert "walked" in capsys.readouterr().out
    monkeypatch.setattr(exact.Finding, "exact", False)
    with pytest.raises(SystemExit) as ended:
        exact.main(["--dtype", "float32"])
    assert ended.value.code == 1


def test_a_folder_that_is_no_drafter_is_bad_input(tmp_path, capsys):
    assert exact.main([str(tmp_path)]) == 2
    assert "is no drafter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--dtype", "int4"], "invalid choice: 'int4'"),
        (["--prompts", "many"], "invalid int value: 'many'"),
        (["a", "b"], "unrecognized arguments: b"),
    ],
)
def test_bad_usage_is_one_line(words, line, capsys):
    assert exact.main(words) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
