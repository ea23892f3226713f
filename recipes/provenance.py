"""Where a run comes from: the resolved recipe, on top of it the command, revision and versions."""

import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path

from draftsmith.recipes.files import write_text
from draftsmith.recipes.load import dump_recipe
from draftsmith.recipes.schema import Recipe

PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "peft", "safetensors")


def write_resolved(recipe: Recipe, folder: Path, argv: Sequence[str]) -> None:
    """Write `recipe.yaml`, every knob in it; `load_recipe` reads it back to the same recipe."""
    header = [
        f"command: {shlex.join(argv)}",
        f"revision: {git_revision()}",
        "versions: " + ", ".join([f"python {platform.python_version()}", *versions()]),
        f"machine: {platform.platform()}",
    ]
    lines = [f"# {line}" for entry in header for line in entry.splitlines()]
    write_text(folder / "recipe.yaml", "\n".join([*lines, "", dump_recipe(recipe)]))


def versions() -> list[str]:
    """Name and version of what the numbers depend on, each as one text."""
    return [version(package) for package in PACKAGES]


def version(package: str) -> str:
    """Name and version. draftsmith itself also runs from its folders, without being installed."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} (not installed)"


def git_revision() -> str:
    """The revision of draftsmith's own checkout, with a mark where files differ from it."""
    folder = Path(str(resources.files("draftsmith.recipes"))).resolve()
    # An installed copy may lie in somebody else's repository: ask whether this file is tracked.
    if git(folder, "ls-files", "--error-unmatch", "schema.py") is None:
        return "not a checkout"
    revision = git(folder, "rev-parse", "HEAD") or "unborn"
    changed = git(folder, "status", "--porcelain", "--untracked-files=no", "--", "..")
    return f"{revision} with changes" if changed else revision


def git(folder: Path, *arguments: str) -> str | None:
    """Git's answer, or None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
