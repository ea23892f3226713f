"""Figures that compare drafters: speedup against tau, and batch sizes."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from draftsmith.eval.plotting import COLOURS, INK, canvas, plain_text
from draftsmith.eval.report import BY_DESIGN, ArmReport, Report
from draftsmith.eval.tables import drafting

MARKS = "osD^vP*X"  # by batch size


def kinds_of(report: Report) -> list[str]:
    """Drafters in the order of the report."""
    return list(dict.fromkeys(str(arm.drafter) for arm in drafting(report)))


def batches_of(report: Report) -> list[int]:
    """Batch sizes, ascending."""
    return sorted({arm.batch for arm in report.arms})


def kind_colour(report: Report, kind: str | None) -> str:
    """One colour per drafter, the same in both figures."""
    return COLOURS[kinds_of(report).index(str(kind)) % len(COLOURS)]


def scatter_figure(report: Report) -> Figure:
    """Every drafting arm: colour by drafter, mark by batch size, hollow where sampled."""
    figure, axes = canvas(7.2, 3.6)
    batches = batches_of(report)
    for arm in drafting(report):
        if arm.speedup is None or arm.tau_micro is None:
            continue
        colour = kind_colour(report, arm.drafter)
        face = colour if arm.temperature == 0 else "none"
        mark = MARKS[batches.index(arm.batch) % len(MARKS)]
        axes.plot(arm.tau_micro, arm.speedup, mark, color=colour, mfc=face, ms=6, mew=1.3)
    for kind in kinds_of(report):
        axes.plot([], [], "o", color=kind_colour(report, kind), label=plain_text(kind))
    for number, batch in enumerate(batches if len(batches) > 1 else []):
        mark = MARKS[number % len(MARKS)]
        axes.plot([], [], mark, color=INK, mfc="none", label=f"batch {batch}")
    axes.axhline(1.0, color=INK, lw=1, ls=":")
    axes.set_xlabel("tokens per target pass (tau); filled: greedy, hollow: sampled")
    axes.set_ylabel("speedup over plain decoding (x)")
    axes.grid()
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def batch_figure(report: Report) -> Figure:
    """Each drafter's fastest exact greedy arm at every batch size, and the tokens per second."""
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    plain = [arm for arm in report.arms if arm.name == arm.baseline and arm.temperature == 0]
    right.plot(
        [arm.batch for arm in plain],
        [arm.tokens_per_second or 0.0 for arm in plain],
        color=INK,
        ls=":",
        marker="o",
        ms=4,
        label="plain",
    )
    for kind in kinds_of(report):
        best = fastest_by_batch([arm for arm in drafting(report) if arm.drafter == kind])
        look = {"color": kind_colour(report, kind), "marker": "o", "ms": 4, "lw": 1.6}
        sizes = [arm.batch for arm in best]
        left.plot(sizes, [arm.speedup or 0.0 for arm in best], label=plain_text(kind), **look)
        right.plot(sizes, [arm.tokens_per_second or 0.0 for arm in best], **look)
    left.axhline(1.0, color=INK, lw=1, ls=":")
    for axes, label in ((left, "speedup (x)"), (right, "tokens per second, whole batch")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches_of(report), [str(batch) for batch in batches_of(report)])
        axes.set_xlabel("batch size")
        axes.set_ylabel(label)
        axes.grid()
    right.set_ylim(0)
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def fastest_by_batch(arms: Sequence[ArmReport]) -> list[ArmReport]:
    """Of exact greedy arms the fastest of every batch size, ascending."""
    exact = [arm for arm in arms if arm.temperature == 0 and arm.lossless != BY_DESIGN]
    sizes = sorted({arm.batch for arm in exact})
    return [
        max((arm for arm in exact if arm.batch == size), key=lambda arm: arm.speedup or 0.0)
        for size in sizes
    ]
