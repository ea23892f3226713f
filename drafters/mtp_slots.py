"""The recursion of an MTP block over packed rows, as training and the walk need it.

Slot 1 is one causal pass over every document. Slots 2..K run for the roots alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.drafters.mtp_attention import Chain
from draftsmith.drafters.mtp_block import MtpBlock
from draftsmith.drafters.slots import Batch, Entries, Roots

Map = Callable[[Tensor], Tensor]


class Recursion:
    """One batch. Groups stand in the order of rows and positions until `groups` hands them out."""

    def __init__(
        self, block: MtpBlock, embed: Map, recycle: Map, batch: Batch, roots: Roots
    ) -> None:
        self.block, self.embed, self.recycle = block, embed, recycle
        self.batch, self.entries = batch, Entries.of(batch, roots)
        self.chain = Chain(self.entries, block.reach)
        self.outputs: list[Tensor] = []  # of every slot so far, [N, D], before the norm

    def run(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The block on tokens [n] with states [n, D] before them: [n, D]."""
        if not len(tokens):  # which the layers of transformers do not take
            return hidden
        flat = self.embed(tokens)[None], hidden[None], positions[None]
        out: Tensor = self.block(*flat, chain=self.chain)
        return out[0]

    def first(self, final: Tensor) -> None:
        """Slot 1, from the target's states [B, T, D]."""
        entries, batch = self.entries, self.batch
        out = self.run(entries.tokens(batch), entries.states(final), entries.positions(batch))
        self.outputs.append(out[entries.root])

    def next(self, tokens: Tensor, hidden: Tensor) -> None:
        """The next slot, from tokens [N] and states [N, D]."""
        positions = self.entries.positions(self.batch)[self.entries.root] + len(self.outputs)
        self.outputs.append(self.run(tokens, hidden, positions))

    def own(self) -> Tensor:
        """The state of the last slot, as the next one reads it: [N, D]."""
        return self.recycle(self.outputs[-1])

    def true_tokens(self) -> Tensor:
        """The text's tokens for the next slot, [N]."""
        return self.entries.tokens_of_slot(self.batch, len(self.outputs) + 1)

    def mixed(self, final: Tensor) -> Tensor:
        """For the next slot, a state that precedes the token it reads, drawn evenly: the target's
        or that of an earlier slot of this or a later root (Megatron's `mtp_hsm`). [N, D].
        """
        count = len(self.outputs)
        found = [self.entries.states_of_slot(final, count + 1)]
        for slot, output in enumerate(self.outputs, start=1):
            found.append(self.recycle(output)[self.entries.ahead(count - slot)].to(final.dtype))
        groups = torch.arange(len(self.entries.root), device=final.device)
        choice = torch.randint(len(found), groups.shape, device=final.device)
        return torch.stack(found)[choice, groups]

    def groups(self) -> Tensor:
        """What the head reads, [N, K, D], in the order of the roots that were given."""
        out: Tensor = self.block.norm(torch.stack(self.outputs, dim=1))
        return out[self.entries.order.argsort()]
