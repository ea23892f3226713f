"""One tree out of several drafters' trees (SpecInfer, 2305.09781, section 3, merge-based).

Trees share their prefixes: where two of them hold the same token below the same node, what hangs
below either hangs below the first. Of guesses the second one goes; of drafts that were drawn it
stays, as a leaf: the rules that weigh drafts by q are exact only if every draw is tried.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.drafters.proposal import Proposal


def merge(trees: Sequence[Proposal], vocab: int) -> Proposal:
    """The union of trees, those of the first in front: siblings come in the order of the trees.

    vocab: the target's, over which every q is written out where there are several.
    """
    trees = [tree for tree in trees if tree.tokens.shape[1]] or trees[:1]
    if len(trees) == 1:
        return trees[0]
    tokens = torch.cat([tree.tokens for tree in trees], dim=1)
    valid = torch.cat([tree.valid for tree in trees], dim=1)
    drawn = trees[0].q is not None
    parent, kept = graft(tokens, stacked_parents(trees), valid, drawn=drawn)
    if not drawn:
        return squeeze(Proposal(tokens, parent, kept))
    q = torch.cat([whole_q(tree, vocab) for tree in trees], dim=1)
    # Each sibling has a law of its own: not for rules that count on one law (K-SEQ, for `iid`).
    return Proposal(tokens, parent, kept, q, "without_replacement")


def squeeze(proposal: Proposal) -> Proposal:
    """Without the nodes that no row has; they have no children."""
    at = proposal.valid.any(dim=0)
    number = torch.cat([at.new_zeros(1), at]).cumsum(dim=0)
    parent = number[proposal.parent[:, at]]
    return Proposal(proposal.tokens[:, at], parent, proposal.valid[:, at])


def stacked_parents(trees: Sequence[Proposal]) -> Tensor:
    """Parents [B, M] by number in the union; every tree's root is the root."""
    parts, before = [], 0
    for tree in trees:
        parts.append(torch.where(tree.parent > 0, tree.parent + before, 0))
        before += tree.parent.shape[1]
    return torch.cat(parts, dim=1)


def graft(tokens: Tensor, parent: Tensor, valid: Tensor, *, drawn: bool) -> tuple[Tensor, Tensor]:
    """Parents and valid nodes [B, M] after equal siblings were joined; nodes keep their numbers."""
    rows = zip(tokens.tolist(), parent.tolist(), valid.tolist(), strict=True)
    joined = [graft_row(*row, drawn=drawn) for row in rows]
    parents, kept = zip(*joined, strict=True)
    return torch.tensor(parents, device=parent.device), torch.tensor(kept, device=valid.device)


def graft_row(
    tokens: list[int], parent: list[int], valid: list[bool], *, drawn: bool
) -> tuple[list[int], list[bool]]:
    """One row of `graft`."""
    first: dict[tuple[int, int], int] = {}  # (parent, token) -> the node that stands for both
    stands = [0]  # by node: the node that its children hang below
    parents, kept = [], []
    for node, (token, above, real) in enumerate(zip(tokens, parent, valid, strict=True), start=1):
        above = stands[above]
        known = first.setdefault((above, token), node) if real else node
        stands.append(known)
        parents.append(above)
        kept.append(real and (drawn or known == node))
    return parents, kept


def whole_q(tree: Proposal, vocab: int) -> Tensor:
    """A tree's q over the target's vocabulary, [B, M, V]."""
    assert tree.q is not None, "all trees are drawn, or none is"
    if tree.ids is None and tree.q.shape[2] == vocab:
        return tree.q
    ids = torch.arange(tree.q.shape[2], device=tree.q.device) if tree.ids is None else tree.ids
    return tree.q.new_zeros((*tree.q.shape[:2], vocab)).index_copy_(2, ids, tree.q)
