"""The exact law of what one node emits, from one call of a rule for all its proposals at once."""

from dataclasses import replace

import torch

from draftsmith.drafters.draws import draw_slots
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import Tree
from draftsmith.eval.verify import Laws
from tests.coins import EnumeratedCoins


class EveryMiss:
    """Coins that miss every flip, and keep with what chance each would not have missed.

    At one node that is the whole law: child i is accepted after the misses before it, and the draw
    ends the round after all of them.
    """

    def __init__(self, proposal, size):
        self.proposal, rows = proposal, proposal.tokens.shape[0]
        self.left = torch.ones(rows, dtype=torch.float64)
        self.out = torch.zeros(rows, size, dtype=torch.float64)
        self.tried = torch.zeros(rows, dtype=torch.long)
        self.accepted = 0.0

    def flip(self, p, q, rows):
        chance = (p / q).clamp(max=1.0)
        skipped = ~self.proposal.valid[rows, self.tried[rows]]
        while skipped.any():
            self.tried[rows[skipped]] += 1
            skipped = ~self.proposal.valid[rows, self.tried[rows]]
        token = self.proposal.tokens[rows, self.tried[rows]]
        self.out[rows, token] += self.left[rows] * chance
        self.left[rows] *= 1 - chance
        self.tried[rows] += 1
        return torch.zeros_like(rows).bool()

    def draw(self, law, rows):
        self.accepted = 1 - self.left
        self.out[rows] += self.left[rows, None] * law / law.sum(dim=1, keepdim=True)
        return torch.zeros_like(rows)


def drawn(q, count, draw, coins):
    """Children of the root, drawn by the real thing."""
    tree = Tree(tuple((rank,) for rank in range(count)))
    return draw_slots(q[None, None], tree, draw, coins)


def all_proposals(propose):
    """Everything that the draws can give, as rows of one proposal, and their weights."""
    coins, rows, weights, more = EnumeratedCoins(), [], [], True
    while more:
        rows.append(propose(coins))
        weights.append(coins.weight)
        more = coins.next()
    parts = {
        name: torch.cat([getattr(row, name) for row in rows])
        for name in ("tokens", "parent", "valid", "q")
        if getattr(rows[0], name) is not None
    }
    return replace(rows[0], **parts), torch.tensor(weights, dtype=torch.float64)


def one_node(p, propose, rule):
    """What one node emits: its law [V], and the probability that it is a draft."""
    proposal, weights = all_proposals(propose)
    logits = p.log().expand(*proposal.tokens.shape[:1], proposal.tokens.shape[1] + 1, -1)
    coins = EveryMiss(proposal, len(p))
    rule(Laws(logits, Sampling(1.0)), proposal, coins)
    return weights @ coins.out, float(weights @ coins.accepted)
