"""What a report says about a target that was adapted beside its drafter (Medusa-2): its arms are
exact with respect to the adapted target, and that is another one than the user gave.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from draftsmith.drafters.card import told_change
from draftsmith.drafters.fingerprint import NONE
from draftsmith.drafters.target import Target
from draftsmith.eval.arms import ORIGINAL, Arm
from draftsmith.eval.lossy import Estimate, Quality
from draftsmith.eval.summary import Trial, prompt_totals, speedup, speedup_interval
from draftsmith.recipes.schema import TargetConfig

EXACT = (
    "The target is adapted: a LoRA adapter that was trained beside the heads changes what it says. "
    "`lossless` and speedups are with respect to plain decoding of the adapted target; the arm "
    f"`{ORIGINAL}` is what it was before."
)


def original_of(target: Target, config: TargetConfig) -> Target | None:
    """The target without its adapter, loaded once more; None where it has none."""
    return None if target.fingerprint["adapter"] == NONE else Target.load(config)


def adapted_notes(
    arms: Sequence[Arm],
    trials: Mapping[str, Sequence[Trial]],
    change: Mapping[str, Any] | None,
    quality: Quality | None,
) -> list[str]:
    """What the adapter changed, and what drafting gains over the target that it was.

    change: as measured before the drafter was written. quality: the adapted target's plain answers
    beside the original's, under the original.
    """
    found = [EXACT]
    if change is not None:
        found += [f"Before export: {line}." for line in told_change(dict(change))]
    if quality is not None:
        found.append(
            "Plain answers to the evaluation prompts, under the original target: "
            f"{told(quality.log_likelihood_change, '.3f')} nats per token beside the original's "
            f"own; agreement {told(quality.agreement, '.0%')}, identical "
            f"{told(quality.identical, '.0%')}."
        )
    for before in (arm for arm in arms if arm.original):
        same = [
            a
            for a in arms
            if a.drafter and (a.batch, a.sampling) == (before.batch, before.sampling)
        ]
        found += [line for arm in same if (line := over_original(arm, before, trials))]
    return found


def compared(arm: Arm, before: Arm) -> bool:
    """Whether an arm drafts under the same conditions."""
    return arm.drafter is not None and (arm.batch, arm.sampling) == (before.batch, before.sampling)


def over_original(arm: Arm, before: Arm, trials: Mapping[str, Sequence[Trial]]) -> str | None:
    """Seconds per token of the original's plain decoding over those of an arm."""
    plain, mine = (prompt_totals(trials[one.name], prefill=False) for one in (before, arm))
    gained, bounds = speedup(plain, mine), speedup_interval(plain, mine)
    if gained is None:
        return None
    shown = "" if bounds is None else f" (95 %: {bounds[0]:.2f} to {bounds[1]:.2f})"
    return f"{arm.name}: {gained:.2f}x{shown} over `{before.name}`, whose answers are others."


def told(value: Estimate, form: str) -> str:
    """A mean and its interval."""
    if value.interval is None:
        return format(value.mean, form)
    return f"{value.mean:{form}} ({value.interval[0]:{form}} to {value.interval[1]:{form}})"
