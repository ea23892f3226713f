"""Copies and near duplicates by runs of words, counted."""

import json
from pathlib import Path

import pytest

from draftsmith.data.overlap import Runs, runs_of_words
from draftsmith.data.prompts import EVALUATED, Rules, collect, load_prompts
from draftsmith.recipes.schema import DataConfig

TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
WORDS = TEXT.split()


@pytest.mark.parametrize("count", [1, 3, 14, 15])
def test_a_text_has_a_run_for_every_place_of_one(count: int) -> None:
    found = runs_of_words(" ".join(WORDS), count)
    assert len(found) == max(0, len(WORDS) - count + 1)
    assert found == runs_of_words(", ".join(WORDS).upper() + "!", count)


def test_what_is_known_touches_and_shares() -> None:
    runs = Runs(3, ["a b c d"])
    assert runs.touches("x b c d y") and not runs.touches("a b x c d")
    assert runs.share("a b c d") == 1 and runs.share("b c d e") == 0.5 and runs.share("a b") == 0
    assert not Runs(0, ["a b"]).touches("a b")


def test_copies_of_evaluation_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    question = " ".join(WORDS)
    rows = {
        "p": [f"Tell me: {question}?", " ".join(WORDS[:13]), " ".join(WORDS[:12]), "else"],
        "q": [question, "another one"],
    }
    for name, asked in rows.items():
        text = "".join(json.dumps({"prompt": one}) + "\n" for one in asked)
        (tmp_path / f"{name}.jsonl").write_text(text)
    for words, kept in ((13, 2), (0, 4), (5, 1), (14, 3)):
        config = DataConfig(
            prompts=str(tmp_path / "p.jsonl"),
            eval_prompts=str(tmp_path / "q.jsonl"),
            overlap_words=words,
        )
        evaluated = load_prompts(config, split="test", seed=0).prompts
        assert len(evaluated) == 2
        found = load_prompts(config, split="train", seed=0, evaluated=evaluated)
        assert len(found.prompts) == kept
        assert found.dropped[EVALUATED] == 4 - kept


def test_later_turns_are_compared_too() -> None:
    evaluated = collect([("1", {"prompt": " ".join(WORDS)})]).prompts
    row = {"turns": ["hello", f"and {' '.join(WORDS)}"]}
    rules = Rules(evaluated, 13, every=True)
    assert collect([("1", row)], rules).dropped == {EVALUATED: 1}


def test_near_duplicates_are_dropped_from_their_share_on() -> None:
    base = " ".join(WORDS)  # 7 runs of 8
    rows = [("1", {"prompt": one}) for one in (base, base + " more", "x " + base + " y z", "short")]
    for share, kept in ((None, 4), (1.0, 4), (0.8, 3), (0.6, 2)):
        found = collect(rows, Rules(overlap_words=8, near_duplicates=share))
        assert len(found.prompts) == kept
        assert found.dropped["near duplicate"] == 4 - kept
