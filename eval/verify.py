"""Verification: what a rule is. It decides which drafts are committed.

A rule sees the target's laws at the nodes of a proposal, standardises only those that it reads, and
takes every random number from `Coins`. `rules.py` lists all rules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from draftsmith.drafters.coins import Coins
from draftsmith.drafters.proposal import Draw, Proposal, Verdict
from draftsmith.drafters.sampler import Sampling, adjust, standardise
from draftsmith.eval.history import History
from draftsmith.recipes.errors import UserError


class Laws:
    """What the target says at every node: raw logits [B, M+1, V] under a sampling.

    A repetition penalty also needs the history of the rows, and the proposal for the nodes' paths.
    """

    def __init__(
        self,
        logits: Tensor,
        sampling: Sampling,
        history: History | None = None,
        proposal: Proposal | None = None,
    ) -> None:
        self.logits, self.sampling = logits, sampling
        self.history, self.proposal = history, proposal

    @property
    def width(self) -> int:
        """The size of the target's vocabulary."""
        return self.logits.shape[-1]

    @cached_property
    def best(self) -> Tensor:
        """The argmax of the raw logits at every node, [B, M+1]."""
        return self.logits.max(dim=-1).indices  # as argmax, which is four times slower in bf16

    def at(self, rows: Tensor, node: Tensor) -> Tensor:
        """The standardised laws [b, V] of a node [b] of each of these rows [b]; at least fp32."""
        return standardise(self.wide(rows, node), self.sampling, self.seen(rows, node))

    def adjusted(self, rows: Tensor, node: Tensor) -> Tensor:
        """Logits [b, V] under bias and penalty; their argmax is the greedy choice."""
        return adjust(self.wide(rows, node), self.sampling, self.seen(rows, node))

    def wide(self, rows: Tensor, node: Tensor) -> Tensor:
        """Raw logits [b, V], at least fp32."""
        logits = self.logits[rows, node]
        return logits if logits.dtype == torch.float64 else logits.float()

    def seen(self, rows: Tensor, node: Tensor) -> Tensor | None:
        """The tokens before, [b, V] bool, where a penalty reads them."""
        if self.history is None or not self.sampling.penalised:
            return None
        return self.history.before(self.proposal, rows, node)

    def choice(self, rows: Tensor, node: Tensor) -> Tensor:
        """The likeliest token [b], lowest id on ties: what greedy decoding takes."""
        if self.sampling.adjusted:
            return self.adjusted(rows, node).argmax(dim=-1)
        return self.best[rows, node]

    def token(self, rows: Tensor, node: Tensor, coins: Coins) -> Tensor:
        """One token [b] from the law of a node of each of these rows."""
        if self.sampling.greedy:
            return self.choice(rows, node)
        return coins.draw(self.at(rows, node), rows)


Rule = Callable[[Laws, Proposal, Coins], Verdict]


def match(laws: Laws, proposal: Proposal, coins: Coins) -> Verdict:
    """One token from the target's law at the root; descend to the child that holds it, and again.

    Where no child does, that very token is emitted: every emitted token is a draw from the target's
    law at its own context, if the drafts do not depend on that draw. At temperature 0 the draw is
    the argmax, and this is greedy decoding whatever the drafts are (Leviathan et al., 2211.17192,
    section 2.2; SpecInfer, 2305.09781, VerifyGreedy and naive sampling).
    """

    def step(rows: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        token = laws.token(rows, node, coins)
        return child_with(proposal, rows, node, token), token

    return descend(proposal, step)


Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def descend(proposal: Proposal, step: Step) -> Verdict:
    """From the root to an accepted child, and again, until a row has none.

    step: for rows [b] at a node [b], the accepted child [b], 0 where there is none, and the token
    [b] to emit there. Rows that ended are not asked again.
    """
    rows = torch.arange(proposal.tokens.shape[0], device=proposal.tokens.device)
    node, length, emitted = (torch.zeros_like(rows) for _ in range(3))
    path: list[Tensor] = []
    while rows.numel():
        child, token = step(rows, node[rows])
        emitted[rows] = token
        rows, child = rows[child > 0], child[child > 0]
        node[rows] = child
        length[rows] += 1
        if rows.numel():
            path.append(torch.zeros_like(node).index_put((rows,), child))
    return Verdict(stacked(path, node), length, emitted)


def offspring(proposal: Proposal, rows: Tensor, node: Tensor) -> Tensor:
    """The children [b, C] of a node [b] of these rows [b], in the order of their draws; 0 after the
    last.
    """
    of = (proposal.parent[rows] == node[:, None]) & proposal.valid[rows]  # [b, M]
    most = int(of.sum(dim=1).max()) if of.numel() else 0
    first = of.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return torch.where(of.gather(1, first), first + 1, 0)


def try_children(children: Tensor, accept: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The first accepted child [b] of children [b, C]; 0: none.

    accept: for the rows of `children` that have none yet, and their next child: whether it is.
    """
    taken = children.new_zeros(children.shape[0])
    for child in children.unbind(dim=1):
        open_rows = ((child > 0) & (taken == 0)).nonzero()[:, 0]
        if not open_rows.numel():
            break
        candidate = child[open_rows]
        taken[open_rows] = torch.where(accept(open_rows, candidate), candidate, 0)
    return taken


def child_with(proposal: Proposal, rows: Tensor, node: Tensor, token: Tensor) -> Tensor:
    """The first child of a node [b] of these rows [b] that holds a token [b]; 0: none does."""
    if not proposal.tokens.shape[1]:
        return torch.zeros_like(rows)
    fits = (
        (proposal.parent[rows] == node[:, None])
        & (proposal.tokens[rows] == token[:, None])
        & proposal.valid[rows]
    )
    return torch.where(fits.any(dim=1), fits.int().argmax(dim=1) + 1, 0)


def stacked(path: list[Tensor], like: Tensor) -> Tensor:
    """Accepted nodes by depth as [B, P]."""
    return torch.stack(path, dim=1) if path else like.new_zeros((like.shape[0], 0))


@dataclass(frozen=True)
class RuleSpec:
    """A rule, and which drafts it is exact for (where it is lossy: has its stated bound for).

    At temperature 0 nothing is weighed by q: any draw is allowed, and lossless rules are `match`.
    """

    name: str
    verify: Callable[..., Verdict]  # (laws, proposal, coins, **parameters)
    draws: tuple[Draw, ...]
    advice: str  # what to choose for other draws
    lossless: bool = True
    parameters: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def described(self) -> str:
        """The name with its parameters, and whether the output law is another than the target's."""
        values = ", ".join(f"{name} {value:g}" for name, value in self.parameters.items())
        return self.name + (f" ({values})" if values else "") + ("" if self.lossless else ", lossy")

    def __call__(self, laws: Laws, proposal: Proposal, coins: Coins) -> Verdict:
        """Verify. Raises UserError for drafts of a draw that the rule is not for."""
        if laws.sampling.greedy and self.lossless:
            return match(laws, proposal, coins)
        if not laws.sampling.greedy:
            self.check(proposal)
        return self.verify(laws, proposal, coins, **self.parameters)

    def check(self, proposal: Proposal) -> None:
        """Refuse drafts that were drawn in another way; without drafts a round is plain decoding.

        Children that are the top-k of a softmax q, weighed with that q as if drawn from it, are off
        by a total variation of 0.6.
        """
        if proposal.tokens.shape[1] == 0:
            return
        if proposal.draw in self.draws and (proposal.q is None) == (proposal.draw == "point"):
            return
        given = f"{proposal.draw!r} {'without' if proposal.q is None else 'with'} q"
        allowed = " or ".join(map(repr, self.draws)) or "nothing at a temperature above 0"
        raise UserError(f"rule {self.name} is for draw {allowed}, not for {given}; {self.advice}")

    def given(self, **parameters: float) -> "RuleSpec":
        """The same rule with other parameters. Raises UserError for what it does not have."""
        for name, value in parameters.items():
            if name not in self.limits:
                known = ", ".join(self.limits) or "none"
                raise UserError(f"rule {self.name} has no parameter {name}; it has: {known}")
            low, high = self.limits[name]
            if not low <= value <= high:
                raise UserError(f"rule {self.name}: {name} is {value}; give {low} to {high}")
        return replace(self, parameters={**self.parameters, **parameters})


point_mass = RuleSpec(
    "point_mass", match, ("point",), "drafts drawn from q need a rule that weighs them by q"
)
