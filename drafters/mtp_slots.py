"""The recursion of an MTP block over whole rows, as training and the walk need it.

Slot 1 is one causal pass over every row. Slots 2..K run for the roots alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.drafters.mtp_attention import Chain
from draftsmith.drafters.mtp_block import MtpBlock
from draftsmith.drafters.reach import Reach
from draftsmith.drafters.slots import (
    Batch,
    Grid,
    Roots,
    cells_ahead,
    enters,
    positions_of_slot,
    previous,
    states_of_slot,
    tokens_of_slot,
)

Embed = Callable[[Tensor], Tensor]  # token ids [..] -> [.., D]
Recycle = Callable[[Tensor], Tensor]  # a block's output -> what the next slot reads


class Recursion:
    """One batch. `slots` gives what the head reads; how it goes on is up to the caller."""

    def __init__(
        self, block: MtpBlock, embed: Embed, recycle: Recycle, batch: Batch, roots: Roots
    ) -> None:
        self.block, self.embed, self.recycle = block, embed, recycle
        self.batch, self.roots, self.grid = batch, roots, Grid.of(roots, batch)
        first = slot_one_sees(batch, block.reach)
        self.chain = Chain(first, root_sees(batch, self.grid, block.reach, 1))
        self.outputs: list[Tensor] = []  # of every slot so far, [B, R, D], before the norm

    def first(self, final: Tensor) -> None:
        """Slot 1, from the target's states [B, T, D]."""
        ids, positions = self.batch.ids, self.batch.positions
        out = self.block(self.embed(ids), previous(final), positions, chain=self.chain)
        self.outputs.append(picked(out, self.grid.position))

    def next(self, tokens: Tensor, hidden: Tensor) -> None:
        """The next slot, from tokens [B, R] and states [B, R, D]."""
        slot = len(self.outputs) + 1
        self.chain.sees = root_sees(self.batch, self.grid, self.block.reach, slot)
        positions = positions_of_slot(self.batch, self.grid.position, slot)
        self.outputs.append(self.block(self.embed(tokens), hidden, positions, chain=self.chain))

    def own(self) -> Tensor:
        """The state of the last slot, as the next one reads it: [B, R, D]."""
        return self.recycle(self.outputs[-1])

    def true_tokens(self) -> Tensor:
        """The text's tokens for the next slot, [B, R]."""
        return tokens_of_slot(self.batch, self.grid.position, len(self.outputs) + 1)

    def mixed(self, final: Tensor) -> Tensor:
        """For the next slot, a state that precedes the token it reads, drawn evenly: the target's
        or that of an earlier slot of this or a later root (Megatron's `mtp_hsm`). [B, R, D].
        """
        count = len(self.outputs)
        found = [states_of_slot(final, self.grid.position, count + 1)]
        for slot, output in enumerate(self.outputs, start=1):
            ahead = torch.full_like(self.grid.position, count - slot)
            found.append(picked(self.recycle(output), cells_ahead(self.grid, ahead)))
        cells = self.grid.position
        choice = torch.randint(len(found), cells.shape, device=cells.device)
        index = choice[None, ..., None].expand(1, -1, -1, found[0].shape[-1])
        return torch.stack([one.to(final.dtype) for one in found]).gather(0, index)[0]

    def groups(self) -> Tensor:
        """What the head reads, [N, K, D]."""
        out: Tensor = self.block.norm(torch.stack(self.outputs, dim=2))  # [B, R, K, D]
        return out[self.roots.row, self.grid.column]


def picked(states: Tensor, at: Tensor) -> Tensor:
    """[B, T, D] at [B, R] -> [B, R, D]."""
    return states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))


def slot_one_sees(batch: Batch, reach: Reach) -> Tensor:
    """[B, 1, T, T] bool: the entries of its document up to itself; where there is none, itself."""
    length = batch.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
    same = batch.documents[:, :, None] == batch.documents[:, None]
    near = reach.sees(batch.positions[:, :, None], batch.positions[:, None])
    itself = torch.eye(length, dtype=torch.bool, device=causal.device)
    return (causal & same & near & enters(batch)[:, None] | itself)[:, None]


def root_sees(batch: Batch, grid: Grid, reach: Reach, slot: int) -> Tensor:
    """[B, 1, R, T] bool: the slot-1 entries of its document up to the root that a slot sees."""
    at = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    before = at <= grid.position[..., None]
    same = batch.documents.gather(1, grid.position)[..., None] == batch.documents[:, None]
    query = positions_of_slot(batch, grid.position, slot)
    near = reach.sees(query[..., None], batch.positions[:, None])
    return (before & same & near & enters(batch)[:, None])[:, None]
