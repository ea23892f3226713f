"""What a run says while it trains: counters, log.jsonl, trackers, the bar."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from torch import Tensor

from draftsmith.data.bar import Bar
from draftsmith.data.plan import check_trackers
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.stages import flat

# What is shown beside the bar, and as what.
SHOWN = {"loss": "loss", "tau": "tau", "tokens_per_second": "tokens a second"}
Record = dict[str, Any]  # JSON values; every record of a step says which under "step"


class Meter:
    """Sums and counts since the last log line, of this process; `total` adds all processes."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self.accelerator, self.device = accelerator, device
        self.sums: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor]) -> None:
        """Add a micro-batch's sums, in double precision: counts reach millions."""
        for name, value in sums.items():
            value = value.detach().to(self.device, torch.float64)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def total(self) -> dict[str, Tensor]:
        """Sums over all processes, on the CPU. Every process calls it, with the same names."""
        names = sorted(self.sums)
        if not names:
            return {}
        flat = torch.cat([self.sums[name].reshape(-1) for name in names])
        flat = self.accelerator.reduce(flat, reduction="sum").cpu()
        pieces = flat.split([self.sums[name].numel() for name in names])
        return {n: p.reshape(self.sums[n].shape) for n, p in zip(names, pieces, strict=True)}

    def dump(self) -> dict[str, Any]:
        """As JSON, summed over all processes."""
        return {name: value.tolist() for name, value in self.total().items()}

    def load(self, values: dict[str, Any]) -> None:
        """Go on from `dump`: the main process carries the sums of all."""
        share = 1.0 if self.accelerator.is_main_process else 0.0
        self.sums = {
            name: share * torch.tensor(value, dtype=torch.float64, device=self.device)
            for name, value in values.items()
        }


class Journal:
    """log.jsonl, the trackers and the bar. Other processes than the main one are silent."""

    def __init__(self, recipe: Recipe, folder: Path, *, main: bool) -> None:
        self.recipe, self.folder, self.main = recipe, folder, main
        self.path = folder / "log.jsonl"
        self.trackers: dict[str, GeneralTracker] = {}
        self.bar: Bar | None = None
        self.shown: dict[str, float] = {}
        check_trackers(recipe)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.main:
            if self.bar is None:
                print(text)
            else:
                self.bar.say(text)

    def open(self, total: int, *, done: int) -> None:
        """Start the trackers, and show the bar from now on."""
        for name in self.recipe.train.trackers if self.main else ():
            try:
                self.trackers[name] = start_tracker(name, self.recipe, self.folder)
            except Exception as error:
                self.say(f"warning: tracker {name} did not start and is left out: {error}")
        self.bar = Bar("train", total, "steps", done=done, quiet=not self.main)

    def advance(self) -> None:
        """One step is done."""
        if self.bar is not None:
            self.bar.advance()

    def write(self, record: Record) -> None:
        """Append a record to log.jsonl, and give its numbers to the trackers and the bar."""
        if not self.main:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); mend that and run again: "
                "training goes on from its last checkpoint"
            ) from error
        values = {f"{record['kind']}/{name}": value for name, value in numbers(record).items()}
        for name in list(self.trackers):
            self.attempt(name, lambda tracker: tracker.log(values, step=record["step"]))
        if self.bar is not None:
            self.shown.update({k: record[k] for k in SHOWN if record.get(k) is not None})
            shown = [f"{SHOWN[name]} {value:.3g}" for name, value in self.shown.items()]
            self.bar.note(", ".join(shown))

    def rewind(self, step: int) -> None:
        """Drop what was logged after `step`: those steps will be taken again."""
        if self.main and self.path.exists():
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
            write_text(self.path, "".join(line + "\n" for line in lines if is_before(line, step)))

    def sync(self) -> None:
        """Make the log durable, so that it is never behind a checkpoint."""
        if self.main and self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """End the bar and the trackers."""
        if self.bar is not None:
            self.bar.close()
        for name in list(self.trackers):
            self.attempt(name, lambda tracker: tracker.finish())

    def attempt(self, name: str, action: Callable[[GeneralTracker], Any]) -> None:
        """Trackers are guests: one that fails is named once and left out from then on."""
        try:
            action(self.trackers[name])
        except Exception as error:
            del self.trackers[name]
            self.say(f"warning: tracker {name} failed and is left out from now on: {error}")


def start_tracker(name: str, recipe: Recipe, folder: Path) -> GeneralTracker:
    """One tracker, told the recipe."""
    tracker: GeneralTracker
    if name == "wandb":
        tracker = WandBTracker("draftsmith", name=recipe.name, dir=str(folder))
    else:
        tracker = TensorBoardTracker("tensorboard", folder)
    tracker.start()
    tracker.store_init_configuration(flatten(recipe.model_dump(mode="json")))
    return tracker


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Nested blocks as dotted names; what is no number, text or truth value as its text."""
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in flat(values).items()
    }


def numbers(record: Record) -> dict[str, float]:
    """The numbers of a record; a list's entries are named by slot, from 1."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat |= {f"{name}/{slot}": entry for slot, entry in enumerate(value, start=1)}
        elif isinstance(value, dict):
            flat |= {f"{name}/{key}": entry for key, entry in value.items()}
        elif name != "step":
            flat[name] = value
    return {name: value for name, value in flat.items() if isinstance(value, int | float)}


def is_before(line: str, step: int) -> bool:
    """Whether a log line is whole and not after `step`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    at = record.get("step", 0) if isinstance(record, dict) else None
    return isinstance(at, int) and at <= step
