"""The report's figures. Drawn once; the HTML takes them as SVG, the folder as PNG."""

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from draftsmith.eval.charts import batch_figure, batches_of, kind_colour, scatter_figure
from draftsmith.eval.plotting import (
    COLOURS,
    FAINT,
    INK,
    PARTS,
    STYLE,
    canvas,
    percent,
    plain_text,
)
from draftsmith.eval.report import ArmReport, Report, TreeChoice
from draftsmith.eval.tables import drafting, fixed, front, ranked

MOST = 40  # arms of a figure with a line for each


def draw_figures(report: Report) -> dict[str, Figure]:
    """Every figure that this report has data for, by name."""
    with rc_context(STYLE):
        figures = {
            "speedup": speedup_figure(report),
            "acceptance_by_slot": slot_figure(report),
            "tau_by_category": category_figure(report),
            "round_breakdown": round_figure(report),
        }
        if drafting(report):
            figures["tau_speedup"] = scatter_figure(report)
        if len(batches_of(report)) > 1:
            figures["batch_sizes"] = batch_figure(report)
        searched = {name: tree for name, tree in report.trees.items() if len(tree.nodes) > 1}
        if searched:
            figures["tree_size"] = tree_figure(searched)
        if (training := training_figure(report.training)) is not None:
            figures["training"] = training
    return figures


def speedup_figure(report: Report) -> Figure:
    """Measured speedup with its interval, and what the isolated costs predict."""
    arms = ranked([arm for arm in report.arms if arm.name != arm.baseline])[:MOST]
    figure, axes = canvas(7.2, 0.9 + 0.32 * len(arms))
    for row, arm in enumerate(arms):
        value = arm.speedup or 0.0  # no bar where no token was timed
        low, high = arm.speedup_interval or (value, value)
        bars = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axes.barh(row, value, height=0.55, color=drafter_colour(report, arm), alpha=0.85)
        axes.errorbar(value, row, xerr=bars, color=INK, capsize=3, lw=1.2)
        if arm.predicted_speedup is not None:
            axes.plot(arm.predicted_speedup, row, "D", mfc="none", mec=INK, ms=6, mew=1.3)
        label = fixed(arm.speedup, 2, "x")
        axes.annotate(label, (0.02, row), va="center", color="white", weight="bold")
    axes.plot([], [], "D", mfc="none", mec=INK, mew=1.3, ls="", label="predicted from costs alone")
    axes.errorbar([], [], xerr=[], color=INK, capsize=3, lw=1.2, label="95 % interval")
    axes.axvline(1.0, color=INK, lw=1, ls=":")
    axes.set_yticks(range(len(arms)), [plain_text(arm.name) for arm in arms])
    axes.invert_yaxis()
    axes.set_xlim(0)
    axes.set_xlabel("speedup over plain decoding (x)")
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def slot_figure(report: Report) -> Figure:
    """Conditional and joint acceptance, each on an axis of its own."""
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for arm in front(report):
        slots = range(1, len(arm.conditional_acceptance) + 1)
        look = {"color": colour_of(report, arm), "marker": "o", "ms": 4, "lw": 1.6}
        left.plot(slots, percent(arm.conditional_acceptance), label=plain_text(arm.name), **look)
        right.plot(slots, percent(arm.joint_acceptance), **look)
    for axes, title in (
        (left, "conditional: given that it was reached"),
        (right, "joint: slots 1..k all"),
    ):
        axes.set_title(title)
        axes.set_xlabel("slot k")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
        axes.set_ylim(0)
    left.set_ylabel("accepted (%)")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def category_figure(report: Report) -> Figure:
    """Acceptance length by category of prompt."""
    arms = front(report)
    categories = sorted({category for arm in arms for category in arm.tau_by_category})
    figure, axes = canvas(7.2, 3.0)
    width = 0.8 / max(1, len(arms))
    for number, arm in enumerate(arms):
        at = [x + width * (number - (len(arms) - 1) / 2) for x in range(len(categories))]
        # Bars start at 1: a round without any draft yields one token.
        heights = [arm.tau_by_category.get(category, 1.0) - 1 for category in categories]
        colour, label = colour_of(report, arm), plain_text(arm.name)
        axes.bar(at, heights, width * 0.92, bottom=1.0, color=colour, label=label)
    names = [plain_text(category) for category in categories]
    axes.set_xticks(range(len(categories)), names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_ylabel("tokens per target pass")
    axes.set_ylim(bottom=1.0)
    axes.grid(axis="y")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def round_figure(report: Report) -> Figure:
    """Where a round's time goes, beside the plain step that it competes with."""
    arms = [arm for arm in report.arms if arm.name == arm.baseline]
    arms = sorted([*arms, *drafting(report)], key=lambda arm: arm.batch)[:MOST]
    figure, axes = canvas(7.2, 0.9 + 0.3 * len(arms))
    for row, arm in enumerate(arms):
        start = 0.0
        for part, colour in PARTS:
            label = part if row == 0 else None
            axes.barh(
                row, arm.milliseconds[part], left=start, height=0.6, color=colour, label=label
            )
            start += arm.milliseconds[part]
        tokens = "" if arm.tau_micro is None else f" / {arm.tau_micro:.2f} tokens"
        axes.annotate(f" {start:.1f} ms{tokens}", (start, row), va="center")
    axes.set_yticks(range(len(arms)), [plain_text(arm.name) for arm in arms])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(0)
    axes.set_xlabel("milliseconds per round (mean)")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def tree_figure(trees: Mapping[str, TreeChoice]) -> Figure:
    """What the search weighed: tokens per round, and the speedup that they should give."""
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, tree) in enumerate(trees.items()):
        gain = [t * tree.plain_ms / ms for t, ms in zip(tree.tau, tree.round_ms, strict=True)]
        colour = COLOURS[number % len(COLOURS)]
        for axes, values in ((left, tree.tau), (right, gain)):
            axes.plot(tree.nodes, values, color=colour, marker="o", ms=4, lw=1.6)
            axes.axvline(tree.chosen, color=colour, lw=1.2, ls="--")
        left.plot([], [], color=colour, label=f"{plain_text(name)}, chosen: {tree.chosen}")
    for axes, label in ((left, "tokens per round (held out)"), (right, "predicted speedup (x)")):
        axes.set_xlabel("nodes")
        axes.set_ylabel(label)
        axes.grid()
    figure.legend(loc="outside upper center", ncols=3)
    right.axhline(1.0, color=INK, lw=1, ls=":")
    return figure


def training_figure(curve: Sequence[dict[str, float]]) -> Figure | None:
    """Training loss, and the walk over held-out answers while training."""
    names = {"loss": "training loss", "tau": "held-out tau, chain walk"}
    points = {
        label: [(point["step"], point[name]) for point in curve if name in point]
        for name, label in names.items()
    }
    panels = [(label, values) for label, values in points.items() if values]
    if not panels:
        return None
    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (label, values) in zip(row, panels, strict=True):
        marker = "o" if len(values) < 20 else ""
        axes.plot(*zip(*values, strict=True), color=COLOURS[0], lw=1.6, marker=marker, ms=4)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid()
    return figure


def colour_of(report: Report, arm: ArmReport) -> str:
    """One colour per arm that stands for its drafter by slot and by category."""
    names = [other.name for other in front(report)]
    return COLOURS[names.index(arm.name) % len(COLOURS)]


def drafter_colour(report: Report, arm: ArmReport) -> str:
    """Grey for baselines, then one colour per drafter."""
    return FAINT if arm.drafter is None else kind_colour(report, arm.drafter)
