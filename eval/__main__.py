"""`python -m draftsmith.eval RECIPE [KEY=VALUE ...] [--dry-run]`: the evaluation by itself."""

import sys
from collections.abc import Sequence
from pathlib import Path

from draftsmith.data.runner import Program, run_recipe
from draftsmith.recipes.entry import guard
from draftsmith.recipes.schema import Recipe


def measure(recipe: Recipe, run: Path) -> None:
    """The evaluation stage."""
    from draftsmith.eval.stage import evaluate

    evaluate(recipe, run)


PROGRAM = Program(
    "python -m draftsmith.eval", {"eval": "decode, measure, report"}, {"eval": measure}
)


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    return guard(lambda: run_recipe(PROGRAM, PROGRAM.parse(argv), argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
