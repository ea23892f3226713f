"""The prompts that ship with the project, and a seeded offline generator that grows them.

The set was written for this project and is under Apache-2.0, like the code: see
`data/starter_set/README.md`.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar

from draftsmith.data import puzzles_logic, puzzles_math, puzzles_text
from draftsmith.recipes.errors import UserError

FILES = {"train": "train.jsonl", "test": "eval.jsonl"}
# One round of `grow`: 13 in 20 are chat, writing, code or role-play, where answers are long.
ROUND = (
    *("chat", "math", "writing", "code", "reasoning", "chat", "roleplay", "writing", "math"),
    *("code", "extraction", "chat", "writing", "reasoning", "code", "math", "chat", "roleplay"),
    *("summarization", "writing"),
)
# Draws without a new prompt before a source counts as exhausted.
PATIENCE = 2000

Message = dict[str, str]
Words = dict[str, list[str]]  # slot name -> what may fill it
T = TypeVar("T")


class Family(NamedTuple):
    """Topics of one kind and the phrasings that fit all of them."""

    category: str
    weight: int
    phrasings: tuple[str, ...]
    topics: tuple[str, ...]
    system: tuple[str, ...]
    system_share: float


def starter_prompts(split: Literal["train", "test"]) -> list[dict[str, Any]]:
    """The shipped prompts: `train` (300 and a few) or `test` (80, ten in each category)."""
    text = files("draftsmith.data").joinpath("starter_set", FILES[split]).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def grow(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` further training prompts, all different from each other and from the shipped ones.

    A longer list begins with the shorter one of the same seed. UserError when nothing new is left.
    """
    shipped = starter_prompts("train") + starter_prompts("test")
    seen = {_key(row["category"], row["messages"]) for row in shipped}
    words, families = _families()
    sources = {name: _source(name, families, words, seed) for name in dict.fromkeys(ROUND)}
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        category = ROUND[len(rows) % len(ROUND)]
        for messages, _ in zip(sources[category], range(PATIENCE), strict=False):
            key = _key(category, messages)
            if key not in seen:
                break
        else:
            raise UserError(
                f"data.grow: {count} prompts asked for, but the generator has no new {category} "
                f"prompt after {len(rows)}; lower data.grow or bring prompts of your own"
            )
        seen.add(key)
        rows.append({"key": key, "category": category, "messages": messages})
    return rows


def _key(category: str, messages: Sequence[Message]) -> str:
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
    return f"grown/{category}/{digest[:16]}"


def _source(
    category: str, families: Sequence[Family], words: Words, seed: int
) -> Iterator[list[Message]]:
    """Endless prompts of one category: its families and tasks take turns in a shuffled order."""
    # Random(str) hashes the text itself, so that the draws are the same in every process
    rng = Random(f"{seed}/{category}")
    streams: list[Iterator[list[Message]]] = []
    for family in families:
        if family.category == category:
            stream = _phrase(family, words, Random(rng.getrandbits(64)))
            streams += [stream] * family.weight  # the same iterator: its decks go on
    for task in _tasks(category):
        streams.append(_ask(task, Random(rng.getrandbits(64))))
    for stream in _deck(streams, rng):
        yield next(stream)


def _tasks(category: str) -> tuple[puzzles_math.Task, ...]:
    tasks = {
        "math": puzzles_math.TASKS,
        "reasoning": puzzles_logic.REASONING,
        "code": puzzles_logic.CODE,
        "extraction": puzzles_text.EXTRACTION,
        "summarization": puzzles_text.SUMMARIZATION,
    }
    return tasks.get(category, ())


def _ask(task: puzzles_math.Task, rng: Random) -> Iterator[list[Message]]:
    while True:
        yield [{"role": "user", "content": task(rng)}]


def _phrase(family: Family, words: Words, rng: Random) -> Iterator[list[Message]]:
    phrasings, topics = _deck(family.phrasings, rng), _deck(family.topics, rng)
    while True:
        topic = next(topics)
        slots = {name: rng.choice(values) for name, values in words.items()}
        slots |= {"topic": topic, "Topic": topic[0].upper() + topic[1:]}
        messages = [{"role": "user", "content": next(phrasings).format_map(slots)}]
        if rng.random() < family.system_share:
            content = rng.choice(family.system).format_map(slots)
            messages.insert(0, {"role": "system", "content": content})
        yield messages


def _deck(items: Sequence[T], rng: Random) -> Iterator[T]:
    """Every item once in a random order, then all of them again in another one, for ever."""
    while True:
        yield from rng.sample(items, len(items))


def _families() -> tuple[Words, tuple[Family, ...]]:
    text = files("draftsmith.data").joinpath("starter_set", "growth.toml").read_text("utf-8")
    table = tomllib.loads(text)
    families = tuple(
        Family(
            category=entry["category"],
            weight=entry["weight"],
            phrasings=tuple(entry["phrasings"]),
            topics=tuple(entry["topics"]),
            system=tuple(entry.get("system", ())),
            system_share=entry.get("system_share", 0.15 if "system" in entry else 0.0),
        )
        for entry in table["family"]
    )
    return table["slots"], families
