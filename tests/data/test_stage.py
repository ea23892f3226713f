"""The data stage says what it did, and what it left out."""

import json
from pathlib import Path

import pytest

from draftsmith.data.plan import make_plan, render
from draftsmith.data.rows import read_rows
from draftsmith.data.stage import prepare
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import Recipe, TargetConfig
from tests.data.serving import Server


def test_prompts_of_the_evaluation_are_left_out_and_counted(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, asked in (("prompts", ["a", "b", "c"]), ("questions", ["B", "d"])):
        lines = [json.dumps({"prompt": text}) + "\n" for text in asked]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    data = {
        "prompts": str(tmp_path / "prompts.jsonl"),
        "eval_prompts": str(tmp_path / "questions.jsonl"),
        "distil": {"max_new_tokens": 4},
    }
    target = {"model": str(tiny_folder), "device": "cpu"}
    prepare(Recipe.model_validate({"name": "x", "target": target, "data": data}), tmp_path)
    assert [row["messages"][0]["content"] for row in read_rows(tmp_path / "rows")] == ["c", "a"]
    assert "1 prompts left out: 1 copy of an evaluation prompt" in capsys.readouterr().out


def test_servers_answer_in_place_of_the_weights(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8))
    (tmp_path / "prompts.jsonl").write_text(text)
    config = TargetConfig(model=str(tiny_folder), device="cpu", dtype="float32")
    with Server(Target.load(config), models=(str(tiny_folder),)) as server:
        data = {
            "prompts": str(tmp_path / "prompts.jsonl"),
            "held_out": 2,
            "distil": {"max_new_tokens": 4, "backend": "openai", "urls": [server.url]},
            "self_written": {"count": 6, "max_new_tokens": 8},
        }
        recipe = Recipe.model_validate({"name": "x", "target": config.model_dump(), "data": data})
        monkeypatch.setattr(Target, "load", None)
        prepare(recipe, tmp_path)
        assert f"from {server.url}" in render(make_plan(recipe), recipe)
    rows = read_rows(tmp_path / "rows")
    assert len(rows) >= 8 and len(read_rows(tmp_path / "self_written")) == 6
    assert json.loads((tmp_path / "rows" / "left_out.json").read_text()) == {}
    manifest = json.loads((tmp_path / "rows" / "manifest.json").read_text())
    monkeypatch.undo()
    assert manifest["target"] == Target.load(config).fingerprint
