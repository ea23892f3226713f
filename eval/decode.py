"""The decoding loop: draft, verify in one target pass, accept, commit. Plain decoding is the same
loop without drafts.
"""

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.coins import Coins, SeededCoins
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.proposal import Plan, Proposal, Verdict
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.history import History, history_for
from draftsmith.eval.verify import Laws, Rule, point_mass
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class Round:
    """One round. Seconds; `emitted` counts what reached the output (EOS and the token limit cut
    it).
    """

    drafted: int
    accepted: int
    emitted: int
    draft_s: float
    verify_s: float
    overhead_s: float


@dataclass(frozen=True)
class Decoded:
    """One answer. The first token comes from prefill and belongs to no round."""

    tokens: list[int]
    rounds: list[Round]
    prefill_s: float
    decode_s: float
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Loop:
    """What every round of an answer shares."""

    target: Target
    drafter: Drafter | None
    tree: Tree | None  # given with a drafter
    sampling: Sampling
    coins: Coins
    cache: TargetCache
    rule: Rule = point_mass
    history: History | None = None  # for a repetition penalty


@dataclass(frozen=True)
class Played:
    """A round, before its tokens are read."""

    proposal: Proposal
    verdict: Verdict
    path: Tensor  # [P+1] the nodes that the cache kept: the root and its accepted path
    state: Any  # the drafter's next one
    draft_s: float
    verify_s: float
    verified: float  # when verification ended


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: list[int],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    tree: Tree | None = None,
    seed: int = 0,
    eos_ids: tuple[int, ...] | None = None,
    rule: Rule = point_mass,
) -> Decoded:
    """Answer one prompt. `tree` shapes the drafts (given with a drafter). EOS stays in the output.

    eos_ids: the ids that end an answer; None: the target's own.
    """
    if not prompt_ids or max_new_tokens < 1:
        raise UserError(
            "decoding needs a prompt of at least one token and max_new_tokens of at least 1"
        )
    if (drafter is None) != (tree is None):
        raise UserError("give a drafter and the tree that shapes its drafts, or neither")
    coins = SeededCoins([seed])
    stops = target.eos_ids if eos_ids is None else eos_ids
    began = clock(target)
    history = history_for(sampling, [prompt_ids], target.vocab_size, target.device)
    loop = Loop(target, drafter, tree, sampling, coins, target.new_cache(), rule, history)
    ids = torch.tensor([prompt_ids], device=target.device)
    states = prefill(target, ids, loop.cache)
    root = first_token(loop, states)
    state = None if drafter is None else drafter.start(ids, states)
    tokens, rounds = [int(root)], []
    prefilled = clock(target)
    while len(tokens) < max_new_tokens and tokens[-1] not in stops:
        played = play(loop, state, root)
        state, root = played.state, played.verdict.next
        drafts = played.proposal.tokens  # [1, M]
        new = cut(
            [*drafts[0, played.path[1:] - 1].tolist(), int(root)],
            stops,
            max_new_tokens - len(tokens),
        )
        tokens.extend(new)
        accepted = int(played.verdict.length)
        seconds = played.draft_s, played.verify_s, clock(target) - played.verified
        rounds.append(Round(drafts.shape[1], accepted, len(new), *seconds))
    finish: Literal["stop", "length"] = "stop" if tokens[-1] in stops else "length"
    return Decoded(tokens, rounds, prefilled - began, clock(target) - prefilled, finish)


def prefill(target: Target, prompt: Tensor, cache: TargetCache) -> TargetStates:
    """Feed a prompt [1, T] to an empty cache; its states."""
    positions = torch.arange(prompt.shape[1], device=target.device)[None]
    return TargetStates(target.step(prompt, positions, cache))


def first_token(loop: Loop, states: TargetStates) -> Tensor:
    """The token [B] that prefill gives: the first root."""
    laws = Laws(loop.target.logits(states.final[:, -1:]), loop.sampling, loop.history)
    rows = torch.arange(states.final.shape[0], device=states.final.device)
    root = laws.token(rows, torch.zeros_like(rows), loop.coins)
    if loop.history is not None:
        loop.history.add(root)
    return root


def play(loop: Loop, state: Any, root: Tensor) -> Played:
    """One round: draft after the root [1], verify in one pass, accept, commit."""
    target, drafter, tree, cache = loop.target, loop.drafter, loop.tree, loop.cache
    start = clock(target)
    if drafter is None or tree is None:
        proposal = empty_proposal(root)
    else:
        proposal = drafter.propose(state, root, Plan(tree, loop.sampling.for_drafts(), loop.coins))
    drafted = clock(target)
    length = cache.length
    hidden = target.step(*layout(root, proposal, tree, length), cache, tree_mask(tree, length))
    laws = Laws(target.logits(hidden), loop.sampling, loop.history, proposal)
    verified = clock(target)
    verdict = loop.rule(laws, proposal, loop.coins)
    if loop.history is not None:
        loop.history.commit(proposal, verdict)
    path = kept_nodes(verdict)
    cache.keep(length, path)
    if drafter is not None:
        state = drafter.commit(state, proposal, verdict, TargetStates(hidden[:, path]))
    return Played(proposal, verdict, path, state, drafted - start, verified - drafted, verified)


def empty_proposal(root: Tensor) -> Proposal:
    """No drafts: the round is one plain step."""
    none = root.new_zeros((root.shape[0], 0))
    return Proposal(none, none, none.bool())


def layout(
    root: Tensor, proposal: Proposal, tree: Tree | None, length: int
) -> tuple[Tensor, Tensor]:
    """Ids and positions [1, M+1] of the verification pass; a node's position is its depth, not its
    index.
    """
    ids = torch.cat([root[:, None], proposal.tokens], dim=1)
    depth = root.new_zeros(1) if tree is None else torch.cat([root.new_zeros(1), tree.depth])
    return ids, length + depth[None]


def tree_mask(tree: Tree | None, length: int) -> Tensor | None:
    """[1, 1, M+1, length+M+1] bool: the context and a node's ancestors. A chain is plain causal:
    None.
    """
    if tree is None or tree.is_chain:
        return None
    context = tree.visible.new_ones((tree.nodes + 1, length))
    return torch.cat([context, tree.visible], dim=1)[None, None]


def kept_nodes(verdict: Verdict) -> Tensor:
    """Node ids to keep for the one row there is: the root and its accepted path [P+1]."""
    path = verdict.path[0, : int(verdict.length)]
    return torch.cat([path.new_zeros(1), path])


def cut(new: list[int], stops: tuple[int, ...], room: int) -> list[int]:
    """What of a round's tokens reaches the output: up to and with the first EOS, at most `room`."""
    for index, token in enumerate(new[:room]):
        if token in stops:
            return new[: index + 1]
    return new[:room]


def clock(target: Target) -> float:
    """Seconds, after the device has finished what it was given."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
