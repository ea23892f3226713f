"""What every export shares: the drafter that is written, files that are exactly what a reader
expects, and errors that say which of them are not.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import sync, write_text
from draftsmith.recipes.schema import Recipe

CONFIG, WEIGHTS = "config.json", "model.safetensors"
Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Source:
    """A drafter's folder. Target and drafter are loaded when an export asks for them."""

    folder: Path
    meta: dict[str, Any]  # draftsmith.json
    recipe: Recipe
    load: Callable[[], Target]

    @cached_property
    def target(self) -> Target:
        """The target that the drafter belongs to."""
        return self.load()

    @cached_property
    def drafter(self) -> Drafter:
        """The drafter, in the target's dtype."""
        return load_drafter(self.folder, self.target)

    @property
    def kind(self) -> str:
        """Of drafter."""
        return str(self.meta["drafter"]["kind"])


@dataclass(frozen=True)
class Export:
    """How an engine gets a kind of drafter.

    write: the engine's files into a folder, which is there and empty; UserError for a drafter that
    they cannot say. read: what the engine makes of them, as a drafter of ours; ValueError for files
    that it refuses or misreads. serve: how the engine is started, with `{target}`, `{drafter}` and
    `{k}` (drafts a round) to be filled in. run: the engine itself, where it is a library of this
    process: prompt [1, T] and a number of new tokens -> both [1, T + N], greedily.
    """

    write: Callable[[Source, Path], None]
    read: Callable[[Path, Source], Drafter]
    serve: str
    note: str = ""
    run: Callable[[Path, Source, Tensor, int], Tensor] | None = None


def write_files(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    weights: str = WEIGHTS,
) -> None:
    """config.json and a file of tensors."""
    kept = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
    save_file(kept, folder / weights, metadata={"format": "pt"})
    sync(folder / weights)
    write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")


def copy_files(source: Path, folder: Path, *, without: tuple[str, ...] = ()) -> None:
    """A drafter's folder as it is, but for what only draftsmith reads."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in without:
            shutil.copyfile(path, folder / path.name)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ValueError."""
    try:
        found: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{CONFIG} holds no object")
    return found


def read_tensors(folder: Path, weights: str = WEIGHTS) -> dict[str, Tensor]:
    """A file of tensors, the only one in the folder: engines read all there are. ValueError."""
    others = {path.name for path in folder.glob("*.safetensors")} - {weights}
    if others:
        raise ValueError(f"{', '.join(sorted(others))} lies beside {weights}, and would be read")
    try:
        return load_file(folder / weights)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights} cannot be read ({error})") from error


def check_tensors(tensors: Mapping[str, Tensor], expected: Shapes) -> None:
    """Exactly these tensors, in one dtype and finite. Raises ValueError: engines leave what they
    miss random, and say nothing.
    """
    have = {name: tuple(value.shape) for name, value in tensors.items()}
    wrong = sorted(
        name for name in have.keys() | expected.keys() if have.get(name) != expected.get(name)
    )
    if wrong:
        raise ValueError(f"missing, left over or misshapen: {', '.join(wrong[:4])}")
    dtypes = {value.dtype for value in tensors.values() if value.is_floating_point()}
    if len(dtypes) != 1:
        raise ValueError(f"numbers of several precisions: {', '.join(sorted(map(str, dtypes)))}")
    broken = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise ValueError(f"NaN or infinite numbers in {', '.join(broken[:4])}")


def check_values(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ValueError unless a config says exactly this."""
    wrong = [
        f"{name} is {config.get(name)!r}, not {value!r}"
        for name, value in wanted.items()
        if config.get(name) != value
    ]
    if wrong:
        raise ValueError(f"{CONFIG}: {'; '.join(wrong)}")


def dtype_name(value: Tensor) -> str:
    """As configs spell it."""
    return str(value.dtype).removeprefix("torch.")


def refuse(engine: str, reason: str) -> UserError:
    """An engine does not load this drafter."""
    return UserError(f"{engine} cannot load this drafter: {reason}")
