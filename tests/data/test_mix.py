"""The mix of categories by weight."""

import json
from collections import Counter
from pathlib import Path

import pytest

from draftsmith.data.prompts import PromptSet, load_prompts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig

THERE = {"code": 40, "math": 10, "chat": 50}


def loaded(folder: Path, *, turned: bool = False, **knobs: object) -> PromptSet:
    rows = [
        {"id": f"{name} {i}", "prompt": f"{name} question {i}", "category": name}
        for name, count in THERE.items()
        for i in range(count)
    ]
    file = folder / "p.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (rows[::-1] if turned else rows)))
    config = DataConfig.model_validate({"prompts": str(file), **knobs})
    return load_prompts(config, split="train", seed=3)


def counted(found: PromptSet) -> dict[str, int]:
    return dict(Counter(prompt.category for prompt in found.prompts))


def test_the_scarcest_category_sets_the_size(tmp_path: Path) -> None:
    found = loaded(tmp_path, mix={"code": 2, "math": 1, "chat": 1})
    assert counted(found) == {"code": 20, "math": 10, "chat": 10}
    assert found.dropped == {"beyond data.mix": 60}


def test_a_limit_is_shared_out_by_weight(tmp_path: Path) -> None:
    found = loaded(tmp_path, mix={"code": 3, "chat": 1.0}, limit=20)
    assert counted(found) == {"code": 15, "chat": 5}
    assert found.dropped == {"beyond data.mix": 80}


def test_who_is_drawn_depends_on_the_seed_and_not_on_the_order(tmp_path: Path) -> None:
    one, other = (
        loaded(tmp_path, mix={"code": 1, "chat": 1}, limit=8, turned=turned)
        for turned in (False, True)
    )
    assert {p.key for p in one.prompts} == {p.key for p in other.prompts}
    more = loaded(tmp_path, mix={"code": 1, "chat": 1}, limit=16)
    assert {p.key for p in one.prompts} < {p.key for p in more.prompts}


def test_without_weights_prompts_come_as_they_are(tmp_path: Path) -> None:
    assert counted(loaded(tmp_path)) == THERE


def test_a_category_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"category 'law'; there are 'chat' \(50\), 'code' \(40\)"):
        loaded(tmp_path, mix={"law": 1, "code": 1})
    with pytest.raises(ValueError, match="greater than 0"):
        loaded(tmp_path, mix={"code": 0})
