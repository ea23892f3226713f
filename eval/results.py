"""What was measured, kept as it comes: an append-only file, so that a killed evaluation goes on.

`measured.jsonl` in the report's folder. Its first line says under which conditions the rest was
measured; under others, or once a report was written, measuring starts anew. A line that a killed
process left unfinished is dropped.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from draftsmith.eval.decode import Decoded
from draftsmith.eval.rows import Round
from draftsmith.recipes.files import write_text

NAME, FINISHED = "measured.jsonl", "finished"
Key = tuple[str | int, ...]


class Results:
    """Values by key; each is made once and written down at once."""

    def __init__(self, path: Path | None, conditions: Mapping[str, Any]) -> None:
        self.path = path
        self.known: dict[Key, Any] = {}
        self.resumed = 0  # values that an earlier process left
        if path is None:
            return
        wanted = json.loads(json.dumps(conditions))
        lines = whole_lines(path)
        if lines and lines[0] == wanted and lines[-1] != [[FINISHED], True]:
            self.known = {tuple(key): value for key, value in lines[1:]}
            self.resumed = len(self.known)
        else:
            lines = [wanted]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))

    def has(self, key: Key) -> bool:
        """Whether it was measured before."""
        return key in self.known

    def once(self, key: Key, make: Callable[[], Any]) -> Any:
        """The value of a key: the one that is there, or what `make` gives (plain JSON)."""
        if key not in self.known:
            self.known[key] = make()
            self.append([list(key), self.known[key]])
        return self.known[key]

    def finish(self) -> None:
        """The report is written: the next one is measured anew."""
        self.append([[FINISHED], True])

    def append(self, line: Any) -> None:
        """One line, durably."""
        if self.path is None:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def whole_lines(path: Path) -> list[Any]:
    """Every line up to the first that is cut or damaged."""
    if not path.is_file():
        return []
    found: list[Any] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            break
        if len(found) > 1 and not is_entry(found[-1]):
            return found[:-1]
    return found


def is_entry(line: Any) -> bool:
    """Whether a line is a key and its value."""
    return isinstance(line, list) and len(line) == 2 and isinstance(line[0], list)


def packed(decoded: Decoded) -> list[Any]:
    """An answer as plain JSON."""
    rounds = [list(astuple(turn)) for turn in decoded.rounds]
    times = [decoded.prefill_s, decoded.decode_s]
    return [decoded.tokens, rounds, *times, decoded.finish]


def unpacked(value: list[Any]) -> Decoded:
    """What `packed` wrote."""
    tokens, rounds, prefill_s, decode_s, finish = value
    return Decoded(tokens, [Round(*turn) for turn in rounds], prefill_s, decode_s, finish)
