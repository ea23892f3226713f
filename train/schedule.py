"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no state."""

import math

from draftsmith.recipes.schema import OptimConfig


def lr_share(step: int, total: int, config: OptimConfig) -> float:
    """Share of `optim.lr` that step `step` (0-based) of `total` uses.

    A linear warm-up reaches 1 at its last step; `cosine` and `wsd` (warm-up, stable, decay:
    MiniCPM, 2404.06395) would reach `min_lr_share` at step `total`, the first that is not taken.
    """
    assert 0 <= step <= total, f"step {step} of {total}"
    warmup = min(config.warmup_steps, total)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress(step, warmup, total)))
    else:
        start = max(warmup, total - round(config.wsd_decay * total))
        share = 1.0 - progress(step, start, total)
    return config.min_lr_share + (1.0 - config.min_lr_share) * share


def progress(step: int, start: int, end: int) -> float:
    """How far step is from start (0) to end (1)."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
