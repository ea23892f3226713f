"""Distilled rows on disk: an append-only file of keyed JSON lines, and how they were made."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text
from draftsmith.recipes.stages import flat

Row = dict[str, Any]
ROWS, MANIFEST = "rows.jsonl", "manifest.json"
TEXTS, IDS, FINISHES = ("key", "category"), ("prompt_ids", "response_ids"), ("stop", "length")


class RowFile:
    """The file of rows, open for appending by one process.

    A line that a killed process left unfinished is cut off on opening; its row is made again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a+b", buffering=0)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error
        _lock(self.file.fileno(), path)
        rows, whole = _whole_lines(path)
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


def read_rows(folder: Path) -> list[Row]:
    """Rows in the order of their keys; UserError when there are none."""
    rows = finished_rows(folder)
    if not rows:
        raise UserError(f"{folder}: holds no distilled rows; run the data stage first")
    return [rows[key] for key in sorted(rows)]


def finished_rows(folder: Path) -> dict[str, Row]:
    """Rows by key; the file may be growing."""
    path = folder / ROWS
    return {row["key"]: row for row in _whole_lines(path)[0]} if path.is_file() else {}


def check_complete(folder: Path, there: int) -> None:
    """UserError when fewer rows are there than the manifest counts.

    Its count is exact: prompts are dropped before it is written, and each of the others has a row.
    """
    count = read_manifest(folder)["prompts"]["count"]
    if there < count:
        raise UserError(
            f"{folder}: {count - there} of {count} rows are missing; run `draftsmith data` again, "
            "which makes them"
        )


def lacks_rows(folder: Path) -> bool:
    """Whether rows that were made are no longer there."""
    known = (folder / MANIFEST).is_file()
    return known and len(finished_rows(folder)) < read_manifest(folder)["prompts"]["count"]


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
    there, here = flat(read_manifest(folder)), flat(json.loads(json.dumps(manifest)))
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
    if row.get("finish_reason") not in FINISHES or type(row.get("temperature")) not in (int, float):
        raise ValueError("finish_reason or temperature is not what it may be")


def _whole_lines(path: Path) -> tuple[list[Row], int]:
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
            check_row(row)
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
