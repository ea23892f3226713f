"""The command line: order of stages, skipping, exit codes, one line for what a user can mend."""

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data import __main__ as data_program
from draftsmith.data import runner
from draftsmith.eval import __main__ as eval_program
from draftsmith.recipes.entry import complain, guard, hold
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.load import load_recipe
from draftsmith.train import cli

RECIPE = "name: mine\ntarget: {model: smollm2-135m}\n"
RESULTS = {"data": "rows", "train": "drafter", "eval": "report"}


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages that leave their result and their name here, instead of working."""
    done: list[str] = []

    def stage(name: str):
        def work(recipe: object, run: Path) -> None:
            done.append(name)
            (run / RESULTS[name]).mkdir(exist_ok=True)

        return work

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "WORK", {name: stage(name) for name in RESULTS})
    monkeypatch.setattr(runner, "show_plan", lambda recipe: print("the plan"))
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return done


def test_run_does_every_stage_once(done: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "mine.yaml"]) == 0
    assert done == ["data", "train", "eval"]
    assert "finished: runs/mine/report" in capsys.readouterr().out
    assert cli.main(["run", "mine.yaml"]) == 0
    assert done == ["data", "train", "eval"]


def test_run_goes_on_where_it_stopped(done: list[str]) -> None:
    assert cli.main(["data", "mine.yaml"]) == 0
    assert cli.main(["run", "mine.yaml"]) == 0
    assert done == ["data", "train", "eval"]


def test_a_stage_out_of_order_is_refused(
    done: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "mine.yaml"]) == 2
    assert "runs/mine/rows is not finished; run `draftsmith data` first" in capsys.readouterr().err
    assert not done and not Path("runs").exists()


def test_other_settings_in_the_same_run_are_refused(
    done: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "mine.yaml"]) == 0
    before = Path("runs/mine/recipe.yaml").read_text()
    for words in (["run", "mine.yaml", "optim.lr=1.0"], ["train", "mine.yaml", "optim.lr=1.0"]):
        assert cli.main(words) == 2
        line = capsys.readouterr().err
        assert "optim.lr: 0.002 there, 1.0 here" in line and line.count("\n") == 1
    assert Path("runs/mine/recipe.yaml").read_text() == before
    assert cli.main(["run", "mine.yaml", "optim.lr=1.0", "name=other"]) == 0
    assert done == 2 * ["data", "train", "eval"]


def test_the_resolved_recipe_is_kept_with_the_command(done: list[str]) -> None:
    assert cli.main(["run", "mine.yaml", "seed=7", "--dry-run"]) == 0
    assert not Path("runs").exists()
    assert cli.main(["run", "--", "mine.yaml", "seed=7"]) == 0
    kept = Path("runs/mine/recipe.yaml")
    assert load_recipe(str(kept)) == load_recipe("mine.yaml", ["seed=7"])
    assert "# command: draftsmith run -- mine.yaml seed=7" in kept.read_text()


def test_a_dry_run_says_what_is_left(done: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "mine.yaml"]) == 0
    capsys.readouterr()
    assert cli.main(["run", "--dry-run", "mine.yaml"]) == 0
    assert "to do    train, eval" in capsys.readouterr().out
    assert done == ["data"]


def test_overrides_may_stand_behind_options(done: list[str]) -> None:
    assert cli.main(["run", "mine.yaml", "--dry-run", "optim.lr=1e-4"]) == 0
    assert not done


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "the following arguments are required: COMMAND, RECIPE"),
        (["run"], "the following arguments are required: RECIPE"),
        (["trian", "mine.yaml"], "invalid choice: 'trian'"),
        (["run", "mine.yaml", "--lr"], "unrecognized arguments: --lr"),
        (["run", "mine.yaml", "--dry"], "unrecognized arguments: --dry"),
    ],
)
def test_bad_usage_is_one_line(
    done: list[str], words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_only_training_takes_several_processes(
    done: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["run", "mine.yaml"]) == 2
    assert "several processes only train" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_second_process_leaves_no_marks(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["data", "mine.yaml"]) == 0
    kept = Path("runs/mine/recipe.yaml").read_text()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["train", "mine.yaml"]) == 0
    assert done == ["data", "train"]
    assert not Path("runs/mine/stages/train.json").exists()
    assert Path("runs/mine/recipe.yaml").read_text() == kept


def test_two_commands_do_not_work_in_one_run(
    done: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/mine").mkdir(parents=True)
    with hold(Path("runs/mine")):
        assert cli.main(["run", "mine.yaml"]) == 2
    assert "another draftsmith command is at work in runs/mine" in capsys.readouterr().err
    assert not done
    assert cli.main(["run", "mine.yaml"]) == 0


@pytest.mark.parametrize(
    ("program", "result"), [(data_program, "rows"), (eval_program, "report")], ids=["data", "eval"]
)
def test_stages_by_themselves_make_the_same_checks(
    done: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: Any,
    result: str,
) -> None:
    name = next(iter(program.PROGRAM.commands))
    own = dataclasses.replace(program.PROGRAM, work={name: cli.WORK[name]})
    monkeypatch.setattr(program, "PROGRAM", own)
    if name == "eval":
        assert program.main(["mine.yaml"]) == 2
        assert "runs/mine/rows is not finished" in capsys.readouterr().err
        assert cli.main(["data", "mine.yaml"]) == cli.main(["train", "mine.yaml"]) == 0
        done.clear()
    capsys.readouterr()
    assert program.main(["mine.yaml", "--dry-run"]) == 0 and not done
    assert f"the plan\nto do    {name}" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert program.main(["mine.yaml"]) == 2
        assert "several processes only train" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(runner, "show_plan", refuse)
        assert program.main(["mine.yaml"]) == 2 and not done
    assert program.main(["mine.yaml"]) == 0 and done == [name]
    assert f"finished: runs/mine/{result}" in capsys.readouterr().out


def refuse(recipe: object) -> None:
    """A plan that cannot work."""
    raise UserError("cannot work")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("first\nsecond\x1b[31m"), 2, "draftsmith: error: first second [31m\n"),
        (
            OSError(errno.ENOSPC, "No space left", "a/b"),
            2,
            "draftsmith: error: a/b: the disk is full",
        ),
        (PermissionError(errno.EACCES, "denied", "a"), 2, "draftsmith: error: a: no permission"),
        (MemoryError(), 2, "draftsmith: error: out of memory; lower train.rows_per_micro_batch"),
        (
            RuntimeError("[enforce fail] can't allocate memory"),
            2,
            "draftsmith: error: out of memory",
        ),
        (KeyboardInterrupt(), 130, "draftsmith: interrupted; the same command goes on from here"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> None:
        raise error

    assert guard(action) == code
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "broken"), RuntimeError("shape"), KeyError("x")]
)
def test_a_fault_of_ours_keeps_its_traceback(error: Exception) -> None:
    def action() -> None:
        raise error

    with pytest.raises(type(error)):
        guard(action)


def test_a_complaint_is_one_printable_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert complain("a\r\n\tb\0") == 2
    assert capsys.readouterr().err == "draftsmith: error: a b\n"


@pytest.mark.parametrize("module", ["train.cli", "train", "data", "eval"])
def test_entry_points_answer_a_bad_recipe_without_loading_torch(
    module: str, tmp_path: Path
) -> None:
    """Through the real interpreter; a poisoned torch would show an early import."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ["run", "nothing.yaml"] if module == "train.cli" else ["nothing.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", f"draftsmith.{module}", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("draftsmith: error: no file nothing.yaml; shipped: ")
    assert done.stderr.count("\n") == 1
