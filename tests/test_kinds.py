"""Every kind of drafter through the whole command line: distil, make it, measure, report."""

import json
from pathlib import Path

import pytest

from draftsmith.drafters.checkpoint import read_metadata
from draftsmith.train import cli
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = "".join(
    json.dumps({"prompt": f"Say {i} {i} {i}.", "category": "ab"[i % 2]}) + "\n" for i in range(12)
)
RECIPE = """
name: mine
target: {{model: {target}, dtype: float32, device: cpu}}
data:
  prompts: prompts.jsonl
  eval_prompts: questions.jsonl
  max_prompt_tokens: 128
  max_length: 256
  held_out: 3
  distil: {{max_new_tokens: 24, batch_size: 4}}
drafter: {drafter}
train: {{epochs: 1, rows_per_step: 1, rows_per_micro_batch: 1, precision: fp32}}
optim: {{warmup_steps: 1}}
eval: {{prompts: 2, max_new_tokens: 8, temperature: {temperature}}}
"""
KINDS = {
    "prompt_lookup": "{kind: prompt_lookup, draft_tokens: 3}",
    "ngram": "{kind: ngram, draft_tokens: 2}",
    "distilled": "{kind: draft_model, layers: 1, draft_tokens: 2}",
    "distilled expansion": "{kind: draft_model, layers: 1, draft_vocab: 60, expansion: [2, 1]}",
    "distilled own": "{kind: draft_model, layers: 1, embedding: own, draft_tokens: 2}",
    "dflash": "{kind: dflash, block_size: 4, layers: 1, taps: [0], start: target}",
    "dflash some": "{kind: dflash, block_size: 4, layers: 1, taps: [0], draft_vocab: 60}",
    "mtp": "{kind: mtp, draft_tokens: 2, draft_vocab: 60}",
    "mtp untied": "{kind: mtp, draft_tokens: 2, depths: 2}",
    "mtp on policy": "{kind: mtp, draft_tokens: 3, recursion: on_policy, start: random}",
    "ready": "{kind: draft_model, models: [small], draft_tokens: 2}",
    "forest": "{kind: draft_model, models: [small, smaller], expansion: [2, 1]}",
}


@pytest.fixture
def desk(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with prompts and two small models. Figures, which take a while, are not drawn."""
    monkeypatch.setattr("draftsmith.eval.figures.draw_figures", lambda report: {})
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(PROMPTS)
    Path("questions.jsonl").write_text(PROMPTS.replace("Say", "Repeat"))
    for name, hidden in (("small", 16), ("smaller", 8)):
        tiny_model(layers=1, hidden=hidden, seed=hidden).save_pretrained(name)
        tiny_tokenizer().save_pretrained(name)
    return tmp_path


def run(tiny_folder: Path, drafter: str, temperature: float = 0.0) -> dict:
    """The report of a run of everything."""
    text = RECIPE.format(target=tiny_folder, drafter=drafter, temperature=temperature)
    Path("mine.yaml").write_text(text)
    assert cli.main(["run", "mine.yaml", "--dry-run"]) == 0
    assert not Path("runs").exists()
    assert cli.main(["run", "mine.yaml"]) == 0
    return json.loads(Path("runs/mine/report/report.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_through_and_measures(desk: Path, tiny_folder: Path, kind: str) -> None:
    report = run(tiny_folder, KINDS[kind])
    arms = {arm["name"]: arm for arm in report["arms"]}
    walks = kind != "forest"
    drafted = [arm for arm in report["arms"] if arm["drafter"] is not None]
    assert drafted and all(arm["lossless"] is True for arm in report["arms"])
    for arm in drafted:
        assert arm["tau_walk"] == (arm["tau_micro"] if walks else None)  # fp32: the walk is exact
    unassisted = kind in ("ngram", "dflash some", "forest") or kind.startswith("mtp")
    lookup = kind == "prompt_lookup"
    assert ("transformers assisted" in arms) == (not unassisted and not lookup)
    assert ("transformers prompt lookup" in arms) == lookup
    assert bool(report["walks"]) == walks
    fixed = kind in ("prompt_lookup", "distilled expansion", "forest", "mtp untied")
    assert bool(report["trees"]) == (not fixed)
    assert Path("runs/mine/drafter/README.md").read_text().startswith("---\nbase_model")
    trained = kind.startswith(("distilled", "dflash", "mtp"))
    assert Path("runs/mine/checkpoints").exists() == trained
    assert cli.main(["eval", "runs/mine/drafter", "eval.prompts=1"]) == 0


@pytest.mark.parametrize("kind", ["ngram", "distilled", "dflash some", "mtp", "forest"])
def test_sampled_arms_draw_where_they_can(desk: Path, tiny_folder: Path, kind: str) -> None:
    report = run(tiny_folder, KINDS[kind], temperature=0.8)
    drawn = [arm for arm in report["arms"] if arm["draw"] not in (None, "point")]
    assert drawn
    for arm in drawn:
        assert arm["rule"] in ("token", "without_replacement") and arm["lossless"] is True
        assert (arm["alpha"] is None) == (kind == "forest") and arm["tau_walk"] is None


def test_a_further_model_learns_what_the_first_misses(
    desk: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tiny_folder, KINDS["distilled"])
    first = Path("runs/mine/drafter")
    over = f"drafter={{kind: draft_model, layers: 1, draft_tokens: 2, boosts: {first}}}"
    assert cli.main(["run", "mine.yaml", over, "name=second"]) == 0
    assert read_metadata(Path("runs/second/drafter"))["drafter"]["boosts"] == str(first)
    both = f"drafter={{kind: draft_model, models: [{first}, runs/second/drafter], draft_tokens: 2}}"
    assert cli.main(["run", "mine.yaml", both, "name=both"]) == 0


@pytest.mark.parametrize(
    ("drafter", "line"),
    [
        ("{kind: draft_model, models: [./nowhere]}", "drafter.models: no folder ./nowhere"),
        ("{kind: draft_model, layers: 1, boosts: ./no}", "drafter.boosts: no folder ./no"),
        ("{kind: draft_model, layers: 9}", "drafter.layers: 9 is more than the 2 of"),
        ("{kind: draft_model, draft_vocab: 999}", "drafter.draft_vocab: 999 is more than the 288"),
        ("{kind: draft_model, expansion: [8, 8, 8]}", "expansion: 584 nodes are too many"),
        ("{kind: mtp, draft_vocab: 999}", "drafter.draft_vocab: 999 is more than the 288"),
        ("{kind: ngram, heads: 3}", "drafter.heads: unknown key"),
        ("{kind: prompt_lookup, min_ngram: 4}", "min_ngram: 4 is more than max_ngram (3)"),
        ("{kind: eagle}", "drafter.kind: 'eagle' is not allowed; allowed: dflash, draft_model"),
    ],
)
def test_bad_drafters_are_one_clear_line(
    desk: Path, tiny_folder: Path, drafter: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = RECIPE.format(target=tiny_folder, drafter=drafter, temperature=0.0)
    Path("mine.yaml").write_text(text)
    assert cli.main(["run", "mine.yaml"]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
    assert not Path("runs").exists()


def test_a_model_with_another_tokenizer_is_refused(
    desk: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["<extra>"])
    other.save_pretrained("small")
    text = RECIPE.format(target=tiny_folder, drafter=KINDS["ready"], temperature=0.0)
    Path("mine.yaml").write_text(text)
    assert cli.main(["run", "mine.yaml"]) == 2
    assert "small has another vocabulary" in capsys.readouterr().err
