"""The shape that decodes fastest: chosen within the budget, kept, and used by the next report."""

import json
from pathlib import Path

import pytest

from draftsmith.drafters.checkpoint import read_metadata
from draftsmith.eval import tuning
from draftsmith.eval.tuning import Shape
from draftsmith.train import cli
from tests.test_kinds import KINDS, PROMPTS, RECIPE

SMALL = ["eval.prompts=2", "eval.max_new_tokens=6"]


@pytest.fixture
def there(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose drafter is trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("draftsmith.eval.figures.draw_figures", lambda report: {})
    Path("prompts.jsonl").write_text(PROMPTS)
    Path("questions.jsonl").write_text(PROMPTS.replace("Say", "Repeat"))
    text = RECIPE.format(target=tiny_folder, drafter=KINDS["ngram"], temperature=0.0)
    Path("mine.yaml").write_text(text)
    for stage in ("data", "train"):
        assert cli.main([stage, "mine.yaml"]) == 0
    return tmp_path


def test_the_fastest_measured_shape_is_kept_and_reported(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Shape] = []
    real = tuning.decode_all

    def slowed(*arguments):
        """Measured as it is, and the last one called the fastest."""
        found = real(*arguments)
        assert all(shape.measured and shape.tau for shape in found)
        seen.extend(found)
        last = found[-1]
        return [*found[:-1], Shape(last.name, last.tree, last.predicted, 99.0, last.tau)]

    monkeypatch.setattr(tuning, "decode_all", slowed)
    assert cli.main(["tune", "runs/mine", "eval.tree_nodes=3", *SMALL]) == 0
    assert f"chosen: {seen[-1].name}" in capsys.readouterr().out
    assert all(shape.tree.nodes <= 3 for shape in seen)
    meta = read_metadata(Path("runs/mine/drafter"))
    assert tuple(map(tuple, meta["tree"])) == seen[-1].tree.paths
    assert meta["tuned"]["shape"] == seen[-1].name and meta["tuned"]["speedup"] == 99.0
    assert cli.main(["eval", "mine.yaml"]) == 0
    assert read_metadata(Path("runs/mine/drafter"))["tree"] == meta["tree"]
    report = json.loads(Path("runs/mine/report/report.json").read_text())
    assert report["trees"] == {}  # nothing was searched again
    longest = len(seen[-1].tree.paths[-1])
    assert longest in {arm["draft_tokens"] for arm in report["arms"]}


def test_what_is_no_run_is_refused(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "mine.yaml"]) == 2
    assert "tune takes the folder of a finished run" in capsys.readouterr().err
