"""From decoded prompts to figures: acceptance, its length, latencies, speedup and its interval."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.decode import Decoded
from draftsmith.eval.rows import Round


@dataclass(frozen=True)
class Trial:
    """One prompt, decoded once by one arm."""

    prompt: int  # index of the prompt
    category: str
    decoded: Decoded
    unit: int | None = None  # which prompts were decoded together; None: this one alone
    repeat: int = 0

    @property
    def together(self) -> int:
        """The unit of the bootstrap."""
        return self.prompt if self.unit is None else self.unit


@dataclass(frozen=True)
class Acceptance:
    """By slot; None where a slot was never reached."""

    conditional: list[float | None]
    joint: list[float | None]
    reached: list[int]


@dataclass(frozen=True)
class Percentiles:
    """In milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class PromptTotals:
    """Seconds and tokens of every prompt (or batch of prompts), summed over its repeats."""

    seconds: Tensor  # [n] float64
    tokens: Tensor  # [n] float64


def rounds_of(trials: Iterable[Trial]) -> list[Round]:
    """All rounds."""
    return [turn for trial in trials for turn in trial.decoded.rounds]


def emitted(trial: Trial) -> int:
    """Tokens that the rounds emitted; the one from prefill is not among them."""
    return sum(turn.emitted for turn in trial.decoded.rounds)


def passes(rounds: Iterable[Round]) -> int:
    """Passes of the target: one a round, and what it replayed after it."""
    return sum(turn.passes for turn in rounds)


def tau_micro(trials: Sequence[Trial]) -> float | None:
    """Tokens over the target's passes, all answers together."""
    rounds = rounds_of(trials)
    return sum(turn.emitted for turn in rounds) / passes(rounds) if rounds else None


def tau_macro(trials: Sequence[Trial]) -> float | None:
    """Mean over answers of tokens over passes; answers that ended with prefill have none."""
    each = [emitted(t) / passes(t.decoded.rounds) for t in trials if t.decoded.rounds]
    return sum(each) / len(each) if each else None


def tau_by_category(trials: Sequence[Trial]) -> dict[str, float]:
    """Micro acceptance length of every category, in alphabetical order."""
    values = {category: tau_micro(of) for category, of in by_category(trials).items()}
    return {category: value for category, value in values.items() if value is not None}


def judged(turn: Round, depth: int) -> tuple[int, int]:
    """Slots accepted and slots reached in a round; slots past the end of the text, or of
    the drafts, are neither.
    """
    if turn.emitted <= turn.accepted:  # the text ended inside the accepted drafts
        return turn.emitted, turn.emitted
    return turn.accepted, min(turn.accepted + 1, turn.drafted, depth)


def acceptance(trials: Sequence[Trial], depth: int) -> Acceptance:
    """Acceptance by slot 1..depth.

    Conditional: accepted over reached, P(L >= k) / P(L >= k-1). Joint: its running product,
    P(L >= k). In a tree slot k is depth k, accepted when any node of that depth is.
    """
    hits, reached = [0] * depth, [0] * depth
    for turn in rounds_of(trials):
        accepted, seen = judged(turn, depth)
        for slot in range(seen):
            reached[slot] += 1
            hits[slot] += slot < accepted
    return rates(hits, reached)


def rates(hits: Sequence[int], reached: Sequence[int]) -> Acceptance:
    """Both kinds of acceptance from counts by slot: of decoded answers and of walks alike."""
    conditional = [h / r if r else None for h, r in zip(hits, reached, strict=True)]
    return Acceptance(conditional, running_products(conditional), list(reached))


def running_products(rates: Sequence[float | None]) -> list[float | None]:
    """Joint acceptance from conditional acceptance; None from the first unknown on."""
    joint: list[float | None] = []
    product: float | None = 1.0
    for rate in rates:
        product = None if rate is None or product is None else product * rate
        joint.append(product)
    return joint


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Linear interpolation between order statistics, in milliseconds."""
    if not seconds:
        return None
    points = torch.tensor([0.5, 0.95, 0.99], dtype=torch.float64)
    values = torch.tensor(seconds, dtype=torch.float64).quantile(points) * 1000
    return Percentiles(*values.tolist())


def token_seconds(trials: Sequence[Trial]) -> list[float]:
    """Seconds per token: a round's time, split evenly over the tokens it emitted."""
    return [
        (turn.draft_s + turn.verify_s + turn.overhead_s) / turn.emitted
        for turn in rounds_of(trials)
        for _ in range(turn.emitted)
    ]


def prompt_totals(trials: Sequence[Trial], *, prefill: bool) -> PromptTotals:
    """Seconds and emitted tokens by what was decoded together: as long as its longest answer took,
    and the tokens of all. With `prefill`, its time and its token count too.
    """
    longest: dict[tuple[int, int], float] = defaultdict(float)
    tokens: dict[int, float] = defaultdict(float)
    for trial in trials:
        decoded, key = trial.decoded, (trial.together, trial.repeat)
        seconds = decoded.decode_s + (decoded.prefill_s if prefill else 0.0)
        longest[key] = max(longest[key], seconds)
        tokens[trial.together] += len(decoded.tokens) if prefill else emitted(trial)
    summed: dict[int, float] = defaultdict(float)
    for (unit, _), seconds in longest.items():
        summed[unit] += seconds
    order = sorted(summed)
    return PromptTotals(
        torch.tensor([summed[i] for i in order], dtype=torch.float64),
        torch.tensor([tokens[i] for i in order], dtype=torch.float64),
    )


def tokens_per_second(totals: PromptTotals) -> float | None:
    """Over all prompts; None when no token was timed (every answer ended with prefill)."""
    tokens = float(totals.tokens.sum())
    return tokens / float(totals.seconds.sum()) if tokens else None


def speedup(plain: PromptTotals, arm: PromptTotals) -> float | None:
    """Seconds per token of plain decoding over those of the arm, on the same prompts.

    None when one of them timed no token.
    """
    if not (plain.tokens.any() and arm.tokens.any()):
        return None
    return float(ratio(plain, arm, torch.arange(len(arm.tokens))[None])[0])


def ratio(plain: PromptTotals, arm: PromptTotals, pick: Tensor) -> Tensor:
    """Speedup for every row of prompt indices, [draws, n] -> [draws]."""
    slow = plain.seconds[pick].sum(-1) / plain.tokens[pick].sum(-1)
    fast = arm.seconds[pick].sum(-1) / arm.tokens[pick].sum(-1)
    return slow / fast


def speedup_interval(
    plain: PromptTotals, arm: PromptTotals, *, draws: int = 10_000, seed: int = 0
) -> tuple[float, float] | None:
    """95 % bootstrap over prompts, paired: a draw takes a prompt's times in both arms.

    None for one prompt, and when no token was timed.
    """
    count = len(arm.tokens)
    if count < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(count, (draws, count), generator=generator)
    values = ratio(plain, arm, pick)
    values = values[values.isfinite() & (values > 0)]  # draws of empty answers have no ratio
    if not len(values):
        return None
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def mean_milliseconds(trials: Sequence[Trial]) -> dict[str, float]:
    """Mean draft, verify and overhead time of a round."""
    rounds = batch_rounds(trials)
    count = max(1, len(rounds))
    return {
        "draft": 1000 * sum(turn.draft_s for turn in rounds) / count,
        "verify": 1000 * sum(turn.verify_s for turn in rounds) / count,
        "overhead": 1000 * sum(turn.overhead_s for turn in rounds) / count,
    }


def batch_rounds(trials: Sequence[Trial]) -> list[Round]:
    """Every round once: of answers that were decoded together the rounds of the longest."""
    longest: dict[tuple[int, int], list[Round]] = {}
    for trial in trials:
        key = (trial.together, trial.repeat)
        if len(trial.decoded.rounds) >= len(longest.get(key, [])):
            longest[key] = trial.decoded.rounds
    return [turn for rounds in longest.values() for turn in rounds]


def acceptance_by_category(trials: Sequence[Trial], depth: int) -> dict[str, Acceptance]:
    """Acceptance by slot of every category, in alphabetical order."""
    return {category: acceptance(of, depth) for category, of in by_category(trials).items()}


def by_category(trials: Sequence[Trial]) -> dict[str, list[Trial]]:
    """Trials of every category, in alphabetical order."""
    groups: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.category].append(trial)
    return {category: groups[category] for category in sorted(groups)}
