"""How the tokens of one target pass lie behind the context: their depths, and who sees whom."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.tree import Tree


@dataclass(frozen=True)
class Nodes:
    """Tokens [B, M] that are fed together behind a context that all of them see.

    R is 1 where the rows agree, else B.
    """

    depth: Tensor  # [R, M] int64: a node's position is the length of its context plus its depth
    visible: Tensor | None = None  # [R, M, M] bool: a node's ancestors and itself; None: a chain


def padded(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as ids [B, T], padded at the end, and their lengths [B]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    return ids.to(device), torch.tensor([len(prompt) for prompt in prompts], device=device)


def last_of(states: Tensor, lengths: Tensor) -> Tensor:
    """The states [B, D] at the last token of every prompt, from [B, T, D]."""
    return states[torch.arange(len(lengths), device=lengths.device), lengths - 1]


def chain_nodes(count: int, device: torch.device) -> Nodes:
    """Every token follows the one before it."""
    return Nodes(torch.arange(count, device=device)[None])


def lay_out(proposal: Proposal, tree: Tree) -> tuple[Proposal, Nodes]:
    """What of a proposal is fed behind its root, and how it lies, the root in front (M+1 nodes).

    A proposal that is laid out as the whole `tree` costs next to nothing here. Otherwise nodes
    behind the last one that is valid in any row are cut off; the other invalid ones are fed as
    token 0, and no valid node sees them.
    """
    if is_whole(proposal, tree):
        if tree.is_chain:
            return proposal, chain_nodes(tree.nodes + 1, tree.depth.device)
        depth = torch.cat([tree.depth.new_zeros(1), tree.depth])
        return proposal, Nodes(depth[None], tree.visible[None])
    parent, valid = proposal.parent.tolist(), proposal.valid.tolist()
    count = max((j for row in valid for j, real in enumerate(row, start=1) if real), default=0)
    proposal = first_nodes(proposal, count)
    if is_chain(parent, valid):
        return proposal, chain_nodes(count + 1, proposal.tokens.device)
    visible = ancestors(proposal.parent)
    return proposal, Nodes(visible.sum(dim=-1) - 1, visible)


def is_whole(proposal: Proposal, tree: Tree) -> bool:
    """Whether every row has all nodes of the tree, where the tree has them."""
    same_size = proposal.parent.shape[1] == tree.nodes
    return same_size and bool(((proposal.parent == tree.parent) & proposal.valid).all())


def is_chain(parent: list[list[int]], valid: list[list[bool]]) -> bool:
    """Whether every valid node follows the one before it."""
    rows = zip(parent, valid, strict=True)
    return all(above == j for parents, real in rows for j, above in enumerate(parents) if real[j])


def first_nodes(proposal: Proposal, count: int) -> Proposal:
    """The first `count` nodes; invalid ones become token 0 below the root."""
    valid = proposal.valid[:, :count]
    return replace(
        proposal,
        tokens=proposal.tokens[:, :count].masked_fill(~valid, 0),
        parent=proposal.parent[:, :count].masked_fill(~valid, 0),
        valid=valid,
        q=None if proposal.q is None else proposal.q[:, :count],
    )


def ancestors(parent: Tensor) -> Tensor:
    """[B, M+1, M+1] bool from parents [B, M]: every node's ancestors and itself, the root first."""
    batch, count = parent.shape
    sees = torch.eye(count + 1, device=parent.device).repeat(batch, 1, 1)
    sees[:, 1:].scatter_(2, parent[..., None], 1.0)  # itself and its parent
    for _ in range(count.bit_length()):  # twice as far every time
        sees = (sees @ sees).clamp(max=1.0)
    return sees > 0
