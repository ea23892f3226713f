"""The report: one object, written as report.json, report.md and report.html.

Figures name their conditions, and `DEFINITIONS` travels with them into each of the three files.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from draftsmith.eval.lossy import Quality
from draftsmith.eval.served import Served
from draftsmith.eval.summary import Acceptance, Percentiles
from draftsmith.recipes.files import write_text

BY_DESIGN = "by design not"  # lossless, of a rule that says so itself
DEFINITIONS = {
    "speedup": "Seconds per token of plain decoding over seconds per token of the arm, on the same "
    "prompts, in the same process, each prompt decoded by every arm in turn. Prefill, and the "
    "token it yields, are not counted.",
    "speedup_interval": "95 % percentile bootstrap over prompts, paired between the two arms.",
    "predicted_speedup": "tau_micro x t_plain / (t_draft + t_verify + t_overhead), the times "
    "measured alone at a fixed context length, not in the run that is predicted.",
    "tau_micro": "Tokens emitted per target pass, bonus token included, prefill's token not: all "
    "tokens over all rounds. The last round of an answer counts the tokens it emitted.",
    "tau_macro": "The same quotient for every answer, then the mean over answers.",
    "alpha": "Mean of sum(min(p, q)) for the first slot over all contexts of the arm's output. The "
    "likeliest token as a draft is a point mass, which gives p(draft); of drawn drafts q is the "
    "law they are drawn from. At temperature 0 p is a point mass too, and alpha is the share of "
    "contexts where the first slot names the target's token.",
    "conditional_acceptance": "By slot: rounds that accepted it over rounds that reached it (all "
    "earlier slots accepted, text not yet ended). In a tree a slot is a depth.",
    "joint_acceptance": "By slot: the running product of conditional acceptance, P(at least k "
    "drafts accepted).",
    "milliseconds": "Mean per round: draft (the drafter proposes), verify (one target pass and the "
    "choice of a token at every node), overhead (acceptance, cache, bookkeeping).",
    "overhead_share": "Overhead over the whole of a round: all that is neither the drafter's work "
    "nor the target's pass with its choice of tokens.",
    "batch": "Prompts that are decoded together. Speedup is over plain decoding of the same "
    "batches; a batch takes as long as its longest answer, and an interval resamples batches.",
    "quality": "Of lossy arms, and of one exact arm beside them, means over prompts with a 95 % "
    "bootstrap over prompts: log-likelihood of the output under the target at temperature 1 (nats "
    "per token), and its change against plain decoding of the same prompts; token_kl, KL(law of "
    "the emitted token || target's law at this temperature), for drawn drafts at the first slot; "
    "agreement with plain decoding's answer (twice the tokens in common blocks over the tokens of "
    "both); share of answers identical to it.",
    "served": "A server of another engine, asked for the same prompts from outside: its tokens are "
    "those it counts, its times include the network, its acceptance is read off its metrics. It is "
    "no baseline of the arms.",
    "token_ms": "A round's time, split evenly over the tokens it emitted.",
    "request_ms": "Prefill and decoding of a whole answer.",
    "lossless": "Greedy: one pass over prompt and answer, every argmax equals the next token (in "
    "half precision: within what rounding can turn). Sampled: no emitted token outside the law's "
    "support, and the summed log p of the emitted tokens within 4 standard errors of its "
    "expectation under the target's law.",
}


@dataclass(frozen=True)
class ArmReport:
    """One way of decoding, its conditions and its figures."""

    name: str
    engine: str
    drafter: str | None
    rule: str
    draw: str | None  # how siblings were drawn; point: the likeliest tokens
    temperature: float
    top_p: float
    top_k: int
    batch: int
    dtype: str
    quantisation: str
    device: str
    threads: int
    baseline: str
    draft_tokens: int | None
    tree: list[list[int]] | None  # every node as the ranks on its path
    prompts: int
    tokens: int
    tokens_per_second: float | None  # None, as the speedups: no token was timed
    tokens_per_second_with_prefill: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    speedup_with_prefill: float | None
    predicted_speedup: float | None
    gap: str  # between the two, in words; empty where it is at most 10 %
    tau_micro: float | None
    tau_macro: float | None
    tau_walk: float | None
    tau_by_category: dict[str, float]
    alpha: float | None
    conditional_acceptance: list[float | None]
    joint_acceptance: list[float | None]
    reached: list[int]
    conditional_by_category: dict[str, list[float | None]]
    lossless: bool | str
    check: str
    milliseconds: dict[str, float]
    overhead_share: float  # of a round
    token_ms: Percentiles | None
    request_ms: Percentiles | None
    drafter_bytes: dict[str, int]  # weights; cache_per_token
    quality: Quality | None = None  # of lossy arms, and of an exact one beside them


@dataclass(frozen=True)
class Piece:
    """A stretch of an answer: who wrote it, and in which round (0: prefill)."""

    text: str
    drafted: bool
    round: int


@dataclass(frozen=True)
class Sample:
    """An answer as one arm decoded it."""

    arm: str
    category: str
    prompt: str
    pieces: list[Piece]


@dataclass(frozen=True)
class TreeChoice:
    """What the tree search compared, by size: tokens per round, held out, and time per round."""

    nodes: list[int]
    tau: list[float]
    round_ms: list[float]
    plain_ms: float
    chosen: int


@dataclass(frozen=True)
class Walk:
    """Simulated decoding of held-out answers by the chain."""

    documents: int
    rounds: int
    tau_micro: float
    tau_macro: float
    tau_by_category: dict[str, float]
    acceptance: Acceptance


@dataclass(frozen=True)
class Report:
    """Everything that the three files say."""

    name: str
    created: str
    command: str
    versions: dict[str, str]
    target: dict[str, str]
    conditions: dict[str, str]  # what holds for every arm
    notes: list[str]
    arms: list[ArmReport]
    costs_ms: dict[str, dict[str, float]]  # by arm: plain, draft, verify, overhead, measured alone
    skipped: dict[str, str] = field(default_factory=dict)  # arms that cannot be, and why
    walks: dict[str, Walk] = field(default_factory=dict)  # by drafter
    trees: dict[str, TreeChoice] = field(default_factory=dict)  # by drafter, where searched
    served: list[Served] = field(default_factory=list)  # by requests in flight
    samples: list[Sample] = field(default_factory=list)
    training: list[dict[str, float]] = field(default_factory=list)
    definitions: dict[str, str] = field(default_factory=lambda: dict(DEFINITIONS))


def write_report(report: Report, folder: Path) -> Path:
    """Write report.json, report.md, report.html and figures/*.png. Returns the HTML's path."""
    from draftsmith.eval.figures import draw_figures
    from draftsmith.eval.markdown import render_markdown
    from draftsmith.eval.page import render_html
    from draftsmith.eval.plotting import save_pngs

    folder.mkdir(parents=True, exist_ok=True)
    figures = draw_figures(report)
    save_pngs(figures, folder / "figures")
    write_text(folder / "report.json", json.dumps(asdict(report), indent=1, allow_nan=False) + "\n")
    write_text(folder / "report.md", render_markdown(report, list(figures)))
    write_text(folder / "report.html", render_html(report, figures))
    return folder / "report.html"
