"""What training logged, as far as a report draws it."""

import json
import sys
from pathlib import Path


def training_curve(path: Path) -> list[dict[str, float]]:
    """Numbers of every whole line of log.jsonl that has a step; nothing where there is no log."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [found for line in lines if (found := numbers(line))]


def numbers(line: str) -> dict[str, float]:
    """The plain numbers of a log line; empty for a line that was cut or has no step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict) or "step" not in record:
        return {}
    return {name: float(value) for name, value in record.items() if is_number(value)}


def is_number(value: object) -> bool:
    """Whether a report can hold it: neither NaN nor infinite, as JSON has no word for them."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
