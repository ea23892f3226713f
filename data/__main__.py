"""`python -m draftsmith.data RECIPE [KEY=VALUE ...] [--dry-run]`: the data stage by itself;
`python -m draftsmith.data stats|inspect|merge ...`: its rows.
"""

import sys
from collections.abc import Sequence

from draftsmith.data.runner import Program, distil, run_recipe
from draftsmith.data.tools import TOOLS
from draftsmith.recipes.entry import guard

PROGRAM = Program(
    "python -m draftsmith.data", {"data": "let the target answer the prompts"}, {"data": distil}
)


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    if argv[:1] and argv[0] in TOOLS:
        return guard(lambda: TOOLS[argv[0]](argv[1:]))
    return guard(lambda: run_recipe(PROGRAM, PROGRAM.parse(argv), argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
