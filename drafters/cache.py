"""The target's key-value cache. The only place that knows how to roll back.

transformers' own dynamic layer concatenates on every step, which copies the whole cache for each
token; these layers write into a buffer that doubles, and rolling back is setting a length. Every
row of a batch has a length of its own. Window layers keep everything too: a rollback never misses
an entry, and masks hide what has left the window.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class Extent:
    """How much of every row is live, and where this pass writes; all layers share it."""

    def __init__(self) -> None:
        self.lengths: list[int] = []  # per row; empty before the first pass
        self.longest = 0
        self.starts: Tensor | int = 0  # of this pass: [B, 1], or the one length that all rows have
        self.rows: Tensor | None = None  # [B, 1] and
        self.columns: Tensor | None = None  # [B, M] where this pass writes, if lengths differ

    def set(self, lengths: list[int]) -> None:
        """Call these lengths live."""
        self.lengths, self.longest = lengths, max(lengths)

    def open(self, batch: int, count: int, device: torch.device) -> None:
        """Prepare to write `count` entries behind every row."""
        if not self.lengths:
            self.set([0] * batch)
        self.rows = self.columns = None
        self.starts = self.longest
        if min(self.lengths) < self.longest:
            self.starts = torch.tensor(self.lengths, device=device)[:, None]
            self.rows = torch.arange(batch, device=device)[:, None]
            self.columns = self.starts + torch.arange(count, device=device)


class BufferedLayer(DynamicLayer):
    """Keys and values [B, H, S, d] in buffers that grow by doubling. A row's live part comes first;
    behind it lies what is finite but nobody's.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, extent: Extent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.extent = extent
        self.buffers: list[Tensor] = []  # keys and values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append, and return everything live. The signature is transformers'."""
        extent, count = self.extent, key_states.shape[-2]
        end = extent.longest + count
        self.reserve(key_states, value_states, end)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            if extent.columns is None:
                buffer[:, :, end - count : end] = new
            else:
                buffer[extent.rows, :, extent.columns] = new.transpose(1, 2)
        keys, values = self.buffers
        return keys[:, :, :end], values[:, :, :end]

    def reserve(self, keys: Tensor, values: Tensor, end: int) -> None:
        """Room for `end` entries, and for as many again when there was none."""
        if not self.buffers:
            room = max(64, 2 * end)
            self.buffers = [new_buffer(one, room) for one in (keys, values)]
            self.is_initialized = True
        elif end > self.buffers[0].shape[-2]:
            self.buffers = [grown(buffer, self.extent.longest, 2 * end) for buffer in self.buffers]

    def get_seq_length(self, *args: Any) -> int:
        """Live length of the longest row (transformers asks for it)."""
        return self.extent.longest

    def get_mask_sizes(self, query_length: Any, *args: Any) -> tuple[int, int]:
        """Key length and offset after `query_length` more tokens."""
        count = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.extent.longest + count, 0

    def gather(self, rows: Tensor, source: Tensor, to: Tensor) -> None:
        """Copy entries `source` [B, P] of rows [B, 1] to columns `to` [B, P]."""
        for buffer in self.buffers:
            buffer[rows, :, to] = buffer[rows, :, source]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        self.buffers = [buffer[rows] for buffer in self.buffers]


def new_buffer(like: Tensor, room: int) -> Tensor:
    """Memory for `room` positions: zeros, for a masked entry is still multiplied (by 0)."""
    return like.new_zeros((*like.shape[:2], room, like.shape[-1]))


def grown(buffer: Tensor, length: int, room: int) -> Tensor:
    """A larger copy of the first `length` entries."""
    larger = new_buffer(buffer, room)
    larger[:, :, :length] = buffer[:, :, :length]
    return larger


class TargetCache:
    """The cache of one decoding: rows of their own lengths."""

    def __init__(self, layers: int) -> None:
        self.extent = Extent()
        self.layers = [BufferedLayer(self.extent) for _ in range(layers)]
        self.cache = Cache(layers=list(self.layers))

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

    def crop(self, lengths: list[int]) -> None:
        """Roll every row back to a length."""
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
            for layer in self.layers:
                layer.gather(rows, start + path, to)
        self.crop([start + count for start, count in zip(starts, counts, strict=True)])

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch (int64 [b], at least one)."""
        for layer in self.layers:
            layer.select(rows)
        self.extent.set([self.lengths[row] for row in rows.tolist()])
