"""Answers that were given elsewhere: taken as they are, and said to be so."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.distill import distil
from draftsmith.data.prompts import load_prompts
from draftsmith.data.rows import read_manifest, read_rows
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig
from draftsmith.train import cli
from tests.data.test_templates import speaker, text_of, turns
from tests.test_kinds import RECIPE


def given(
    folder: Path, rows: list[dict[str, Any]], *, limit: int = 40, **data: Any
) -> tuple[list[dict[str, Any]], dict[str, int], dict[str, Any]]:
    """Rows of a file by key, what was dropped, and the manifest."""
    file = folder / "given.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    distilled = {"backend": "given", "max_new_tokens": limit}
    config = DataConfig.model_validate({"prompts": str(file), "distil": distilled, **data})
    prompts = load_prompts(config, split="train", seed=0)
    summary = distil(speaker("chatml"), prompts.prompts, config, folder / "rows", seed=0)
    dropped = dict(prompts.dropped + summary.dropped)
    return read_rows(folder / "rows"), dropped, read_manifest(folder / "rows")


FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": turns("Hi?", "Hello.")},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]
    },
    "prompt and completion": {"prompt": "Hi?", "completion": "Hello."},
    "conversational": {
        "prompt": turns("Hi?"),
        "completion": [{"role": "assistant", "content": "Hello."}],
    },
    "a row of another run": {"messages": turns("Hi?"), "response": "Hello."},
    "a question after it": {"messages": turns("Hi?", "Hello.", "And now?")},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_gives_the_same(tmp_path: Path, form: str) -> None:
    ((row,), dropped, _) = given(tmp_path, [{"id": "k", **FORMS[form]}])
    tokenizer = speaker("chatml").tokenizer
    assert row["key"] == "k" and not dropped
    assert text_of(tokenizer, row["response_ids"]) == "Hello.<|im_end|>"
    assert row["messages"] == turns("Hi?") and row["finish_reason"] == "stop"


def test_the_last_answer_alone_unless_all_turns_are_asked_for(tmp_path: Path) -> None:
    talk = {"id": "k", "messages": turns("1?", "one", "2?", "two", "3?", "three")}
    (tmp_path / "last").mkdir()
    (tmp_path / "all").mkdir()
    last, _, _ = given(tmp_path / "last", [talk])
    every, _, _ = given(tmp_path / "all", [talk], turns="all")
    assert [row["response"] for row in last] == ["three"]
    assert sorted(row["response"] for row in every) == ["one", "three", "two"]
    assert [row["key"] for row in every] == ["k", "k (turn 2)", "k (turn 3)"]


def test_ids_and_temperature_are_kept_where_they_are_given(tmp_path: Path) -> None:
    tokenizer = speaker("chatml").tokenizer
    odd = tokenizer("He", add_special_tokens=False)["input_ids"]
    talk = turns("Hi?", "He")
    talk[1] |= {"token_ids": odd, "temperature": 0.0}
    rows = [
        {"id": "a", "messages": talk},
        {"id": "b", "messages": turns("Ho?", "Hu"), "temperature": 0.7},
        {"id": "c", "messages": turns("Cut?", "off"), "finish_reason": "length"},
        {"id": "d", "prompt": "D?", "response": "zz", "response_ids": odd},
    ]
    found, dropped, manifest = given(tmp_path, rows)
    assert not dropped
    assert [row["temperature"] for row in found] == [0.0, 0.7, None, None]
    assert [row["finish_reason"] for row in found] == ["stop", "stop", "length", "stop"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert found[0]["response_ids"] == [*odd, end] == found[3]["response_ids"]
    assert found[2]["response_ids"][-1] != end
    origin = manifest["origin"]
    assert origin["with token ids"] == 2 and origin["with temperature"] == 2
    assert "not made here" in origin["answers"] and origin["source"] == "given.jsonl"


def test_what_cannot_be_trained_is_counted_with_its_reason(tmp_path: Path) -> None:
    strange = turns("Ids?", "x")
    strange[1]["token_ids"] = [999_999]
    rows = [
        {"messages": turns("Good?", "Yes.")},
        {"messages": [{"role": "system", "content": "Only this."}]},
        {"messages": turns("No answer?")},
        {"messages": turns("Half?", "a \udc80")},
        {"messages": strange},
        {"messages": turns("Empty?", "")},
        {"messages": [{"role": "assistant", "content": "Nobody asked."}]},
    ]
    found, dropped, _ = given(tmp_path, rows)
    assert sorted(row["response"] for row in found) == ["", "Yes."]  # the empty one ends at once
    assert dropped == {
        "no assistant turn": 3,
        "text that is no Unicode": 1,
        "token ids that the target does not have": 1,
    }


def test_a_long_answer_is_cut_as_the_target_would_have_been(tmp_path: Path) -> None:
    ((row,), _, _) = given(tmp_path, [{"messages": turns("Long?", "word " * 30)}], limit=12)
    assert len(row["response_ids"]) == 12 and row["finish_reason"] == "length"


def test_answers_to_one_question_are_duplicates_of_nothing_but_themselves(tmp_path: Path) -> None:
    rows = [{"messages": turns("Hi?", text)} for text in ("One.", "Two.", "One.")]
    found, dropped, _ = given(tmp_path, rows)
    assert len(found) == 2 and dropped == {"duplicate": 1}


def test_a_copy_of_an_evaluation_prompt_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "g.jsonl"
    rows = [{"messages": turns("Hi there?", "Hello.")}, {"messages": turns("Else?", "Yes.")}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate({"prompts": str(file), "distil": {"backend": "given"}})
    asked = tmp_path / "q.jsonl"
    asked.write_text(json.dumps({"prompt": "hi THERE"}) + "\n")
    questions = DataConfig(eval_prompts=str(asked))
    evaluated = load_prompts(questions, split="test", seed=0).prompts
    found = load_prompts(config, split="train", seed=0, evaluated=evaluated)
    assert [prompt.messages[0]["content"] for prompt in found.prompts] == ["Else?"]
    assert dict(found.dropped) == {"copy of an evaluation prompt": 1}


def test_other_answers_to_the_same_prompts_are_not_mixed_in(tmp_path: Path) -> None:
    given(tmp_path, [{"id": "k", "messages": turns("Hi?", "One.")}])
    assert len(given(tmp_path, [{"id": "k", "messages": turns("Hi?", "One.")}])[0]) == 1
    with pytest.raises(UserError, match=r"made with other settings .*origin"):
        given(tmp_path, [{"id": "k", "messages": turns("Hi?", "Two.")}])


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        ({"prompts": "starter"}, "prompts: with distil.backend: given"),
        ({"grow": 4}, "grow: with distil.backend: given"),
        ({"answers": 2}, "answers: with distil.backend: given"),
        ({"self_written": {"count": 3}}, "self_written.count: with distil.backend: given"),
        ({"distil": {"backend": "given", "urls": ["http://a"]}}, "urls: give them with"),
    ],
)
def test_knobs_that_would_make_more_answers_are_refused(knobs: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        DataConfig.model_validate({"prompts": "x.jsonl", "distil": {"backend": "given"}} | knobs)


def test_a_drafter_is_trained_on_given_answers(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("draftsmith.eval.figures.draw_figures", lambda report: {})
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": turns(f"Say {i}.", f"{i} {i} {i}", "More?", "no")} for i in range(12)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("questions.jsonl").write_text(json.dumps({"prompt": "What now?"}) + "\n")
    text = RECIPE.format(target=tiny_folder, drafter="{kind: medusa, heads: 2}", temperature=0.0)
    Path("mine.yaml").write_text(text)
    words = ["run", "mine.yaml", "data.distil.backend=given", "data.turns=all"]
    assert cli.main([*words, "--dry-run"]) == 0
    assert "given with the prompts of prompts.jsonl" in capsys.readouterr().out
    assert cli.main(words) == 0
    assert len(read_rows(Path("runs/mine/rows"))) == 24
    report = json.loads(Path("runs/mine/report/report.json").read_text())
    assert all(arm["lossless"] is True for arm in report["arms"])
