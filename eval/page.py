"""The report as one self-contained HTML page: no script, nothing fetched, all text escaped."""

from collections.abc import Mapping
from html import escape as escape_markup

from matplotlib.figure import Figure

from draftsmith.eval.plotting import svg_of
from draftsmith.eval.report import ArmReport, Report, Sample
from draftsmith.eval.tables import (
    Table,
    detail_tables,
    drafting,
    fixed,
    front,
    interval,
    leaderboard,
    visible,
    yes,
)

CAPTIONS = {
    "speedup": "Measured speedup, and what costs measured alone predict",
    "acceptance_by_slot": "Acceptance by slot",
    "tau_by_category": "Acceptance length by category (bars start at 1: no draft accepted)",
    "round_breakdown": "Where a round's time goes",
    "tau_speedup": "Tokens per target pass against speedup: an arm far below others of its tau "
    "pays too much for its drafts",
    "batch_sizes": "Speedup by batch size: each drafter's fastest greedy arm",
    "tree_size": "Tree size: held-out tokens per round against the cost of verifying more nodes",
    "training": "Training",
}

STYLE = """
:root { color-scheme: light dark; --ink: #1d2127; --page: #fbfbfa; --card: #ffffff; --line: #dfe2e6;
  --soft: #667080; --accent: #2f72b0; --a: #cfe3f6; --b: #fbe3c3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --page: #15181c; --card: #1c2026;
  --line: #343a43; --soft: #98a2b0; --accent: #6fb0ea; --a: #1d4468; --b: #62441a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 0.6rem; }
h3 { font-size: 1rem; margin: 1.8rem 0 0.4rem; }
p { margin: 0.4rem 0; }
.soft, figcaption, dd { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.8rem;
  margin: 1.4rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.8rem 1rem; }
.card b { display: block; font-size: 1.75rem; line-height: 1.25; color: var(--accent); }
.card span { color: var(--soft); font-size: 0.85rem; }
figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  margin: 1rem 0; padding: 1rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { font-size: 0.9rem; margin-bottom: 0.6rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.88rem; }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th { font-weight: 600; color: var(--soft); }
.text td, .text th { text-align: left; white-space: normal; }
.answer { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 0.8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.question { color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; }
mark { color: inherit; border-radius: 3px; padding: 0.08em 0; }
mark.a { background: var(--a); }
mark.b { background: var(--b); }
dt { font-weight: 600; margin-top: 0.6rem; }
dd { margin: 0; }
code { font-size: 0.88em; overflow-wrap: anywhere; }
"""


def render_html(report: Report, figures: Mapping[str, Figure]) -> str:
    """The whole page."""
    details = "".join(f"<h3>{escape(t.title)}</h3>{table_html(t)}" for t in detail_tables(report))
    body = [
        heading(report),
        cards(report),
        table_html(leaderboard(report)),
        notes(report),
        "<h2>Figures</h2>",
        *(figure_html(name, figure) for name, figure in figures.items()),
        samples(report),
        f"<h2>Tables</h2>{details}",
        pairs("Checks", {arm.name: arm.check for arm in report.arms}),
        pairs("Conditions that hold for every arm", all_conditions(report)),
        definitions(report),
    ]
    title = escape(f"{report.name}: draftsmith report")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def escape(text: str) -> str:
    """Text as text, whatever it holds."""
    return escape_markup(visible(text))


def heading(report: Report) -> str:
    """What was measured, and when."""
    target, arms = report.target, drafting(report)
    kinds = ", ".join(dict.fromkeys(str(arm.drafter) for arm in arms)) or "no"
    return (
        f"<header><h1>{escape(report.name)}</h1>"
        f'<p class="soft">{escape(kinds)} drafting for <code>{escape(target["model"])}</code> '
        f"(weights {escape(target['origin'])}), {escape(report.conditions['machine'])}, "
        f"{escape(report.created)}</p></header>"
    )


def best_arm(report: Report) -> ArmReport | None:
    """The fastest greedy drafting arm, one prompt at a time where that was measured."""
    return max(front(report), key=lambda arm: arm.speedup or 0.0, default=None)


def cards(report: Report) -> str:
    """The fastest greedy arm in four numbers."""
    arm = best_arm(report)
    if arm is None:
        return ""
    figures = [
        (
            fixed(arm.speedup, 2, "x"),
            f"speedup of {arm.name}, 95 %: {interval(arm.speedup_interval)}",
        ),
        (fixed(arm.tau_micro, 2), "tokens per target pass (tau, micro)"),
        (fixed(arm.tokens_per_second, 1), "tokens per second, prefill not counted"),
        (yes(arm.lossless), "output is the target's own"),
    ]
    inner = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(text)}</span></div>'
        for value, text in figures
    )
    return f'<div class="cards">{inner}</div>'


def table_html(table: Table) -> str:
    """A table that scrolls sideways by itself."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    kind = ' class="text"' if table.prose else ""
    head, rows = f"<thead><tr>{head}</tr></thead>", f"<tbody>{rows}</tbody>"
    return f'{note}<div class="table"><table{kind}>{head}{rows}</table></div>'


def notes(report: Report) -> str:
    """What a reader must know before quoting a figure."""
    inner = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f"<ul>{inner}</ul>" if inner else ""


def figure_html(name: str, figure: Figure) -> str:
    """A figure with its caption."""
    caption = escape(CAPTIONS[name])
    drawing = svg_of(name, figure).replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
    return f"<figure><figcaption>{caption}</figcaption>{drawing}</figure>"


def samples(report: Report) -> str:
    """Answers with accepted drafts marked."""
    if not report.samples:
        return ""
    intro = (
        '<p class="soft">Marked: drafted and accepted, one colour per round in turn. '
        "Unmarked: the target's own token.</p>"
    )
    return f"<h2>Samples</h2>{intro}" + "".join(sample_html(sample) for sample in report.samples)


def sample_html(sample: Sample) -> str:
    """One question and its answer."""
    pieces = "".join(
        f'<mark class="{"ab"[piece.round % 2]}">{escape(piece.text)}</mark>'
        if piece.drafted
        else escape(piece.text)
        for piece in sample.pieces
    )
    return (
        f"<h3>{escape(sample.category)} ({escape(sample.arm)})</h3>"
        f'<p class="question">{escape(sample.prompt)}</p><div class="answer">{pieces}</div>'
    )


def all_conditions(report: Report) -> dict[str, str]:
    """Conditions, target, versions and command in one list."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    target = {f"target {name}": value for name, value in report.target.items()}
    return {**report.conditions, **target, "versions": versions, "command": report.command}


def pairs(title: str, values: Mapping[str, str]) -> str:
    """Names and sentences."""
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in values.items())
    return f'<h3>{escape(title)}</h3><div class="table"><table class="text">{rows}</table></div>'


def definitions(report: Report) -> str:
    """What each figure means."""
    inner = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>"
        for name, text in report.definitions.items()
    )
    return f"<h2>Definitions</h2><dl>{inner}</dl>"
