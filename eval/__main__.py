"""`python -m draftsmith.eval RECIPE [KEY=VALUE ...]`: the evaluation stage by itself."""

import sys
from collections.abc import Sequence

from draftsmith.recipes.entry import guard, open_run, parse_arguments, run_folder
from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.stages import DATA, EVAL, TRAIN, need, run_stage


def command(argv: Sequence[str]) -> None:
    """Measure a recipe's trained drafter."""
    about = {"eval": "decode, measure, report"}
    arguments = parse_arguments(argv, prog="python -m draftsmith.eval", commands=about)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    for stage in (DATA, TRAIN):
        need(recipe, run_folder(recipe), stage, f"draftsmith {stage.name}")
    from draftsmith.eval.stage import evaluate

    with open_run(recipe, ["python", "-m", "draftsmith.eval", *argv]) as run:
        run_stage(recipe, run, EVAL, lambda: evaluate(recipe, run))
    print(f"finished: {run / EVAL.result}")


if __name__ == "__main__":
    sys.exit(guard(lambda: command(sys.argv[1:])))
