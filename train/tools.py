"""`draftsmith export DRAFTER --to ENGINE`, `draftsmith push DRAFTER --repo org/name` and
`draftsmith stitch DRAFTER OUT`: drafters leave the house.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.recipes.entry import DRAFTER, Parser
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.train.push import push

if TYPE_CHECKING:
    from draftsmith.drafters.engine_files import Export, Source

PROMPTS, TOKENS = 4, 32  # of --check, where the recipe's evaluation has more


def export(words: Sequence[str]) -> None:
    """`export DRAFTER --to ENGINE [--out FOLDER] [--check]`"""
    parser = Parser(
        prog="draftsmith export", description="Write a drafter's files for another engine."
    )
    parser.add_argument("drafter", metavar="DRAFTER", help=DRAFTER)
    parser.add_argument("--to", required=True, metavar="ENGINE", help="see README, Engines")
    parser.add_argument("--out", metavar="FOLDER", help="where (DRAFTER/exports/ENGINE)")
    parser.add_argument("--check", action="store_true", help="read it back, draft and decode")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as target.model=..")
    given = parser.parse_intermixed_args(list(words))
    from draftsmith.eval.exports import find_export, open_source, serving, write_export

    source = open_source(given.drafter, given.overrides)
    found = find_export(source.kind, given.to)
    out = user_path(given.out) if given.out else source.folder / "exports" / given.to
    if given.out and out.exists():
        raise UserError(f"--out {out}: is there already; give a folder that is not")
    write_export(found, source, out)
    said = serving(
        found,
        target=source.meta["target"]["model"],
        drafter=str(out),
        drafts=source.drafter.depth,
    )
    print(f"{out}\n{said}" + (f"\n({found.note})" if found.note else ""))
    if given.check:
        print(checked(found, source, out))


def checked(found: "Export", source: "Source", out: Path) -> str:
    """What the check says."""
    from draftsmith.eval.export_check import check_export
    from draftsmith.eval.prompts import evaluation_prompts

    recipe = source.recipe
    prompts, _ = evaluation_prompts(source.target, recipe, drafts=source.drafter.depth)
    asked = [prompt.ids for prompt in prompts[:PROMPTS]]
    count = min(recipe.eval.max_new_tokens, TOKENS)
    return check_export(found, source, out, asked, count).sentence()


def stitch(words: Sequence[str]) -> None:
    """`stitch DRAFTER OUT [--target TARGET] [--link]`"""
    parser = Parser(
        prog="draftsmith stitch",
        description="Put trained MTP layers into a copy of their target's checkpoint.",
    )
    parser.add_argument("drafter", metavar="DRAFTER", help="a run's folder, or a drafter's")
    parser.add_argument("out", metavar="OUT", help="folder to be made")
    parser.add_argument("--target", help="the checkpoint, where it has moved: a folder or Hub id")
    parser.add_argument("--link", action="store_true", help="link the files that stay as they are")
    given = parser.parse_args(list(words))
    from draftsmith.drafters.mtp_publish import publish
    from draftsmith.eval.subjects import drafter_folder

    out = user_path(given.out)
    folder = drafter_folder(given.drafter)
    source = publish(folder, out, target=given.target, link=given.link)
    print(f"{out}: {source} with the MTP layers of {folder}")


TOOLS: dict[str, Callable[[Sequence[str]], None]] = {
    "export": export,
    "push": push,
    "stitch": stitch,
}
