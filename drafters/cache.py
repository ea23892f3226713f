"""The target's cache. The only place that knows how to roll back."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from draftsmith.drafters.cache_layers import (
    BufferedLayer,
    Extent,
    RecurrentLayer,
    State,
    layer_like,
    state_rows,
)
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class Mark:
    """Where a cache was: the lengths of its rows, and the states that cannot be cropped."""

    lengths: list[int]
    states: list[State]  # of every recurrent layer

    def rows(self, rows: Tensor) -> "Mark":
        """The same of some rows."""
        lengths = [self.lengths[row] for row in rows.tolist()]
        return Mark(lengths, [state_rows(state, rows) for state in self.states])


class TargetCache:
    """The cache of one decoding: rows of their own lengths. room: see `Extent`."""

    def __init__(self, config: Any, room: int | None = None) -> None:
        self.extent = Extent(room)
        layers = [layer_like(one, self.extent) for one in DynamicCache(config=config).layers]
        self.hold(layers)

    def hold(self, layers: list[Any]) -> None:
        """Take these layers."""
        self.cache = Cache(layers=layers)
        self.buffered = [one for one in layers if isinstance(one, BufferedLayer)]
        self.recurrent = [one for one in layers if isinstance(one, RecurrentLayer)]
        self.stored = [one for one in layers if isinstance(one, BufferedLayer | RecurrentLayer)]

    @property
    def lengths(self) -> list[int]:
        """Cached positions of every row."""
        return self.extent.lengths

    def open(self, batch: int, count: int, device: torch.device) -> Extent:
        """Before a pass of `count` tokens a row."""
        self.extent.open(batch, count, device)
        return self.extent

    def close(self, count: int) -> None:
        """After the pass: what it wrote is live."""
        self.extent.set([length + count for length in self.lengths])

    def mark(self, *, states: bool = True) -> Mark:
        """Where the cache is now, to come back to; without the states, to know the lengths."""
        return Mark(self.lengths, [layer.save() for layer in self.recurrent if states])

    def restore(self, mark: Mark) -> None:
        """Forget what came after the mark."""
        for layer, state in zip(self.recurrent, mark.states, strict=True):
            layer.load(state)
        self.extent.set(mark.lengths)

    def crop(self, lengths: list[int]) -> None:
        """Roll every row back to a length."""
        if self.recurrent:
            raise UserError(
                "linear attention, Mamba and convolution layers have a state that cannot be "
                "cropped; a draft model needs attention layers alone"
            )
        pairs = list(zip(lengths, self.lengths, strict=True))
        if not all(0 <= new <= length for new, length in pairs):
            raise ValueError(f"cannot crop rows of {self.lengths} positions to {lengths}")
        self.extent.set(lengths)

    def keep(self, starts: list[int], path: Tensor, counts: list[int], *, moved: bool) -> None:
        """After a pass whose nodes lie behind `starts`: keep the first counts[row] nodes of
        path[row] ([B, P], padded with any node), in that order.

        moved: whether a kept node lies elsewhere than in its place.
        """
        if moved:
            start = torch.tensor(starts, device=path.device)[:, None]
            rows = torch.arange(len(starts), device=path.device)[:, None]
            to = start + torch.arange(path.shape[1], device=path.device)
            for layer in self.buffered:
                layer.gather(rows, start + path, to)
        self.crop([start + count for start, count in zip(starts, counts, strict=True)])

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch (int64 [b], at least one)."""
        for layer in self.stored:
            layer.select(rows)
        self.extent.set([self.lengths[row] for row in rows.tolist()])

    def part(self, rows: Tensor) -> "TargetCache":
        """A cache of copies of these rows."""
        other = copy.copy(self)
        other.extent = Extent(self.extent.room)
        other.extent.set(self.lengths)
        layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer in layers:
            if isinstance(layer, BufferedLayer):
                layer.extent = other.extent
        other.hold(layers)
        other.select(rows)
        return other

    def put(self, rows: Tensor, part: "TargetCache") -> None:
        """Replace these rows by a part."""
        for mine, theirs in zip(self.stored, part.stored, strict=True):
            mine.put(rows, theirs)
        lengths = dict(zip(rows.tolist(), part.lengths, strict=True))
        self.extent.set([lengths.get(row, length) for row, length in enumerate(self.lengths)])
