"""The data stage says what it did, and what it left out."""

import json
from pathlib import Path

import pytest

from draftsmith.data.rows import read_rows
from draftsmith.data.stage import prepare
from draftsmith.recipes.schema import Recipe


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
