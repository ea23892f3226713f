"""`draftsmith push DRAFTER --repo org/name`: a drafter goes to the Hub."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftsmith.recipes.entry import DRAFTER, Parser
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.provenance import version


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
