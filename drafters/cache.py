"""The target's key-value cache. The only place that knows how to roll back.

transformers' own dynamic layer concatenates on every step, which copies the whole cache for each
token; these layers write into a buffer that doubles, and rolling back is setting a length.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class BufferedLayer(DynamicLayer):
    """Keys and values [B, H, S, d] in a buffer that grows by doubling; the newest `length` are
    live.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for what arrives first, and as much again."""
        self.dtype, self.device = key_states.dtype, key_states.device
        room = max(64, 2 * key_states.shape[-2])
        self.key_buffer = new_buffer(key_states, room)
        self.value_buffer = new_buffer(value_states, room)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append, and return everything live. The signature is transformers'."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.key_buffer.shape[-2]:
            self.key_buffer = grown(self.key_buffer, self.length, 2 * end)
            self.value_buffer = grown(self.value_buffer, self.length, 2 * end)
        self.key_buffer[:, :, self.length : end] = key_states
        self.value_buffer[:, :, self.length : end] = value_states
        self.length = end
        return self.live()

    def live(self) -> tuple[Tensor, Tensor]:
        """Views of the live part."""
        return self.key_buffer[:, :, : self.length], self.value_buffer[:, :, : self.length]

    def get_seq_length(self, *args: Any) -> int:
        """Live length (transformers asks for it)."""
        return self.length

    def get_mask_sizes(self, query_length: Any, *args: Any) -> tuple[int, int]:
        """Key length and offset after `query_length` more tokens."""
        count = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.length + count, 0

    def gather(self, start: int, index: Tensor) -> None:
        """Move entries start + index to start, start+1, ... and drop what follows."""
        end = start + index.shape[0]
        for buffer in (self.key_buffer, self.value_buffer):
            buffer[:, :, start:end] = buffer[:, :, start + index]
        self.length = end

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        self.key_buffer, self.value_buffer = self.key_buffer[rows], self.value_buffer[rows]


def new_buffer(like: Tensor, room: int) -> Tensor:
    """Uninitialised memory for `room` positions."""
    return like.new_empty((*like.shape[:2], room, like.shape[-1]))


def grown(buffer: Tensor, length: int, room: int) -> Tensor:
    """A larger copy of the live part."""
    larger = new_buffer(buffer, room)
    larger[:, :, :length] = buffer[:, :, :length]
    return larger


class TargetCache:
    """The cache of one decoding: every row has the same length."""

    def __init__(self, layers: int) -> None:
        self.layers = [BufferedLayer() for _ in range(layers)]
        self.cache = Cache(layers=list(self.layers))

    @property
    def length(self) -> int:
        """Cached positions."""
        return self.layers[0].length

    def crop(self, length: int) -> None:
        """Roll back to `length` positions."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}")
        for layer in self.layers:
            layer.length = length

    def keep(self, start: int, index: Tensor) -> None:
        """After a tree pass whose nodes lie at start, start+1, ...: keep nodes `index` [P], in that
        order.
        """
        inorder = torch.equal(index, torch.arange(index.shape[0], device=index.device))
        if inorder:
            return self.crop(start + index.shape[0])
        for layer in self.layers:
            layer.gather(start, index)

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch (int64 [b])."""
        for layer in self.layers:
            layer.select(rows)
