"""The decoding waist: what a drafter offers in one round, and what the verifier answers."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from draftsmith.drafters.coins import Coins
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import Tree

Draw = Literal["chain", "iid", "without_replacement", "point"]


@dataclass(frozen=True)
class Proposal:
    """A tree of drafted tokens. Node 0 is the root (committed); node j >= 1 is `tokens[:, j-1]`.

    `parent[:, j-1] < j` is node j's parent. `q` is the law each token was really drawn from, given
    its earlier siblings; None is a point mass. `draw` says how every sibling group was drawn, in
    the order of the nodes. Whether a node is valid must not depend on the token drawn for it.
    """

    tokens: Tensor  # [B, M] int64
    parent: Tensor  # [B, M] int64
    valid: Tensor  # [B, M] bool
    q: Tensor | None = None  # [B, M, Vq]
    draw: Draw = "point"
    ids: Tensor | None = None  # [Vq] target ids of q's columns, which is 0 elsewhere; None: all

    def law(self, rows: Tensor, node: Tensor, width: int) -> Tensor:
        """q of a node [b] of each of these rows [b] over the target's vocabulary: [b, width]."""
        assert self.q is not None, "a point mass has no q"
        q = self.q[rows, node - 1]
        if self.ids is None:
            return q
        return q.new_zeros((len(rows), width)).index_copy_(1, self.ids, q)


@dataclass(frozen=True)
class Verdict:
    """Which nodes were accepted, and the token that follows them."""

    path: Tensor  # [B, P] int64 node ids (root excluded), padded with 0
    length: Tensor  # [B] int64, accepted nodes
    next: Tensor  # [B] int64, the correction or bonus token: the new root


@dataclass(frozen=True)
class Plan:
    """How a drafter is asked to draft: the shape, the law of sampled drafts, the coins, and how
    siblings are drawn (`point`: the likeliest tokens, nothing is drawn).

    A drafter whose guesses are fixed reads the shape alone and answers with draw `point`.
    """

    tree: Tree
    sampling: Sampling
    coins: Coins
    draw: Draw = "point"
