"""What is watched while a drafter trains: a sample first, then curves and held-out walks."""

from typing import Any

from torch import Tensor

from draftsmith.data.render import sample_text
from draftsmith.drafters.quantised import count_parameters
from draftsmith.eval.walk import recipe_ranks, walk
from draftsmith.train.joint import phase_at
from draftsmith.train.rng import undisturbed
from draftsmith.train.schedule import lr_share
from draftsmith.train.setup import Training

SLOW = 1.5  # times as long as the others, from which on a process is named


def introduce(t: Training) -> None:
    """What will be trained, and on what."""
    sample = t.rows.documents[0]
    t.journal.say(sample_text(t.target.tokenizer, sample.ids, sample.supervised))
    frozen = count_parameters(t.target.model)
    t.journal.say(
        f"{len(t.rows.documents)} documents in {len(t.rows)} rows, {t.rows.tokens:,} tokens, "
        f"{t.rows.supervised / t.rows.tokens:.0%} supervised; {len(t.held_out)} held out"
    )
    adapters = () if t.target.adapter is None else t.target.adapter.parameters.values()
    adapted = sum(value.numel() for value in adapters)
    learning = "drafter" if not adapted else f"drafter, {adapted:,} of them the target's adapters"
    t.journal.say(
        f"{t.trained:,} trainable parameters ({learning}), {frozen - adapted:,} frozen (target)"
    )
    t.journal.say(f"{t.total} steps, {t.step} of them done")


def log_step(t: Training) -> None:
    """Write what happened since the last log line, and start counting anew."""
    total = t.meter.total()
    t.meter.sums = {}
    t.supervised += int(total["supervised"])
    learned = total["denominator"] > 0
    record = {
        "kind": "train",
        "step": t.step,
        "epoch": (t.step - 1) // t.steps_per_epoch,
        "loss": float(total["loss"] / total["denominator"]) if learned else None,
        "lr": rate_of(t),
        "grad_norm": t.grad_norm,
        "supervised_tokens": t.supervised,
        "skipped_steps": int(total["skipped"]),
        "tokens_per_second": float(total["tokens"] / total["seconds"]),
        "seconds": t.seconds,
    }
    if "language_loss" in total and learned:
        record["language_loss"] = float(total["language_loss"] / total["denominator"])
    if "own_work" in total:
        seconds, positions = total["own_work"].tolist()
        record["own_seconds"] = seconds
        name_slowest(t, seconds, positions)
    t.journal.write({**record, **(curves(total) if learned else {})})


def rate_of(t: Training) -> float:
    """The drafter's learning rate in the step that was taken last."""
    phase = phase_at(t.recipe, t.step - 1, t.total)
    step, steps = t.step - 1 - phase.start, phase.end - phase.start
    return t.recipe.optim.lr * lr_share(step, steps, t.recipe.optim)


def name_slowest(t: Training, seconds: list[float], positions: list[float]) -> None:
    """Say which process the others wait for, where it takes much longer for as much; once for each
    process.
    """
    each = [one / max(1.0, count) for one, count in zip(seconds, positions, strict=True)]
    slowest = max(range(len(each)), key=each.__getitem__)
    others = (sum(each) - each[slowest]) / (len(each) - 1)
    lost = seconds[slowest] - others * positions[slowest]
    if each[slowest] > SLOW * others and lost > 1 and slowest not in t.slow:
        t.slow.add(slowest)
        t.journal.say(
            f"warning: process {slowest} is slow: it takes {each[slowest] / others:.1f} times as "
            f"long as the others for as many tokens; up to step {t.step} they waited {lost:.0f} s"
        )


def curves(total: dict[str, Tensor]) -> dict[str, Any]:
    """Per slot: how often it is right where all before it are, and its overlap with the teacher."""
    found = {
        "conditional_hit_rate": ratios(total["joint_hits"], total["reached"]),
        "uniform_hit_length": uniform_length(total["joint_hits"], total["groups"]),
    }
    if "overlap" in total:
        found["overlap"] = ratios(total["overlap"], total["overlap_valid"])
        found["uniform_overlap_length"] = uniform_length(
            total["joint_overlap"], total["overlap_groups"]
        )
    return found


def ratios(part: Tensor, whole: Tensor) -> list[float]:
    """Ratios of counts; 0 where nothing was counted."""
    return (part / whole.clamp(min=1)).tolist()


def uniform_length(joint: Tensor, groups: Tensor) -> float:
    """1 + the sum over slots of the mean joint hit or overlap: a curve over all roots, no tau."""
    return float(1 + (joint / groups.clamp(min=1)).sum())


def evaluate(t: Training) -> None:
    """Walk the held-out answers; training goes on as if nothing had happened.

    The answers are the original's: of an adapted target this is a curve, not what it decodes.
    """
    if t.target.adapter is not None:
        t.target.adapter.train(False)
    # A target that is spread computes with all processes; one that is not keeps the others waiting.
    t.pulse.does("evaluating", t.step)
    table = None
    with t.parallel.whole():
        if t.accelerator.is_main_process or t.processes.target_is_sharded:
            with undisturbed():
                table = recipe_ranks(t.recipe, t.target, t.drafter, t.held_out)
    if table is not None and t.accelerator.is_main_process:
        result = walk(table)
        categories = sorted(result.by_category.items())
        record = {
            "kind": "held_out",
            "step": t.step,
            "tau": result.total.tau_micro,
            "tau_macro": result.total.tau_macro,
            "conditional_acceptance": result.total.acceptance().conditional,
            "tau_by_category": {name: counts.tau_micro for name, counts in categories},
        }
        t.journal.write(record)
    t.wait()
