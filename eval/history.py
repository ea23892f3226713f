"""What stands before every node: the context and the node's own path, for a repetition penalty."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.drafters.sampler import Sampling


class History:
    """Which tokens each row's context holds, the root included."""

    def __init__(self, contexts: Sequence[Sequence[int]], vocab: int, device: torch.device) -> None:
        self.seen = torch.zeros((len(contexts), vocab), dtype=torch.bool)
        for row, ids in enumerate(contexts):
            self.seen[row, list(ids)] = True
        self.seen = self.seen.to(device)

    def before(self, proposal: Proposal | None, rows: Tensor, node: Tensor) -> Tensor:
        """The tokens before the next one at a node [b] of each of these rows [b]: [b, V] bool."""
        seen = self.seen[rows]
        below = torch.arange(len(rows), device=rows.device)
        while proposal is not None and bool((node > 0).any()):
            below, rows, node = below[node > 0], rows[node > 0], node[node > 0]
            seen[below, proposal.tokens[rows, node - 1]] = True
            node = proposal.parent[rows, node - 1]
        return seen

    def add(self, tokens: Tensor) -> None:
        """One committed token [B] of every row."""
        self.seen.scatter_(1, tokens[:, None], True)

    def commit(self, proposal: Proposal, verdict: Verdict) -> None:
        """The accepted drafts and the token after them."""
        for at in range(verdict.path.shape[1]):
            rows = (verdict.length > at).nonzero()[:, 0]
            self.seen[rows, proposal.tokens[rows, verdict.path[rows, at] - 1]] = True
        self.add(verdict.next)

    def select(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.seen = self.seen[rows]


def history_for(
    sampling: Sampling, contexts: Sequence[Sequence[int]], vocab: int, device: torch.device
) -> History | None:
    """The history of these contexts where the sampling reads it; None costs nothing."""
    return History(contexts, vocab, device) if sampling.penalised else None
