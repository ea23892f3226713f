"""Rules that accept more than the target's law allows: faster, and another output law."""

import math

import torch
from torch import Tensor

from draftsmith.drafters.coins import Coins
from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.eval.rules_rejection import of_token, rejection
from draftsmith.eval.verify import Laws, descend, match, offspring, try_children


def lenient(laws: Laws, proposal: Proposal, coins: Coins, *, lenience: float) -> Verdict:
    """Token rejection with l q for q (Leviathan et al., 2211.17192, appendix A.5): no token is
    emitted with more than p(x) / l. At temperature 0: accept what has p(x) >= l max p.
    """
    if not laws.sampling.greedy:
        return rejection(laws, proposal, coins, lenience=lenience)

    def step(rows: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        logits = laws.adjusted(rows, node)  # [b, V]
        least = logits.amax(dim=1) + math.log(lenience)

        def accept(at: Tensor, child: Tensor) -> Tensor:
            return of_token(logits[at], proposal.tokens[rows[at], child - 1]) >= least[at]

        taken = try_children(offspring(proposal, rows, node), accept)
        return taken, logits.argmax(dim=1)

    return descend(proposal, step)


def typical(
    laws: Laws, proposal: Proposal, coins: Coins, *, epsilon: float, delta: float
) -> Verdict:
    """Typical acceptance (Medusa, 2401.10774, section 2.3.2): accept x if
    p(x) > min(epsilon, delta exp(-H(p))). The longest accepted path, among equals the likeliest;
    the token after it is greedy.
    """
    if laws.sampling.greedy:
        return match(laws, proposal, coins)
    batch, nodes = proposal.tokens.shape
    logp = proposal.tokens.new_zeros((batch, nodes + 1), dtype=torch.float64)  # along paths
    depth = torch.full_like(logp, -1).long()  # of accepted nodes
    rows = torch.arange(batch, device=depth.device)
    node = torch.zeros_like(rows)
    depth[:, 0] = 0
    while rows.numel():  # accepted nodes whose children are not judged yet; a row may have several
        children = offspring(proposal, rows, node)  # [f, C]
        inner = children.any(dim=1)  # the laws of leaves are not read
        rows, node, children = rows[inner], node[inner], children[inner]
        p = laws.at(rows, node)  # [i, V]
        tokens = proposal.tokens[rows[:, None], (children - 1).clamp(min=0)]
        share = p.gather(1, tokens)  # [i, C]
        fits = (children > 0) & (share > threshold(p, epsilon, delta)[:, None])
        at, column = fits.nonzero(as_tuple=True)
        child = children[at, column]
        logp[rows[at], child] = logp[rows[at], node[at]] + share[at, column].double().log()
        depth[rows[at], child] = depth[rows[at], node[at]] + 1
        rows, node = rows[at], child
    length = depth.amax(dim=1)
    last = logp.masked_fill(depth < length[:, None], float("-inf")).argmax(dim=1)
    rows = torch.arange(batch, device=depth.device)
    return Verdict(path_to(proposal, last, length), length, laws.choice(rows, last))


def threshold(p: Tensor, epsilon: float, delta: float) -> Tensor:
    """min(epsilon, delta exp(-H)) of laws p [n, V]: [n]."""
    entropy: Tensor = torch.special.entr(p).sum(dim=1)
    return (delta * (-entropy).exp()).clamp(max=epsilon)


def path_to(proposal: Proposal, node: Tensor, length: Tensor) -> Tensor:
    """The nodes from the root (left out) to a node [B] at depth `length` [B], padded: [B, P]."""
    rows = torch.arange(len(node), device=node.device)
    path = node.new_zeros((len(node), int(length.max())))
    for depth in range(path.shape[1], 0, -1):
        here = length >= depth
        path[here, depth - 1] = node[here]
        node = torch.where(here, proposal.parent[rows, node - 1], node)
    return path
