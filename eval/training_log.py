"""What training logged, as far as a report draws it."""

import json
from pathlib import Path


def training_curve(path: Path) -> list[dict[str, float]]:
    """Numbers of every whole line of log.jsonl that has a step; nothing where there is no log."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [found for line in lines if (found := numbers(line))]


def numbers(line: str) -> dict[str, float]:
    """The plain numbers of a log line; empty for a line that was cut or has no step."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(record, dict) or "step" not in record:
        return {}
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
