"""The command line: `draftsmith run|data|train|eval RECIPE [KEY=VALUE ...] [--dry-run]`, and
`draftsmith data stats|inspect|merge`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith.data.runner import Program, Work, distil, run_recipe
from draftsmith.data.tools import TOOLS
from draftsmith.recipes.entry import Arguments, guard
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.schema import Recipe

COMMANDS = {
    "run": "all stages; what is finished is skipped",
    "data": "let the target answer the prompts; see also data stats, inspect, merge --help",
    "train": "train the drafter on the answers",
    "eval": "decode, measure, report; takes a recipe or a drafter's folder",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 2 for bad input, 130 when interrupted."""
    words = sys.argv[1:] if argv is None else list(argv)
    return guard(lambda: command(words))


def command(argv: Sequence[str]) -> None:
    """Do what the command line says."""
    if argv[:1] == ["data"] and argv[1:2] and argv[1] in TOOLS:
        return TOOLS[argv[1]](argv[2:])
    program = Program("draftsmith", COMMANDS, WORK)
    arguments = program.parse(argv)
    if arguments.command == "eval" and user_path(arguments.recipe).is_dir():
        evaluate_folder(arguments)
    else:
        run_recipe(program, arguments, argv)


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


WORK: dict[str, Work] = {"data": distil, "train": train_drafter, "eval": measure}


def evaluate_folder(arguments: Arguments) -> None:
    """Measure a drafter from its folder alone; overrides change the recipe that it carries."""
    if arguments.dry_run:
        raise UserError("--dry-run plans a recipe; a drafter's folder has nothing left to plan")
    from draftsmith.drafters.checkpoint import read_metadata
    from draftsmith.eval.stage import evaluate_checkpoint, stored_recipe

    folder = user_path(arguments.recipe)
    recipe = stored_recipe(read_metadata(folder), folder, arguments.overrides)
    evaluate_checkpoint(folder, recipe)


if __name__ == "__main__":
    sys.exit(main())
