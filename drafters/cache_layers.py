"""Layers of the target's cache: attention over positions, recurrent states, and both at once.

transformers' own dynamic layer concatenates on every step, which copies the whole cache for each
token; ours writes into a buffer that doubles, and rolling back is setting a length. Every row of a
batch has a length of its own. Window layers keep everything too: a rollback never misses an entry,
and masks hide what has left the window.

Recurrent states (linear attention, Mamba, convolutions) cannot be cropped: they are saved before a
pass and put back after it, and what was accepted is fed once more.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)


class Extent:
    """How much of every row is live, and where this pass writes; all layers share it.

    room: columns that every pass reads, live or not, so that all passes have one shape; None: as
    many as are live.
    """

    def __init__(self, room: int | None = None) -> None:
        self.room = room
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
        if self.longest + count > self.width(count):
            raise ValueError(f"{self.longest + count} positions do not fit a room of {self.room}")
        self.rows = self.columns = None
        self.starts = self.longest
        if self.room is not None or min(self.lengths) < self.longest:
            self.starts = torch.tensor(self.lengths, device=device)[:, None]
            self.rows = torch.arange(batch, device=device)[:, None]
            self.columns = self.starts + torch.arange(count, device=device)

    def width(self, count: int) -> int:
        """Columns that a pass of `count` tokens reads, its own among them."""
        return self.longest + count if self.room is None else self.room


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
        end = extent.width(count)
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
            room = max(64, 2 * end) if self.extent.room is None else end
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
        return self.extent.width(count), 0

    def gather(self, rows: Tensor, source: Tensor, to: Tensor) -> None:
        """Copy entries `source` [B, P] of rows [B, 1] to columns `to` [B, P]."""
        for buffer in self.buffers:
            buffer[rows, :, to] = buffer[rows, :, source]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        self.buffers = [buffer[rows] for buffer in self.buffers]

    def put(self, rows: Tensor, other: Any) -> None:
        """Replace these rows by the rows of another layer."""
        end = other.extent.longest
        if end > self.buffers[0].shape[-2]:
            self.buffers = [grown(buffer, self.extent.longest, 2 * end) for buffer in self.buffers]
        for buffer, new in zip(self.buffers, other.buffers, strict=True):
            buffer[rows, :, :end] = new[:, :, :end]


def new_buffer(like: Tensor, room: int) -> Tensor:
    """Memory for `room` positions: zeros, for a masked entry is still multiplied (by 0)."""
    return like.new_zeros((*like.shape[:2], room, like.shape[-1]))


def grown(buffer: Tensor, length: int, room: int) -> Tensor:
    """A larger copy of the first `length` entries."""
    larger = new_buffer(buffer, room)
    larger[:, :, :length] = buffer[:, :, :length]
    return larger


State = dict[str, dict[int, Any]]  # of a layer that has several: attribute -> number -> value

STATE = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
)


class RecurrentLayer(LinearAttentionLayer):
    """Recurrent and convolution states, one of each per row however long its context."""

    def save(self) -> State:
        """A copy of the states."""
        return {name: mapped(getattr(self, name), torch.Tensor.clone) for name in STATE}

    def load(self, state: State) -> None:
        """Put a saved copy back, which stays what it is."""
        for name, value in state.items():
            setattr(self, name, mapped(value, torch.Tensor.clone))

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        self.load(state_rows(self.save(), rows))

    def put(self, rows: Tensor, other: Any) -> None:
        """Replace these rows by the rows of another layer."""
        for name in STATE[:2]:
            theirs = getattr(other, name)
            for number, mine in getattr(self, name).items():
                if mine is not None:
                    mine[rows] = theirs[number]


def mapped(values: dict[int, Any], change: Any) -> dict[int, Any]:
    """Change the tensors among these values."""
    return {k: change(v) if isinstance(v, Tensor) else v for k, v in values.items()}


def state_rows(state: State, rows: Tensor) -> State:
    """These rows of a saved state."""
    return {name: mapped(value, lambda one: one[rows]) for name, value in state.items()}


class HybridLayer(RecurrentLayer, BufferedLayer):  # type: ignore[misc,override] # as transformers
    """Attention and a recurrent state side by side in one layer."""

    def __init__(self, extent: Extent, number_of_states: int) -> None:
        BufferedLayer.__init__(self, extent)
        RecurrentLayer.__init__(self, number_of_states)

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        RecurrentLayer.select(self, rows)
        BufferedLayer.select(self, rows)

    def put(self, rows: Tensor, other: Any) -> None:
        """Replace these rows by the rows of another layer."""
        RecurrentLayer.put(self, rows, other)
        BufferedLayer.put(self, rows, other)


def layer_like(layer: Any, extent: Extent) -> Any:
    """Our layer in the place of transformers' own; layers without a cache stay."""
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):
        return HybridLayer(extent, layer.number_of_states)
    if isinstance(layer, LinearAttentionLayer):
        return RecurrentLayer(layer.number_of_states)
    return BufferedLayer(extent) if isinstance(layer, DynamicLayer) else layer
