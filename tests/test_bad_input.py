"""Bad input through the real command line: one clear line, exit code 2, nothing half-written."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from draftsmith.train import cli
from tests.tiny import CHATML, tiny_model, tiny_tokenizer

PROMPTS = "".join(
    json.dumps({"prompt": f"Say the number {i}.", "category": "a"}) + "\n" for i in range(12)
)
QUESTIONS = PROMPTS.replace("Say", "Write")
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
drafter: {{heads: 2}}
train: {{epochs: 1, rows_per_step: 1, rows_per_micro_batch: 1, save_every: 1, precision: fp32}}
eval: {{prompts: 2, max_new_tokens: 8, tree_nodes: 4}}
"""


@pytest.fixture
def desk(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good recipe, good prompts and a copy of a good target."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "target")
    Path("prompts.jsonl").write_text(PROMPTS)
    Path("questions.jsonl").write_text(QUESTIONS)
    Path("mine.yaml").write_text(RECIPE.format(target="./target"))
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run that went well, all stages of it; tests work on copies."""
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    try:
        shutil.copytree(tiny_folder, "target")
        Path("prompts.jsonl").write_text(PROMPTS)
        Path("questions.jsonl").write_text(QUESTIONS)
        Path("mine.yaml").write_text(RECIPE.format(target="./target"))
        assert cli.main(["run", "mine.yaml"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the trained run, in the current folder, its report still to be made."""
    shutil.copytree(trained, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/runs/mine/report")
    monkeypatch.chdir(tmp_path / "copy")
    return Path("runs/mine")


class Refusal:
    """Run a command that must be refused; returns the line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str) -> str:
        self.capsys.readouterr()
        assert cli.main(words) == 2
        lines = [line for line in self.capsys.readouterr().err.splitlines() if "error:" in line]
        assert len(lines) == 1 and lines[0].startswith("draftsmith: error: ")
        assert "Traceback" not in lines[0] and len(lines[0]) < 600
        return lines[0].removeprefix("draftsmith: error: ")


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """See Refusal."""
    return Refusal(capsys)


def leftovers(folder: Path) -> list[Path]:
    """Temporary files and folders that somebody forgot."""
    return [path for path in folder.rglob(".*") if path.name != ".lock"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("training: {lr: 1.0}", "mine.yaml: training.lr: unknown key; did you mean optim.lr?"),
        ("optim: {lr: fast}", "mine.yaml: optim.lr: 'fast' is not allowed; allowed: a number"),
        ("seed: 1\nseed: 2", "bad YAML (the key seed is given twice)"),
        ("seed: [1", "bad YAML"),
    ],
    ids=["unknown key", "wrong type", "key twice", "not YAML"],
)
def test_a_bad_recipe(desk: Path, refused: Refusal, text: str, line: str) -> None:
    with Path("mine.yaml").open("a") as file:
        file.write(text + "\n")
    assert line in refused("run", "mine.yaml")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("drafter.heads=0", "command line: drafter.heads: 0 is not allowed"),
        ("eval.max_new_tokens=1", "allowed: a whole number at least 2"),
        ("drafter.draft_vocab=1000", "drafter.draft_vocab: 1000 is more than the 288 tokens"),
        ("optim.lr", "write KEY=VALUE"),
        ("target.device=tpu", "target.device: 'tpu' is no device; use auto, cpu, cuda"),
        ("target.model=./nowhere", "target.model: no folder ./nowhere"),
        ("target.model=nobody/nothing", "target.model: cannot load 'nobody/nothing'"),
        ("target.dtype=int4", "target.dtype: 'int4' is not allowed; allowed: one of bfloat16"),
        ("data.prompts=nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        ("data.prompts=mine.yaml", "mine.yaml: prompts are read from a .jsonl file"),
        ("data.held_out=12", "data.held_out: 12 documents are kept away"),
        ("data.max_prompt_tokens=256", "data.max_prompt_tokens: 256 leaves no room"),
        ("train.rows_per_micro_batch=2", "train.rows_per_micro_batch: 2 does not divide"),
        ("runs=prompts.jsonl", "is a file; give a folder (runs=FOLDER)"),
        ("name=../elsewhere", "command line: name: '../elsewhere' is not allowed"),
        ("name='a\udcff'", "no valid text, its character 3 (U+DCFF) is not allowed in YAML"),
        ("data.prompts='~nobody-of-this-name/p.jsonl'", "the home folder that ~ stands for"),
        ("runs='~nobody-of-this-name'", "the home folder that ~ stands for"),
        ('data.eval_prompts="a\\0b"', "is no path: it holds a NUL character"),
        ('target.model="a\\0b"', "is no path: it holds a NUL character"),
        ("target.device=meta", "target.device: 'meta' is no device"),
    ],
)
def test_a_bad_setting(desk: Path, refused: Refusal, override: str, line: str) -> None:
    assert line in refused("run", "mine.yaml", override)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "prompts.jsonl: the file is empty"),
        ("\n\n", "prompts.jsonl: the file is empty"),
        ('{"prompt": "a"}\n{"prompt": ', "prompts.jsonl:2: the line is not JSON"),
        ('{"question": "a"}\n', "prompts.jsonl:1: found 'question'; a prompt is in one of"),
        (
            '{"messages": [{"role": "system", "content": "a"}]}\n',
            "no prompt is left. Dropped: 1 no user",
        ),
        ('{"prompt": "   "}\n', "no prompt is left. Dropped: 1 empty prompt"),
    ],
    ids=["empty", "blank", "cut line", "other fields", "no user turn", "empty prompt"],
)
def test_bad_prompts(desk: Path, refused: Refusal, text: str, line: str) -> None:
    Path("prompts.jsonl").write_text(text)
    assert line in refused("run", "mine.yaml")
    assert not Path("runs").exists()


def test_a_target_folder_without_config(desk: Path, refused: Refusal) -> None:
    Path("target/config.json").unlink()
    assert "has no config.json; give a Hugging Face model folder" in refused("run", "mine.yaml")
    assert not Path("runs").exists()


def test_a_tokenizer_without_chat_template(desk: Path, refused: Refusal) -> None:
    Path("target/chat_template.jinja").unlink(missing_ok=True)
    tiny_tokenizer(None).save_pretrained("target")
    assert "has no chat template" in refused("run", "mine.yaml")
    assert not Path("runs").exists()


def test_a_template_without_generation_prompt(desk: Path, refused: Refusal) -> None:
    tiny_tokenizer(CHATML.partition("{% if add_generation_prompt %}")[0]).save_pretrained("target")
    assert "its chat template has no generation prompt" in refused("run", "mine.yaml")
    assert not list(Path("runs").rglob("*.jsonl"))


def test_weights_that_are_cut_off(desk: Path, refused: Refusal) -> None:
    weights = Path("target/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "target.model: cannot load './target'" in refused("run", "mine.yaml")
    assert not list(Path("runs").rglob("*.jsonl"))


def test_weights_that_are_missing(desk: Path, refused: Refusal) -> None:
    Path("target/model.safetensors").unlink()
    assert "target.model: cannot load './target'" in refused("run", "mine.yaml")


def test_prompts_that_are_all_too_long(desk: Path, refused: Refusal) -> None:
    line = refused("run", "mine.yaml", "data.max_prompt_tokens=10")
    assert "no prompt is left to answer. Dropped: 12 prompt longer than 10 tokens" in line
    assert not list(Path("runs").rglob("*.jsonl"))


def test_answers_that_are_all_dropped(desk: Path, refused: Refusal) -> None:
    words = ("run", "mine.yaml", "data.cut_answers=drop", "data.distil.max_new_tokens=1")
    assert "every row was dropped (12 answer cut by max_new_tokens)" in refused(*words)
    assert refused(*words).startswith("runs/mine/rows: every row was dropped")  # and again, resumed
    assert not Path("runs/mine/drafter").exists()


def test_a_disk_that_fills_up_while_distilling(
    desk: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, "rows.jsonl")
    assert "No space left" in refused("run", "mine.yaml")
    assert Path("runs/mine/rows/rows.jsonl").read_bytes() == b""
    monkeypatch.undo()
    os.chdir(desk)
    assert cli.main(["data", "mine.yaml"]) == 0
    assert len(Path("runs/mine/rows/rows.jsonl").read_text().splitlines()) == 12


def fill_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Syncing a file of this name says that the disk is full."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("name", ["checkpoints", "drafter"])
def test_a_disk_that_fills_up_while_training(
    run: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutil.rmtree(run / "drafter")
    shutil.rmtree(run / "checkpoints")
    fill_disk(monkeypatch, f"/{name}/" if name == "checkpoints" else "drafter-")
    line = refused("train", "mine.yaml")
    assert "disk" in line and "full" in line
    assert not (run / "drafter").exists() and not leftovers(run)


def test_evaluation_before_training(run: Path, refused: Refusal) -> None:
    shutil.rmtree(run / "drafter")
    assert "drafter is not finished; run `draftsmith train` first" in refused("eval", "mine.yaml")
    assert not (run / "report").exists()


def test_other_settings_in_the_same_run(run: Path, refused: Refusal) -> None:
    before = sorted(run.rglob("*"))
    line = refused("run", "mine.yaml", "data.distil.temperature=1.0")
    assert "data.distil.temperature: 0.0 there, 1.0 here" in line and "name=" in line
    assert sorted(run.rglob("*")) == before


def test_rows_that_are_damaged(run: Path, refused: Refusal) -> None:
    shutil.rmtree(run / "drafter")
    rows = run / "rows" / "rows.jsonl"
    lines = rows.read_text().splitlines()
    rows.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    assert "rows.jsonl" in refused("train", "mine.yaml")
    assert not (run / "drafter").exists()


def test_rows_that_were_lost_are_made_again(run: Path, refused: Refusal) -> None:
    shutil.rmtree(run / "drafter")
    rows = run / "rows" / "rows.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:4] + lines[5:]))
    line = refused("train", "mine.yaml")
    assert "1 of 12 rows are missing; run `draftsmith data` again" in line
    assert cli.main(["data", "mine.yaml", "--dry-run"]) == 0 and not (run / "drafter").exists()
    assert cli.main(["data", "mine.yaml"]) == 0
    assert sorted(rows.read_text().splitlines(keepends=True)) == sorted(lines)
    assert cli.main(["run", "mine.yaml"]) == 0


def test_checkpoints_that_are_all_corrupted(run: Path, refused: Refusal) -> None:
    shutil.rmtree(run / "drafter")
    for file in (run / "checkpoints").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-10])
    line = refused("train", "mine.yaml")
    assert "corrupted" in line and "checkpoints" in line
    assert not (run / "drafter").exists()


@pytest.mark.parametrize("words", [("eval", "mine.yaml"), ("eval", "runs/mine/drafter")])
@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "draftsmith.json"])
def test_a_drafter_that_is_corrupted(
    run: Path, refused: Refusal, name: str, words: tuple[str, ...]
) -> None:
    file = run / "drafter" / name
    file.write_bytes(file.read_bytes()[:-10])
    assert "broken drafter checkpoint" in refused(*words)
    assert not (run / "report").exists() and not (run / "drafter" / "report").exists()


def test_a_drafter_of_another_target(run: Path, refused: Refusal) -> None:
    shutil.rmtree("target")
    tiny_model(hidden=64).save_pretrained("target")
    tiny_tokenizer().save_pretrained("target")
    assert "was trained for target './target', which differs" in refused("eval", "mine.yaml")
    assert not (run / "report").exists()


def test_rows_of_other_weights_in_the_same_folder(run: Path, refused: Refusal) -> None:
    shutil.rmtree(run / "drafter")
    tiny_model(seed=1).save_pretrained("target")
    assert "the answers are another target's (content " in refused("train", "mine.yaml")
    assert not (run / "drafter").exists()


def test_a_drafter_is_not_measured_as_another(run: Path, refused: Refusal) -> None:
    line = refused("eval", "runs/mine/drafter", "optim.lr=1.0")
    assert "optim.lr: the drafter in runs/mine/drafter is trained" in line and "eval, " in line
    assert not (run / "drafter" / "report").exists()


def test_a_drafter_that_was_moved_away_from_its_target(
    run: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run / "drafter", "away/drafter")
    monkeypatch.chdir("away")
    line = refused("eval", "drafter")
    assert "drafter/draftsmith.json" in line and "target.model=PATH" in line
    there = ["target.model=../target", "data.eval_prompts=../questions.jsonl", "eval.prompts=1"]
    assert cli.main(["eval", "drafter", *there]) == 0


def test_a_folder_that_is_no_drafter(run: Path, refused: Refusal) -> None:
    assert "is no drafter" in refused("eval", "runs/mine/rows")
    assert "is a folder; give a recipe's .yaml file" in refused("train", "runs/mine/drafter")


def test_a_good_run_is_not_refused(run: Path) -> None:
    """The desk these cases start from works: what they are refused for is what they changed."""
    assert cli.main(["run", "mine.yaml"]) == 0
    assert (run / "report" / "report.json").exists() and not leftovers(run)
    assert cli.main(["eval", "runs/mine/drafter", "eval.prompts=1"]) == 0
    report = json.loads((run / "drafter" / "report" / "report.json").read_text())
    assert all(arm["prompts"] == 1 for arm in report["arms"])
