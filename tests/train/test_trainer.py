"""Training through its entry: it learns, it resumes bit for bit, and it counts as it says."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.train import checkpoint, trainer
from draftsmith.train.checkpoint import latest
from draftsmith.train.resume import compare, identity
from draftsmith.train.rng import rng_state
from draftsmith.train.setup import adamw, prepare
from draftsmith.train.trainer import take_step, train
from tests.train.counting import counting_row, read_log, recipe_for, save_rows, save_target

TIMED = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(target, tmp_path):
    return save_rows(tmp_path / "run", [counting_row(number) for number in range(48)], target)


def weights(run):
    return latest(run / "checkpoints").trainables


def untimed(run, kind="train"):
    return [{k: v for k, v in r.items() if k not in TIMED} for r in read_log(run, kind)]


def digest(values):
    total = hashlib.sha256()
    for value in values:
        total.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def assert_same_run(one, other):
    """Weights, moments, counters, random states, drafter and log, bit for bit."""
    left, right = (latest(run / "checkpoints") for run in (one, other))
    assert left.step == right.step
    for have, want in ((left.trainables, right.trainables), (left.optimizer, right.optimizer)):
        assert have.keys() == want.keys() and have
        assert all(checkpoint.same_bits(have[name], want[name]) for name in have)
    for name in ("rng", "meter", "supervised", "grad_norm", "epoch", "step_in_epoch"):
        assert left.state[name] == right.state[name]
    name = "medusa_lm_head.safetensors"
    assert (one / "drafter" / name).read_bytes() == (other / "drafter" / name).read_bytes()
    for kind in ("train", "held_out"):
        assert untimed(one, kind) == untimed(other, kind)


# --- it learns -----------------------------------------------------------------------------------


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


def test_bf16_trainables_are_refused():
    norm = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="must be fp32"):
        adamw({"norm": norm}, recipe_for("x").optim)


def test_the_target_is_untouched_and_the_optimizer_holds_the_drafter_alone(target, run):
    t = prepare(recipe_for(target), run)
    frozen = [*t.target.model.parameters(), *t.target.model.buffers()]
    before = digest(frozen)
    for _ in range(3):
        take_step(t)
    assert digest(frozen) == before
    assert not any(value.requires_grad or value.grad is not None for value in frozen)
    assert not t.target.model.training
    held = [value for group in t.optimizer.param_groups for value in group["params"]]
    assert {id(value) for value in held} == {id(value) for value in t.parameters.values()}
    assert sum(value.numel() for value in held) == 3 * (32 * 32 + 32)


def test_the_schedule_and_the_clip_are_applied(target, run):
    recipe = recipe_for(target, optim={"lr": 0.5, "warmup_steps": 4, "clip": 1e-3})
    train(recipe, run)
    rates = [record["lr"] for record in read_log(run)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5] and 0 < rates[-1] < 0.05


# --- what a step adds up -------------------------------------------------------------------------


def gradients(target, run, monkeypatch, **knobs):
    """The gradient of the first step, before clipping."""
    found = {}

    def keep(t):
        found.update({name: value.grad.clone() for name, value in t.parameters.items()})

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


# --- stop and resume -----------------------------------------------------------------------------

# How one run of 15 steps is killed, again and again: a call, and its number in the process. It
# saves at every 3rd step, logs at every 2nd, evaluates at every 4th.
DEATHS = [
    ("draftsmith.train.trainer", "take_step", 2),
    ("draftsmith.train.checkpoint", "save_file", 2),
    ("draftsmith.train.checkpoint", "place", 1),
    ("os", "rename", 1),
    ("draftsmith.train.checkpoint", "sync", 4),  # the first after the rename: step 3 is kept
    ("draftsmith.train.trainer", "evaluate", 1),
    ("draftsmith.train.trainer", "log_step", 1),
    ("draftsmith.train.trainer", "backward", 6),  # in the middle of step 6
    ("draftsmith.train.checkpoint", "write_json", 1),
    ("shutil", "rmtree", 4),  # steps 6 and 9 are kept, step 3 is not yet removed
    ("draftsmith.train.trainer", "finish", 1),  # all is done but the drafter
]


def in_children(folder, jobs):
    """Run the jobs; which were killed."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("killer.py")), str(folder / "jobs.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [line == "True" for line in done.stdout.splitlines() if line in ("True", "False")]


def test_killed_anywhere_the_resumed_run_ends_as_the_undisturbed_one(target, tmp_path):
    knobs = {"save_every": 3, "eval_every": 4, "log_every": 2, "rows_per_step": 2}
    recipe = recipe_for(
        target,
        train={**knobs, "rows_per_micro_batch": 1},
        drafter={"projection": "low_rank", "rank": 4},
    )
    rows = [counting_row(number) for number in range(48)]

    def job(name, **death):
        run = save_rows(tmp_path / name, rows, target)
        return {"recipe": recipe.model_dump(mode="json"), "run": str(run), **death}

    jobs = [job("whole")]
    jobs += [job("calls", call=death) for death in DEATHS] + [job("calls")]
    # Twice at no chosen moment, the second time a run that was resumed already.
    clock = random.Random()
    jobs += [job("clock", seconds=clock.uniform(0.05, 0.8)) for _ in range(2)] + [job("clock")]
    killed = in_children(tmp_path, jobs)
    assert killed[: len(DEATHS) + 2] == [False] + [True] * len(DEATHS) + [False]
    for name in ("calls", "clock"):
        assert_same_run(tmp_path / name, tmp_path / "whole")
        steps = [record["step"] for record in read_log(tmp_path / name)]
        assert steps == sorted(set(steps)) and steps[-1] == 15
    assert latest(tmp_path / "whole" / "checkpoints").state["epoch"] == 3


class Stop(Exception):
    pass


def stop_after(monkeypatch, steps):
    """Let training raise after so many steps of this process."""
    real, count = trainer.take_step, 0

    def step(t):
        nonlocal count
        if count == steps:
            raise Stop
        count += 1
        real(t)

    monkeypatch.setattr(trainer, "take_step", step)


@pytest.fixture
def stopped(target, run, monkeypatch):
    """A run with checkpoints at steps 4 and 6, stopped after step 7."""
    recipe = recipe_for(target, train={"save_every": 2})
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(Stop):
            train(recipe, run)
    return recipe


def test_a_corrupted_newest_checkpoint_costs_two_steps_and_changes_nothing(
    stopped, target, run, tmp_path, caplog
):
    whole = save_rows(tmp_path / "whole", [counting_row(number) for number in range(48)], target)
    train(stopped, whole)
    path = run / "checkpoints" / "step-000006" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    train(stopped, run)
    assert "step-000006" in caplog.text
    assert_same_run(run, whole)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"optim": {"lr": 2e-2}}, "optim.lr 0.01 -> 0.02"),
        ({"seed": 1}, "seed 0 -> 1; the training rows"),  # others are held out
        ({"train": {"epochs": 4}}, "train.epochs 3 -> 4"),
        ({"drafter": {"heads": 2}}, "drafter.heads 3 -> 2"),
        ({"objective": {"loss": "kl"}}, "objective.loss ce -> kl"),
    ],
)
def test_another_recipe_cannot_resume(stopped, target, run, change, names):
    blocks = dict(change)
    knobs = {"save_every": 2, **blocks.pop("train", {})}
    with pytest.raises(UserError, match=f"another recipe; changed: {names}; undo"):
        train(recipe_for(target, train=knobs, **blocks), run)


def test_other_rows_cannot_resume(stopped, target, run):
    save_rows(run, [counting_row(number) for number in range(49)], target)
    with pytest.raises(UserError, match="changed: the training rows"):
        train(stopped, run)


def test_other_weights_cannot_resume_and_older_checkpoints_name_none(stopped, run):
    t = prepare(stopped, run)
    was = identity(t)
    del was["target"]["content"]
    compare(was, identity(prepare(stopped, run)), t)
    was["target"]["content"] = "another"
    with pytest.raises(UserError, match=r"changed: the target .*'content': 'another'"):
        compare(was, identity(prepare(stopped, run)), t)


def test_harmless_knobs_may_change(stopped, target, run, tmp_path):
    whole = save_rows(tmp_path / "whole", [counting_row(number) for number in range(48)], target)
    train(stopped, whole)
    knobs = {"save_every": 5, "eval_every": 3, "keep_checkpoints": 1, "log_every": 1}
    data = {**stopped.data.model_dump(), "eval_prompts": "other.jsonl", "eval_split": "x"}
    train(recipe_for(target, train=knobs, eval={"max_new_tokens": 7}, data=data), run)
    assert digest(weights(run).values()) == digest(weights(whole).values())


def test_another_micro_batch_may_resume_and_is_named(stopped, target, run, capsys):
    train(recipe_for(target, train={"save_every": 2, "rows_per_micro_batch": 1}), run)
    assert "warning: train.rows_per_micro_batch 2 -> 1" in capsys.readouterr().out


def test_after_resume_all_is_fp32_and_draws_go_on(stopped, run):
    t = prepare(stopped, run)
    random.random(), np.random.rand(), torch.rand(1)  # whatever was drawn before
    trainer.resume(t)
    assert rng_state() == latest(run / "checkpoints").state["rng"][0]
    held = [*t.parameters.values()]
    held += [value for state in t.optimizer.state.values() for value in state.values()]
    assert len(held) == 4 * len(t.parameters) and {value.dtype for value in held} == {torch.float32}
    assert t.step == 6 and all(float(s["step"]) == 6 for s in t.optimizer.state.values())


def test_a_finished_run_only_writes_its_drafter_again(target, run):
    recipe = recipe_for(target, train={"epochs": 1})
    folder = train(recipe, run)
    before = (run / "log.jsonl").read_bytes(), load_file(folder / "medusa_lm_head.safetensors")
    train(recipe, run)
    assert (run / "log.jsonl").read_bytes() == before[0]
    after = load_file(folder / "medusa_lm_head.safetensors")
    assert all(torch.equal(after[name], before[1][name]) for name in after)


def test_evaluation_does_not_disturb_training(target, run, tmp_path):
    other = save_rows(tmp_path / "other", [counting_row(number) for number in range(48)], target)
    train(recipe_for(target, train={"eval_every": 1}), run)
    train(recipe_for(target), other)
    assert digest(weights(run).values()) == digest(weights(other).values())
    left, right = (latest(folder / "checkpoints").state["rng"] for folder in (run, other))
    assert left == right


# --- bad weather ---------------------------------------------------------------------------------


def test_a_disk_that_fills_up_loses_nothing(stopped, run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(UserError, match=r"disk full.*nothing lost: last checkpoint at step 6"):
            train(stopped, run)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000006"]
    train(stopped, run)
    assert read_log(run)[-1]["step"] == latest(run / "checkpoints").step


def test_a_gradient_that_is_not_finite_stops_before_it_does_harm(target, run, monkeypatch):
    t = prepare(recipe_for(target), run)
    before = digest(t.parameters.values())
    real = t.accelerator.backward
    monkeypatch.setattr(t.accelerator, "backward", lambda loss: real(loss * float("nan")))
    with pytest.raises(UserError, match="gradient of step 1 is not finite"):
        take_step(t)
    assert digest(t.parameters.values()) == before


def test_no_rows_and_too_few_rows_say_so(target, tmp_path):
    with pytest.raises(UserError, match="no distilled rows"):
        train(recipe_for(target), tmp_path / "none")
    run = save_rows(tmp_path / "run", [counting_row(number) for number in range(8)], target)
    with pytest.raises(UserError, match=r"data\.held_out"):
        train(recipe_for(target), run)
    data = {"min_supervised_tokens": 99, "held_out": 1}
    with pytest.raises(UserError, match="no row is left to train on"):
        train(recipe_for(target, data=data), run)


def test_rows_that_were_lost_say_so(target, run):
    path = run / "rows" / "rows.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[2:]))
    with pytest.raises(UserError, match="2 of 48 rows are missing; run `draftsmith data` again"):
        train(recipe_for(target), run)


@pytest.mark.parametrize("token", [32, 10**30])
def test_a_token_that_the_target_does_not_have_says_so(target, tmp_path, token):
    rows = [counting_row(number) for number in range(24)]
    rows[3]["response_ids"][0] = token
    run = save_rows(tmp_path / "run", rows, target)
    with pytest.raises(UserError, match=f"'003' holds the token {token} and .* has 0 to 31"):
        train(recipe_for(target), run)


def test_rows_of_older_weights_in_the_same_folder_are_refused(tmp_path):
    target = save_target(tmp_path / "target")
    run = save_rows(tmp_path / "run", [counting_row(number) for number in range(48)], target)
    save_target(target, seed=1)
    with pytest.raises(UserError, match=r"the answers are another target's \(content "):
        train(recipe_for(target), run)


def test_rows_that_do_not_name_their_target_s_content_are_taken(target, run):
    path = run / "rows" / "manifest.json"
    made = json.loads(path.read_text())
    del made["target"]["content"]
    path.write_text(json.dumps(made))
    train(recipe_for(target, train={"max_steps": 1}), run)


@pytest.mark.parametrize(
    ("key", "refused"), [("template", True), ("content", True), ("dtype", False)]
)
def test_rows_of_another_target_are_refused_and_another_precision_is_named(
    target, run, capsys, key, refused
):
    recipe = recipe_for(target, train={"max_steps": 1})
    made = json.loads((run / "rows" / "manifest.json").read_text())
    made["target"][key] = "another"
    (run / "rows" / "manifest.json").write_text(json.dumps(made))
    if refused:
        with pytest.raises(UserError, match="the answers are another target's"):
            train(recipe, run)
    else:
        train(recipe, run)
        assert "made in another precision (dtype another / float32" in capsys.readouterr().out


def test_rows_that_nobody_answers_for_are_refused(target, run):
    path = run / "rows" / "manifest.json"
    good = json.loads(path.read_text())
    changes = [{"target": 3}, {"target": []}, {"prompts": {"count": "48"}}, {"prompts": []}]
    bads = [{**good, **change} for change in changes] + [{"target": good["target"]}]
    for bad in ("{", "[" * 100_000, *map(json.dumps, bads)):
        path.write_text(bad)
        with pytest.raises(UserError, match=r"manifest.json: is damaged"):
            train(recipe_for(target), run)
    path.unlink()
    with pytest.raises(UserError, match=r"holds no manifest.json, so nothing says whose answers"):
        train(recipe_for(target), run)


def test_the_start_says_what_is_trained(target, run, capsys):
    train(recipe_for(target, train={"max_steps": 1}), run)
    said = capsys.readouterr().out
    assert "tokens supervised" in said  # the sample
    assert "3,168 trainable parameters (drafter)" in said
    assert "frozen (target)" in said


# --- several processes ---------------------------------------------------------------------------

PROCESS = """
import sys
from pathlib import Path
from draftsmith.recipes.schema import Recipe
from draftsmith.train.trainer import train

for recipe, run in zip(sys.argv[1::2], sys.argv[2::2]):
    train(Recipe.model_validate_json(Path(recipe).read_text()), Path(run))
"""


def in_two_processes(folder, jobs):
    """Train recipes in runs, one after the other, with two processes."""
    words = []
    for recipe, run in jobs:
        (run / "recipe.json").write_text(recipe.model_dump_json())
        words += [run / "recipe.json", run]
    (folder / "process.py").write_text(PROCESS)
    launch = ["torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, folder / "process.py", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


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
    in_two_processes(tmp_path, [(recipe, two) for recipe, _, two in jobs])
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
