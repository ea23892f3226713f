"""Every turn of a conversation answered anew, on the target's own answers before it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.dataset import split_held_out, training_documents
from draftsmith.data.distill import distil
from draftsmith.data.prompts import Prompt, Rules, collect, first_key
from draftsmith.data.render import render_prompt
from draftsmith.data.rows import check_complete, read_rows
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from tests.data.asking import make_config
from tests.data.serving import Server, ascii_target

EVERY = Rules(every=True)


def said(*turns: str) -> dict[str, Any]:
    """A conversation: user and assistant in turn; S: and T: begin a system's and a tool's words."""
    roles = {"S:": "system", "T:": "tool", "U:": "user", "A:": "assistant"}
    return {"messages": [{"role": roles[t[:2]], "content": t[2:]} for t in turns]}


def collected(row: dict[str, Any]) -> Prompt:
    (prompt,) = collect([("row 1", row)], EVERY).prompts
    return prompt


def texts(prompt: Prompt) -> list[list[str]]:
    return [[one["content"] for one in part] for part in (prompt.messages, *prompt.later)]


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (said("U:a", "A:b", "U:c", "A:d"), [["a"], ["c"]]),
        (said("S:s", "U:a", "A:b", "U:c"), [["s", "a"], ["c"]]),  # it ends with a question (A5)
        (said("U:a", "U:c"), [["a"], ["c"]]),
        (said("A:hello", "U:a", "A:b"), [["a"]]),
        (said("U:a", "A:b", "T:t", "A:c", "U:d"), [["a"]]),  # the tool's result is of another call
        (said("U:a", "A:b", "S:s", "U:c"), [["a"], ["s", "c"]]),
        ({"turns": ["a", "c", "d"]}, [["a"], ["c"], ["d"]]),
        ({"prompt": "a"}, [["a"]]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}]},
            [["a"]],
        ),
    ],
)
def test_answers_are_left_out_and_what_follows_them_is_kept(
    row: dict[str, Any], parts: list[list[str]]
) -> None:
    assert texts(collected(row)) == parts


@pytest.mark.parametrize("row", [said("S:only"), said("A:x"), said("U: ", "A:b", "U:c")])
def test_conversations_without_a_question_are_counted(row: dict[str, Any]) -> None:
    found = collect([("row 1", row)], EVERY)
    assert not found.prompts and found.dropped.total() == 1


def test_conversations_that_begin_alike_are_two() -> None:
    rows = [(where, {"turns": ["a", where]}) for where in "bcb"]
    found = collect(rows, EVERY)
    assert len({prompt.key for prompt in found.prompts}) == 2
    assert found.dropped == {"duplicate": 1}
    assert len(collect(rows).prompts) == 1  # of the last turn alone, only what it asks counts


@pytest.fixture(scope="module")
def teller() -> Target:
    return ascii_target()


def talks(count: int) -> list[Prompt]:
    rows = [
        ("row", {"id": f"k{i}", "turns": [f"{i} {j} abc" for j in range(1 + i % 3)]})
        for i in range(count)
    ]
    return collect(rows, EVERY).prompts


@torch.no_grad()
def spoken(target: Target, ids: list[int], count: int) -> list[int]:
    """The readable reference."""
    found: list[int] = []
    while len(found) < count and (not found or found[-1] not in target.eos_ids):
        hidden = target.base(input_ids=torch.tensor([ids + found])).last_hidden_state
        found.append(int(target.logits(hidden[:, -1]).argmax()))
    return found


@pytest.mark.parametrize("served", [False, True])
def test_every_answer_goes_on_from_the_ones_before_it(
    teller: Target, tmp_path: Path, served: bool
) -> None:
    prompts = talks(15)
    with Server(teller, exact=False) as server:
        asked = {"backend": "openai", "urls": (server.url,)} if served else {}
        config = make_config(max_new_tokens=30, **asked)
        made = distil(teller, prompts, config, tmp_path, seed=0)
        again = distil(teller, prompts, config, tmp_path, seed=0)
    assert again.made == 0 and made.made == made.rows == again.rows
    rows = {row["key"]: row for row in read_rows(tmp_path)}
    for row in rows.values():
        assert row["prompt_ids"] == render_prompt(teller.tokenizer, row["messages"])
        assert row["response_ids"] == spoken(teller, row["prompt_ids"], 30)
    for prompt in prompts:
        key = prompt.key
        for turn, words in enumerate(prompt.later, start=2):
            before, key = rows[key], f"{prompt.key} (turn {turn})"
            if before["finish_reason"] == "length":
                assert key not in rows  # nothing follows a cut answer
                break
            answer = {"role": "assistant", "content": before["response"]}
            assert rows[key]["messages"] == [*before["messages"], answer, *words]
    assert sum("(turn 2)" in key for key in rows) > 4 and any("(turn 3)" in key for key in rows)
    check_complete(tmp_path)


def test_both_backends_give_the_same_rows(teller: Target, tmp_path: Path) -> None:
    with Server(teller, exact=False) as server:
        there = make_config(max_new_tokens=30, backend="openai", urls=(server.url,))
        distil(teller, talks(9), there, tmp_path / "there", seed=0)
    distil(teller, talks(9), make_config(max_new_tokens=30), tmp_path / "here", seed=0)
    assert read_rows(tmp_path / "there") == read_rows(tmp_path / "here")


def test_a_later_turn_that_was_lost_is_missed_and_made_again(
    teller: Target, tmp_path: Path
) -> None:
    config = make_config(max_new_tokens=30)
    distil(teller, talks(9), config, tmp_path, seed=0)
    rows, path = read_rows(tmp_path), tmp_path / "turn_2" / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    with pytest.raises(UserError, match=r"turn_2: 1 of \d+ rows are missing"):
        check_complete(tmp_path)
    assert distil(teller, talks(9), config, tmp_path, seed=0).made == 1
    assert read_rows(tmp_path) == rows


def test_turns_of_one_conversation_are_held_out_together(teller: Target, tmp_path: Path) -> None:
    config = make_config(max_new_tokens=30)
    distil(teller, talks(12), config, tmp_path, seed=0)
    documents, _ = training_documents(tmp_path, config)
    training, held_out = split_held_out(documents, 3, 0)
    keys = [{first_key(document.key) for document in some} for some in (training, held_out)]
    assert held_out and not keys[0] & keys[1]


def test_a_key_that_looks_like_a_later_turn_is_refused(teller: Target, tmp_path: Path) -> None:
    rows = [("1", {"id": "k", "turns": ["a b c", "d"]}), ("2", {"id": "k (turn 2)", "prompt": "x"})]
    prompts = collect(rows, EVERY).prompts
    config = make_config(max_new_tokens=60)
    with pytest.raises(UserError, match=r"data\.turns: the key 'k \(turn 2\)' is needed"):
        distil(teller, prompts, config, tmp_path, seed=0)
