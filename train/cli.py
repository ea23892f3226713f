"""The command line: `draftsmith run|data|train|eval RECIPE [KEY=VALUE ...]`.

Stages are imported when they start, so that help and a bad recipe answer at once.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from draftsmith.recipes.entry import (
    Arguments,
    guard,
    is_main_process,
    open_run,
    parse_arguments,
    run_folder,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.stages import STAGES, TRAIN, Stage, is_finished, need, run_stage

COMMANDS = {
    "run": "all stages; what is finished is skipped",
    "data": "let the target answer the prompts",
    "train": "train the drafter on the answers",
    "eval": "decode, measure, report; takes a recipe or a drafter's folder",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 2 for bad input, 130 when interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    return guard(lambda: command(words))


def command(argv: Sequence[str]) -> None:
    """Do what the command line says."""
    arguments = parse_arguments(argv, prog="draftsmith", commands=COMMANDS)
    if arguments.command == "eval" and Path(arguments.recipe).expanduser().is_dir():
        evaluate_folder(arguments)
        return
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    asked = [stage for stage in STAGES if arguments.command in ("run", stage.name)]
    left = [stage for stage in STAGES if not is_finished(recipe, run_folder(recipe), stage)]
    if arguments.dry_run:
        show_plan(recipe)
        print(
            "to do    " + (", ".join(stage.name for stage in left if stage in asked) or "nothing")
        )
        return
    if any(stage in left for stage in asked):
        check_processes(asked)
        check_order(recipe, asked[0])
        show_plan(recipe)
        with open_run(recipe, ["draftsmith", *argv]) as run:
            for stage in asked:
                take(stage, recipe, run)
    tell(f"finished: {run_folder(recipe) / asked[-1].result}")


def take(stage: Stage, recipe: Recipe, run: Path) -> None:
    """Do a stage unless it is finished."""
    tell(f"\n{stage.name}: {COMMANDS[stage.name]}")
    main_process = is_main_process()
    if not run_stage(recipe, run, stage, lambda: WORK[stage.name](recipe, run), main=main_process):
        tell(f"finished before: {run / stage.result}")


def distil(recipe: Recipe, run: Path) -> None:
    """The data stage."""
    from draftsmith.data.stage import prepare

    prepare(recipe, run)


def train_drafter(recipe: Recipe, run: Path) -> None:
    """The training stage."""
    from draftsmith.train.trainer import train

    train(recipe, run)


def measure(recipe: Recipe, run: Path) -> None:
    """The evaluation stage."""
    from draftsmith.eval.stage import evaluate

    evaluate(recipe, run)


WORK: dict[str, Callable[[Recipe, Path], None]] = {
    "data": distil,
    "train": train_drafter,
    "eval": measure,
}


def evaluate_folder(arguments: Arguments) -> None:
    """Measure a drafter from its folder alone; overrides change the recipe that it carries."""
    if arguments.dry_run:
        raise UserError("--dry-run plans a recipe; a drafter's folder has nothing left to plan")
    from draftsmith.drafters.checkpoint import read_metadata
    from draftsmith.eval.stage import evaluate_checkpoint, stored_recipe

    folder = Path(arguments.recipe).expanduser()
    recipe = stored_recipe(read_metadata(folder), folder, arguments.overrides)
    evaluate_checkpoint(folder, recipe)


def show_plan(recipe: Recipe) -> None:
    """Print what will be done; refuses what cannot work."""
    from draftsmith.train.plan import make_plan, render

    tell(render(make_plan(recipe), recipe))


def check_order(recipe: Recipe, first: Stage) -> None:
    """A stage needs those before it."""
    for stage in STAGES[: STAGES.index(first)]:
        need(recipe, run_folder(recipe), stage, f"draftsmith {stage.name}")


def check_processes(asked: Sequence[Stage]) -> None:
    """Only training is spread over processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and list(asked) != [TRAIN]:
        raise UserError(
            "several processes only train; run `draftsmith data` before and `draftsmith eval` "
            "after `accelerate launch -m draftsmith.train RECIPE`"
        )


def tell(text: str) -> None:
    """Print, once for all processes."""
    if is_main_process():
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
