"""Reports about adapted targets: both targets are measured, and told apart."""

import json
from pathlib import Path

import pytest

from draftsmith.eval.arms import ORIGINAL
from draftsmith.train import cli
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = "".join(
    json.dumps({"prompt": f"Say {i} {i} {i}.", "category": "ab"[i % 2]}) + "\n" for i in range(12)
)
RECIPE = """
name: mine
target: {model: ./tiny, dtype: float32, device: cpu}
data:
  prompts: prompts.jsonl
  eval_prompts: questions.jsonl
  max_prompt_tokens: 128
  max_length: 256
  held_out: 3
  distil: {max_new_tokens: 16, batch_size: 4}
drafter: {kind: medusa, heads: 2}
adapter:
  rank: 4
  lr: 0.01
  heads_first: 0.25
  gate: {answers: 2, max_new_tokens: 6, max_kl: null, max_fall: null}
train: {epochs: 1, rows_per_step: 1, rows_per_micro_batch: 1, precision: fp32}
optim: {warmup_steps: 1, lr: 0.04}
eval: {prompts: 3, max_new_tokens: 10, tree_nodes: 4}
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, prompts and a model."""
    monkeypatch.setattr("draftsmith.eval.figures.draw_figures", lambda report: {})
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text(PROMPTS)
    Path("questions.jsonl").write_text(PROMPTS.replace("Say", "Repeat"))
    Path("mine.yaml").write_text(RECIPE)
    tiny_model(hidden=64).save_pretrained("tiny")
    tiny_tokenizer().save_pretrained("tiny")
    return tmp_path


def read(folder: str) -> dict:
    """A report."""
    return json.loads(Path(folder, "report.json").read_text())


def test_a_run_measures_the_adapted_target_beside_its_original(desk: Path) -> None:
    assert cli.main(["run", "mine.yaml", "--dry-run"]) == 0
    assert cli.main(["run", "mine.yaml"]) == 0
    report = read("runs/mine/report")
    arms = {arm["name"]: arm for arm in report["arms"]}
    assert report["target"]["adapter"] != "none"
    assert all(arm["lossless"] is True for arm in report["arms"])
    assert arms[ORIGINAL]["baseline"] == "plain" and arms[ORIGINAL]["drafter"] is None
    drafted = [arm for arm in report["arms"] if arm["drafter"] == "medusa"]
    for arm in drafted:
        assert arm["tau_walk"] == arm["tau_micro"]  # on the adapted target's own answers
        told = [note for note in report["notes"] if note.startswith(f"{arm['name']}: ")]
        assert any(f"over `{ORIGINAL}`" in note for note in told)
    assert any("KL(original || adapted)" in note for note in report["notes"])
    assert any("Plain answers to the evaluation prompts" in note for note in report["notes"])
    assert "adapted by LoRA" in drafted[0]["quantisation"]
    assert cli.main(["eval", "runs/mine/drafter", "eval.prompts=2"]) == 0
    assert ORIGINAL in {arm["name"] for arm in read("runs/mine/drafter/report")["arms"]}


def test_an_adapted_drafter_and_a_plain_one_are_not_in_one_report(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "mine.yaml"]) == 0
    assert cli.main(["run", "mine.yaml", "name=other", "adapter=null"]) == 0
    assert "adapter" not in read("runs/other/report")["target"] or (
        read("runs/other/report")["target"]["adapter"] == "none"
    )
    assert ORIGINAL not in {arm["name"] for arm in read("runs/other/report")["arms"]}
    assert cli.main(["eval", "runs/mine", "runs/other"]) == 2
    assert "one report is about one target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("drafter={kind: mtp}", "adapter: a target is adapted beside Medusa's heads, not mtp"),
        ("train.feature_cache=true", "train.feature_cache: the states of a target that learns"),
        ("adapter.rank=0", "adapter.rank: 0 is not allowed"),
        ("adapter.heads_first=1.0", "adapter.heads_first: 1.0 is not allowed"),
        ("adapter.lora_alpha=3", "did you mean adapter.alpha?"),
        ("target.load_in=int3", "target.load_in: 'int3' is not allowed; allowed: one of nf4, int8"),
        ("target={model: ./tiny, load_in: nf4, device: cpu}", ""),
    ],
)
def test_what_an_adapter_rules_out_is_said_before_anything_loads(
    desk: Path, override: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["run", "mine.yaml", override, "--dry-run"])
    assert code == (2 if line else 0)
    assert line in capsys.readouterr().err
    if not line:
        assert cli.main(["run", "mine.yaml", override, "adapter.merged=true", "--dry-run"]) == 2
        assert "adapter.merged: adapters over nf4 weights" in capsys.readouterr().err
