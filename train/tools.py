"""`draftsmith export DRAFTER --to ENGINE` and `draftsmith push DRAFTER --repo org/name`: drafters
leave the house.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.recipes.entry import Parser
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.provenance import version

if TYPE_CHECKING:
    from draftsmith.drafters.engine_files import Export, Source

DRAFTER = "a run's folder, a drafter's, or its name on the Hub (org/name, org/name@revision)"
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


def push(words: Sequence[str]) -> None:
    """`push DRAFTER --repo org/name --license ID [..]`"""
    given = push_parser().parse_intermixed_args(list(words))
    pairs = [pair(text) for text in given.replace]
    from draftsmith.drafters.hub import upload
    from draftsmith.eval.exports import open_source
    from draftsmith.eval.publish import Offer, prepare

    source = open_source(given.drafter)
    offer = Offer(
        repository=given.repo,
        license=given.license,
        data_license=given.data_license,
        base_model=given.base_model,
        exports=tuple(given.export),
        replace=tuple(pairs),
    )
    with tempfile.TemporaryDirectory(prefix="draftsmith-push-") as folder:
        parcel = prepare(source, offer, Path(folder))
        print(parcel.listing())
        for old, new in parcel.replaced:
            print(f"in texts, {old} is replaced by {new}")
        who = "everybody" if given.public else "those who may see your private repositories"
        if given.dry_run:
            print(f"nothing was pushed; without --dry-run this goes to {given.repo}, for {who}")
            return
        message = f"{source.kind} drafter by {version('draftsmith')}"
        print(upload(given.repo, parcel.files, private=not given.public, message=message))


def push_parser() -> Parser:
    """What `push` takes."""
    parser = Parser(
        prog="draftsmith push", description="Put a drafter on the Hub, as it was measured."
    )
    parser.add_argument("drafter", metavar="DRAFTER", help=DRAFTER)
    parser.add_argument("--repo", required=True, metavar="ORG/NAME")
    parser.add_argument("--license", metavar="ID", help="of the drafter, such as apache-2.0")
    parser.add_argument(
        "--data-license", metavar="TEXT", help="what the training data is, and its licence"
    )
    parser.add_argument("--base-model", metavar="ORG/NAME", help="the target's name on the Hub")
    parser.add_argument(
        "--export", action="append", default=[], metavar="ENGINE", help="files of an engine, too"
    )
    parser.add_argument(
        "--replace", action="append", default=[], metavar="OLD=NEW", help="in all texts: your paths"
    )
    parser.add_argument("--public", action="store_true", help="for everybody to see (private)")
    parser.add_argument("--dry-run", action="store_true", help="list every file, push nothing")
    return parser


def pair(text: str) -> tuple[str, str]:
    """OLD=NEW. Raises UserError."""
    old, equals, new = text.partition("=")
    if not old or not equals:
        raise UserError(f"--replace {text}: write OLD=NEW")
    return old, new


TOOLS: dict[str, Callable[[Sequence[str]], None]] = {"export": export, "push": push}
