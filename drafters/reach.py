"""How far back each kind of attention layer looks, and the masks that say so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.layout import Nodes


@dataclass(frozen=True)
class Reach:
    """Everything before, a window that ends at the token itself, or the token's own chunk."""

    window: int | None = None
    chunk: int | None = None

    def covers(self, length: int) -> bool:
        """Whether the first `length` positions all see each other."""
        return length <= min(self.window or length, self.chunk or length)

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether positions `query` reach back to positions `key` (broadcast)."""
        if self.window is not None:
            return query - key < self.window
        if self.chunk is not None:
            return query // self.chunk == key // self.chunk
        return torch.ones_like(query - key, dtype=torch.bool)


def layer_types(config: Any) -> list[str] | None:
    """A text config's; families without them have layers of one type."""
    found: list[str] | None = getattr(config, "layer_types", None)  # or a property, or an alias
    return found


def reaches(config: Any) -> dict[str, Reach]:
    """By layer type, for those that attend to positions.

    Families without layer types slide (or chunk) in every layer where a window (or chunk) is set.
    """
    kinds = layer_types(config)
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if kinds is None:
        return {"every": Reach(window=window) if window else Reach(chunk=chunk)}
    known = {
        "full_attention": Reach(),
        "hybrid": Reach(),
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=chunk),
    }
    return {kind: known[kind] for kind in kinds if kind in known}


def mask_refusal(config: Any) -> str | None:
    """Why a model takes no masks over single positions, if it does not."""
    used, family = config._attn_implementation, config.model_type
    if used not in ("sdpa", "eager"):
        return f'{used} takes no masks of single positions (attn_implementation="sdpa" does)'
    if family in ("bloom", "mpt") or getattr(config, "alibi", False):
        return "ALiBi takes no masks of single positions"
    if family == "gpt_neo":
        return "its local layers take no masks of single positions"
    return None


def masks(
    reach: Mapping[str, Reach],
    nodes: Nodes,
    positions: Tensor,
    starts: Tensor | int,
    longest: int,
    *,
    always: bool = False,
) -> dict[str, Tensor] | None:
    """By layer type, [R, 1, M, S] bool (True: visible), for M nodes at `positions` [R, M].

    starts: the lengths of the contexts [B, 1], or the one that all have; longest: of them. Column c
    below a row's start is its context's position c, the columns behind it are the nodes, and what
    lies behind those is nobody's: S is longest + M. None: plainly causal
    (unless `always`), or no attention.
    """
    uniform = isinstance(starts, int)
    if not reach or (uniform and nodes.visible is None and not always):
        return None
    length = longest + positions.shape[1]
    columns = torch.arange(length, device=positions.device)[None]
    node = columns - starts  # [1 or B, S]: below 0 in the context
    cheap = uniform and nodes.visible is not None
    seen = (tree_mask(nodes, longest) if cheap else ragged_mask(nodes, node, positions))[:, None]
    found = {one: seen for one in reach.values()}
    narrow = [one for one in found if not one.covers(length)]
    if narrow:
        own = node.clamp(0, positions.shape[1] - 1).expand(len(positions), -1)
        keys = torch.where(node < 0, columns, positions.gather(1, own))[:, None, None]
        for one in narrow:
            found[one] = seen & one.sees(positions[:, None, :, None], keys)
    return {kind: found[one] for kind, one in reach.items()}


def tree_mask(nodes: Nodes, length: int) -> Tensor:
    """[R, M, length + M]: the context and a node's ancestors, where all rows are as long."""
    assert nodes.visible is not None, "a chain of rows of one length needs no mask"
    rows, count = nodes.visible.shape[:2]
    return torch.cat([nodes.visible.new_ones((rows, count, length)), nodes.visible], dim=2)


def ragged_mask(nodes: Nodes, node: Tensor, positions: Tensor) -> Tensor:
    """[B, M, S]: as `tree_mask`; node [B, S] says which node a column is, row by row."""
    count = positions.shape[1]
    if nodes.visible is None:
        return node[:, None] <= torch.arange(count, device=node.device)[:, None]
    index = node.clamp(0, count - 1)[:, None].expand(-1, count, -1)  # [B, M, S]
    visible = nodes.visible.expand(len(node), -1, -1).gather(2, index)
    node = node[:, None]
    return (node < 0) | (visible & (node < count))
