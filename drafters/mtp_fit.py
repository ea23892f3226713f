"""The start of an MTP block whose layer is a copy of the target's: its projection, fitted.

Where the copied layer of the target reads the state of a token, the block has the token and the
target's final state at the one before. The projection is what comes nearest to it, in the least
squares over some training data; the copied layer then does most of what it did. With SmolLM2-135M
and 18,000 tokens slot 1 hits 26 % and slot 2 20 % before the first step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.mtp import MtpModule
from draftsmith.drafters.mtp_block import MtpBlock
from draftsmith.drafters.slots import Batch, Entries, all_roots

SPREAD = 16  # tokens for every column of the projection
RIDGE = 0.1  # of the mean square of a column


@dataclass
class Normal:
    """The normal equations, summed: inputs [2D] against inputs, and against states [D]."""

    inputs: Tensor  # [2D, 2D]
    states: Tensor  # [2D, D]

    def add(self, inputs: Tensor, states: Tensor) -> None:
        """More tokens [n, 2D] and [n, D]. Each counts by its relative error, not by its size."""
        weight = states.pow(2).mean(dim=-1, keepdim=True).clamp(min=1e-12).rsqrt()
        inputs, states = inputs * weight, states * weight
        self.inputs += inputs.T @ inputs
        self.states += inputs.T @ states

    def solve(self) -> Tensor:
        """The projection [D, 2D]."""
        size = self.inputs.diagonal().mean()
        eye = torch.eye(len(self.inputs), device=self.inputs.device)
        found: Tensor = torch.linalg.solve(self.inputs + RIDGE * size * eye, self.states)
        return found.T


def wanted(block: MtpBlock) -> int:
    """Tokens that the fit wants to see."""
    return SPREAD * block.fc.in_features


@torch.no_grad()
def fit(drafter: MtpModule, batches: Iterable[Batch]) -> None:
    """Fit the projection of the first block, whose layer is a copy, on the target's states of these
    batches (until it has seen `wanted` tokens).
    """
    block, size, seen = drafter.block, drafter.target.hidden_size, 0
    new = block.fc.weight.new_zeros
    normal = Normal(new((2 * size, 2 * size)), new((2 * size, size)))
    for batch in batches:
        inputs, states = pairs(drafter, batch)
        normal.add(inputs, states)
        seen += len(inputs)
        if seen >= wanted(block):
            break
    block.fc.weight.copy_(normal.solve())


def pairs(drafter: MtpModule, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the projection reads [E, 2D] at every token but a document's first, and what the copied
    layer reads there in the target [E, D].
    """
    block, target = drafter.block, drafter.target
    place, entries = block.place, Entries.of(batch, all_roots(batch))
    states = target.states(batch, (place - 1,) if place else ())
    read = target.embedding[batch.ids] if states.layers is None else states.layers
    hidden = entries.states(drafter.read(states.final)).to(block.fc.weight.dtype)
    inputs = block.inputs(drafter.embed(entries.tokens(batch)), hidden)
    return inputs, read[entries.row, entries.position].to(inputs.dtype)
