"""Between a running training and its checkpoints: what is kept, and what must agree on resume."""

from typing import Any

from accelerate.utils import gather_object
from pydantic import ValidationError

from draftsmith.data.dataset import fingerprint
from draftsmith.drafters.fingerprint import remembered
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.stages import COSMETIC, EVALUATION, ROUNDING
from draftsmith.train import checkpoint
from draftsmith.train.checkpoint import Snapshot
from draftsmith.train.progress import flatten
from draftsmith.train.rng import rng_state, set_rng_state
from draftsmith.train.setup import Training

FOLDER = "checkpoints"
# Knobs that may change between a run and its resumption, and change no weight.
HARMLESS = ("name", "runs", "eval.", *EVALUATION, *COSMETIC)


def save(t: Training) -> None:
    """Write a checkpoint of this moment. Every process calls it."""
    t.journal.sync()
    t.pulse.does("saving", t.step)
    state = {
        "epoch": t.step // t.steps_per_epoch,
        "step_in_epoch": t.step % t.steps_per_epoch,
        "seconds": t.seconds,
        "supervised": t.supervised,
        "grad_norm": t.grad_norm,
        "meter": t.meter.dump(),
        "rng": gather_object([rng_state()]),
        **identity(t),
    }
    weights, moments = t.parallel.weights(), t.parallel.moments()
    if t.accelerator.is_main_process:
        snapshot = Snapshot(t.step, weights, moments, state)
        keep = t.recipe.train.keep_checkpoints
        checkpoint.save(snapshot, t.folder / FOLDER, keep=keep)
    t.wait()


def resume(t: Training) -> None:
    """Go on from the newest checkpoint that is whole, if there is one."""
    if t.accelerator.is_main_process:
        checkpoint.tidy(t.folder / FOLDER)
    t.wait()
    snapshot = checkpoint.latest(t.folder / FOLDER)
    t.journal.rewind(-1 if snapshot is None else snapshot.step)
    if snapshot is None:
        return
    compare(snapshot.state, identity(t), t)
    restore(snapshot, t)
    t.journal.say(f"resumed at step {t.step} of {t.total}")


def restore(snapshot: Snapshot, t: Training) -> None:
    """Weights, moments, counters and random states as they were."""
    t.parallel.load(snapshot.trainables, snapshot.optimizer)
    t.step, t.seconds = snapshot.step, snapshot.state["seconds"]
    t.supervised, t.grad_norm = snapshot.state["supervised"], snapshot.state["grad_norm"]
    t.meter.load(snapshot.state["meter"])
    states, process = snapshot.state["rng"], t.accelerator.process_index
    if len(states) == t.accelerator.num_processes:
        set_rng_state(states[process])
    else:
        t.meter.sums.pop("own_work", None)  # by process
        t.journal.say(
            f"warning: this run was trained by {len(states)} processes and goes on with "
            f"{t.accelerator.num_processes}: it is the same up to rounding and random draws"
        )


def identity(t: Training) -> dict[str, Any]:
    """What a checkpoint and the run that resumes it must agree in."""
    return {
        "recipe": t.recipe.model_dump(mode="json"),
        "target": t.target.fingerprint,
        "data": fingerprint(t.rows.documents),
    }


def compare(was: dict[str, Any], now: dict[str, Any], t: Training) -> None:
    """Raises UserError for a change that would make this another run."""
    try:
        # Knobs that came since then have their defaults.
        recipe = Recipe.model_validate(was["recipe"]).model_dump(mode="json")
    except ValidationError:
        recipe = was["recipe"]
    before, after = flatten(recipe), flatten(now["recipe"])
    changes = {
        name: f"{name} {before.get(name)} -> {after.get(name)}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name) and not name.startswith(HARMLESS)
    }
    rounding = [changes.pop(name) for name in ROUNDING if name in changes]
    target = remembered(was["target"], now["target"])
    if target != now["target"]:
        changes["target"] = f"the target {was['target']} -> {now['target']}"
    if was["data"] != now["data"]:
        changes["data"] = "the training rows"
    if changes:
        raise UserError(
            f"{t.folder} was started with another recipe; changed: {'; '.join(changes.values())}; "
            "undo that, or choose another name to start a new run"
        )
    if rounding:
        t.journal.say(f"warning: {'; '.join(rounding)}: the same run, but only up to rounding")
