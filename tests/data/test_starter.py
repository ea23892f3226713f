"""The starter set: well-formed, balanced, evaluation kept apart from training; its generator."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import chain
from random import Random
from typing import Any

import pytest

from draftsmith.data import puzzles_logic, puzzles_math, puzzles_text, starter
from draftsmith.data.starter import grow, starter_prompts
from draftsmith.recipes.errors import UserError

CATEGORIES = {
    *("chat", "writing", "math", "code"),
    *("reasoning", "extraction", "summarization", "roleplay"),
}
TASKS = (
    *puzzles_math.TASKS,
    *puzzles_logic.REASONING,
    *puzzles_logic.CODE,
    *puzzles_text.EXTRACTION,
    *puzzles_text.SUMMARIZATION,
)
RUN = 13  # words

Row = dict[str, Any]


@pytest.fixture(scope="module")
def train() -> list[Row]:
    return starter_prompts("train")


@pytest.fixture(scope="module")
def test() -> list[Row]:
    return starter_prompts("test")


@pytest.fixture(scope="module")
def grown() -> list[Row]:
    return grow(3000, seed=0)


def text(row: Row) -> str:
    return "\n".join(message["content"] for message in row["messages"])


def runs(row: Row) -> set[tuple[str, ...]]:
    """Every run of 13 words in any message, whatever the case and punctuation."""
    found = set()
    for message in row["messages"]:
        words = re.findall(r"\w+", message["content"].lower())
        found |= {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}
    return found


def shared_runs(training: list[Row], evaluation: list[Row]) -> set[tuple[str, ...]]:
    held_out = set(chain.from_iterable(map(runs, evaluation)))
    return held_out & set(chain.from_iterable(map(runs, training)))


def users(row: Row) -> list[str]:
    said = (message["content"] for message in row["messages"] if message["role"] == "user")
    return [" ".join(re.findall(r"\w+", content.lower())) for content in said]


def test_counts_and_categories(train: list[Row], test: list[Row]) -> None:
    assert len(train) >= 300
    assert Counter(row["category"] for row in test) == dict.fromkeys(CATEGORIES, 10)
    counts = Counter(row["category"] for row in train)
    assert counts.keys() == CATEGORIES
    assert min(counts.values()) >= 35


@pytest.mark.parametrize("name", ["train", "test", "grown"])
def test_rows_are_well_formed(name: str, request: pytest.FixtureRequest) -> None:
    rows: list[Row] = request.getfixturevalue(name)
    for row in rows:
        assert row.keys() == {"key", "category", "messages"}
        assert row["category"] in CATEGORIES
        assert row["key"].split("/")[:2] == [row["key"].split("/")[0], row["category"]]
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == [("user", "assistant")[i % 2] for i in range(len(turns))]
        assert turns[-1] == "user"
        for message in row["messages"]:
            assert message.keys() == {"role", "content"}
            assert message["content"].strip() == message["content"] != ""


def test_shipped_rows_vary_in_shape(train: list[Row], test: list[Row]) -> None:
    for rows in (train, test):
        assert sum(row["messages"][0]["role"] == "system" for row in rows) >= len(rows) // 20
        assert sum(len(users(row)) > 1 for row in rows) >= len(rows) // 30


def test_nothing_occurs_twice(train: list[Row], test: list[Row], grown: list[Row]) -> None:
    rows = train + test + grown
    assert len({row["key"] for row in rows}) == len(rows)
    assert len({json.dumps(row["messages"]) for row in rows}) == len(rows)
    shipped = [said for row in train + test for said in users(row)]
    assert len(set(shipped)) == len(shipped)


def test_evaluation_prompts_stay_out_of_training(
    train: list[Row], test: list[Row], grown: list[Row]
) -> None:
    training = train + grown + grow(1500, seed=1)
    assert not shared_runs(training, test)
    held_out = {said for row in test for said in users(row)}
    assert not held_out & {said for row in training for said in users(row)}


def test_the_overlap_check_finds_an_overlap(train: list[Row]) -> None:
    long = next(row for row in train if len(text(row).split()) > 60)
    words = text(long).upper().split()
    copied = {"messages": [{"role": "user", "content": "Well - " + "  ".join(words[20:40])}]}
    assert shared_runs([copied], [long])


def test_growth_is_prefix_stable(grown: list[Row]) -> None:
    assert grow(0, seed=0) == []
    assert grow(137, seed=0) == grown[:137]


def test_seeds_differ(grown: list[Row]) -> None:
    keys = {row["key"] for row in grown[:500]}
    assert len(keys & {row["key"] for row in grow(500, seed=1)}) < 50


def test_growth_is_the_same_in_another_process(grown: list[Row]) -> None:
    """Neither string hashing nor the global generator has a say in it."""
    code = (
        "import json, random; random.seed(99); from draftsmith.data.starter import grow;"
        "print(json.dumps(grow(400, seed=0)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(output) == grown[:400]


def test_growth_leaves_the_global_generator_alone() -> None:
    import random

    random.seed(5)
    before = random.getstate()
    grow(200, seed=3)
    assert random.getstate() == before


def test_growth_is_balanced(grown: list[Row]) -> None:
    counts = Counter(row["category"] for row in grown)
    assert counts.keys() == CATEGORIES
    natural = counts["chat"] + counts["writing"] + counts["code"]
    assert 0.45 <= natural / len(grown) <= 0.65


def test_growth_is_varied(grown: list[Row]) -> None:
    """No wording of four opening words takes more than a twentieth of the prompts."""
    openings = Counter(" ".join(text(row).split()[:4]) for row in grown)
    assert openings.most_common(1)[0][1] <= len(grown) / 20
    assert len(openings) > len(grown) / 3


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_tasks_draw_from_their_generator_only(task: puzzles_math.Task) -> None:
    first, second = ([task(rng) for _ in range(40)] for rng in (Random(1), Random(1)))
    assert first == second
    assert len(set(first)) >= 20


def test_there_are_many_tasks() -> None:
    assert len({task.__name__ for task in TASKS}) == len(TASKS) >= 20


def test_every_phrasing_fits_its_slots() -> None:
    """An unknown slot raises; an empty or doubled entry shows here."""
    words, families = starter._families()
    for family in families:
        assert family.category in CATEGORIES
        for entries in (family.phrasings, family.topics):
            assert len(set(entries)) == len(entries) > 0
        slots = {**{name: values[0] for name, values in words.items()}, "topic": "x", "Topic": "X"}
        for phrasing in family.phrasings:
            filled = phrasing.format_map(slots)
            assert "x" in filled.lower() or family.system_share == 1.0


def test_truth_tellers_have_one_solution() -> None:
    """Solved again from the text alone."""
    for seed in range(30):
        puzzle = puzzles_logic.truth_tellers(Random(seed))
        said = re.findall(r'(\w+) says: "([^"]+)\."', puzzle)
        names = [who for who, _ in said]
        assert len(names) == 3
        worlds = [dict(zip(names, bits, strict=True)) for bits in _truth_table()]
        assert sum(all(w[who] == _holds(what, w) for who, what in said) for w in worlds) == 1


def _truth_table() -> list[tuple[bool, bool, bool]]:
    return [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]


def _holds(statement: str, world: dict[str, bool]) -> bool:
    counts = {"None": 0, "Just": 1, "Two": 2}
    first = statement.split()[0]
    if first in counts:
        return sum(world.values()) == counts[first]
    return world[first] == statement.endswith("tells the truth")


@pytest.mark.parametrize(
    "task",
    [task for task in puzzles_logic.CODE if task.__name__.startswith("trace")],
    ids=lambda task: task.__name__,
)
def test_code_that_is_shown_runs(
    task: puzzles_math.Task, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(60):
        blocks = task(Random(seed)).split("\n\n")
        code = [b for b in blocks if b.startswith(("x =", "xs =", "words =", "def ", "print("))]
        exec("\n\n".join(code), {})
        assert capsys.readouterr().out.strip()


def test_asking_for_too_much_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def poor(rng: Random) -> str:
        return f"What is {rng.randint(1, 2)} + 1?"

    monkeypatch.setattr(starter, "_tasks", lambda category: (poor,))
    monkeypatch.setattr(starter, "_families", lambda: ({}, ()))
    with pytest.raises(UserError, match=r"data\.grow"):
        grow(100, seed=0)
