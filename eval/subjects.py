"""The drafters that a report measures: from folders, or made on the spot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from draftsmith.data.dataset import Document, split_held_out, training_documents
from draftsmith.drafters.checkpoint import (
    META,
    drafter_config,
    load_drafter,
    read_metadata,
)
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.fingerprint import NONE
from draftsmith.drafters.hub import fetch
from draftsmith.drafters.hub_name import hub_name
from draftsmith.drafters.methods import CONFIGS, Drafter, Untrained, build
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.tune import Calibration, calibrate, from_json
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.schema import DrafterConfig, Recipe

SAME_TARGET = ("architecture", "template", "hidden_size", "vocab_size")


@dataclass(frozen=True)
class Subject:
    """A drafter that is measured, and what is known about it."""

    name: str  # in the arms
    drafter: Drafter
    calibration: Calibration | None  # None: the drafter's guesses have no ranks
    folder: Path | None = None  # None: it was made on the spot
    keep_tree: bool = False  # whether the drafter is told which tree was chosen
    tuned: Tree | None = None  # the shape that `draftsmith tune` chose

    @property
    def described(self) -> dict[str, Any]:
        """Which drafter it is: results of another one are not its own."""
        meta = self.folder and self.folder / META
        return {
            "config": self.drafter.config.model_dump(mode="json"),
            "tuned": None if self.tuned is None else [list(path) for path in self.tuned.paths],
            "folder": str(self.folder),
            "written": None if meta is None else [file.stat().st_mtime for file in weights(meta)],
        }


def weights(meta: Path) -> list[Path]:
    """A drafter's tensors: everything else in its folder may change with a measurement."""
    return sorted(meta.parent.glob("*.safetensors"))


@dataclass(frozen=True)
class Entry:
    """A drafter as the user named it, checked as far as that goes without weights."""

    config: DrafterConfig
    folder: Path | None
    meta: dict[str, Any] | None
    calibration: Calibration | None


def drafter_folder(name: str) -> Path:
    """A drafter's folder, given that, its run's, or a name on the Hub. Raises UserError."""
    path, remote = user_path(name), hub_name(name)
    if remote is not None:
        return fetch(remote)
    inner = path / "drafter"
    return inner if not (path / META).is_file() and inner.is_dir() else path


def find_entries(names: Sequence[str]) -> list[Entry]:
    """Drafters by folder, or by kind where neither training nor answers are needed."""
    return [find_entry(name) for name in names]


def find_entry(name: str) -> Entry:
    """One drafter. Raises UserError."""
    if name in CONFIGS and not user_path(name).is_dir():
        return Entry(untrained_config(name), None, None, None)
    folder = drafter_folder(name)
    if not folder.is_dir():
        makeable = ", ".join(kind for kind in CONFIGS if needs(kind) is None)
        raise UserError(
            f"eval.drafters: no folder {name}; give the folder of a drafter or of its run, its "
            f"name on the Hub (org/name), or a kind that needs none ({makeable})"
        )
    meta = read_metadata(folder)
    return Entry(drafter_config(meta), folder, meta, stored_calibration(meta, folder))


def needs(kind: str) -> str | None:
    """What a kind of drafter cannot do without; None: it can be made on the spot."""
    try:
        config = CONFIGS[kind].model_validate({"kind": kind})
    except ValidationError:
        return "knobs of its own"
    if config.trained_slots:
        return "training"
    return "answers" if config.counts else None


def untrained_config(kind: str) -> DrafterConfig:
    """The config of a drafter that is made on the spot. Raises UserError where it cannot be."""
    lacking = needs(kind)
    if lacking is not None:
        raise UserError(
            f"eval.drafters: {kind} needs {lacking}: run its recipe, and give the run's folder"
        )
    return CONFIGS[kind].model_validate({"kind": kind})


def stored_calibration(meta: dict[str, Any], folder: Path) -> Calibration | None:
    """The calibration that a drafter's folder carries, for drafters that have one."""
    config = drafter_config(dict(meta))
    if not config.walks:
        return None
    if meta.get("calibration") is None:
        raise UserError(
            f"{folder} carries no calibration, which the tree search needs; "
            "evaluate its run once, which writes it"
        )
    return from_json(meta["calibration"], folder, depth=config.depth)


def check_same_target(entries: Sequence[Entry], first: dict[str, Any], folder: str) -> None:
    """Drafters of one report guess for one target. Raises UserError."""
    for entry in entries:
        if entry.meta is None:
            continue
        theirs = entry.meta["target"]
        unlike = [key for key in SAME_TARGET if theirs.get(key) != first.get(key)]
        if theirs.get("adapter", NONE) != first.get("adapter", NONE):
            unlike.append("adapter")
        if unlike:
            texts = ", ".join(f"{key} {theirs.get(key)} / {first.get(key)}" for key in unlike)
            raise UserError(
                f"{entry.folder} was made for another target than {folder} ({texts}); one report "
                "is about one target"
            )


def load_subjects(entries: Sequence[Entry], target: Target, taken: Sequence[str]) -> list[Subject]:
    """Load or make every drafter; names in the report are unlike each other and `taken`."""
    found: list[Subject] = []
    for entry in entries:
        if entry.folder is None:
            drafter = build(entry.config, target, None)
            cast(Untrained, drafter).count([])
            drafter = drafter.to(target.dtype).eval()
        else:
            drafter = load_drafter(entry.folder, target)
        name = free_name(entry, [*taken, *(one.name for one in found)])
        tuned = None if entry.meta is None else tuned_tree(entry.meta)
        found.append(Subject(name, drafter, entry.calibration, entry.folder, tuned=tuned))
    return found


def tuned_tree(meta: dict[str, Any]) -> Tree | None:
    """The shape that a drafter was tuned to, if it was."""
    if meta.get("tuned") is None or meta.get("tree") is None:
        return None
    return Tree(tuple(map(tuple, meta["tree"])))


def free_name(entry: Entry, taken: Sequence[str]) -> str:
    """The kind; where that is taken, with the run's name; where that is too, with a number."""
    names: list[str] = [entry.config.kind]
    if entry.meta is not None and isinstance(entry.meta.get("recipe"), dict):
        names.append(f"{entry.config.kind} ({entry.meta['recipe'].get('name')})")
    names += [f"{names[-1]} #{number}" for number in range(2, 100)]
    return next(name for name in names if name not in taken)


def held_out_documents(recipe: Recipe, run: Path) -> list[Document]:
    """The documents that training did not see."""
    documents, _ = training_documents(run / "rows", recipe.data)
    return split_held_out(documents, recipe.data.held_out, recipe.seed)[1]


def shorten(drafter: Drafter, count: int) -> None:
    """Let a block drafter draft so many tokens. Raises UserError where it cannot."""
    if not isinstance(drafter, DFlash):
        raise UserError(
            f"eval.draft_tokens: a {drafter.config.kind} drafter has no block that could be "
            "smaller; leave it out"
        )
    if count > drafter.depth:
        raise UserError(
            f"eval.draft_tokens: {count} is more than the {drafter.depth} that it was trained for; "
            "give fewer"
        )
    drafter.depth = count


def own_subject(recipe: Recipe, run: Path, target: Target) -> tuple[Subject, Calibration | None]:
    """A run's own drafter, calibrated on the answers that training did not see."""
    folder = run / "drafter"
    drafter, held_out = load_drafter(folder, target), held_out_documents(recipe, run)
    if recipe.eval.draft_tokens is not None:
        shorten(drafter, recipe.eval.draft_tokens)
    calibration = None
    if recipe.drafter.walks:
        calibration = calibrate(recipe, target, drafter, held_out)
    tuned = tuned_tree(read_metadata(folder))
    keep = recipe.eval.tree_nodes == "auto" and tuned is None
    subject = Subject(recipe.drafter.kind, drafter, calibration, folder, keep, tuned)
    return subject, calibration
