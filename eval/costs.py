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
from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.decode import Loop, clock, play
from draftsmith.eval.theory import RoundCost
from draftsmith.eval.verify import Laws, point_mass

WARM_UP = 2  # turns that are thrown away


@dataclass(frozen=True)
class Bench:
    """A cached context to which every timed round is put back."""

    plain: Loop
    ids: Tensor  # the context [1, S]
    lengths: Tensor  # [1]: S
    states: TargetStates  # its states [1, S, D]
    root: Tensor  # [1]
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
    turns: int = 15,
) -> list[RoundCost]:
    """The cost of a round with each tree, and of a plain step, after `context` cached tokens."""
    bench = prepare(target, context, sampling, drafter.taps)
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


def prepare(target: Target, context: int, sampling: Sampling, taps: tuple[int, ...] = ()) -> Bench:
    """Cache `context` random tokens. They repeat, or prompt lookup would have nothing to draft; to
    others, what they are changes no cost.
    """
    generator = torch.Generator().manual_seed(0)
    period = max(1, context // 4)
    some = torch.randint(target.vocab_size, (1, period), generator=generator).to(target.device)
    whole = some.repeat(1, context // period + 2)
    ids, root = whole[:, :context], whole[:, context]
    plain = Loop(target, None, None, sampling, SeededCoins([0]), target.new_cache())
    lengths = torch.tensor([context], device=target.device)
    states = target.prefill(ids, lengths, plain.cache, taps=taps)
    return Bench(plain, ids, lengths, states, root, plain.cache.mark())


def time_plain(bench: Bench) -> float:
    """Seconds of one plain round of the decoding loop."""
    parts = time_round(bench, bench.plain, None)
    return parts.draft + parts.verify + parts.overhead


def time_tree(bench: Bench, drafter: Drafter, state: object, tree: Tree) -> Parts:
    """Seconds of one drafted round of the decoding loop, in its three parts."""

    def rule(laws: Laws, proposal: Proposal, coins: Coins) -> Verdict:
        point_mass(laws, proposal, coins)  # for its time
        return some_verdict(tree, laws)

    return time_round(bench, replace(bench.plain, drafter=drafter, tree=tree, rule=rule), state)


def time_round(bench: Bench, loop: Loop, state: object) -> Parts:
    """Time a round, and put the cache back."""
    played = play(loop, state, bench.root)
    seconds = Parts(played.draft_s, played.verify_s, clock(loop.target) - played.verified)
    loop.cache.restore(bench.mark)
    return seconds


def some_verdict(tree: Tree, laws: Laws) -> Verdict:
    """Two drafts accepted (one where node 1 has no child): random context would accept none."""
    children = (tree.parent == 1).nonzero()[:1, 0] + 1
    path = torch.cat([children.new_ones(1), children])[None]  # [1, P]
    return Verdict(path, path.new_full((1,), path.shape[1]), laws.best[:, 0])
