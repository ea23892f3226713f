"""Several drafters in one report, through the command line."""

import json
from pathlib import Path

import pytest

from draftsmith.drafters.checkpoint import read_metadata
from draftsmith.drafters.target import Target
from draftsmith.eval import stage
from draftsmith.eval.results import NAME
from draftsmith.train import cli
from tests.test_kinds import KINDS, PROMPTS, RECIPE
from tests.tiny import tiny_model, tiny_tokenizer

CONDITIONS = [
    "eval.batches=[1, 2]",
    "eval.tree_nodes=3",
    "eval.temperature=1",
    "eval.max_new_tokens=6",
]
RULES = "eval.rules=[point_mass, token, block, without_replacement, typical]"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder with two finished runs."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("draftsmith.eval.figures.draw_figures", lambda report: {})
        Path("prompts.jsonl").write_text(PROMPTS)
        Path("questions.jsonl").write_text(PROMPTS.replace("Say", "Repeat"))
        for kind in ("ngram", "distilled"):
            text = RECIPE.format(target=tiny_folder, drafter=KINDS[kind], temperature=0.0)
            Path(f"{kind}.yaml").write_text(text.replace("name: mine", f"name: {kind}"))
            assert cli.main(["run", f"{kind}.yaml"]) == 0
    return folder


@pytest.fixture
def there(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In that folder, with figures left out."""
    monkeypatch.chdir(desk)
    monkeypatch.setattr("draftsmith.eval.figures.draw_figures", lambda report: {})
    return desk


def arms_of(path: str) -> dict[str, dict]:
    return {arm["name"]: arm for arm in json.loads(Path(path, "report.json").read_text())["arms"]}


def test_runs_and_a_kind_are_measured_side_by_side(there: Path) -> None:
    before = read_metadata(Path("runs/ngram/drafter"))
    words = ["runs/ngram", "runs/distilled/drafter", "prompt_lookup", *CONDITIONS, RULES]
    assert cli.main(["eval", *words]) == 0
    arms = arms_of("runs/compare/report")
    kinds = {arm["drafter"] for arm in arms.values()}
    assert kinds == {None, "ngram", "draft_model", "prompt_lookup"}
    for name in (
        *("transformers.generate", "transformers assisted", "transformers prompt lookup"),
        *("ngram chain, block T=1 B=2", "draft_model chain, token T=1", "prompt_lookup chain B=2"),
    ):
        assert name in arms, sorted(arms)
    for arm in arms.values():
        assert arm["lossless"] in (True, "by design not")
        assert (arm["lossless"] is True) == (", lossy" not in arm["rule"])
        assert arm["prompts"] == 2
        assert (arm["predicted_speedup"] is None) == (arm["drafter"] is None)
    skipped = json.loads(Path("runs/compare/report/report.json").read_text())["skipped"]
    assert "not drawn" in skipped["prompt_lookup chain, token T=1"]
    assert read_metadata(Path("runs/ngram/drafter")) == before
    text = Path("runs/compare/report/report.html").read_text()
    assert (
        "not drawn" in text and "Leaderboard" in Path("runs/compare/report/report.md").read_text()
    )


def test_a_recipe_names_the_drafters_that_its_run_is_compared_with(there: Path) -> None:
    text = Path("ngram.yaml").read_text().replace("name: ngram", "name: beside")
    Path("beside.yaml").write_text(text)
    over = "eval.drafters=[runs/distilled, runs/ngram]"
    assert cli.main(["run", "beside.yaml", over]) == 0
    kinds = {arm["drafter"] for arm in arms_of("runs/beside/report").values()}
    assert kinds == {None, "ngram", "draft_model", "ngram (ngram)"}


def test_a_killed_comparison_goes_on(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["eval", "prompt_lookup", "runs/ngram", "name=killed", *CONDITIONS]
    monkeypatch.setattr(stage, "make_report", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(words) == 130
    monkeypatch.undo()
    monkeypatch.chdir(there)
    monkeypatch.setattr("draftsmith.eval.figures.draw_figures", lambda report: {})
    path = Path("runs/killed/report", NAME)
    measured = path.read_text()
    path.write_text(measured[:-30])  # the last cell is lost
    assert cli.main(words) == 0
    lines = path.read_text().splitlines()
    assert lines[: measured.count("\n") - 1] == measured.splitlines()[:-1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["runs/ngram", "./nowhere"], "eval.drafters: no folder ./nowhere"),
        (["runs/ngram", "medusa"], "eval.drafters: medusa needs training"),
        (["runs/ngram", "ngram"], "eval.drafters: ngram needs answers"),
        (["runs/ngram", "runs/distilled", "eval.rules=[tokens]"], "eval.rules"),
        (["runs/ngram", "runs/distilled", "eval.batches=[]"], "eval.batches"),
        (["runs/ngram", "runs/distilled", "eval.batches=[2, 2]"], "batches: something is listed"),
        (["runs/ngram", "runs/distilled", "eval.batches=[8]"], "all more than the 2 prompts"),
        (["runs/ngram", "runs/distilled", "--dry-run"], "--dry-run plans a recipe"),
    ],
)
def test_bad_comparisons_are_one_clear_line(
    there: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", *words, "name=bad"]) == 2
    error = capsys.readouterr().err
    assert line in error.splitlines()[-1] and "Traceback" not in error


def test_drafters_of_another_target_are_refused_before_weights_load(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(vocab=300).save_pretrained("other")
    tiny_tokenizer().save_pretrained("other")
    text = RECIPE.format(target="./other", drafter=KINDS["ngram"], temperature=0.0)
    Path("other.yaml").write_text(text.replace("name: mine", "name: other"))
    for command in ("data", "train"):
        assert cli.main([command, "other.yaml"]) == 0
    monkeypatch.setattr(Target, "load", lambda config: pytest.fail("loaded"))
    shown = Path("runs/other/drafter/draftsmith.json")
    meta = json.loads(shown.read_text())
    meta["calibration"] = read_metadata(Path("runs/ngram/drafter"))["calibration"]
    shown.write_text(json.dumps(meta))
    assert cli.main(["eval", "runs/ngram", "runs/other"]) == 2
    assert "another target" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_said_before_weights_load(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Target, "load", lambda config: pytest.fail("loaded"))
    assert cli.main(["eval", "runs/ngram", "eval.served=http://127.0.0.1:9/v1"]) == 2
    assert "127.0.0.1:9/v1 cannot be reached" in capsys.readouterr().err
