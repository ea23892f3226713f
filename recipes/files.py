"""Files that are there whole or not at all, and the paths that users write."""

import errno
import os
from pathlib import Path

from draftsmith.recipes.errors import UserError


def user_path(text: str) -> Path:
    """A path as a user writes it, `~` expanded. Raises UserError for what no system can open."""
    if "\0" in text:
        raise UserError(f"{text!r} is no path: it holds a NUL character")
    try:
        os.fsencode(text)
        return Path(text).expanduser()
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} is no path: it holds half a surrogate pair") from error
    except RuntimeError as error:  # nobody of that name, or nobody's home is known
        raise UserError(
            f"{text}: the home folder that ~ stands for is not known; write the path out"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write atomically: a temporary file beside it, synced, then renamed over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Make a file or a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: Exception) -> str:
    """What went wrong and what to do."""
    if disk_full(error):
        return f"{path}: disk full; free some space and run again"
    return f"{path}: cannot be written ({error}); mend that and run again"


def disk_full(error: Exception) -> bool:
    """Whether there was no room. safetensors wraps the operating system's error in a text."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError):
        return error.errno in full
    return any(f"os error {code}" in str(error) for code in full)
