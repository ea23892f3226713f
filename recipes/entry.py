"""What every entry point shares: arguments, the run's folder, and errors in one line."""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.load import shipped_recipes
from draftsmith.recipes.provenance import version, write_resolved
from draftsmith.recipes.schema import Recipe

# How a drafter is named on the command line.
DRAFTER = "a run's folder, a drafter's, or its name on the Hub (org/name, org/name@revision)"
BAD_INPUT, INTERRUPTED = 2, 130  # exit codes
# What the user's machine says no to; anything else is a fault of ours and keeps its traceback.
REFUSALS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EACCES: "no permission; give a folder that you may write to (runs=FOLDER)",
    errno.EPERM: "no permission; give a folder that you may write to (runs=FOLDER)",
    errno.EROFS: "the disk is read-only; give a folder that you may write to (runs=FOLDER)",
    errno.ENOTDIR: "a file is in the way of a folder; move it or give another one (runs=FOLDER)",
    errno.EEXIST: "a file is in the way of a folder; move it or give another one (runs=FOLDER)",
    errno.ENAMETOOLONG: "the name is too long; give a shorter one",
}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line."""

    command: str
    recipe: str
    overrides: tuple[str, ...]
    dry_run: bool
    accelerate: str | None = None  # how several processes train: a config file, or a shipped name
    processes: int | None = None  # None: as many as there are GPUs
    profile: bool = False  # only say where the time and memory of a training step go


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Bad usage is bad input."""
        raise UserError(f"{message}; see `{self.prog} --help`")


def parse_arguments(argv: Sequence[str], *, prog: str, commands: dict[str, str]) -> Arguments:
    """`COMMAND RECIPE [KEY=VALUE ...] [--dry-run]`; with one command, it is not named."""
    about = "\n".join(f"  {name:6} {text}" for name, text in commands.items())
    names = "\n".join(f"  {name}" for name in sorted(shipped_recipes()))
    parser = Parser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Train drafters for speculative decoding.\n\n{about}",
        epilog=f"shipped recipes:\n{names}",
        allow_abbrev=False,
    )
    parser.set_defaults(command=next(iter(commands)))
    if len(commands) > 1:
        parser.add_argument("command", choices=commands, metavar="COMMAND", help="see above")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("recipe", metavar="RECIPE", help="a .yaml file, or a shipped recipe's name")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="for example optim.lr=1e-4"
    )
    parser.add_argument(
        "--profile", action="store_true", help="train: take a few steps and say what they cost"
    )
    parser.add_argument(
        "--accelerate",
        metavar="HOW",
        help="train with several processes: ddp, fsdp2, zero2, zero3 or a file for `accelerate "
        "launch`",
    )
    parser.add_argument(
        "--processes", type=int, metavar="N", help="how many; without it, one for every GPU"
    )
    parser.add_argument("--version", action="version", version=version("draftsmith"))
    # Not parse_args: it refuses overrides that stand behind an option.
    found = parser.parse_intermixed_args(list(argv))
    if found.processes is not None and (found.accelerate is None or found.processes < 1):
        parser.error("--processes: give 1 or more, together with --accelerate")
    overrides = tuple(found.overrides)
    if found.profile and found.command != "train":
        parser.error("--profile: only training is profiled")
    return Arguments(
        found.command,
        found.recipe,
        overrides,
        found.dry_run,
        found.accelerate,
        found.processes,
        found.profile,
    )


def guard(action: Callable[[], None]) -> int:
    """Run a command; the exit code. What a user can mend ends in one line on stderr."""
    try:
        action()
    except UserError as error:
        return complain(str(error))
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        return INTERRUPTED
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        return complain(where + REFUSALS[error.errno])
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return complain(
            "out of memory; lower train.rows_per_micro_batch, train.chunk or data.distil.batch_size"
        )
    return 0


def out_of_memory(error: Exception) -> bool:
    """Python's, CUDA's (a RuntimeError, told without importing torch) or the CPU allocator's."""
    kinds = (type(error).__name__ == "OutOfMemoryError", "can't allocate memory" in str(error))
    return isinstance(error, MemoryError) or any(kinds)


def complain(message: str) -> int:
    """One line on stderr, whatever the message holds; the exit code for bad input."""
    say("error: " + message)
    return BAD_INPUT


def say(message: str) -> None:
    """One printable line on stderr."""
    line = "".join(character if character.isprintable() else " " for character in message)
    print("draftsmith: " + " ".join(line.split()), file=sys.stderr)


def run_folder(recipe: Recipe) -> Path:
    """Where the run's files are."""
    return user_path(recipe.runs) / recipe.name


def is_main_process() -> bool:
    """Whether this is the only process, or the first of those that a launcher started."""
    return os.environ.get("RANK", "0") == "0"


def tell(text: str) -> None:
    """Print, once for all processes."""
    if is_main_process():
        print(text, flush=True)


@contextmanager
def open_run(recipe: Recipe, argv: Sequence[str]) -> Iterator[Path]:
    """The run's folder: made, held against a second command, and told where it comes from."""
    run = run_folder(recipe)
    if not is_main_process():
        yield run
        return
    run.mkdir(parents=True, exist_ok=True)
    with hold(run):
        write_resolved(recipe, run, argv)
        yield run


@contextmanager
def hold(run: Path) -> Iterator[None]:
    """Keep other commands out of a run. The system lets go of it when the process ends."""
    import fcntl

    with open(run / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another draftsmith command is at work in {run}; wait for it or use another name"
            ) from error
        yield
