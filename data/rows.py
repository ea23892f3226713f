"""Distilled rows on disk: an append-only file of keyed JSON lines, and how they were made."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from draftsmith.drafters.fingerprint import remembered
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text
from draftsmith.recipes.stages import flat

Row = dict[str, Any]
ROWS, DROPPED, MANIFEST = "rows.jsonl", "dropped.jsonl", "manifest.json"
TURN = "turn_"  # and a number: the folder of later turns, in that of the first ones
TEXTS, IDS, FINISHES = ("key", "category"), ("prompt_ids", "response_ids"), ("stop", "length")


class RowFile:
    """A file of keyed rows, open for appending by one process.

    A line that a killed process left unfinished is cut off on opening; its row is made again.
    """

    def __init__(self, path: Path, check: Callable[[Any], None] | None = None) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a+b", buffering=0)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
        _lock(self.file.fileno(), path)
        rows, whole = _whole_lines(path, check or check_row)
        self.file.truncate(whole)
        self.keys = {row["key"] for row in rows}

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows durably: all of them, or none and UserError says why."""
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        before = self.file.seek(0, os.SEEK_END)
        left = memoryview(lines.encode("utf-8", "backslashreplace"))
        try:
            while left:
                left = left[self.file.write(left) :]
            os.fsync(self.file.fileno())
        except OSError as error:
            self.file.truncate(before)
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); its {len(self.keys)} rows are "
                "kept, make room and run the same command again"
            ) from error
        self.keys.update(row["key"] for row in rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()


def rounds(folder: Path) -> list[Path]:
    """The folder of first answers, and those of later turns of the same conversations."""
    later = [path for path in folder.glob(f"{TURN}*") if path.name.removeprefix(TURN).isdecimal()]
    return [folder, *sorted(later, key=lambda path: int(path.name.removeprefix(TURN)))]


def read_rows(folder: Path) -> list[Row]:
    """Rows of all turns in the order of their keys; UserError when there are none."""
    rows = {key: row for one in rounds(folder) for key, row in finished_rows(one).items()}
    if not rows:
        raise UserError(f"{folder}: holds no distilled rows; run the data stage first")
    return [rows[key] for key in sorted(rows)]


def finished_rows(folder: Path) -> dict[str, Row]:
    """Rows of one round by key; the file may be growing."""
    return _by_key(folder / ROWS, check_row)


def dropped_rows(folder: Path) -> dict[str, Row]:
    """Why prompts that were asked have no row, by key."""
    return _by_key(folder / DROPPED, check_drop)


def check_complete(folder: Path) -> None:
    """UserError when fewer rows are there than the manifest counts.

    Its count is exact: each of its prompts has a row, or says in DROPPED why it has none.
    """
    for one in rounds(folder):
        count, missing = read_manifest(one)["prompts"]["count"], count_missing(one)
        if missing > 0:
            raise UserError(
                f"{one}: {missing} of {count} rows are missing; run `draftsmith data` again, which "
                "makes them (rows of other machines join them by `draftsmith data merge`)"
            )


def count_missing(folder: Path) -> int:
    """Rows of one round that its manifest counts and that are not there."""
    there = len(finished_rows(folder)) + len(dropped_rows(folder))
    return int(read_manifest(folder)["prompts"]["count"]) - there


def lacks_rows(folder: Path) -> bool:
    """Whether rows that were made are no longer there."""
    known = [one for one in rounds(folder) if (one / MANIFEST).is_file()]
    return any(count_missing(one) > 0 for one in known)


def agree_on_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, or refuse: the rows of one folder are made in one way."""
    path = folder / MANIFEST
    if not path.is_file():
        if finished_rows(folder):
            raise UserError(f"{folder}: holds rows but no {MANIFEST}; give another folder")
        try:
            return write_text(path, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    known = read_manifest(folder)
    there = flat({**known, "target": remembered(known["target"], manifest["target"])})
    here = flat(json.loads(json.dumps(manifest)))
    differing = [
        f"{name} was {there.get(name)!r}, now {here.get(name)!r}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if differing:
        raise UserError(
            f"{folder}: its rows were made with other settings ({'; '.join(differing)}). They "
            "cannot be mixed, nor prompts added (batches are planned from all of them): go back to "
            "those settings, give the run another name, or remove the folder"
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """How the rows of a folder were made. Raises UserError where nothing says so."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder}: holds no {MANIFEST}, so nothing says whose answers its rows are; "
            "remove the folder and distil again"
        )
    try:
        manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if type(manifest["prompts"]["count"]) is not int or not isinstance(
            manifest["target"], dict
        ):
            raise ValueError("prompts.count is no whole number, or target no object")
        return manifest
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: is damaged ({error}); remove the folder and distil again"
        ) from error


def check_row(row: Any) -> None:
    """Raises ValueError for what the data stage did not write, as far as training reads it."""
    if not isinstance(row, dict):
        raise ValueError(f"a row is a JSON object, not {type(row).__name__}")
    for name in TEXTS:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} is no text")
    for name in IDS:
        ids = row.get(name)
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(f"{name} is no list of token ids")
    heat = row.get("temperature", "")  # null: the answer was given, and nobody says at which
    if row.get("finish_reason") not in FINISHES or type(heat) not in (int, float, type(None)):
        raise ValueError("finish_reason or temperature is not what it may be")


def check_drop(row: Any) -> None:
    """Raises ValueError for what is no record of a dropped row."""
    names = ("key", "category", "reason", "detail")
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in names):
        raise ValueError(f"one of {', '.join(names)} is no text")


def _by_key(path: Path, check: Callable[[Any], None]) -> dict[str, Row]:
    return {row["key"]: row for row in _whole_lines(path, check)[0]} if path.is_file() else {}


def _whole_lines(path: Path, check: Callable[[Any], None]) -> tuple[list[Row], int]:
    """The rows of all complete lines, and the bytes they take; a cut last line is left out."""
    rows: list[Row] = []
    whole = 0
    data = path.read_bytes()
    lines = data.split(b"\n")
    # What follows the last newline is unfinished.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines) - 1:
                break
            raise _damaged(path, number, error) from error
        try:
            check(row)
        except ValueError as error:
            raise _damaged(path, number, error) from error
        rows.append(row)
        whole += len(line) + 1
    return rows, whole


def _damaged(path: Path, number: int, error: Exception) -> UserError:
    return UserError(
        f"{path}:{number}: the line is damaged ({error}); remove it and run `draftsmith data` "
        "again, which makes its row anew"
    )


def _lock(descriptor: int, path: Path) -> None:
    import fcntl  # POSIX alone has it

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise UserError(f"{path}: another process is writing it; wait for it or end it") from error
