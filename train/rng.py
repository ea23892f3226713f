"""Random number states of a process, as plain JSON values; and seeds."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """States of the generators of Python, NumPy, torch and, where it is in use, CUDA."""
    version, internal, gauss = random.getstate()
    kind, keys, at, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(kind), [int(key) for key in keys], int(at), int(has_gauss), float(cached)],
        "torch": to_hex(torch.random.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = to_hex(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue where `rng_state` was called."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, at, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), at, has_gauss, cached))
    torch.random.set_rng_state(from_hex(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(from_hex(state["cuda"]))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Give the generators back as they were."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def row_seed(seed: int, epoch: int, row: int) -> int:
    """A seed of 63 bits for what is sampled in a row in an epoch."""
    text = f"{seed} {epoch} {row}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def to_hex(state: torch.Tensor) -> str:
    """A byte tensor as text."""
    return bytes(state.tolist()).hex()


def from_hex(text: str) -> torch.Tensor:
    """The byte tensor that `to_hex` was given."""
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
