"""Block verification (Sun et al., 2403.10444, algorithm 2): a chain is judged as a whole.

The same drafts, the same target pass and the same output law as token rejection; never fewer
accepted drafts on average.
"""

import torch
from torch import Tensor

from draftsmith.drafters.coins import Coins
from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.eval.rules_rejection import drawn_with, of_token, residual
from draftsmith.eval.verify import Laws


def block(laws: Laws, proposal: Proposal, coins: Coins) -> Verdict:
    """Accept the longest prefix whose own coin falls well.

    With weight w_0 = 1 and w_i = min(w_{i-1} p(y_i) / q(y_i), 1), prefix i < n has chance
    S / (S + 1 - w_i), S = sum (w_i p - q)^+ at its end; the whole chain has w_n. The next token
    comes from (w_i p - q)^+ at the end of the prefix, or from p after the whole chain.
    """
    count = chain_length(proposal)
    weight, chance = weigh(laws, proposal, count)
    length = longest_prefix(chance, count, coins)
    rows = torch.arange(len(count), device=count.device)
    law = laws.at(rows, length)
    cut = (length < count).nonzero()[:, 0]
    if cut.numel():
        at = length[cut]
        q = proposal.law(cut, at + 1, laws.width).to(law.dtype)
        law[cut] = residual(weight[cut, at, None].to(law.dtype) * law[cut], q)
    nodes = torch.arange(1, proposal.tokens.shape[1] + 1, device=count.device)
    path = torch.where(nodes <= length[:, None], nodes, 0)
    return Verdict(path, length, coins.draw(law, rows))


def chain_length(proposal: Proposal) -> Tensor:
    """Drafts [B] of every row's chain, up to the first that is not valid."""
    before = torch.arange(proposal.tokens.shape[1], device=proposal.tokens.device)
    straight = (proposal.parent == before) | ~proposal.valid
    assert bool(straight.all()), "block verification is for chains"
    return proposal.valid.long().cumprod(dim=1).sum(dim=1)


def weigh(laws: Laws, proposal: Proposal, count: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and chance [B, M+1] fp64 of every prefix; 0 after one that p rules out."""
    weight = proposal.tokens.new_zeros(
        (len(count), proposal.tokens.shape[1] + 1), dtype=torch.float64
    )
    weight[:, 0] = 1.0
    chance = torch.zeros_like(weight)
    rows = torch.arange(len(count), device=count.device)
    for i in range(weight.shape[1] - 1):
        rows = rows[(count[rows] > i) & (weight[rows, i] > 0)]
        if not rows.numel():
            break
        p = laws.at(rows, torch.full_like(rows, i))  # [b, V]
        q = proposal.law(rows, torch.full_like(rows, i + 1), laws.width).to(p.dtype)
        w, draft = weight[rows, i], proposal.tokens[rows, i]
        left = (w[:, None].to(p.dtype) * p - q).clamp(min=0.0).sum(dim=1).double()
        chance[rows, i] = torch.where(left > 0, left / (left + 1 - w), 0.0)
        ratio = of_token(p, draft).double() / drawn_with(q, draft).double()
        weight[rows, i + 1] = (w * ratio).clamp(max=1.0)
    every = torch.arange(len(count), device=count.device)
    chance[every, count] = weight[every, count]
    return weight, chance


def longest_prefix(chance: Tensor, count: Tensor, coins: Coins) -> Tensor:
    """The largest i [B] whose coin comes up with chance [B, M+1]; 0 where none does.

    From the end on: coins of shorter prefixes would decide nothing.
    """
    length = torch.zeros_like(count)
    for i in range(chance.shape[1] - 1, 0, -1):
        rows = ((count >= i) & (length == 0)).nonzero()[:, 0]
        if rows.numel():
            mine = chance[rows, i]
            taken = coins.flip(mine, torch.ones_like(mine), rows)
            length[rows] = torch.where(taken, i, 0)
    return length
