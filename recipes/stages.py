"""Which stages of a run are begun or finished, and with which settings.

`stages/<stage>.json` in the run's folder holds the settings that a stage's outputs depend on.
Outputs that were made with other settings are refused: nothing is ever mixed or deleted.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path, write_text
from draftsmith.recipes.schema import Recipe

# Knobs that change what is shown or kept, not the results,
COSMETIC = (
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.keep_checkpoints",
    "train.trackers",
    "train.patience",
)
# and these only the order in which numbers are added up: a run may go on with others.
ROUNDING = ("train.rows_per_micro_batch", "train.chunk", "train.feature_cache", "target.device")
# Where answers come from and how patiently, not what they are,
TRANSPORT = (
    "data.distil.urls",
    "data.distil.share",
    "data.distil.server.key_variable",
    "data.distil.server.concurrency",
    "data.distil.server.timeout",
    "data.distil.server.tries",
    "data.distil.server.patience",
)
# what says nothing unless servers are asked.
SERVED = ("data.distil.backend", "data.distil.server.model", "data.distil.server.api")
# What each choice of a knob makes use of: with another choice these say nothing.
USED_WITH = {
    "objective.weights": {
        "geometric": ("objective.decay",),
        "exponential": ("objective.gamma",),
        "list": ("objective.slot_weights",),
        "dpace": ("objective.dpace_alpha",),
    },
    "objective.loss": {"kl": ("objective.temperature",), "lk": ("objective.lk_eta",)},
    "optim.schedule": {"wsd": ("optim.wsd_decay",)},
}
WEIGHTS = "objective.weights"  # end-to-end TV has its own

# The prompts of the report, which only it reads; and the data stage, to keep self-written prompts
# apart from them.
EVALUATION = ("data.eval_prompts", "data.eval_split")


@dataclass(frozen=True)
class Stage:
    """A part of a run: what it depends on, and what it leaves."""

    name: str
    keys: tuple[str, ...]  # dotted keys or blocks of the recipe
    outputs: tuple[str, ...]  # folders of the run; begun when one of them is there
    result: str  # the folder without which the stage is not finished
    but: tuple[str, ...] = ()  # dotted keys in those blocks that it does not depend on


ROWS = (
    "seed",
    "target",
    "data.prompts",
    "data.split",
    "data.grow",
    "data.limit",
    "data.mix",
    "data.answers",
    "data.turns",
    "data.overlap_words",
    "data.near_duplicates",
    "data.thinking",
)
DATA = Stage(
    "data",
    (*ROWS, "data.self_written", "data.max_prompt_tokens", "data.distil"),
    ("rows", "self_written"),
    "rows",
)
TRAIN = Stage(
    "train",
    ("seed", "target", "data", "drafter", "adapter", "objective", "optim", "train"),
    ("checkpoints", "drafter"),
    "drafter",
    but=EVALUATION,
)
EVAL = Stage("eval", (*TRAIN.keys, "eval"), ("report",), "report")
STAGES = (DATA, TRAIN, EVAL)


def settings(recipe: Recipe, stage: Stage) -> dict[str, Any]:
    """What the stage's outputs depend on, as dotted key -> value."""
    knobs = flat(recipe.model_dump(mode="json"))
    idle = idle_knobs(knobs)
    mine = {key: knobs[key] for key in knobs if key not in idle and depends(recipe, stage, key)}
    for key in ("data.prompts", "data.eval_prompts"):
        if key in mine and (path := user_path(str(mine[key]))).is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            mine[f"contents of {key}"] = digest[:16]
    return mine


def depends(recipe: Recipe, stage: Stage, key: str) -> bool:
    """Whether the stage's outputs depend on a dotted key."""
    written = recipe.data.self_written.count > 0
    if key.startswith("data.self_written.") and not written:
        return False
    if key in EVALUATION and stage == DATA:
        return written
    if key in SERVED and recipe.data.distil.backend == "transformers":
        return False
    named = any(key == part or key.startswith(f"{part}.") for part in stage.keys)
    return named and key not in (*COSMETIC, *ROUNDING, *TRANSPORT, *stage.but)


def idle_knobs(knobs: dict[str, Any]) -> set[str]:
    """Dotted keys that say nothing beside the other knobs."""
    weighted = knobs["objective.loss"] != "e2e_tv"
    idle = set() if weighted else {WEIGHTS}
    for knob, choices in USED_WITH.items():
        chosen = knobs[knob] if weighted or knob != WEIGHTS else None
        idle.update(*(keys for choice, keys in choices.items() if choice != chosen))
    return idle


def default_of(recipe: Recipe, key: str) -> Any:
    """What a dotted key says where it is not given."""
    *blocks, name = key.split(".")
    holder: Any = recipe
    for block in blocks:
        holder = getattr(holder, block)
    default = type(holder).model_fields[name].get_default(call_default_factory=True)
    return to_jsonable_python(default)


def flat(block: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested blocks as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in block.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def marker(run: Path, stage: Stage) -> Path:
    """The stage's marker file."""
    return run / "stages" / f"{stage.name}.json"


def is_finished(recipe: Recipe, run: Path, stage: Stage) -> bool:
    """Whether the stage's result is there, made with these very settings.

    Raises UserError when there are outputs that were made with others.
    """
    here = [run / name for name in stage.outputs if (run / name).exists()]
    if not here:
        return False
    known = read_marker(run, stage)
    if known is None:
        raise UserError(
            f"{here[0]} holds files that no run of draftsmith marked as its own; "
            "give the recipe another name (name=...) or move them away"
        )
    differences = compare(*comparable(recipe, stage, known["settings"]))
    if differences:
        raise UserError(
            f"{here[0]} was made with other settings ({'; '.join(differences)}); "
            f"give the recipe another name (name=...) or delete {' and '.join(map(str, here))}"
        )
    return known["state"] == "finished" and (run / stage.result).exists()


def comparable(
    recipe: Recipe, stage: Stage, then: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a marker, and those of now, without what makes no difference.

    Markers of older versions name knobs that say nothing, and lack knobs that came later: a new
    knob's default does what was done before there was one.
    """
    now = settings(recipe, stage)
    idle = idle_knobs(flat(recipe.model_dump(mode="json")))
    known = {
        key: value
        for key, value in then.items()
        if key not in idle and key.removeprefix("contents of ") not in stage.but
    }
    young = {
        key
        for key in now.keys() - known.keys()
        if not key.startswith("contents of ") and now[key] == default_of(recipe, key)
    }
    return known, {key: value for key, value in now.items() if key not in young}


def run_stage(
    recipe: Recipe, run: Path, stage: Stage, work: Callable[[], object], *, main: bool = True
) -> bool:
    """Do the stage's work unless it is finished; whether it did. Only `main` writes markers."""
    if is_finished(recipe, run, stage):
        return False
    if main:
        write_marker(recipe, run, stage, "begun")
    work()
    if main:
        write_marker(recipe, run, stage, "finished")
    return True


def need(recipe: Recipe, run: Path, stage: Stage, command: str) -> None:
    """Raise UserError unless an earlier stage is finished."""
    if not is_finished(recipe, run, stage):
        raise UserError(
            f"{run / stage.result} is not finished; run `{command}` first, or `draftsmith run`"
        )


def write_marker(recipe: Recipe, run: Path, stage: Stage, state: str) -> None:
    """Write the marker, atomically."""
    text = json.dumps({"state": state, "settings": settings(recipe, stage)}, indent=1)
    write_text(marker(run, stage), text + "\n")


def read_marker(run: Path, stage: Stage) -> dict[str, Any] | None:
    """The marker, if there is one."""
    path = marker(run, stage)
    if not path.exists():
        return None
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        check_marker(known)
    except (ValueError, RecursionError) as error:
        # The run's files may be good: what they were made with is all that is lost.
        raise UserError(
            f"{path} is damaged ({error}), so nothing says what {run / stage.result} was made "
            "with; restore it from a copy, or leave this run as it is and give the recipe another "
            "name (name=...)"
        ) from error
    return {"state": known["state"], "settings": known["settings"]}


def check_marker(known: Any) -> None:
    """Raises ValueError for what `write_marker` did not write."""
    if not isinstance(known, dict) or known.get("state") not in ("begun", "finished"):
        raise ValueError("no state in it")
    found = known.get("settings")
    if not isinstance(found, dict) or not found:
        raise ValueError("no settings in it")


def compare(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The settings that differ, each as `key: then -> now`; at most four."""
    absent = "absent"
    keys = [key for key in {**then, **now} if then.get(key, absent) != now.get(key, absent)]
    texts = [f"{key}: {then.get(key, absent)} there, {now.get(key, absent)} here" for key in keys]
    return texts if len(texts) <= 4 else [*texts[:3], f"and {len(texts) - 3} more"]
