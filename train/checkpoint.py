"""Checkpoints for exact resume: written aside, read back and compared, then renamed into place.

    checkpoints/step-000200/trainables.safetensors   the drafter's trained weights, fp32
                            optimizer.safetensors    exp_avg.NAME, exp_avg_sq.NAME, step.NAME
                            state.json               cursor, counters, random states, identity
                            manifest.json            step and the sha256 of the three files

A process that dies at any moment leaves whole checkpoints and at most one `.partial` folder.
"""

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import cannot_write, sync

log = logging.getLogger(__name__)

PARTIAL = ".partial"
CORRUPT = ".corrupt"
TENSOR_FILES = ("trainables.safetensors", "optimizer.safetensors")
STATE_FILE = "state.json"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Snapshot:
    """All that decides how a run goes on from here."""

    step: int  # optimizer steps taken
    trainables: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]  # JSON values


class Corrupt(Exception):
    """A checkpoint that does not hold what its manifest says."""


def save(snapshot: Snapshot, folder: Path, *, keep: int) -> Path:
    """Write `folder`/step-NNNNNN atomically, then remove all but the newest `keep` checkpoints."""
    partial = folder / PARTIAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write(snapshot, partial)
        check(snapshot, partial)
        path = place(partial, folder / f"step-{snapshot.step:06d}")
    except (OSError, SafetensorError, Corrupt) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(explain(error, folder)) from error
    for old in steps(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def write(snapshot: Snapshot, folder: Path) -> None:
    """The three files and their manifest, all on the disk when this returns."""
    for name, tensors in zip(TENSOR_FILES, (snapshot.trainables, snapshot.optimizer), strict=True):
        save_file(tensors, folder / name)
        sync(folder / name)
    write_json(snapshot.state, folder / STATE_FILE)
    hashes = {name: sha256(folder / name) for name in (*TENSOR_FILES, STATE_FILE)}
    write_json({"format": 1, "step": snapshot.step, "files": hashes}, folder / MANIFEST)
    sync(folder)


def check(snapshot: Snapshot, folder: Path) -> None:
    """Read everything back and compare it bit for bit with what is in memory."""
    again = load(folder, step=snapshot.step)
    same = again.state == snapshot.state
    for have, want in (
        (again.trainables, snapshot.trainables),
        (again.optimizer, snapshot.optimizer),
    ):
        same = same and have.keys() == want.keys()
        same = same and all(same_bits(have[name], want[name]) for name in want)
    if not same:
        raise Corrupt("what was read back differs from what was written")


def place(partial: Path, path: Path) -> Path:
    """Rename the finished folder; the rename itself is made durable."""
    if path.exists():
        shutil.rmtree(path)
    os.rename(partial, path)
    sync(path.parent)
    return path


def load(folder: Path, *, step: int) -> Snapshot:
    """Read one checkpoint. Raises Corrupt unless every byte is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if (manifest["format"], manifest["step"]) != (1, step):
            raise Corrupt(f"{MANIFEST} is of format {manifest['format']}, step {manifest['step']}")
        for name in (*TENSOR_FILES, STATE_FILE):
            if sha256(folder / name) != manifest["files"][name]:
                raise Corrupt(f"{name} has changed since it was written")
        trainables, optimizer = (read_tensors(folder / name) for name in TENSOR_FILES)
        state = json.loads((folder / STATE_FILE).read_bytes())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Corrupt(f"{type(error).__name__}: {error}") from error
    return Snapshot(step, trainables, optimizer, state)


def tidy(folder: Path) -> None:
    """Remove what a killed process left, and set corrupted checkpoints aside (with a warning).

    Raises UserError when there are checkpoints and none of them can be read.
    """
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    broken = []
    for path in reversed(steps(folder)):
        try:
            load(path, step=step_of(path))
            break
        except Corrupt as error:
            broken.append(f"{path.name} ({error})")
    if broken and len(broken) == len(steps(folder)):
        raise UserError(
            f"{folder}: every checkpoint is corrupted: {'; '.join(broken)}; "
            "restore it from a copy, or remove it to train from the start"
        )
    for text in broken:
        name = text.split()[0]
        log.warning("checkpoint %s is corrupted; going on from the one before it", text)
        shutil.rmtree(folder / (name + CORRUPT), ignore_errors=True)
        os.rename(folder / name, folder / (name + CORRUPT))


def latest(folder: Path) -> Snapshot | None:
    """The newest checkpoint; None where there is none. Call `tidy` first."""
    found = steps(folder)
    return load(found[-1], step=step_of(found[-1])) if found else None


def steps(folder: Path) -> list[Path]:
    """Checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if is_step(path.name)]
    return sorted(found, key=step_of)


def is_step(name: str) -> bool:
    """Whether this is a finished checkpoint's name."""
    return name.startswith("step-") and name.removeprefix("step-").isdigit()


def step_of(path: Path) -> int:
    """step-000123 -> 123."""
    return int(path.name.removeprefix("step-"))


def explain(error: Exception, folder: Path) -> str:
    """One line for a checkpoint that could not be written."""
    found = steps(folder)
    last = f"last checkpoint at step {step_of(found[-1])}" if found else "no checkpoint yet"
    return f"{cannot_write(folder, error)}; nothing lost: {last}"


def write_json(value: Any, path: Path) -> None:
    """Write and fsync."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of their own memory: the file may go."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of dtype, shape and every bit (so that NaN equals itself)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


def sha256(path: Path) -> str:
    """Digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
