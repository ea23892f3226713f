"""The report's tables, as text cells; markdown, HTML and the terminal only lay them out."""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.eval.lossy import Estimate
from draftsmith.eval.report import BY_DESIGN, ArmReport, Report
from draftsmith.eval.summary import Percentiles

NONE = "-"
MANY = 6  # arms that a figure by slot or category can still tell apart


@dataclass(frozen=True)
class Table:
    """A title, what it needs said, column names and rows. The first column is left-aligned."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]
    prose: bool = False  # sentences, not figures


def visible(text: str) -> str:
    """Text without control characters and lone surrogates, which files and figures refuse."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"
        else c
        for c in text
    )


def fixed(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number, or a dash where there is none."""
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def share(value: float | None) -> str:
    """A rate as a percentage."""
    return NONE if value is None else f"{100 * value:.1f} %"


def interval(bounds: tuple[float, float] | None) -> str:
    """A confidence interval."""
    return NONE if bounds is None else f"{bounds[0]:.2f} to {bounds[1]:.2f}"


def three(values: Percentiles | None, digits: int = 1) -> str:
    """P50 / P95 / P99."""
    if values is None:
        return NONE
    return " / ".join(f"{value:.{digits}f}" for value in (values.p50, values.p95, values.p99))


def megabytes(count: int) -> str:
    """Bytes in MB, 10^6."""
    return f"{count / 1e6:.1f} MB"


def yes(value: bool | str) -> str:
    """True and false as words; a string speaks for itself."""
    return value if isinstance(value, str) else "yes" if value else "NO"


def drafts(arm: ArmReport) -> str:
    """What a round drafts."""
    if arm.tree is not None:
        return f"tree, {len(arm.tree)} nodes, depth {arm.draft_tokens}"
    return NONE if arm.draft_tokens is None else f"chain of {arm.draft_tokens}"


def drafting(report: Report) -> list[ArmReport]:
    """The arms that draft."""
    return [arm for arm in report.arms if arm.drafter is not None]


def leaderboard(report: Report) -> Table:
    """What most readers came for: every arm, the fastest first."""
    header = [
        *("arm", "batch", "speedup", "95 % interval", "predicted", "tau micro", "tau macro"),
        *("alpha", "tokens/s", "overhead", "lossless"),
    ]
    rows = [
        [
            arm.name,
            str(arm.batch),
            fixed(arm.speedup, 2, "x"),
            "baseline" if arm.name == arm.baseline else interval(arm.speedup_interval),
            fixed(arm.predicted_speedup, 2, "x"),
            fixed(arm.tau_micro, 3),
            fixed(arm.tau_macro, 3),
            fixed(arm.alpha, 3),
            fixed(arm.tokens_per_second, 1),
            share(arm.overhead_share if arm.drafter is not None else None),
            yes(arm.lossless),
        ]
        for arm in ranked(report.arms)
    ]
    return Table("Leaderboard", headline_note(report), header, rows)


def ranked(arms: Sequence[ArmReport]) -> list[ArmReport]:
    """By speedup, the largest first; arms without one last."""
    return sorted(arms, key=lambda arm: -(arm.speedup or 0.0))


def headline_note(report: Report) -> str:
    """The conditions without which the result means nothing."""
    first = report.arms[0]
    return (
        f"Target {report.target['model']} ({first.quantisation}), {first.dtype} on {first.device}, "
        f"{first.threads} threads; {first.prompts} prompts; prefill not "
        "counted. Speedup is over plain decoding in the same engine at the same temperature and "
        "batch size. Overhead is its share of a round."
    )


def front(report: Report) -> list[ArmReport]:
    """The arms that stand for their drafters in figures: greedy, of the smallest batch, exact; only
    the fastest of each drafter where there are many.
    """
    arms = [arm for arm in drafting(report) if arm.temperature == 0 and arm.lossless != BY_DESIGN]
    least = min((arm.batch for arm in arms), default=1)
    arms = [arm for arm in arms if arm.batch == least]
    if len(arms) <= MANY:
        return arms
    kinds = dict.fromkeys(arm.drafter for arm in arms)
    return [
        max((arm for arm in arms if arm.drafter == kind), key=lambda arm: arm.speedup or 0.0)
        for kind in kinds
    ]


def condition_table(report: Report) -> Table:
    """Every condition of every arm."""
    header = [
        *(
            "arm",
            "engine",
            "rule",
            "draw",
            "temperature",
            "top-p",
            "top-k",
            "drafts",
            "batch",
            "dtype",
        ),
        *("weights", "device", "threads", "prompts", "tokens", "compared with"),
    ]
    rows = [
        [
            arm.name,
            arm.engine,
            arm.rule,
            NONE if arm.draw is None else arm.draw,
            f"{arm.temperature:g}",
            f"{arm.top_p:g}",
            str(arm.top_k) if arm.top_k else "off",
            drafts(arm),
            str(arm.batch),
            arm.dtype,
            arm.quantisation,
            arm.device,
            str(arm.threads),
            str(arm.prompts),
            str(arm.tokens),
            arm.baseline,
        ]
        for arm in report.arms
    ]
    return Table("Conditions", "Tokens are those that were timed.", header, rows)


def latency_table(report: Report) -> Table:
    """Percentiles and the parts of a round."""
    header = ["arm", "token P50 / P95 / P99", "request P50 / P95 / P99", "draft", "verify"]
    header += ["overhead", "speedup with prefill"]
    rows = [
        [
            arm.name,
            three(arm.token_ms),
            three(arm.request_ms, 0),
            *(fixed(arm.milliseconds[part], 2) for part in ("draft", "verify", "overhead")),
            fixed(arm.speedup_with_prefill, 2, "x"),
        ]
        for arm in report.arms
    ]
    return Table(
        "Latency in milliseconds", "Draft, verify and overhead are means per round.", header, rows
    )


def slot_table(
    report: Report, title: str, rates: Callable[[ArmReport], list[float | None]]
) -> Table:
    """One kind of acceptance by slot; the two kinds never share a table."""
    arms = drafting(report)
    depth = max((len(rates(arm)) for arm in arms), default=0)
    rows = []
    for arm in arms:
        cells = [share(rate) for rate in rates(arm)]
        rows.append([arm.name, *cells, *[NONE] * (depth - len(cells))])
    header = ["arm", *(f"slot {slot}" for slot in range(1, depth + 1))]
    return Table(title, "", header, rows)


def category_slots(report: Report) -> Table:
    """Conditional acceptance by slot and category."""
    rows = []
    arms = front(report)
    depth = max((len(arm.conditional_acceptance) for arm in arms), default=0)
    for arm in arms:
        for category, rates in arm.conditional_by_category.items():
            cells = [share(rate) for rate in rates]
            rows.append([f"{arm.name}: {category}", *cells, *[NONE] * (depth - len(cells))])
    header = ["arm: category", *(f"slot {slot}" for slot in range(1, depth + 1))]
    return Table("Conditional acceptance by category", "", header, rows)


def gap_table(report: Report) -> Table:
    """Where measured and predicted speedup are more than 10 % apart."""
    rows = [[arm.name, arm.gap] for arm in report.arms if arm.gap]
    note = "Arms whose measured speedup is more than 10 % off the predicted one."
    return Table("Measured against predicted", note, ["arm", "why"], rows, prose=True)


def skipped_table(report: Report) -> Table:
    """What was asked for and is not among the arms."""
    rows = [[name, why] for name, why in report.skipped.items()]
    return Table("Not measured", "", ["arm", "why"], rows, prose=True)


def quality_table(report: Report) -> Table:
    """What lossy rules cost, beside an exact arm."""
    rows = [
        [
            arm.name,
            yes(arm.lossless),
            estimated(arm.quality.log_likelihood),
            estimated(arm.quality.log_likelihood_change),
            estimated(arm.quality.token_kl),
            estimated(arm.quality.agreement, 2),
            estimated(arm.quality.identical, 2),
        ]
        for arm in report.arms
        if arm.quality is not None
    ]
    header = ["arm", "lossless", "log p per token", "change", "token KL", "agreement", "identical"]
    note = "Paired with plain decoding of the same prompts; 95 % intervals over prompts; nats."
    return Table("Lossy rules", note, header, rows)


def estimated(value: Estimate | None, digits: int = 3) -> str:
    """A mean and its interval."""
    if value is None:
        return NONE
    if value.interval is None:
        return f"{value.mean:.{digits}f}"
    low, high = value.interval
    return f"{value.mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def served_table(report: Report) -> Table:
    """The server that was measured from outside."""
    rows = [
        [
            str(one.concurrency),
            fixed(one.tokens_per_second, 1),
            fixed(one.decode_tokens_per_second, 1),
            three(one.first_token_ms, 0),
            three(one.token_ms),
            three(one.request_ms, 0),
            share(one.acceptance),
            fixed(one.tau, 2),
        ]
        for one in report.served
    ]
    header = ["requests in flight", "tokens/s", "of one request", "first token P50 / P95 / P99"]
    header += ["between pieces", "request", "acceptance", "tau"]
    where = f"{report.served[0].model} at {report.served[0].url}" if report.served else ""
    note = f"{where}. Milliseconds, seen from outside; not comparable with the arms' engine."
    return Table("Served engine", note, header, rows)


def slot_tables(report: Report) -> list[Table]:
    """Conditional and joint acceptance."""
    return [
        slot_table(report, "Conditional acceptance", lambda arm: arm.conditional_acceptance),
        slot_table(report, "Joint acceptance", lambda arm: arm.joint_acceptance),
    ]


def category_table(report: Report) -> Table:
    """Acceptance length by category of prompt."""
    arms = front(report)
    categories = sorted({category for arm in arms for category in arm.tau_by_category})
    rows = [
        [category, *(fixed(arm.tau_by_category.get(category), 3) for arm in arms)]
        for category in categories
    ]
    return Table(
        "Acceptance length by category", "Micro.", ["category", *(arm.name for arm in arms)], rows
    )


def walk_table(report: Report) -> Table:
    """Simulated beside decoded acceptance length, arm by arm."""
    rows = [
        [arm.name, fixed(arm.tau_walk, 3), fixed(arm.tau_micro, 3)]
        for arm in drafting(report)
        if arm.tau_walk is not None
    ]
    note = (
        "The walk simulates decoding along the plain arm's answers. Greedy in fp32 it equals "
        "decoding exactly; in bf16 a near-tie may fall differently in a block than in one step."
    )
    return Table("Acceptance length, walked and decoded", note, ["arm", "walked", "decoded"], rows)


def cost_table(report: Report) -> Table:
    """Isolated costs, the ground of the prediction."""
    parts = ("plain", "draft", "verify", "overhead")
    rows = [
        [name, *(fixed(costs[part], 2) for part in parts)]
        for name, costs in report.costs_ms.items()
    ]
    header = ["arm", "plain step", "draft", "verify", "overhead"]
    note = f"Medians of interleaved runs of each part alone, {report.conditions['cost context']}."
    return Table("Isolated costs in milliseconds", note, header, rows)


def memory_table(report: Report) -> Table:
    """What the drafter costs to hold."""
    rows = [
        [
            arm.name,
            megabytes(arm.drafter_bytes["weights"]),
            str(arm.drafter_bytes["cache_per_token"]),
        ]
        for arm in drafting(report)
    ]
    return Table("Drafter memory", "", ["arm", "weights", "cache bytes per token"], rows)


def detail_tables(report: Report) -> list[Table]:
    """Everything below the result."""
    tables = [
        served_table(report),
        quality_table(report),
        latency_table(report),
        *slot_tables(report),
        category_table(report),
        walk_table(report),
        category_slots(report),
        gap_table(report),
    ]
    tables += [
        skipped_table(report),
        cost_table(report),
        memory_table(report),
        condition_table(report),
    ]
    return [table for table in tables if table.rows]


def terminal_table(table: Table) -> str:
    """Aligned columns for a terminal."""
    lines: Sequence[list[str]] = [table.header, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
