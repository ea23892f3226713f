import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data import starter
from draftsmith.data.prompts import (
    Prompt,
    PromptSet,
    content_key,
    keyed_number,
    load_prompts,
    normalised,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig


def write(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(source: str, *, seed: int = 0, **knobs: Any) -> PromptSet:
    return load_prompts(DataConfig(prompts=source, **knobs), split="train", seed=seed)


def keys(prompts: list[Prompt]) -> list[str]:
    return [prompt.key for prompt in prompts]


USER = {"role": "user", "content": "Why is the sky blue?"}
FORMS = {
    "openai": {"messages": [USER]},
    "sharegpt": {"conversations": [{"from": "human", "value": USER["content"]}]},
    "plain": {"prompt": USER["content"]},
    "prompt as turns": {"prompt": [USER]},
    "spec-bench": {"turns": [USER["content"], "And at night?"]},
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]
    },
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_prompt(tmp_path: Path, row: dict[str, object]) -> None:
    found = load(write(tmp_path / "p.jsonl", [row]))
    (prompt,) = found.prompts
    assert prompt.messages == (USER,) and prompt.category == "uncategorised" and not found.dropped


def test_forms_mix_in_one_file_and_unknown_roles_are_counted(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "b"}, {"from": "gpt", "value": "c"}]},
        {"conversations": [{"from": "narrator", "value": "b"}]},
        {"messages": [{"role": "critic", "content": "d"}]},
        {"messages": [{"role": "critic", "content": "e"}]},
    ]
    found = load(write(tmp_path / "p.jsonl", rows))
    assert [p.messages[-1]["content"] for p in found.prompts] == ["a", "b"]
    assert found.dropped == Counter({"unknown role 'critic'": 2, "unknown role 'narrator'": 1})


def test_answers_at_the_end_are_removed_and_history_stays(tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": "and more"},
    ]
    (prompt,) = load(write(tmp_path / "p.jsonl", [{"messages": said}])).prompts
    assert list(prompt.messages) == said[:4]


def test_a_tool_call_without_text_keeps_its_call(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}], "logprobs": 3}
    said = [USER, call, {"role": "tool", "content": "42", "tool_call_id": "1"}]
    (prompt,) = load(write(tmp_path / "p.jsonl", [{"messages": said}])).prompts
    assert prompt.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert prompt.messages[2]["role"] == "tool"


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"é": None}}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])], ids=["list", "text"])
def test_the_tools_of_a_row_belong_to_its_prompt(tmp_path: Path, tools: object) -> None:
    rows = [{"prompt": "a", "tools": tools}, {"prompt": "a"}, {"prompt": "a", "tools": None}]
    found = load(write(tmp_path / "p.jsonl", [*rows, {"prompt": "a", "tools": []}]))
    assert [prompt.tools for prompt in found.prompts] == [(TOOL,), ()]
    assert found.dropped == {"duplicate": 2}
    assert found.prompts[1].key == content_key([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("tools", ["look_up", "[" * 100_000, {"name": "x"}, ["look_up"], 3])
def test_tools_of_another_kind_are_one_clear_line(tmp_path: Path, tools: object) -> None:
    with pytest.raises(UserError, match=r"p\.jsonl:1: 'tools' must be a list of JSON objects"):
        load(write(tmp_path / "p.jsonl", [{"prompt": "a", "tools": tools}]))


UNUSABLE = {
    "system only": ([{"role": "system", "content": "Be kind."}], "no user turn at the end"),
    "nobody": ([], "no user turn at the end"),
    "null": (None, "no user turn at the end"),
    "blank": ([{"role": "user", "content": " \n"}], "empty prompt"),
    "half a pair": ([{"role": "user", "content": "\ud800"}], "text that is no Unicode"),
    "image": (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "content that is not text",
    ),
}


@pytest.mark.parametrize(("messages", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_rows_without_a_prompt_are_dropped_and_counted(
    tmp_path: Path, messages: object, reason: str
) -> None:
    found = load(write(tmp_path / "p.jsonl", [{"messages": messages}, {"prompt": "good"}]))
    assert len(found.prompts) == 1 and found.dropped == {reason: 1}


HALF = "\ud800"  # of a surrogate pair
NO_UNICODE = {
    "prompt": {"prompt": HALF},
    "turn": {"turns": [HALF]},
    "id": {"id": f"a{HALF}", "prompt": "a"},
    "category": {"category": HALF, "prompt": "a"},
    "name": {"messages": [{**USER, "name": HALF}]},
    "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
    "tool": {"prompt": "a", "tools": [{"name": HALF}]},
    "tool call": {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [{HALF: HALF}]}, USER]
    },
}


@pytest.mark.parametrize("row", NO_UNICODE.values(), ids=NO_UNICODE)
def test_text_that_is_no_unicode_is_dropped_wherever_it_stands(
    tmp_path: Path, row: dict[str, object]
) -> None:
    found = load(write(tmp_path / "p.jsonl", [row, {"prompt": "good"}]))
    assert len(found.prompts) == 1 and found.dropped == {"text that is no Unicode": 1}


def test_all_rows_dropped_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Dropped: 2 empty prompt"):
        load(write(tmp_path / "p.jsonl", [{"prompt": ""}, {"prompt": " "}]))


def test_keys_are_given_or_made_of_the_content(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"id": 7, "prompt": "b"}, {"key": "k", "id": 8, "prompt": "c"}]
    rows += [{"id": None, "prompt": "d"}, {"id": 0, "prompt": "e"}]
    found = keys(load(write(tmp_path / "p.jsonl", rows)).prompts)
    assert found[1:3] == ["7", "k"] and found[4] == "0"
    random.Random(0).shuffle(rows)
    again = keys(load(write(tmp_path / "q.jsonl", rows)).prompts)
    assert set(again) == set(found)  # no key is a running number


def test_duplicates_and_clashing_ids_are_counted(tmp_path: Path) -> None:
    rows = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "a"}, {"id": 1, "prompt": "b"}]
    found = load(write(tmp_path / "p.jsonl", rows))
    assert keys(found.prompts) == ["1"]
    assert found.dropped == {"duplicate": 1, "id of another prompt": 1}


SAME = {
    "itself": {"prompt": "Why is the sky blue?"},
    "case and spacing": {"prompt": "  why is the SKY\n blue?"},
    "written otherwise": {"prompt": "Why is the sky\u00a0blue\uff1f"},
    "with a system prompt": {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    "with tools": {"messages": [USER], "tools": [TOOL]},
}


@pytest.mark.parametrize("row", SAME.values(), ids=SAME)
def test_what_is_evaluated_on_is_not_trained_on(tmp_path: Path, row: dict[str, object]) -> None:
    others = [{"prompt": "Why is the sea blue?"}, {"messages": [USER, USER]}]
    config = DataConfig(prompts=write(tmp_path / "p.jsonl", [row, *others]), limit=2)
    evaluated = load(write(tmp_path / "e.jsonl", [{"prompt": USER["content"]}])).prompts
    found = load_prompts(config, split="train", seed=0, evaluated=evaluated)
    assert len(found.prompts) == 2 and found.dropped == {"copy of an evaluation prompt": 1}
    assert len(load_prompts(config, split="train", seed=1).prompts) == 2


def test_several_answers_are_copies_of_a_prompt_under_keys_of_their_own(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", [{"id": i, "prompt": f"say {i}"} for i in range(4)])
    hot = {"temperature": 1.0}
    found = load(source, limit=3, answers=2, distil=hot).prompts
    assert len({prompt.key for prompt in found}) == 6
    assert len({prompt.messages[0]["content"] for prompt in found}) == 3
    assert keys(found)[:3] == keys(load(source, limit=3).prompts)  # the first ones are themselves
    with pytest.raises(ValueError, match="equal at temperature 0"):
        DataConfig(answers=2)
    rows = [{"id": "a", "prompt": "x"}, {"id": "a (answer 2)", "prompt": "y"}]
    with pytest.raises(UserError, match="needed for another answer"):
        load(write(tmp_path / "q.jsonl", rows), answers=2, distil=hot)


def test_limit_draws_the_same_prompts_in_any_order_and_grows_by_addition(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": f"question {i}"} for i in range(50)]
    first = keys(load(write(tmp_path / "p.jsonl", rows), limit=10).prompts)
    shuffled = rows.copy()
    random.Random(1).shuffle(shuffled)
    source = write(tmp_path / "q.jsonl", shuffled)
    assert set(keys(load(source, limit=10).prompts)) == set(first) and len(first) == 10
    assert set(first) < set(keys(load(source, limit=20).prompts))
    assert set(keys(load(source, limit=10, seed=1).prompts)) != set(first)


def test_blank_lines_and_a_byte_order_mark_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": "a"}\n\n  \n{"prompt": "b\u2028c"}', encoding="utf-8")
    assert [p.messages[0]["content"] for p in load(str(path)).prompts] == ["a", "b\u2028c"]


BROKEN = {
    "cut line": ('{"prompt": "a"}\n{"prompt": "b', r"p\.jsonl:2: the line is not JSON"),
    "not utf-8": (b'\n{"prompt": "\xff"}', r"p\.jsonl:2: the line is not JSON"),
    "a list": ("[1]\n", r"p\.jsonl:1: the line must hold a JSON object, not list"),
    "no prompt": ('{"text": "a"}\n', r"p\.jsonl:1: found 'text'; a prompt is in one of 'messages'"),
    "prompt is a number": ('{"prompt": 3}\n', "'prompt' must be text or a list of turns, not int"),
    "messages are text": ('{"messages": "a"}\n', "'messages' must be a list of turns, not str"),
    "too deep": (
        '{"prompt": ' + "[" * 100_000 + "\n",
        r"p\.jsonl:1: the line is not JSON \(maximum recursion depth",
    ),
    "turn is text": ('{"messages": ["hi"]}\n', "a turn must be an object"),
    "empty": ("", "the file is empty"),
    "blank": ("\n \n", "the file is empty"),
}


@pytest.mark.parametrize(("text", "says"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_one_clear_line(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=says) as error:
        load(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "./missing", "/missing/folder", "~nobody-of-this-name/p.jsonl"]
)
def test_missing_sources_are_named(name: str) -> None:
    with pytest.raises(UserError, match=name):
        load(name)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("prompt\na\n")
    with pytest.raises(UserError, match=r"prompts are read from a \.jsonl file"):
        load(str(tmp_path / "p.csv"))


def test_saved_data_sets_and_their_splits(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"id": str(i), "prompt": f"p{i}"} for i in range(3)])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=rows).save_to_disk(str(tmp_path / "many"))
    assert keys(load(str(tmp_path / "one")).prompts) == ["0", "1", "2"]
    assert keys(load(str(tmp_path / "many")).prompts) == ["0", "1", "2"]
    with pytest.raises(UserError, match="no split 'dev'; it has 'train'"):
        load(str(tmp_path / "many"), split="dev")


def test_a_folder_of_files_is_read_by_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    assert len(load(str(tmp_path / "set")).prompts) == 2
    with pytest.raises(UserError, match="split 'dev' cannot be loaded"):
        load(str(tmp_path / "set"), split="dev")


def test_a_hub_that_cannot_be_reached_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"org/set: split 'train' cannot be loaded \(no route\)"):
        load("org/set")


def test_starter_splits_growth_and_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str) -> dict[str, object]:
        return {"key": name, "category": "c", "messages": [{"role": "user", "content": name}]}

    monkeypatch.setattr(starter, "starter_prompts", lambda split: [row(split)])
    monkeypatch.setattr(
        starter, "grow", lambda count, seed: [row(f"g{i} {seed}") for i in range(count)]
    )
    config = DataConfig(grow=2)
    assert keys(load_prompts(config, split="train", seed=5).prompts) == ["train", "g0 5", "g1 5"]
    assert keys(load_prompts(config, split="test", seed=5).prompts) == ["test"]
    limited = DataConfig(grow=2, limit=1)
    assert len(load_prompts(limited, split="train", seed=5).prompts) == 1


def test_the_shipped_sets_are_usable_and_disjoint() -> None:
    train = load_prompts(DataConfig(), split="train", seed=0)
    held = load_prompts(DataConfig(), split="test", seed=0)
    assert len(train.prompts) > 100 and len(held.prompts) > 50
    assert not train.dropped and not held.dropped
    assert not set(keys(train.prompts)) & set(keys(held.prompts))
    said = [{content_key(prompt.messages) for prompt in half.prompts} for half in (train, held)]
    assert not said[0] & said[1]


def test_keyed_numbers_are_uniform_and_independent_by_purpose() -> None:
    first = [keyed_number(0, "limit", str(i)) / 2**64 for i in range(2000)]
    second = [keyed_number(0, "held out", str(i)) / 2**64 for i in range(2000)]
    assert abs(sum(first) / 2000 - 0.5) < 0.03
    both = sum(a < 0.5 and b < 0.5 for a, b in zip(first, second, strict=True)) / 2000
    assert abs(both - 0.25) < 0.04


def test_normalised_is_idempotent_and_blind_to_case_space_and_outer_punctuation() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        text = "".join(numbers.choices("aBß é.!?'  \n", k=12))
        plain = normalised(text)
        assert normalised(plain) == plain == normalised(f'  "{text.swapcase()}"\n')
    assert normalised("It's Ok!") == "it's ok"
