"""Proposals of slots that do not read each other's tokens: Medusa heads, a block drafter."""

import torch
from torch import Tensor

from draftsmith.drafters.draws import draw_slots
from draftsmith.drafters.grow import best_columns
from draftsmith.drafters.proposal import Plan, Proposal
from draftsmith.drafters.sampler import standardise


def propose_slots(logits: Tensor, plan: Plan, ids: Tensor | None) -> Proposal:
    """The best guesses of every slot, or draws from its law, laid out as the plan's tree.

    logits [B, K, Vq], K at least the tree's depth. ids [Vq]: the target ids of the columns; None:
    the columns themselves.
    """
    tree = plan.tree
    if plan.draw != "point":
        return draw_slots(standardise(logits, plan.sampling), tree, plan.draw, plan.coins, ids)
    best = best_columns(logits, tree.width)  # [B, K, S]
    best = best if ids is None else ids[best]
    tokens = best[:, tree.depth - 1, tree.rank]  # [B, M]
    valid = torch.ones_like(tokens, dtype=torch.bool)
    return Proposal(tokens, tree.parent.expand(len(logits), -1), valid)
