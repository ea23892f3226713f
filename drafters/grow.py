"""Growing a tree of drafts, level by level, from a drafter whose guesses read the tokens before
them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.draws import Children, draw_children
from draftsmith.drafters.proposal import Plan, Proposal
from draftsmith.drafters.sampler import standardise
from draftsmith.drafters.tree import Tree

# Node numbers [n] and the drafts so far [B, M] -> logits [B, n, Vq] after each of these nodes.
Below = Callable[[list[int], Tensor], Tensor]


@dataclass(frozen=True)
class Family:
    """A node and its children, all by number; `ranks` places the children among its guesses."""

    parent: int
    children: list[int]
    ranks: list[int]


def levels(tree: Tree) -> list[list[Family]]:
    """The families of every depth, parents in the order of their numbers."""
    number = {(): 0, **{path: node for node, path in enumerate(tree.paths, start=1)}}
    found: dict[int, dict[int, Family]] = {}
    for path in tree.paths:
        parent = number[path[:-1]]
        family = found.setdefault(len(path), {}).setdefault(parent, Family(parent, [], []))
        family.children.append(number[path])
        family.ranks.append(path[-1])
    return [list(found[depth].values()) for depth in sorted(found)]


def lines(tree: Tree) -> list[list[int]]:
    """For every node number, the nodes from below the root down to it; none for the root."""
    number = {path: node for node, path in enumerate(tree.paths, start=1)}
    return [[], *([number[path[: k + 1]] for k in range(len(path))] for path in tree.paths)]


def grow(plan: Plan, first: Tensor, below: Below, ids: Tensor | None = None) -> Proposal:
    """Drafts in the plan's shape, drawn as the plan says.

    first [B, Vq]: logits after the root. below: called once for every level but the first, with the
    nodes that have children. ids [Vq]: the target ids of the columns; None: the columns themselves.
    """
    batch, tree = first.shape[0], plan.tree
    tokens = torch.zeros((batch, tree.nodes), dtype=torch.int64, device=first.device)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    q = None if plan.draw == "point" else first.new_zeros((*tokens.shape, first.shape[1]))
    for depth, families in enumerate(levels(tree)):
        parents = [family.parent for family in families]
        logits = first[:, None] if depth == 0 else below(parents, tokens)
        for place, family in enumerate(families):
            drawn = choose(logits[:, place], family.ranks, plan)
            at = [child - 1 for child in family.children]
            tokens[:, at] = drawn.tokens if ids is None else ids[drawn.tokens]
            reached = valid[:, family.parent - 1] if family.parent else valid.new_ones(batch)
            valid[:, at] = drawn.valid & reached[:, None]
            if q is not None:
                q[:, at] = drawn.q
    return Proposal(tokens, tree.parent.expand(batch, -1), valid, q, plan.draw, ids)


def choose(logits: Tensor, ranks: Sequence[int], plan: Plan) -> Children:
    """The children of one node from the logits after it [B, Vq].

    Drawn children need no ranks: the first draw is the first child.
    """
    if plan.draw == "point":
        best = best_columns(logits, max(ranks) + 1)[:, list(ranks)]
        return Children(best, logits[:, None, :0], torch.ones_like(best, dtype=torch.bool))
    law = standardise(logits, plan.sampling)
    rows = torch.arange(len(law), device=law.device)
    return draw_children(law, len(ranks), plan.draw, plan.coins, rows)


def best_columns(logits: Tensor, count: int) -> Tensor:
    """The `count` likeliest columns, best first, [..., count]; of one, the lowest id on ties."""
    if count == 1:
        return logits.argmax(dim=-1, keepdim=True)
    return logits.topk(count, dim=-1).indices
