"""What the parts of a round cost, measured alone, to predict runs that were not measured.

Parts are timed in turn (plain step, tree 1, tree 2, ..., and again), so that a machine that slows
down slows all of them; the median over the turns is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.proposal import Verdict
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.decode import clock, empty_proposal, kept_nodes, layout, tree_mask
from draftsmith.eval.theory import RoundCost
from draftsmith.eval.verify import choose, verify

WARM_UP = 2  # turns that are thrown away


@dataclass(frozen=True)
class Bench:
    """A cached context to which every timed round is put back."""

    target: Target
    cache: TargetCache
    states: TargetStates  # of the context [1, S, D]
    root: Tensor  # [1]
    sampling: Sampling
    generator: torch.Generator

    @property
    def context(self) -> int:
        """Cached positions."""
        return self.states.final.shape[1]


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
    bench = prepare(target, context, sampling)
    state = drafter.start(bench.states)
    plain: list[float] = []
    drafted: list[list[Parts]] = [[] for _ in trees]
    for turn in range(WARM_UP + turns):
        steps = [time_plain(bench)]
        rounds = [time_round(bench, drafter, state, tree) for tree in trees]
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


def prepare(target: Target, context: int, sampling: Sampling) -> Bench:
    """Cache `context` random tokens; what they are changes no cost."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (1, context), generator=generator).to(target.device)
    cache = target.new_cache()
    positions = torch.arange(context, device=target.device)[None]
    states = TargetStates(target.step(ids, positions, cache))
    draws = torch.Generator(target.device).manual_seed(0)
    return Bench(target, cache, states, ids[:, -1], sampling, draws)


def time_plain(bench: Bench) -> float:
    """Seconds of one plain round, as the decoding loop does it."""
    target, cache = bench.target, bench.cache
    start = clock(target)
    proposal = empty_proposal(bench.root)
    hidden = target.step(*layout(bench.root, proposal, None, bench.context), cache, None)
    chosen = choose(target.logits(hidden), bench.sampling, bench.generator)
    verdict = verify(proposal, chosen)
    cache.keep(bench.context, kept_nodes(verdict))
    seconds = clock(target) - start
    cache.crop(bench.context)
    return seconds


def time_round(bench: Bench, drafter: Drafter, state: object, tree: Tree) -> Parts:
    """Seconds of one drafted round, as the decoding loop does it, in its three parts."""
    target, cache, root = bench.target, bench.cache, bench.root
    start = clock(target)
    proposal = drafter.propose(state, root, tree)
    drafted = clock(target)
    ids, positions = layout(root, proposal, tree, bench.context)
    hidden = target.step(ids, positions, cache, tree_mask(tree, bench.context))
    chosen = choose(target.logits(hidden), bench.sampling, bench.generator)
    verified = clock(target)
    verify(proposal, chosen)
    verdict = some_verdict(tree, chosen)
    path = kept_nodes(verdict)
    cache.keep(bench.context, path)
    drafter.commit(state, verdict, TargetStates(hidden[:, path]))
    seconds = Parts(drafted - start, verified - drafted, clock(target) - verified)
    cache.crop(bench.context)
    return seconds


def some_verdict(tree: Tree, chosen: Tensor) -> Verdict:
    """Two drafts accepted (one where node 1 has no child): random context would accept none."""
    children = (tree.parent == 1).nonzero()[:1, 0] + 1
    path = torch.cat([children.new_ones(1), children])[None]  # [1, P]
    return Verdict(path, path.new_full((1,), path.shape[1]), chosen[:, 0])
