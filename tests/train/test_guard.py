"""Training that starts from a trained drafter must not end worse."""

import json

import pytest

from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.mtp_stitch import stitch
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.train.trainer import train
from tests.train.counting import counting_row, read_log, recipe_for, save_rows, save_target

MTP = {"kind": "mtp", "draft_tokens": 2}


@pytest.fixture
def trained(tmp_path):
    """A target with an MTP layer that has learned to count, and rows."""
    plain = save_target(tmp_path / "plain", hidden=64)
    rows = [counting_row(number) for number in range(48)]
    recipe = recipe_for(plain, train={"epochs": 8, "rows_per_step": 2}, drafter=MTP)
    run = save_rows(tmp_path / "first", rows, plain)
    train(recipe, run)
    target = Target.load(recipe.target)
    block = load_drafter(run / "drafter", target).block
    folder = tmp_path / "target"
    stitch(plain, [block.state_dict()], folder, layers=1, hidden_first=False)
    return folder, save_rows(tmp_path / "second", rows, folder), read_log(run, "held_out")[-1]


def healing(folder, lr):
    return recipe_for(
        folder,
        train={"epochs": 1},
        optim={"lr": lr, "warmup_steps": 0},
        drafter={**MTP, "start": "checkpoint"},
    )


def test_a_better_end_is_written(trained, capsys):
    folder, run, before = trained
    assert (train(healing(folder, 1e-5), run) / "model.safetensors").is_file()
    start, end = read_log(run, "held_out")
    assert (start["step"], start["tau"]) == (0, before["tau"]) and start["tau"] > 1.5
    said = capsys.readouterr().out
    assert f"all {start['tau']:.3f} -> {end['tau']:.3f}, even " in said


def test_a_worse_end_is_not(trained):
    folder, run, _ = trained
    with pytest.raises(
        UserError, match=r"is not written: .* worse .*all [23]\.\d+ -> 1\.\d+, even "
    ):
        train(healing(folder, 1.0), run)
    assert not (run / "drafter").exists()
    assert json.loads((run / "log.jsonl").read_text().splitlines()[0])["step"] == 0
