"""The target's laws after logits processors of transformers, which read the ids before a token."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling
from draftsmith.eval.verify import Laws

Process = Callable[[int, Tensor, Tensor], Tensor]  # (row, ids [n], fp32 logits [V]) -> logits [V]


class ProcessedLaws(Laws):
    """`Laws` whose logits at a node have gone through `process`, with the ids of the row's context
    and of the node's own path. Only nodes that a rule reads are processed, each once.
    """

    def __init__(
        self,
        logits: Tensor,
        sampling: Sampling,
        process: Process,
        contexts: Sequence[Tensor],
        proposal: Proposal | None,
    ) -> None:
        super().__init__(logits, sampling, None, proposal)
        self.process, self.contexts = process, contexts
        self.known: dict[tuple[int, int], Tensor] = {}

    def wide(self, rows: Tensor, node: Tensor) -> Tensor:
        """Processed logits [b, V], fp32."""
        pairs = zip(rows.tolist(), node.tolist(), strict=True)
        return torch.stack([self.scores(row, at) for row, at in pairs])

    def choice(self, rows: Tensor, node: Tensor) -> Tensor:
        """The likeliest token [b], lowest id on ties."""
        return self.wide(rows, node).argmax(dim=-1)

    def scores(self, row: int, node: int) -> Tensor:
        """Processed logits [V] at one node."""
        if (row, node) not in self.known:
            ids = torch.cat([self.contexts[row], self.path(row, node)])
            self.known[row, node] = self.process(row, ids, self.logits[row, node].float())
        return self.known[row, node]

    def path(self, row: int, node: int) -> Tensor:
        """The drafted tokens that lead to a node."""
        tokens: list[int] = []
        while node > 0 and self.proposal is not None:
            tokens.append(int(self.proposal.tokens[row, node - 1]))
            node = int(self.proposal.parent[row, node - 1])
        return self.contexts[row].new_tensor(tokens[::-1])
