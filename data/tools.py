"""`draftsmith data stats|inspect|merge`: folders of rows, for people and from several machines."""

from collections.abc import Callable, Sequence

from draftsmith.recipes.entry import Parser
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path


def stats(words: Sequence[str]) -> None:
    """`stats FOLDER`"""
    parser = Parser(prog="draftsmith data stats", description="Count rows by source.")
    parser.add_argument("folder", metavar="FOLDER", help="a run's folder, or a folder of rows")
    given = parser.parse_args(list(words))
    from draftsmith.data import show

    print(show.stats(user_path(given.folder)))


def inspect(words: Sequence[str]) -> None:
    """`inspect FOLDER [--count N] [--key KEY] [--source SOURCE]`"""
    parser = Parser(prog="draftsmith data inspect", description="Show rows, answers in green.")
    parser.add_argument("folder", metavar="FOLDER", help="a run's folder, or a folder of rows")
    parser.add_argument("--count", type=int, default=3, help="rows that are shown (3)")
    parser.add_argument("--key", help="the row of this key")
    parser.add_argument("--source", help="rows of this source alone")
    given = parser.parse_args(list(words))
    if given.count < 1:
        raise UserError(f"--count {given.count}: give 1 or more")
    from draftsmith.data import show

    folder = user_path(given.folder)
    print(show.inspect(folder, count=given.count, key=given.key, source=given.source))


def merge(words: Sequence[str]) -> None:
    """`merge OUT FOLDER...`"""
    parser = Parser(
        prog="draftsmith data merge", description="Join rows that several machines made."
    )
    parser.add_argument("out", metavar="OUT", help="folder of rows that they are added to")
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="runs, or folders of rows")
    given = parser.parse_args(list(words))
    from draftsmith.data.merge import merge as merge_rows
    from draftsmith.data.rows import MANIFEST
    from draftsmith.data.show import rows_folder

    out = rows_folder(user_path(given.out))
    folders = [rows_folder(user_path(one)) for one in given.folders]
    if (out / MANIFEST).is_file() and out not in folders:
        folders = [out, *folders]
    found = merge_rows(out, folders)
    said = f"{out}: {found.rows:,} rows, {found.dropped:,} dropped prompts"
    said += f", {found.repeated:,} repeated rows left out" if found.repeated else ""
    print(said + (f"; {found.missing:,} are still missing" if found.missing else ""))


TOOLS: dict[str, Callable[[Sequence[str]], None]] = {
    "stats": stats,
    "inspect": inspect,
    "merge": merge,
}
