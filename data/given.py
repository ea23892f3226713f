"""Answers that rows bring along, made elsewhere by the target.

A row holds a conversation with assistant turns (`messages`, `conversations`), or a prompt and its
`completion`, or `response` as rows of another run do. `token_ids` of a turn (`response_ids` of a
row), `finish_reason` and `temperature` are kept where they are given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
RESPONSES = ("completion", "response")  # of a row, beside its prompt


@dataclass(frozen=True)
class Given:
    """An assistant's turn, after so many messages of its conversation."""

    after: int
    message: Message
    ids: tuple[int, ...] | None
    finish: Literal["stop", "length"]
    temperature: float | None  # None: nobody says


def completed(row: Mapping[str, Any]) -> list[Any]:
    """The turns that a row holds apart from its prompt."""
    for name in RESPONSES:
        value = row.get(name)
        if isinstance(value, list):
            return list(value)
        if isinstance(value, str):
            ids = {"token_ids": row["response_ids"]} if row.get("response_ids") else {}
            return [{"role": "assistant", "content": value, **ids}]
    return []


def given_answers(
    row: Mapping[str, Any], said: Sequence[Message], turns: Sequence[Any], *, every: bool
) -> tuple[Given, ...]:
    """The answers among the messages `said`, of which `turns` are the row's own words: all, or the
    last. An assistant that speaks twice in a row answers once, at last.
    """
    places = [
        place
        for place, message in enumerate(said)
        if message["role"] == "assistant"
        and place > 0
        and said[place - 1]["role"] in ("user", "tool")
    ]
    chosen = places if every else places[-1:]
    return tuple(one_answer(row, place, said[place], turns[place]) for place in chosen)


def one_answer(row: Mapping[str, Any], place: int, message: Message, turn: Any) -> Given:
    """With what the turn says of itself, or else the row."""
    told: Mapping[str, Any] = turn if isinstance(turn, Mapping) else {}
    ids = told.get("token_ids")
    valid = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)
    heat = told.get("temperature", row.get("temperature"))
    cut = told.get("finish_reason", row.get("finish_reason")) == "length"
    return Given(
        after=place,
        message=message,
        ids=tuple(ids) if isinstance(ids, list) and valid and ids else None,
        finish="length" if cut else "stop",
        temperature=float(heat) if type(heat) in (int, float) else None,
    )
