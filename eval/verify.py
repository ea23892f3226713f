"""Verification of point-mass proposals: the rule that decides what is committed.

One token is chosen at every node from the target's law there: the argmax when greedy, one draw
otherwise. Starting at the root, descend to the child that holds the chosen token; where no child
does, the chosen token itself is emitted. Every emitted token is thus a draw from the target's law
at its own context, whatever the drafter proposed: the rule is lossless for chains and for trees
(Leviathan et al., 2211.17192, with q a point mass; SpecInfer, 2305.09781, naive sampling).
"""

import torch
from torch import Tensor

from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.drafters.sampler import Sampling, draw, standardise


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """One token per node from the target's law there: logits [B, M+1, V] -> [B, M+1]."""
    if sampling.greedy:
        return logits.max(dim=-1).indices  # as argmax, which is four times slower in bf16 on CPUs
    return draw(standardise(logits.float(), sampling), generator)


def verify(proposal: Proposal, chosen: Tensor) -> Verdict:
    """Follow the chosen tokens [B, M+1] down the tree. Raises ValueError for draws it is not exact
    for.
    """
    if proposal.draw != "point" or proposal.q is not None:
        raise ValueError(
            f"the point-mass rule is exact for draw 'point' without q, not for {proposal.draw!r}; "
            "a proposal drawn from q needs a rule that uses q"
        )
    rows = chosen.shape[0]
    node = torch.zeros(rows, dtype=torch.long, device=chosen.device)
    length = torch.zeros_like(node)
    path: list[Tensor] = []
    for _ in range(proposal.tokens.shape[1]):
        wanted = chosen.gather(1, node[:, None])  # [B, 1]
        fits = (proposal.parent == node[:, None]) & (proposal.tokens == wanted) & proposal.valid
        hit = fits.any(dim=1)
        if not bool(hit.any()):
            break
        node = torch.where(hit, fits.int().argmax(dim=1) + 1, node)
        length += hit
        path.append(torch.where(hit, node, 0))
    stacked = torch.stack(path, dim=1) if path else node.new_zeros((rows, 0))
    return Verdict(stacked, length, chosen.gather(1, node[:, None])[:, 0])
