"""Stopped anywhere, a run goes on bit for bit; what would make it another run is refused."""

import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.recipes.errors import UserError
from draftsmith.train import checkpoint, trainer
from draftsmith.train.checkpoint import latest
from draftsmith.train.resume import compare, identity
from draftsmith.train.rng import rng_state
from draftsmith.train.setup import prepare
from draftsmith.train.trainer import train
from tests.train.children import in_children, job_of
from tests.train.counting import counting_row, digest, read_log, recipe_for, save_rows, weights

TIMED = ("seconds", "tokens_per_second")


def untimed(run, kind="train"):
    return [{k: v for k, v in r.items() if k not in TIMED} for r in read_log(run, kind)]


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
    ("draftsmith.train.trainer", "forward", 6),  # in the middle of step 6
    ("draftsmith.train.checkpoint", "write_json", 1),
    ("shutil", "rmtree", 4),  # steps 6 and 9 are kept, step 3 is not yet removed
    ("draftsmith.train.trainer", "finish", 1),  # all is done but the drafter
]


def test_killed_anywhere_the_resumed_run_ends_as_the_undisturbed_one(target, tmp_path):
    knobs = {"save_every": 3, "eval_every": 4, "log_every": 2, "rows_per_step": 2}
    recipe = recipe_for(
        target,
        train={**knobs, "rows_per_micro_batch": 1},
        drafter={"projection": "low_rank", "rank": 4, "reads_root": True},
    )
    rows = [counting_row(number) for number in range(48)]

    def job(name, **death):
        run = save_rows(tmp_path / name, rows, target)
        return job_of(recipe, run, **death)

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
    held = [*t.parallel.parameters.values()]
    held += [value for state in t.parallel.optimizer.state.values() for value in state.values()]
    assert len(held) == 4 * len(t.parallel.parameters) and {value.dtype for value in held} == {
        torch.float32
    }
    assert t.step == 6 and all(float(s["step"]) == 6 for s in t.parallel.optimizer.state.values())


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
