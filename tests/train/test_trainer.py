"""Training through its entry: it learns, and it counts as it says."""

import pytest
import torch

from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.train import trainer
from draftsmith.train.checkpoint import latest
from draftsmith.train.setup import prepare
from draftsmith.train.trainer import take_step, train
from tests.train.children import in_children, job_of
from tests.train.counting import (
    counting_row,
    digest,
    read_log,
    recipe_for,
    save_rows,
    save_target,
    weights,
)


def test_medusa_learns_to_count(tmp_path):
    target = save_target(tmp_path / "target", hidden=64)
    run = save_rows(tmp_path / "run", [counting_row(number) for number in range(48)], target)
    recipe = recipe_for(target, train={"epochs": 24, "rows_per_step": 2, "eval_every": 30})
    folder = train(recipe, run)
    log = read_log(run)
    assert log[0]["loss"] > 1.0 and log[-1]["loss"] < 0.02
    assert log[-1]["conditional_hit_rate"] == [1.0, 1.0, 1.0]
    assert log[-1]["uniform_hit_length"] > 3.0
    walks = read_log(run, "held_out")
    assert walks[0]["tau"] < walks[-1]["tau"] and walks[-1]["tau"] > 3.0
    assert set(walks[-1]["tau_by_category"]) == {"even", "odd"}
    loaded = load_drafter(folder, Target.load(recipe.target))
    assert torch.equal(loaded.weight, weights(run)["weight"])


@pytest.mark.parametrize("recursion", ["teacher", "on_policy", "mixed"])
def test_mtp_learns_to_count(tmp_path, recursion):
    target = save_target(tmp_path / "target", hidden=64)
    run = save_rows(tmp_path / "run", [counting_row(number) for number in range(48)], target)
    drafter = {"kind": "mtp", "draft_tokens": 3, "recursion": recursion}
    train(recipe_for(target, train={"epochs": 16, "rows_per_step": 2}, drafter=drafter), run)
    log = read_log(run)
    assert log[0]["loss"] > 3.0 and log[-1]["loss"] < 0.5
    assert min(log[-1]["conditional_hit_rate"]) > 0.9
    assert read_log(run, "held_out")[-1]["tau"] > 2.0


def test_a_reduced_draft_vocabulary_is_counted_on_the_rows_and_kept(target, run):
    recipe = recipe_for(target, drafter={"draft_vocab": 18})
    loaded = load_drafter(train(recipe, run), Target.load(recipe.target))
    end = Target.load(recipe.target).eos_ids[0]
    assert loaded.draft_ids.tolist() == sorted([0, end, *range(16, 32)])
    assert read_log(run)[-1]["loss"] < read_log(run)[0]["loss"]


def test_bf16_compute_keeps_fp32_weights_that_move_less_than_bf16_can(target, run):
    # Own heads start as the target's (about 0.5 each); a step of 1e-6 would vanish in bf16.
    recipe = recipe_for(
        target,
        train={"precision": "bf16", "max_steps": 3},
        optim={"lr": 1e-6, "warmup_steps": 0},
        drafter={"projection": "own", "heads": 1},
        dtype="bfloat16",
    )
    train(recipe, run)
    after, start = weights(run)["own"], Target.load(recipe.target).head_weight.float()
    assert after.dtype == torch.float32
    moved = (after[0] - start)[16:].abs()
    assert 0 < moved.max() < 1e-5
    assert (moved > 0).float().mean() > 0.9
    assert torch.equal(after.bfloat16()[0], start.bfloat16())


def test_the_target_is_untouched_and_the_optimizer_holds_the_drafter_alone(target, run):
    t = prepare(recipe_for(target), run)
    frozen = [*t.target.model.parameters(), *t.target.model.buffers()]
    before = digest(frozen)
    for _ in range(3):
        take_step(t)
    assert digest(frozen) == before
    assert not any(value.requires_grad or value.grad is not None for value in frozen)
    assert not t.target.model.training
    held = [value for group in t.parallel.optimizer.param_groups for value in group["params"]]
    assert {id(value) for value in held} == {id(value) for value in t.parallel.parameters.values()}
    assert sum(value.numel() for value in held) == 3 * (32 * 32 + 32)


def test_the_schedule_and_the_clip_are_applied(target, run):
    recipe = recipe_for(target, optim={"lr": 0.5, "warmup_steps": 4, "clip": 1e-3})
    train(recipe, run)
    rates = [record["lr"] for record in read_log(run)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5] and 0 < rates[-1] < 0.05


def gradients(target, run, monkeypatch, **knobs):
    """The gradient of the first step, before clipping."""
    found = {}

    def keep(t):
        found.update({name: value.grad.clone() for name, value in t.parallel.parameters.items()})

    monkeypatch.setattr(trainer, "apply_gradients", keep)
    take_step(prepare(recipe_for(target, **knobs), run))
    return found


@pytest.mark.parametrize(
    "objective", [{}, {"loss": "kl"}, {"weights": "dpace"}, {"loss": "e2e_tv"}]
)
def test_1x8_accumulation_equals_8x1(target, run, monkeypatch, objective):
    def step(size):
        knobs = {"train": {"rows_per_step": 8, "rows_per_micro_batch": size}}
        return gradients(target, run, monkeypatch, objective=objective, **knobs)

    whole = step(8)
    assert all(value.abs().max() > 1e-3 for value in whole.values())
    for size in (1, 3, 4):
        for name, value in step(size).items():
            torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)


def test_a_step_is_the_mean_over_slots_not_over_rows(target, tmp_path, monkeypatch):
    # One long answer and many short ones: a mean of row means would weigh them alike.
    rows = [counting_row(n, answer=40 if n % 2 else 3) for n in range(12)]
    run = save_rows(tmp_path / "run", rows, target)
    data = {"max_length": 48, "held_out": 1, "max_prompt_tokens": 16}
    found = [
        gradients(target, run, monkeypatch, train={"rows_per_step": 8, **knobs}, data=data)
        for knobs in ({"rows_per_micro_batch": 1}, {"rows_per_micro_batch": 8})
    ]
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-5, atol=1e-6)


def test_nothing_supervised_is_skipped_and_stays_finite(target, tmp_path):
    # An answer of one token starts a group but has no slot to fill.
    run = save_rows(tmp_path / "run", [counting_row(n, answer=1) for n in range(24)], target)
    train(recipe_for(target, train={"log_every": 2}), run)
    log = read_log(run)
    assert all(record["loss"] is None and record["grad_norm"] == 0.0 for record in log)
    assert sum(record["skipped_steps"] for record in log) == log[-1]["step"]
    assert all(not value.any() for value in weights(run).values())


def test_counters_cover_every_step_once(target, run):
    recipe = recipe_for(target, train={"log_every": 4, "epochs": 2})
    train(recipe, run)
    log = read_log(run)
    assert [r["step"] for r in log] == [4, 8] or log[-1]["step"] % 4
    rows = prepare(recipe, run).rows
    assert log[-1]["supervised_tokens"] == 2 * rows.supervised
    assert all(record["tokens_per_second"] > 0 for record in log)


def test_a_gradient_that_is_not_finite_stops_before_it_does_harm(target, run, monkeypatch):
    t = prepare(recipe_for(target), run)
    before = digest(t.parallel.parameters.values())
    real = t.accelerator.backward
    monkeypatch.setattr(t.accelerator, "backward", lambda loss: real(loss * float("nan")))
    with pytest.raises(UserError, match="gradient of step 1 is not finite"):
        take_step(t)
    assert digest(t.parallel.parameters.values()) == before


def test_the_start_says_what_is_trained(target, run, capsys):
    train(recipe_for(target, train={"max_steps": 1}), run)
    said = capsys.readouterr().out
    assert "tokens supervised" in said  # the sample
    assert "3,168 trainable parameters (drafter)" in said
    assert "frozen (target)" in said


def test_two_processes_equal_one(target, tmp_path):
    # Rows hold one long answer, or many answers of one token, which supervise no slot. With three
    # rows a step the shares are unequal and one may have nothing to learn; with one row a process
    # is idle, and a step may have nothing to learn at all.
    rows = [counting_row(n, answer=1 if n % 3 == 0 else 28) for n in range(25)]
    jobs = []
    for count, cache in ((3, False), (1, True)):
        knobs = {"rows_per_step": count, "rows_per_micro_batch": 1, "feature_cache": cache}
        recipe = recipe_for(
            target,
            train={**knobs, "eval_every": 9, "epochs": 2},
            optim={"lr": 1e-3},
            data={"max_length": 32, "held_out": 3, "max_prompt_tokens": 16},
        )
        one, two = (
            save_rows(tmp_path / f"{name}-{count}", rows, target) for name in ("one", "two")
        )
        train(recipe, one)
        jobs.append((recipe, one, two))
    in_children(tmp_path, [job_of(recipe, two, processes=2) for recipe, _, two in jobs])
    for _, one, two in jobs:
        for have, want in zip(read_log(two), read_log(one), strict=True):
            for name in ("step", "supervised_tokens", "skipped_steps"):
                assert have[name] == want[name]
            if want["loss"] is not None:
                assert have["loss"] == pytest.approx(want["loss"], rel=1e-6)
            assert have["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        for name, value in weights(two).items():
            torch.testing.assert_close(value, weights(one)[name], rtol=0, atol=1e-6)
        assert read_log(two, "held_out") == read_log(one, "held_out")
        assert len(latest(two / "checkpoints").state["rng"]) == 2
    assert sum(record["skipped_steps"] for record in read_log(jobs[1][1])) > 0


@pytest.mark.parametrize(
    "drafter",
    [
        {"kind": "draft_model", "layers": 2},
        {"kind": "dflash", "layers": 1, "taps": [0], "block_size": 4, "mask_token_id": 5},
    ],
    ids=["draft_model", "dflash"],
)
def test_a_target_that_nobody_reads_to_the_end_changes_nothing(tmp_path, drafter):
    # Steps that are logged read the teacher's law, the others the text alone.
    target = save_target(tmp_path / "target", layers=3)
    runs = []
    for every in (1, 1000):
        rows = [counting_row(number) for number in range(48)]
        run = save_rows(tmp_path / str(every), rows, target)
        train(recipe_for(target, train={"epochs": 1, "log_every": every}, drafter=drafter), run)
        runs.append(run)
    assert digest(weights(runs[0]).values()) == digest(weights(runs[1]).values())
    assert read_log(runs[1])[-1]["grad_norm"] == read_log(runs[0])[-1]["grad_norm"]
