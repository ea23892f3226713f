"""`draftsmith train RECIPE --profile`: where the time and the memory of a training step go.

    runs/<name>/profile/profile.json   the table, as numbers
                        trace.json     one more step as torch's profiler sees it, for Perfetto

Nothing of the run is touched: no checkpoint is read or written.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text
from draftsmith.recipes.schema import Recipe
from draftsmith.train.setup import Training, prepare
from draftsmith.train.trainer import take_step

WARM_UP, MEASURED = 2, 3  # steps


def profile_training(recipe: Recipe, run: Path) -> Path:
    """Take a few steps and write what they cost; returns the folder. Raises UserError."""
    if not recipe.drafter.trained_slots:
        raise UserError(f"--profile: {recipe.drafter.kind} takes no gradient steps")
    training = prepare(recipe, run)
    for _ in range(WARM_UP):
        take_step(training)
    training.phases.on = True
    tokens = sum(measured_step(training) for _ in range(MEASURED))
    training.phases.on = False
    found = summary(training, tokens)
    folder = run / "profile"
    if training.accelerator.is_main_process:
        write_text(folder / "profile.json", json.dumps(found, indent=2) + "\n")
    trace(training, folder)
    training.journal.say(table(found))
    training.journal.close()
    return folder


def measured_step(t: Training) -> int:
    """One step; its positions in this process."""
    take_own = t.next_rows()[t.accelerator.process_index :: t.accelerator.num_processes]
    take_step(t)
    return sum(map(t.rows.length, take_own))


def summary(t: Training, tokens: int) -> dict[str, Any]:
    """Per phase: seconds of a step, its share, and the peak of memory."""
    whole = sum(spent.seconds for spent in t.phases.spent.values())
    phases = {
        name: {
            "seconds": spent.seconds / MEASURED,
            "share": spent.seconds / whole,
            "peak_bytes": spent.peak,
        }
        for name, spent in t.phases.spent.items()
    }
    return {
        "steps": MEASURED,
        "device": str(t.target.device),
        "threads": torch.get_num_threads(),
        "processes": t.accelerator.num_processes,
        "step_seconds": whole / MEASURED,
        "tokens_per_second": tokens / whole,
        "phases": phases,
    }


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'phase':24}{'ms a step':>11}{'share':>8}{'peak MB':>10}"]
    lines += [
        f"{name:24}{one['seconds'] * 1e3:11.1f}{one['share']:8.1%}{one['peak_bytes'] / 2**20:10.0f}"
        for name, one in found["phases"].items()
    ]
    lines.append(
        f"{'all':24}{found['step_seconds'] * 1e3:11.1f}{'':8}"
        f"{max(one['peak_bytes'] for one in found['phases'].values()) / 2**20:10.0f}"
    )
    return "\n".join([*lines, f"{found['tokens_per_second']:,.0f} tokens a second in this process"])


def trace(t: Training, folder: Path) -> None:
    """One step under torch's profiler, of the main process."""
    kinds = [ProfilerActivity.CPU]
    if t.target.device.type == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    t.phases.on = True  # its marks are in the trace
    with profile(activities=kinds, profile_memory=True) as seen:
        take_step(t)
    t.phases.on = False
    if t.accelerator.is_main_process:
        partial = folder / ".trace.json.partial"
        seen.export_chrome_trace(str(partial))
        os.replace(partial, folder / "trace.json")
    t.wait()
