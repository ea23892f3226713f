"""Rules that accept a draft x with probability min(1, p(x) / q(x)), and correct by the residual.

One draft per node: Leviathan et al. (2211.17192, algorithm 1) and Chen et al. (2302.01318).
Several: children are tried in turn against the residual of those before (SpecInfer, 2305.09781,
algorithm 2, for independent draws; recursive rejection without replacement, Jeon et al.,
2402.14160, and Sequoia, 2402.12374), or all against a scaled q (SpecTr's K-SEQ, 2310.15141).
"""

import torch
from torch import Tensor

from draftsmith.drafters.coins import Coins
from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.eval.verify import Laws, descend, offspring, try_children
from draftsmith.recipes.errors import UserError

NOTHING = 1e-8  # residual mass that is rounding: p and q are equal there
HALVINGS = 20  # of the interval that holds K-SEQ's scale: its upper end is exact, and near the best


def rejection(laws: Laws, proposal: Proposal, coins: Coins, *, lenience: float = 1.0) -> Verdict:
    """Try the children of a node in turn; after each miss p becomes the residual (p - q)^+.

    q is each child's own law given its earlier siblings: that makes the one loop exact for chains,
    for independent children (duplicates tried again; of several drafters too) and for draws without
    replacement. lenience l puts l q in the place of q (Leviathan et al., appendix A.5): no token of
    a chain comes with more than p(x) / l.
    """

    def step(rows: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        p = laws.at(rows, node)  # [b, V]

        def accept(at: Tensor, child: Tensor) -> Tensor:
            q = proposal.law(rows[at], child, laws.width).to(p.dtype)  # [a, V]
            draft = proposal.tokens[rows[at], child - 1]
            taken = coins.flip(p[at, draft], lenience * drawn_with(q, draft), rows[at])
            missed = at[~taken]
            if missed.numel():
                p[missed] = residual(p[missed], lenience * q[~taken])
            return taken

        taken = try_children(offspring(proposal, rows, node), accept)
        return taken, draw_where(taken == 0, p, rows, coins)

    return descend(proposal, step)


def of_token(law: Tensor, token: Tensor) -> Tensor:
    """law [b, V] of a token [b]."""
    return law.gather(1, token[:, None])[:, 0]


def drawn_with(q: Tensor, token: Tensor) -> Tensor:
    """The probability [b] that a draft [b] had when it was drawn."""
    chance = of_token(q, token)
    assert bool((chance > 0).all()), "a draft has q = 0: it was drawn from another law than q"
    return chance


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)^+ renormalised, [b, V]; p itself where nothing is left."""
    rest = (p - q).clamp(min=0.0)
    mass = rest.sum(dim=-1, keepdim=True)
    return torch.where(mass > NOTHING, rest / mass, p)


def draw_where(wanted: Tensor, law: Tensor, rows: Tensor, coins: Coins) -> Tensor:
    """A token [b] from law [b, V] of those of these rows that want one; 0 for the others."""
    at = wanted.nonzero()[:, 0]
    token = torch.zeros_like(rows)
    if at.numel():
        token[at] = coins.draw(law[at], rows[at])
    return token


def k_sequential(laws: Laws, proposal: Proposal, coins: Coins, *, rho: float = 1.0) -> Verdict:
    """K-SEQ: accept each of k independent children with min(1, p / (rho q)); the first one counts.

    Exact from the smallest rho on at which the residual is nowhere negative, which also accepts
    most; `rho` is used where it is larger than that. Raises UserError for siblings of several laws.
    """

    def step(rows: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        p = laws.at(rows, node)  # [b, V]
        children = offspring(proposal, rows, node)  # [b, C]
        if not children.numel():
            return torch.zeros_like(rows), coins.draw(p, rows)
        count = (children > 0).sum(dim=1)
        first = children[:, 0].clamp(min=1)  # q of a row without children: nothing is read of it
        q = proposal.law(rows, first, laws.width).to(p.dtype)
        scale = smallest_scale(p, q, count, rho)

        def accept(at: Tensor, child: Tensor) -> Tensor:
            draft = proposal.tokens[rows[at], child - 1]
            chance = drawn_with(proposal.law(rows[at], child, laws.width).to(p.dtype), draft)
            check_one_law(chance, q[at, draft])
            return coins.flip(p[at, draft], scale[at] * chance, rows[at])

        taken = try_children(children, accept)
        return taken, draw_where(taken == 0, unspent(p, q, count, scale), rows, coins)

    return descend(proposal, step)


def check_one_law(chance: Tensor, first: Tensor) -> None:
    """Refuse a child whose probability [a] is not the first sibling's law's [a]."""
    if not torch.equal(chance, first):
        raise UserError(
            "rule k_sequential is for siblings of one law; these come from several drafters; "
            "choose multi_step"
        )


def smallest_scale(p: Tensor, q: Tensor, count: Tensor, least: float) -> Tensor:
    """The smallest rho >= least [b] with 1 - (1 - beta)^k <= rho beta, beta = sum min(q, p / rho).

    The left side falls and the right side grows with rho; at rho = k it holds. count: k [b].
    Returns a scale at which it holds, at most (k - least) / 2^HALVINGS above the smallest.
    """
    low = p.new_full(count.shape, least)
    enough = covered(p, q, count, low) <= low
    high = torch.where(enough, low, count.to(p.dtype))
    for _ in range(HALVINGS):
        if bool(enough.all()):
            break
        middle = (low + high) / 2
        fits = covered(p, q, count, middle) <= middle
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high


def covered(p: Tensor, q: Tensor, count: Tensor, scale: Tensor) -> Tensor:
    """(1 - (1 - beta)^k) / beta [b]: how much of min(q, p / rho) is spent, over k children."""
    beta = torch.minimum(q, p / scale[:, None]).sum(dim=1)
    spent = 1 - (1 - beta).clamp(min=0.0) ** count
    return torch.where(beta > 0, spent / beta, count)


def unspent(p: Tensor, q: Tensor, count: Tensor, scale: Tensor) -> Tensor:
    """K-SEQ's residual p - min(q, p / rho) (1 - (1 - beta)^k) / beta, [b, V], not normalised."""
    share = torch.minimum(q, p / scale[:, None])
    rest = (p - covered(p, q, count, scale)[:, None] * share).clamp(min=0.0)
    return torch.where(rest.sum(dim=1, keepdim=True) > NOTHING, rest, p)
