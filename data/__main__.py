"""`python -m draftsmith.data RECIPE [KEY=VALUE ...]`: the data stage by itself."""

import sys
from collections.abc import Sequence

from draftsmith.recipes.entry import guard, open_run, parse_arguments
from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.stages import DATA, run_stage


def command(argv: Sequence[str]) -> None:
    """Distil what a recipe asks for."""
    about = {"data": "let the target answer the prompts"}
    arguments = parse_arguments(argv, prog="python -m draftsmith.data", commands=about)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from draftsmith.data.stage import prepare

    with open_run(recipe, ["python", "-m", "draftsmith.data", *argv]) as run:
        run_stage(recipe, run, DATA, lambda: prepare(recipe, run))
    print(f"finished: {run / DATA.result}")


if __name__ == "__main__":
    sys.exit(guard(lambda: command(sys.argv[1:])))
