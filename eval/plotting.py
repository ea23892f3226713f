"""How the report's figures look, and how they are written.

In the SVG the ink is the page's own text colour: figures read on light and dark pages alike.
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.eval.tables import visible

INK, FAINT = "#101112", "#8a8f98"
COLOURS = ("#3b82c4", "#e08a1e", "#2a9d78", "#b667a8", "#c4554d", "#7a6ad8")
PARTS = (("draft", "#e08a1e"), ("verify", "#3b82c4"), ("overhead", FAINT))
STYLE: dict[Any, Any] = {  # matplotlib types its keys as 300 literals
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "path",
}


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def percent(rates: Sequence[float | None]) -> list[float]:
    """Rates for an axis; unknown ones leave a gap."""
    return [float("nan") if rate is None else 100 * rate for rate in rates]


def plain_text(text: str) -> str:
    """A label of one line, at most 32 characters, that matplotlib does not read as a formula."""
    text = " ".join(visible(text).split())
    text = text if len(text) <= 32 else f"{text[:30]}..."
    return text.replace("$", r"\$")


def save_pngs(figures: dict[str, Figure], folder: Path) -> None:
    """One PNG per figure, on white."""
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=160, facecolor="white")


def svg_of(name: str, figure: Figure) -> str:
    """An <svg> element for an HTML page: no header, ids of its own, the page's ink."""
    with rc_context({**STYLE, "svg.hashsalt": name}), io.StringIO() as buffer:
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace(INK, "currentColor")
