"""The log, the counters, and trackers that may fail."""

import importlib.util
import json
import time

import pytest
import torch
from accelerate import Accelerator

from draftsmith.recipes.errors import UserError
from draftsmith.train import progress
from draftsmith.train.progress import Journal, Meter, numbers
from draftsmith.train.trainer import train
from tests.train.counting import counting_row, read_log, recipe_for, save_rows


def record(step, **values):
    return {"kind": "train", "step": step, **values}


def journal(folder, **knobs):
    return Journal(recipe_for("x", **knobs), folder, main=True)


def test_a_rewound_log_keeps_whole_records_up_to_the_step(tmp_path):
    log = journal(tmp_path)
    for step in (2, 4, 6):
        log.write(record(step))
    with open(log.path, "a") as file:
        file.write('{"kind": "train", "st')  # a killed process
    log.rewind(4)
    assert read_log(tmp_path) == [record(2), record(4)]
    log.write(record(6, loss=1.0))
    assert read_log(tmp_path)[-1] == record(6, loss=1.0)
    log.rewind(-1)
    assert log.path.read_text() == ""


def test_a_log_that_is_no_text_is_rewound_all_the_same(tmp_path):
    log = journal(tmp_path)
    log.write(record(2))
    with open(log.path, "ab") as file:
        file.write(b"\xff\x00\xfe\n" + b"[" * 100_000 + b'\n{"step": "2"}\n')
    log.write(record(4))
    log.rewind(4)
    assert read_log(tmp_path) == [record(2), record(4)]


def test_only_the_main_process_writes(tmp_path):
    Journal(recipe_for("x"), tmp_path, main=False).write(record(1))
    assert not (tmp_path / "log.jsonl").exists()


def test_a_log_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(UserError, match=r"log\.jsonl: cannot be written"):
        journal(tmp_path).write(record(1))


def test_sums_survive_a_dump_exactly():
    meter = Meter(Accelerator(cpu=True), torch.device("cpu"))
    for _ in range(10):
        meter.add({"loss": torch.tensor(0.1), "hits": torch.tensor([2**30, 1])})
    again = Meter(meter.accelerator, meter.device)
    again.load(json.loads(json.dumps(meter.dump())))
    for one in (meter, again):
        one.add({"loss": torch.tensor(0.7), "hits": torch.tensor([1, 1])})
    assert meter.dump() == again.dump()
    assert again.dump()["hits"] == [10 * 2**30 + 1, 11]


def test_numbers_are_named_by_slot_and_category():
    nested = {"hit": [0.5, 0.25], "tau": {"a": 2.0}}
    flat = numbers({"step": 3, "loss": None, "kind": "train", **nested})
    assert flat == {"hit/1": 0.5, "hit/2": 0.25, "tau/a": 2.0}


# --- trackers ------------------------------------------------------------------------------------


@pytest.fixture
def run(target, tmp_path):
    return save_rows(tmp_path / "run", [counting_row(number) for number in range(24)], target)


def test_wandb_offline_and_tensorboard_get_every_number(target, run, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    train(recipe_for(target, train={"trackers": ["wandb", "tensorboard"], "epochs": 1}), run)
    (wandb_file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30  # its writer is a process of its own
    while b"held_out/tau" not in wandb_file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    data = wandb_file.read_bytes()
    assert b"train/conditional_hit_rate/1" in data and b"held_out/tau" in data
    (events,) = (path for path in run.glob("tensorboard/events*"))
    board = EventAccumulator(str(events))
    board.Reload()
    logged = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert logged == [(r["step"], pytest.approx(r["loss"])) for r in read_log(run)]


def test_a_tracker_that_fails_warns_once_and_training_goes_on(target, run, monkeypatch, capsys):
    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(progress.TensorBoardTracker, "log", fail)
    train(recipe_for(target, train={"trackers": ["tensorboard"]}), run)
    assert capsys.readouterr().out.count("tracker tensorboard failed") == 1
    assert (run / "drafter").is_dir()


def test_a_tracker_that_does_not_start_warns_and_training_goes_on(target, run, monkeypatch, capsys):
    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(progress.WandBTracker, "start", fail)
    train(recipe_for(target, train={"trackers": ["wandb"]}), run)
    assert capsys.readouterr().out.count("tracker wandb did not start") == 1


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(run, monkeypatch):
    real = importlib.util.find_spec

    def find(name, *rest):
        return None if name == "wandb" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(UserError, match=r"wandb is not installed.*draftsmith\[wandb\]"):
        train(recipe_for("no such target", train={"trackers": ["wandb"]}), run)
