"""What the parts of a round cost, measured alone, to predict runs that were not measured.

Parts are timed in turn (plain step, tree 1, tree 2, ..., and again), so that a machine that slows
down slows all of them; the median over the turns is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from draftsmith.drafters.cache import Mark
from draftsmith.drafters.coins import Coins, SeededCoins
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.proposal import Draw, Proposal, Verdict
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.decode import Loop, clock, play
from draftsmith.eval.theory import RoundCost
from draftsmith.eval.verify import Laws, Rule, point_mass

WARM_UP = 2  # turns that are thrown away


@dataclass(frozen=True)
class Bench:
    """A cached context to which every timed round is put back."""

    plain: Loop
    ids: Tensor  # the context [B, S]
    lengths: Tensor  # [B]: S
    states: TargetStates  # its states [B, S, D]
    root: Tensor  # [B]
    mark: Mark  # of the cache behind the context


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of one round."""

    draft: float
    verify: float
    overhead: float


@torch.inference_mode()
def measure_costs(
    target: Target,
    drafter: Drafter,
    trees: Sequence[Tree],
    *,
    context: int,
    sampling: Sampling,
    rule: Rule = point_mass,
    draw: Draw = "point",
    batch: int = 1,
    turns: int = 15,
) -> list[RoundCost]:
    """The cost of a round with each tree, and of a plain step, after `context` cached tokens in
    each of `batch` rows.
    """
    coins = SeededCoins(range(batch))
    loop = Loop(target, None, None, sampling, coins, target.new_cache(), rule, draw)
    bench = prepare(loop, context, batch, drafter.taps)
    state = drafter.start(bench.ids, bench.lengths, bench.states)
    plain: list[float] = []
    drafted: list[list[Parts]] = [[] for _ in trees]
    for turn in range(WARM_UP + turns):
        steps = [time_plain(bench)]
        rounds = [time_tree(bench, drafter, state, tree) for tree in trees]
        if turn >= WARM_UP:
            plain += steps
            for parts, one in zip(drafted, rounds, strict=True):
                parts.append(one)
    step = median(plain)
    return [
        RoundCost(
            plain=step,
            draft=median(part.draft for part in parts),
            verify=median(part.verify for part in parts),
            overhead=median(part.overhead for part in parts),
        )
        for parts in drafted
    ]


def prepare(plain: Loop, context: int, batch: int, taps: tuple[int, ...]) -> Bench:
    """Cache `context` random tokens, the same in every row. They repeat, or prompt lookup would
    have nothing to draft; to others, what they are changes no cost.
    """
    target, generator = plain.target, torch.Generator().manual_seed(0)
    period = max(1, context // 4)
    some = torch.randint(target.vocab_size, (1, period), generator=generator).to(target.device)
    whole = some.repeat(batch, context // period + 2)
    ids, root = whole[:, :context], whole[:, context]
    lengths = torch.full((batch,), context, device=target.device)
    states = target.prefill(ids, lengths, plain.cache, taps=taps)
    return Bench(plain, ids, lengths, states, root, plain.cache.mark())


def time_plain(bench: Bench) -> float:
    """Seconds of one plain round of the decoding loop."""
    parts = time_round(bench, bench.plain, None)
    return parts.draft + parts.verify + parts.overhead


def time_tree(bench: Bench, drafter: Drafter, state: object, tree: Tree) -> Parts:
    """Seconds of one drafted round of the decoding loop, in its three parts."""

    def rule(laws: Laws, proposal: Proposal, coins: Coins) -> Verdict:
        bench.plain.rule(laws, proposal, coins)  # for its time
        return some_verdict(proposal, laws)

    return time_round(bench, replace(bench.plain, drafter=drafter, tree=tree, rule=rule), state)


def time_round(bench: Bench, loop: Loop, state: object) -> Parts:
    """Time a round, and put the cache back."""
    played = play(loop, state, bench.root)
    seconds = Parts(played.draft_s, played.verify_s, clock(loop.target) - played.verified)
    loop.cache.restore(bench.mark)
    return seconds


def some_verdict(proposal: Proposal, laws: Laws) -> Verdict:
    """Two drafts accepted (one where node 1 has no child; what there is, where less was drafted):
    random context would accept none.
    """
    batch, count = proposal.tokens.shape
    below = (proposal.parent[0] == 1).nonzero()[:1, 0] + 1
    path = torch.cat([below.new_ones(min(1, count)), below])  # [P]
    length = path.new_full((batch,), len(path))
    return Verdict(path.expand(batch, -1), length, laws.best[:, 0])
