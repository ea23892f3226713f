"""Verification: the rule that decides which drafts are committed.

A rule sees the target's laws at the nodes of a proposal, standardises only those that it reads, and
takes every random number from `Coins`.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from draftsmith.drafters.coins import Coins
from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.drafters.sampler import Sampling, standardise


class Laws:
    """What the target says at every node: raw logits [B, M+1, V] under a sampling."""

    def __init__(self, logits: Tensor, sampling: Sampling) -> None:
        self.logits, self.sampling = logits, sampling

    @cached_property
    def best(self) -> Tensor:
        """The argmax at every node, [B, M+1]."""
        return self.logits.max(dim=-1).indices  # as argmax, which is four times slower in bf16

    def at(self, rows: Tensor, node: Tensor) -> Tensor:
        """The standardised laws [b, V] of a node [b] of each of these rows [b]; at least fp32."""
        logits = self.logits[rows, node]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return standardise(wide, self.sampling)

    def token(self, rows: Tensor, node: Tensor, coins: Coins) -> Tensor:
        """One token [b] from the law of a node of each of these rows."""
        if self.sampling.greedy:
            return self.best[rows, node]
        return coins.draw(self.at(rows, node), rows)


Rule = Callable[[Laws, Proposal, Coins], Verdict]


def point_mass(laws: Laws, proposal: Proposal, coins: Coins) -> Verdict:
    """One token from the target's law at the root; descend to the child that holds it, and again.

    Where no child does, that very token is emitted. Every emitted token is thus a draw from the
    target's law at its own context, whatever the drafter proposed: lossless for chains and trees
    (Leviathan et al., 2211.17192, with q a point mass; SpecInfer, 2305.09781, naive sampling).
    Greedy decoding is the same with the argmax as the draw. Raises ValueError for drafts that were
    themselves drawn at random.
    """
    if proposal.draw != "point" or proposal.q is not None:
        raise ValueError(
            f"the point-mass rule is exact for draw 'point' without q, not for {proposal.draw!r}; "
            "a proposal drawn from q needs a rule that uses q"
        )
    rows = torch.arange(proposal.tokens.shape[0], device=proposal.tokens.device)
    node, length, emitted = (torch.zeros_like(rows) for _ in range(3))
    path: list[Tensor] = []
    while rows.numel():
        token = laws.token(rows, node[rows], coins)
        emitted[rows] = token
        found = child_with(proposal, rows, node[rows], token)
        rows, found = rows[found > 0], found[found > 0]
        node[rows] = found
        length[rows] += 1
        if rows.numel():
            path.append(torch.zeros_like(node).index_put((rows,), found))
    return Verdict(stacked(path, node), length, emitted)


def child_with(proposal: Proposal, rows: Tensor, node: Tensor, token: Tensor) -> Tensor:
    """The first child of a node [b] of these rows [b] that holds a token [b]; 0: none does."""
    if not proposal.tokens.shape[1]:
        return torch.zeros_like(rows)
    fits = (
        (proposal.parent[rows] == node[:, None])
        & (proposal.tokens[rows] == token[:, None])
        & proposal.valid[rows]
    )
    return torch.where(fits.any(dim=1), fits.int().argmax(dim=1) + 1, 0)


def stacked(path: list[Tensor], like: Tensor) -> Tensor:
    """Accepted nodes by depth as [B, P]."""
    return torch.stack(path, dim=1) if path else like.new_zeros((like.shape[0], 0))
