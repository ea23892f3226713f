"""The Hub: drafters by name, fetched and uploaded. `org/name`, or `org/name@revision`.

Only weights in safetensors and text are fetched, never code. The client resumes what was cut off:
files that are there, or were uploaded whole, are not sent again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from draftsmith.drafters.hub_name import HubName
from draftsmith.recipes.errors import UserError

FETCHED = ("*.json", "*.safetensors", "README.md", "recipe.yaml", "tokenizer*", "*.jinja")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def fetch(name: HubName) -> Path:
    """The folder of a repository's files in the Hub's cache, downloaded where it is not there.
    Raises UserError.
    """
    with said_clearly(name.repository, name.revision):
        found = snapshot_download(
            name.repository, revision=name.revision, allow_patterns=list(FETCHED)
        )
    return Path(found)


def upload(
    repository: str, files: Sequence[tuple[str, Path]], *, private: bool, message: str
) -> str:
    """Put files (path there, path here) into a repository in one commit; returns its address.

    The repository is made where it is missing. Raises UserError; what was uploaded by then is not
    sent again.
    """
    api = HfApi()
    with said_clearly(repository, None):
        api.create_repo(repository, private=private, exist_ok=True)
        info = api.model_info(repository)
        check_foreign(repository, [one.rfilename for one in info.siblings or ()], files)
        done = api.create_commit(
            repository,
            [CommitOperationAdd(there, here) for there, here in files],
            commit_message=message,
            parent_commit=info.sha,
        )
    return str(done.commit_url)


def check_foreign(repository: str, there: Sequence[str], files: Sequence[tuple[str, Path]]) -> None:
    """Raises UserError where other weights lie beside ours: engines read all that they find."""
    mine = {name for name, _ in files}
    others = [
        name for name in there if "/" not in name and name.endswith(WEIGHTS) and name not in mine
    ]
    if others:
        raise UserError(
            f"{repository} holds other weights ({', '.join(others[:3])}), which engines would read "
            "with this drafter's; push to another name, or remove them there"
        )


@contextmanager
def said_clearly(repository: str, revision: str | None) -> Iterator[None]:
    """What the Hub's client says, in one line that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the client raises a dozen kinds, its transport's among them
        raise UserError(sentence(repository, revision, error)) from error


def sentence(repository: str, revision: str | None, error: Exception) -> str:
    """What went wrong, and how to mend it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    status = None
    if isinstance(cause, HfHubHTTPError) and cause.response is not None:
        status = cause.response.status_code
    known = cause or error
    match known:
        case RevisionNotFoundError():
            return f"{repository} has no revision {revision}; see its page for those it has"
        case GatedRepoError():
            return f"{repository} is gated; ask for access on its page, then `hf auth login`"
        case RepositoryNotFoundError() if status != 401:
            return (
                f"{repository}: the Hub knows no such repository, or shows it to others only; "
                "check the name, or `hf auth login`"
            )
        case LocalEntryNotFoundError() | OfflineModeIsEnabled():
            return (
                f"{repository} is not in this machine's cache and the Hub cannot be reached; go "
                "online (HF_HUB_OFFLINE unset), or give a folder"
            )
        case HFValidationError():
            return f"{repository} is no name of a repository ({first_line(known)}); give org/name"
        case BadRequestError() | EntryNotFoundError():
            return f"{repository}: the Hub refuses ({first_line(known)})"
    if status in (401, 403):
        return (
            f"{repository}: the Hub refuses access ({status}); log in with a token that may write "
            "there (`hf auth login`, or HF_TOKEN)"
        )
    if status in (409, 412):
        return (
            f"{repository} changed meanwhile, or is being made ({status}); run the same command "
            "again"
        )
    reason = f"{status}" if status is not None else first_line(known)
    return (
        f"{repository}: the Hub did not answer as it should ({reason}); run the same command "
        "again: what is uploaded or fetched is kept"
    )


def first_line(error: BaseException) -> str:
    """Of what an error says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1].removeprefix('* ')}"
    return lines[0] if lines else type(error).__name__
