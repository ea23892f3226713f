"""The command line: `draftsmith run|data|train|eval RECIPE [KEY=VALUE ...] [--dry-run]`,
`draftsmith tune RUN`, `draftsmith export|push|stitch DRAFTER ...`, and `draftsmith data
stats|inspect|merge`.

`eval` also takes drafters: their folders, those of their runs, or names on the Hub.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.data.runner import Program, Work, distil, run_recipe
from draftsmith.data.tools import TOOLS
from draftsmith.drafters.hub_name import hub_name
from draftsmith.recipes.entry import Arguments, guard, open_run, tell
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.load import shipped_recipes
from draftsmith.recipes.schema import Recipe
from draftsmith.train.tools import TOOLS as LEAVING

COMMANDS = {
    "run": "all stages; what is finished is skipped",
    "data": "let the target answer the prompts; see also data stats, inspect, merge --help",
    "train": "train the drafter on the answers",
    "eval": "decode, measure, report; takes a recipe, folders of drafters, or org/name",
    "tune": "choose the chain or tree that decodes fastest here; takes a run's folder",
    "export": "write a drafter's files for another engine; see export --help",
    "push": "put a drafter on the Hub; see push --help",
    "stitch": "put trained MTP layers into a copy of their target's checkpoint",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 2 for bad input, 130 when interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    return guard(lambda: command(words))


def command(argv: Sequence[str]) -> None:
    """Do what the command line says."""
    if argv[:1] == ["data"] and argv[1:2] and argv[1] in TOOLS:
        return TOOLS[argv[1]](argv[2:])
    if argv[:1] and argv[0] in LEAVING:
        return LEAVING[argv[0]](argv[1:])
    program = Program("draftsmith", COMMANDS, WORK)
    arguments = program.parse(argv)
    if arguments.command == "tune":
        return tune_folder(arguments)
    more: list[str] = []
    if arguments.command == "eval":
        arguments, more = with_drafters(arguments)
    if arguments.command == "eval" and is_drafter(arguments.recipe):
        evaluate_folder(arguments, argv, compared=bool(more))
    elif arguments.accelerate is not None:
        launch_training(program, arguments, argv)
    else:
        run_recipe(program, arguments, argv)


def with_drafters(arguments: Arguments) -> tuple[Arguments, list[str]]:
    """Words that set no knob name further drafters: `eval.drafters`. A folder or recipe says under
    which conditions, wherever it stands.
    """
    words = [word for word in arguments.overrides if "=" not in word]
    knobs = tuple(word for word in arguments.overrides if "=" in word)
    if not words:
        return arguments, words
    first, *more = [arguments.recipe, *words]
    there = user_path(first).exists() or is_drafter(first)
    if not there and first not in shipped_recipes():  # a kind, no conditions
        first, more = more[0], [first, *more[1:]]
    listed = f"eval.drafters={json.dumps(more)}"
    return replace(arguments, recipe=first, overrides=(*knobs, listed)), more


def is_drafter(word: str) -> bool:
    """Whether a word names a drafter, here or on the Hub, and not a recipe."""
    return user_path(word).is_dir() or hub_name(word) is not None


def launch_training(program: Program, arguments: Arguments, argv: Sequence[str]) -> None:
    """The stages that were asked for, training with several processes."""
    from draftsmith.train.launch import launch

    if arguments.command not in ("train", "run"):
        raise UserError(f"--accelerate: only training takes several processes, not {argv[0]}")
    stages = ["data", "train", "eval"] if arguments.command == "run" else ["train"]
    for stage in stages:
        if stage == "train":
            launch(arguments)
        else:
            alone = replace(arguments, command=stage, accelerate=None)
            run_recipe(program, alone, argv)


def train_drafter(recipe: Recipe, run: Path) -> None:
    """The training stage."""
    if recipe.drafter.trained_slots:
        from draftsmith.train.trainer import train

        train(recipe, run)
    else:
        from draftsmith.train.untrained import keep

        keep(recipe, run)


def measure(recipe: Recipe, run: Path) -> None:
    """The evaluation stage."""
    from draftsmith.eval.stage import evaluate

    evaluate(recipe, run)


def profile_step(recipe: Recipe, run: Path) -> None:
    """Instead of the training stage."""
    from draftsmith.train.profiling import profile_training

    tell(f"finished: {profile_training(recipe, run)}")


WORK: dict[str, Work] = {
    "data": distil,
    "train": train_drafter,
    "eval": measure,
    "profile": profile_step,
}


def evaluate_folder(arguments: Arguments, argv: Sequence[str], *, compared: bool) -> None:
    """Measure a drafter from its folder alone, or a run's; overrides change the recipe that it
    carries. compared: with other drafters, which gives the report a run's folder of its own, as a
    drafter from the Hub has.
    """
    if arguments.dry_run:
        raise UserError("--dry-run plans a recipe; a drafter's folder has nothing left to plan")
    from draftsmith.drafters.checkpoint import read_metadata
    from draftsmith.eval.stage import evaluate_checkpoint, stored_recipe
    from draftsmith.eval.subjects import drafter_folder

    folder, remote = drafter_folder(arguments.recipe), hub_name(arguments.recipe)
    named = [f"name={remote.short}"] if remote else []
    named = ["name=compare"] if compared else named
    recipe = stored_recipe(read_metadata(folder), folder, (*named, *arguments.overrides))
    if not compared and remote is None:  # the Hub's cache is not written to
        evaluate_checkpoint(folder, recipe, folder / "report")
        return
    with open_run(recipe, ["draftsmith", *argv]) as run:
        evaluate_checkpoint(folder, recipe, run / "report")


def tune_folder(arguments: Arguments) -> None:
    """Choose a run's shape; overrides change the recipe that its drafter carries."""
    path = user_path(arguments.recipe)
    if arguments.dry_run or not path.is_dir():
        raise UserError(f"tune takes the folder of a finished run, not {arguments.recipe}")
    from draftsmith.drafters.checkpoint import read_metadata
    from draftsmith.eval.stage import stored_recipe
    from draftsmith.eval.subjects import drafter_folder
    from draftsmith.eval.tuning import tune

    folder = drafter_folder(arguments.recipe)
    tune(folder, stored_recipe(read_metadata(folder), folder, arguments.overrides))


if __name__ == "__main__":
    sys.exit(main())
