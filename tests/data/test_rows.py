"""Rows on disk: whole or not at all, and what is no row is named."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data.dataset import training_documents
from draftsmith.data.distill import distil
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows import RowFile, agree_on_manifest, lacks_rows, read_rows
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from tests.data.asking import make_config, make_prompts


def test_damaged_folders_are_refused(target: Target, tmp_path: Path) -> None:
    prompts, config = make_prompts(3), make_config()
    distil(target, prompts, config, tmp_path, seed=0)
    path, rows = tmp_path / "manifest.json", tmp_path / "rows.jsonl"
    good = path.read_text()
    for bad in ("{", "{}", "[]", '{"prompts": 3}'):
        path.write_text(bad)
        with pytest.raises(UserError, match=r"manifest.json: is damaged"):
            distil(target, prompts, config, tmp_path, seed=0)
    path.unlink()
    with pytest.raises(UserError, match=r"holds rows but no manifest.json"):
        distil(target, prompts, config, tmp_path, seed=0)
    path.write_text(good)
    rows.write_text("nonsense\n" + rows.read_text())
    with pytest.raises(UserError, match=r"rows.jsonl:1: the line is damaged"):
        distil(target, prompts, config, tmp_path, seed=0)


def test_rows_of_a_version_that_knew_no_quantisation_go_on(target: Target, tmp_path: Path) -> None:
    distil(target, make_prompts(3), make_config(), tmp_path, seed=0)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["target"]["quantisation"]
    path.write_text(json.dumps(manifest))
    assert distil(target, make_prompts(3), make_config(), tmp_path, seed=0).made == 0


def full_row(**changes: Any) -> dict[str, Any]:
    """A row as far as it is checked."""
    row = {"key": "k", "category": "c", "prompt_ids": [1], "response_ids": [2, 3]}
    return row | {"finish_reason": "stop", "temperature": 0.0} | changes


NO_ROWS: dict[str, object] = {
    "list": [1],
    "nothing": {},
    "key": full_row(key=3),
    "category": full_row(category=None),
    "ids": full_row(prompt_ids="12"),
    "text id": full_row(response_ids=[1, "2"]),
    "part id": full_row(response_ids=[1.0]),
    "truth": full_row(response_ids=[True]),
    "negative": full_row(prompt_ids=[-1]),
    "finish": full_row(finish_reason=["stop"]),
    "temperature": full_row(temperature="0.0"),
}


@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
@pytest.mark.parametrize("row", NO_ROWS.values(), ids=NO_ROWS)
def test_a_row_of_other_kinds_is_named_by_file_and_line(
    tmp_path: Path, row: object, last: bool
) -> None:
    rows = [full_row(), row] if last else [row, full_row()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    line = r"rows\.jsonl:2: " if last else r"rows\.jsonl:1: "
    with pytest.raises(UserError, match=line + "the line is damaged .* `draftsmith data` again"):
        read_rows(tmp_path)


def test_a_row_that_is_nested_too_deep_is_damaged(tmp_path: Path) -> None:
    text = "[" * 100_000 + "\n" + json.dumps(full_row()) + "\n"
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the line is damaged"):
        read_rows(tmp_path)


def test_rows_that_were_lost_are_counted_and_made_again(target: Target, tmp_path: Path) -> None:
    prompts, config = make_prompts(10), make_config()
    distil(target, prompts, config, tmp_path, seed=0)
    path = tmp_path / "rows.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    assert not lacks_rows(tmp_path) and len(training_documents(tmp_path, config)[0]) == 10
    path.write_text("".join(lines[:3] + lines[5:]), "utf-8")
    assert lacks_rows(tmp_path)
    with pytest.raises(UserError, match="2 of 10 rows are missing; run `draftsmith data` again"):
        training_documents(tmp_path, config)
    distil(target, prompts, config, tmp_path, seed=0)
    assert sorted(path.read_text("utf-8").splitlines(keepends=True)) == sorted(lines)
    assert not lacks_rows(tmp_path)


def test_prompts_that_were_dropped_are_not_missing(target: Target, tmp_path: Path) -> None:
    long = Prompt("long", "c", ({"role": "user", "content": "x" * 200},))
    config = make_config().model_copy(update={"max_prompt_tokens": 150})
    distil(target, [*make_prompts(3), long], config, tmp_path, seed=0)
    assert len(training_documents(tmp_path, config)[0]) == 3 and not lacks_rows(tmp_path)


def test_no_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no distilled rows"):
        read_rows(tmp_path)


@contextmanager
def small_disk() -> Iterator[None]:
    """Files may not grow beyond 3,000 bytes: writing fails half-way, as on a full disk.

    Only around the call under test: the limit would also stop a log that pytest writes to.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"key": str(i), "text": "x" * 900} for i in range(4)]
    with RowFile(path) as file:
        file.append(rows[:2])
        before = path.read_bytes()
        match = r"cannot be written .*; its 2 rows are kept"
        with small_disk(), pytest.raises(UserError, match=match) as error:
            file.append(rows[2:])
        assert path.read_bytes() == before and "\n" not in str(error.value)


def test_a_full_disk_stops_distilling_and_it_can_go_on(target: Target, tmp_path: Path) -> None:
    prompts, config = make_prompts(20), make_config()
    distil(target, prompts, config, tmp_path / "large", seed=0)
    with small_disk(), pytest.raises(UserError, match="cannot be written"):
        distil(target, prompts, config, tmp_path / "small", seed=0)
    distil(target, prompts, config, tmp_path / "small", seed=0)
    assert read_rows(tmp_path / "small") == read_rows(tmp_path / "large")


def test_a_manifest_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        agree_on_manifest(tmp_path / "file" / "rows", {"prompts": {"count": 1}})
    with pytest.raises(UserError, match="cannot be written"):
        RowFile(tmp_path / "file" / "rows" / "rows.jsonl")


def test_one_process_writes_the_rows(tmp_path: Path) -> None:
    with (
        RowFile(tmp_path / "rows.jsonl"),
        pytest.raises(UserError, match="another process is writing it"),
    ):
        RowFile(tmp_path / "rows.jsonl")
    RowFile(tmp_path / "rows.jsonl").file.close()


def test_any_text_survives_the_file(tmp_path: Path) -> None:
    rows = [full_row(key="a\u2028\n", response="\x00\x85\ud800 é 漢")]
    with RowFile(tmp_path / "rows.jsonl") as file:
        file.append(rows)
    assert read_rows(tmp_path) == rows
    assert json.loads((tmp_path / "rows.jsonl").read_text("utf-8")) == rows[0]
