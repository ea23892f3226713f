"""Rows for people: how many of which source, what was left out and why, and samples in colour."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from draftsmith.data.dataset import documents_from_rows
from draftsmith.data.prompts import keyed_number, listed
from draftsmith.data.render import sample_text
from draftsmith.data.rows import (
    Row,
    count_missing,
    dropped_rows,
    read_manifest,
    read_rows,
    rounds,
)
from draftsmith.drafters.target import hub_errors, locate
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text
from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.schema import DataConfig, TargetConfig

LEFT_OUT = "left_out.json"  # in a folder of rows: prompts that were never asked, by reason
COLUMNS = ("source", "rows", "tokens", "a row", "cut", "greedy", "dropped")


def rows_folder(path: Path) -> Path:
    """The folder of rows that a user means by a run's folder, or by itself."""
    return path / "rows" if (path / "rows").is_dir() else path


def stats(path: Path) -> str:
    """A table by source, and the reasons for what was left out."""
    folder = rows_folder(path)
    rows, losses = read_rows(folder), all_losses(folder)
    reasons = reasons_by_source(losses, unfit_rows(folder, rows))
    sources = sorted({row["category"] for row in rows} | reasons.keys())
    lines = [table_line(one, rows, reasons.get(one, Counter())) for one in sources]
    if len(sources) > 1:
        every = sum(reasons.values(), Counter[str]())
        lines.append(table_line(None, rows, every))
    text = [f"{folder}, answers of {read_manifest(folder)['target'].get('model')}", ""]
    text += aligned([COLUMNS, *lines])
    text += [f"{one}: {listed(reasons[one])}" for one in sorted(reasons)]
    if left_out := read_left_out(folder):
        text.append(f"prompts that were not asked: {listed(left_out)}")
    missing = sum(max(0, count_missing(one)) for one in rounds(folder))
    return "\n".join([*text, f"{missing:,} rows are missing"] if missing else text)


def all_losses(folder: Path) -> list[Row]:
    """What servers gave no usable answer to, in all turns."""
    return [loss for one in rounds(folder) for loss in dropped_rows(one).values()]


def unfit_rows(folder: Path, rows: Sequence[Row]) -> list[Row]:
    """Rows that training leaves out, with the run's recipe; none where there is no recipe."""
    recipe = folder.parent / "recipe.yaml"
    config = load_recipe(str(recipe)).data if recipe.is_file() else None
    return [] if config is None else list(judged(rows, config))


def judged(rows: Iterable[Row], config: DataConfig) -> Iterable[Row]:
    """Rows that a recipe drops, with the reason."""
    for row in rows:
        _, dropped = documents_from_rows([row], config)
        yield from ({"category": row["category"], "reason": reason} for reason in dropped)


def reasons_by_source(*losses: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """How often which reason, by source."""
    found: dict[str, Counter[str]] = {}
    for some in losses:
        for loss in some:
            found.setdefault(loss["category"], Counter())[loss["reason"]] += 1
    return found


def table_line(source: str | None, rows: Sequence[Row], reasons: Counter[str]) -> tuple[str, ...]:
    """A source's counts; of all sources for None."""
    mine = [row for row in rows if source in (None, row["category"])]
    tokens = sum(len(row["response_ids"]) for row in mine)
    count = max(1, len(mine))
    return (
        source or "all",
        f"{len(mine):,}",
        f"{tokens:,}",
        f"{tokens / count:.0f}",
        f"{sum(row['finish_reason'] == 'length' for row in mine) / count:.0%}",
        f"{sum(row['temperature'] == 0 for row in mine) / count:.0%}",
        f"{reasons.total():,}",
    )


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """A table in text: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]


def inspect(path: Path, *, count: int, key: str | None, source: str | None) -> str:
    """Samples of rows as they are trained on, the answer in green."""
    folder = rows_folder(path)
    rows = [row for row in read_rows(folder) if source in (None, row["category"])]
    if key is not None:
        rows = [row for row in rows if row["key"] == key]
    if not rows:
        raise UserError(
            f"{folder}: no row of that key or source; `draftsmith data stats` lists them"
        )
    tokenizer = load_tokenizer(folder)
    shown = sorted(rows, key=lambda row: keyed_number(0, "inspect", row["key"]))[:count]
    return "\n\n".join(described(row, tokenizer) for row in shown)


def described(row: Row, tokenizer: Any) -> str:
    """A row with a line about it."""
    ids = [*row["prompt_ids"], *row["response_ids"]]
    supervised = [False] * len(row["prompt_ids"]) + [True] * len(row["response_ids"])
    head = (
        f"{row['key']} ({row['category']}), temperature {row['temperature']}, finish reason "
        f"{row['finish_reason']}"
    )
    return f"{head}\n{sample_text(tokenizer, ids, supervised)}"


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of the target that the rows name."""
    target = read_manifest(folder)["target"]
    name, revision = str(target.get("model")), target.get("revision")
    config = TargetConfig(model=name)
    pinned = revision if isinstance(revision, str) and len(revision) == 40 else None
    with hub_errors(name):
        return AutoTokenizer.from_pretrained(locate(config), revision=pinned)


def write_left_out(folder: Path, reasons: Counter[str]) -> None:
    """Keep why prompts were never asked."""
    write_text(folder / LEFT_OUT, json.dumps(dict(reasons.most_common()), indent=2) + "\n")


def read_left_out(folder: Path) -> Counter[str]:
    """Why prompts were never asked, where it was kept."""
    path = folder / LEFT_OUT
    try:
        return Counter(json.loads(path.read_text("utf-8"))) if path.is_file() else Counter()
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove it") from error
