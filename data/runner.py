"""Take a recipe through stages, with the checks that every entry point shares.

The stages themselves are imported when they start: help and a bad recipe answer at once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.rows import lacks_rows
from draftsmith.recipes.entry import (
    Arguments,
    is_main_process,
    open_run,
    parse_arguments,
    run_folder,
    tell,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sharing import asked_shares
from draftsmith.recipes.stages import (
    DATA,
    STAGES,
    TRAIN,
    Stage,
    is_finished,
    need,
    run_stage,
    write_marker,
)

Work = Callable[[Recipe, Path], object]


@dataclass(frozen=True)
class Program:
    """How a command line is called, and what its commands do."""

    name: str
    commands: dict[str, str]  # command -> what it does, in words
    work: Mapping[str, Work]  # by the stage's name

    def parse(self, argv: Sequence[str]) -> Arguments:
        """Raises UserError for bad usage."""
        return parse_arguments(argv, prog=self.name, commands=self.commands)


def run_recipe(program: Program, arguments: Arguments, argv: Sequence[str]) -> None:
    """Do the stages that were asked for; with --dry-run, only say what would be done."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    asked = [stage for stage in STAGES if arguments.command in ("run", stage.name)]
    left = [stage for stage in STAGES if not is_finished(recipe, run_folder(recipe), stage)]
    lost = DATA in asked and DATA not in left and lacks_rows(run_folder(recipe) / DATA.result)
    if lost:
        left = [DATA, *left]
    if arguments.dry_run:
        show_plan(recipe)
        to_do = ", ".join(stage.name for stage in left if stage in asked)
        tell("to do    " + (to_do or "nothing"))
        return
    if arguments.profile:
        check_order(recipe, TRAIN)
        with open_run(recipe, [*program.name.split(), *argv]) as run:
            program.work["profile"](recipe, run)
        return
    if any(stage in left for stage in asked):
        check_processes(asked)
        check_order(recipe, asked[0])
        show_plan(recipe)
        with open_run(recipe, [*program.name.split(), *argv]) as run:
            if lost:
                write_marker(recipe, run, DATA, "begun")  # it goes on from the rows that are left
            for stage in asked:
                take(program, stage, recipe, run)
    tell(f"finished: {run_folder(recipe) / asked[-1].result}")


def take(program: Program, stage: Stage, recipe: Recipe, run: Path) -> None:
    """Do a stage unless it is finished."""
    tell(f"\n{stage.name}: {program.commands[stage.name]}")
    work, main = program.work[stage.name], is_main_process()
    if not run_stage(recipe, run, stage, lambda: work(recipe, run), main=main):
        tell(f"finished before: {run / stage.result}")


def show_plan(recipe: Recipe) -> None:
    """Print what will be done; refuses what cannot work."""
    from draftsmith.data.plan import make_plan, render

    tell(render(make_plan(recipe, asked_shares()), recipe))


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


def distil(recipe: Recipe, run: Path) -> None:
    """The data stage."""
    from draftsmith.data.stage import prepare

    prepare(recipe, run)
