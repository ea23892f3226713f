"""`python -m draftsmith.data RECIPE [KEY=VALUE ...] [--dry-run]`: the data stage by itself."""

import sys
from collections.abc import Sequence

from draftsmith.data.runner import Program, distil, run_recipe
from draftsmith.recipes.entry import guard

PROGRAM = Program(
    "python -m draftsmith.data", {"data": "let the target answer the prompts"}, {"data": distil}
)


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    return guard(lambda: run_recipe(PROGRAM, PROGRAM.parse(argv), argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
