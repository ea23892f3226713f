"""What blocks see in training: their document before their anchor, and themselves.

Consecutive blocks of a document attend together, a few at a time: keys are the document up to the
last of their anchors, and the blocks of the run; a mask keeps the blocks apart. So the cost is that
of N * B queries over a document and a few blocks, the memory that of one run, and documents never
meet. On CUDA the same pattern is one call of FlexAttention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from draftsmith.drafters.slots import Batch, Roots

TOGETHER = 16  # blocks of a run: a block sees this many times its own keys, masked
Over = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """Blocks `first` to `last` (not included), whose context lies in [start, end) of a row."""

    first: int
    last: int
    row: int
    start: int
    end: int
    mask: Tensor  # [G * B, C + G * B] bool


def runs_of(batch: Batch, roots: Roots, block: int) -> list[Run]:
    """Runs of the blocks of these roots, in order."""
    begins = roots.position - batch.positions[roots.row, roots.position]  # of their documents
    rows, starts, ends = (one.tolist() for one in (roots.row, begins, roots.position))
    found, first = [], 0
    for last in range(1, len(rows) + 1):
        goes_on = last < len(rows) and (rows[last], starts[last]) == (rows[first], starts[first])
        if goes_on and last - first < TOGETHER:
            continue
        end = max(ends[first:last])
        mask = run_mask(roots.position[first:last], starts[first], end, block)
        found.append(Run(first, last, rows[first], starts[first], end, mask))
        first = last
    return found


def run_mask(anchors: Tensor, start: int, end: int, block: int) -> Tensor:
    """Context strictly before the anchors [G], and each block itself: [G * B, C + G * B]."""
    context = torch.arange(start, end, device=anchors.device) < anchors[:, None]  # [G, C]
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    own = own.repeat_interleave(block, dim=1)  # [G, G * B]
    return torch.cat([context, own], dim=1).repeat_interleave(block, dim=0)


def over_runs(runs: list[Run]) -> Over:
    """Attention of blocks, run by run: queries, keys and values of the blocks [N, B, heads, d],
    keys and values of the context [rows, T, Hkv, d] -> [N, B, H, d].
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if not runs:  # on the graph, for data parallelism
            return q + 0 * (keys.sum() + values.sum())
        parts = []
        for run in runs:
            own = slice(run.first, run.last)
            context = run.row, slice(run.start, run.end)
            seen = torch.cat([keys[context], k[own].flatten(0, 1)])
            read = torch.cat([values[context], v[own].flatten(0, 1)])
            mixed = gather(q[own].flatten(0, 1)[None], seen[None], read[None], run.mask)[0]
            parts.append(mixed.unflatten(0, (run.last - run.first, -1)))
        return torch.cat(parts)

    return attend


def gather(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of [N, M, H, d] over [N, S, Hkv, d]; mask [.., M, S] or none."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed.transpose(1, 2)


def over_all(batch: Batch, roots: Roots, block: int) -> Over:
    """The same as `over_runs`, as one call of FlexAttention over all rows and blocks."""
    total, count = batch.ids.numel(), len(roots.row) * block
    anchors = roots.row * batch.ids.shape[1] + roots.position  # [N] into the flattened rows
    begins = anchors - batch.positions[roots.row, roots.position]

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        group = query // block
        context = (key >= begins[group]) & (key < anchors[group])
        own = (key - total) // block == group
        return torch.where(key < total, context, own)

    kernel, masked = kernels(batch.ids.device.type)
    mask = masked(visible, None, None, count, total + count, device=batch.ids.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        seen, read = (
            torch.cat([context.flatten(0, 1), own.flatten(0, 1)])
            for context, own in ((keys, k), (values, v))
        )
        heads = [one.transpose(0, 1)[None] for one in (q.flatten(0, 1), seen, read)]
        mixed: Tensor = kernel(*heads, block_mask=mask, enable_gqa=True)
        blocks: Tensor = mixed[0].transpose(0, 1).unflatten(0, (-1, block))
        return blocks.to(q.dtype)

    return attend


@cache
def kernels(device: str) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """FlexAttention and its mask builder: compiled, but on CPUs, where that has no gradient."""
    if device == "cpu":
        return flex_attention, create_block_mask
    return torch.compile(flex_attention), torch.compile(create_block_mask)


def attention(batch: Batch, roots: Roots, block: int) -> Over:
    """How the blocks of these roots attend, on whatever device they are."""
    if batch.ids.device.type == "cuda" and len(roots.row):
        return over_all(batch, roots, block)
    return over_runs(runs_of(batch, roots, block))
