"""The report as Markdown."""

from collections.abc import Mapping, Sequence

from draftsmith.eval.report import Report
from draftsmith.eval.tables import Table, detail_tables, leaderboard, visible

MARKUP = "\\|*_`[]#"


def render_markdown(report: Report, figures: Sequence[str]) -> str:
    """The whole file. `figures` are names of PNGs in figures/."""
    parts = [
        f"# {cell(report.name)}",
        section(leaderboard(report), level=2),
        "\n".join(f"- {cell(note)}" for note in report.notes),
        "\n".join(f"![{name.replace('_', ' ')}](figures/{name}.png)" for name in figures),
        *(section(table, level=3) for table in detail_tables(report)),
        pairs("Checks", {arm.name: arm.check for arm in report.arms}),
        pairs("Conditions that hold for every arm", report.conditions),
        pairs("Target", report.target),
        pairs("Versions", {**report.versions, "created": report.created}),
        pairs("Definitions", report.definitions),
        f"Made by: {cell(report.command)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(table: Table, *, level: int) -> str:
    """A titled table."""
    note = [cell(table.note)] if table.note else []
    return "\n\n".join([f"{'#' * level} {cell(table.title)}", *note, table_text(table)])


def table_text(table: Table) -> str:
    """Columns after the first are numbers, to the right; sentences are not."""
    rule = ["---", *["---" if table.prose else "---:"] * (len(table.header) - 1)]
    rows = [[cell(text) for text in row] for row in (table.header, *table.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def pairs(title: str, values: Mapping[str, str]) -> str:
    """Names and sentences."""
    lines = "\n".join(f"- **{cell(name)}**: {cell(text)}" for name, text in values.items())
    return f"### {title}\n\n{lines}"


def cell(text: str) -> str:
    """Text that neither ends its cell nor acts as markup."""
    text = visible(text)
    for character in MARKUP:
        text = text.replace(character, f"\\{character}")
    return " ".join(text.replace("<", "&lt;").replace(">", "&gt;").split())
