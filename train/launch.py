"""Training with several processes, by `accelerate launch`."""

import subprocess
import sys

import torch

from draftsmith.data.plan import make_plan
from draftsmith.data.runner import check_order
from draftsmith.recipes.entry import Arguments, run_folder, tell
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.load import launching, load_recipe
from draftsmith.recipes.stages import TRAIN, is_finished


def launch(arguments: Arguments) -> None:
    """Train as `--accelerate` says, in processes of their own. Raises UserError, and SystemExit
    where they fail: they have said why.
    """
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    command = command_line(arguments)
    if not (arguments.dry_run or arguments.profile) and is_finished(
        recipe, run_folder(recipe), TRAIN
    ):
        tell(f"finished before: {run_folder(recipe) / TRAIN.result}")
        return
    check_order(recipe, TRAIN)
    make_plan(recipe)  # what is wrong is said here, once and in one line
    code = subprocess.call(command)
    if code:
        sys.exit(code)


def command_line(arguments: Arguments) -> list[str]:
    """What is run."""
    assert arguments.accelerate is not None
    count = arguments.processes or torch.cuda.device_count()
    if not count:
        raise UserError("--accelerate: there is no GPU to count; say --processes N")
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(launching(arguments.accelerate))),
        *("--num_processes", str(count)),
        *("-m", "draftsmith.train", arguments.recipe, *arguments.overrides),
        *(["--dry-run"] if arguments.dry_run else []),
        *(["--profile"] if arguments.profile else []),
    ]
