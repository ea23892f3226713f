"""Drawing drafts: the children of a node from a law q, and the law that each was really drawn from.

A rule that weighs drafts by q is exact only for the q that these functions hand back (Leviathan et
al., 2211.17192, appendix A.1; SpecInfer, 2305.09781, section 4.3; Jeon et al., 2402.14160).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.coins import Coins
from draftsmith.drafters.proposal import Draw, Proposal
from draftsmith.drafters.tree import Tree


@dataclass(frozen=True)
class Children:
    """What was drawn at a node of each row. Tokens are columns of q."""

    tokens: Tensor  # [b, k] int64, 0 where not valid
    q: Tensor  # [b, k, Vq] the law of each draw, given its earlier siblings
    valid: Tensor  # [b, k] bool: a law of few tokens runs out of draws without replacement


def draw_children(law: Tensor, count: int, draw: Draw, coins: Coins, rows: Tensor) -> Children:
    """`count` children of one node of each of these rows [b], from its law [b, Vq].

    chain: one. iid: independent, duplicates kept. without_replacement: no token twice; the law of a
    child is q with its earlier siblings' tokens at 0, renormalised. Raises ValueError for `point`,
    which draws nothing, and for a chain of more than one child.
    """
    if draw == "without_replacement":
        return draw_distinct(law, count, coins, rows)
    if draw == "point" or (draw == "chain" and count != 1):
        raise ValueError(f"no {count} children are drawn by {draw!r}")
    tokens = torch.stack([coins.draw(law, rows) for _ in range(count)], dim=1)
    q = law[:, None].expand(-1, count, -1)
    return Children(tokens, q, torch.ones_like(tokens, dtype=torch.bool))


def draw_distinct(law: Tensor, count: int, coins: Coins, rows: Tensor) -> Children:
    """Draws without replacement; a row whose law has run out draws no more, and uses no coins."""
    tokens = rows.new_zeros((len(rows), count))
    q = law.new_zeros((len(rows), count, law.shape[1]))
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    left = law.clone()
    for child in range(count):
        at = (left.sum(dim=-1) > 0).nonzero()[:, 0]
        if not at.numel():
            break
        q[at, child] = left[at] / left[at].sum(dim=-1, keepdim=True)
        tokens[at, child] = coins.draw(q[at, child], rows[at])
        valid[at, child] = True
        left[at, tokens[at, child]] = 0.0
    return Children(tokens, q, valid)


def draw_slots(
    laws: Tensor, tree: Tree, draw: Draw, coins: Coins, ids: Tensor | None = None
) -> Proposal:
    """Drafts of slots that do not read each other's tokens (Medusa heads, a block drafter).

    laws [B, K, Vq]: slot k's law serves every node of depth k-1 of the tree, whose ranks only count
    children. ids [Vq]: the target ids of the columns; None: the columns themselves.
    """
    rows = torch.arange(laws.shape[0], device=laws.device)
    tokens = rows.new_zeros((len(rows), tree.nodes))
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    q = laws.new_zeros((len(rows), tree.nodes, laws.shape[-1]))
    for depth, children in families(tree):
        drawn = draw_children(laws[:, depth], len(children), draw, coins, rows)
        at = [child - 1 for child in children]
        tokens[:, at], q[:, at], valid[:, at] = drawn.tokens, drawn.q, drawn.valid
    tokens = tokens if ids is None else ids[tokens]
    return Proposal(tokens, tree.parent.expand(len(rows), -1), valid, q, draw, ids)


def families(tree: Tree) -> list[tuple[int, list[int]]]:
    """Depth and children (node numbers in order) of every node that has any; parents first."""
    found: dict[tuple[int, ...], list[int]] = {}
    for node, path in enumerate(tree.paths, start=1):
        found.setdefault(path[:-1], []).append(node)
    return [(len(parent), children) for parent, children in found.items()]
