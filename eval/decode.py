"""The decoding loop: draft, verify in one target pass, accept, commit. Plain decoding is the same
loop without drafts, and one prompt is a batch of one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.coins import Coins, SeatedCoins, SeededCoins
from draftsmith.drafters.layout import last_of, lay_out, padded
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.proposal import Draw, Plan, Proposal, Verdict
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.history import History, history_for
from draftsmith.eval.rows import Ending, Round, Row, stop_strings
from draftsmith.eval.verify import Laws, Rule, point_mass
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class Decoded:
    """One answer. The first token comes from prefill and belongs to no round. `decode_s` ends with
    the answer's last round, whoever else is still being decoded.
    """

    tokens: list[int]
    rounds: list[Round]
    prefill_s: float
    decode_s: float
    finish: Literal["stop", "length"]


Judge = Callable[[Sequence[Row], Tensor, Proposal | None], Laws]  # (rows, logits, drafts)


@dataclass(frozen=True)
class Loop:
    """What every round of a batch shares."""

    target: Target
    drafter: Drafter | None
    tree: Tree | None  # given with a drafter
    sampling: Sampling
    coins: Coins
    cache: TargetCache
    rule: Rule = point_mass
    draw: Draw = "point"
    history: History | None = None  # for a repetition penalty
    rows: Sequence[Row] = ()  # who is in the batch
    judge: Judge | None = None  # gives the laws in the place of `Laws`

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers that the drafter reads."""
        return () if self.drafter is None else self.drafter.taps


@dataclass(frozen=True)
class Committed:
    """A verdict, read: what every row goes on with."""

    tokens: list[list[int]]  # accepted drafts, then the next root
    counts: list[int]  # accepted drafts
    drafted: list[int]  # valid nodes
    moved: bool  # whether an accepted node is not the n-th of its path by number


@dataclass(frozen=True)
class Played:
    """A round."""

    proposal: Proposal
    committed: Committed
    passes: int  # of the target
    root: Tensor  # [B] the next one
    state: Any  # the drafter's next one
    draft_s: float
    verify_s: float
    verified: float  # when verification ended


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
    stops: Sequence[str] = (),
    rule: Rule = point_mass,
    draw: Draw = "point",
) -> Decoded:
    """Answer one prompt: `decode_batch` of one."""
    return decode_batch(
        target,
        drafter,
        [prompt_ids],
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        tree=tree,
        seeds=[seed],
        eos_ids=eos_ids,
        stops=stops,
        rule=rule,
        draw=draw,
    )[0]


def decode_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    seeds: Sequence[int],
    tree: Tree | None = None,
    eos_ids: tuple[int, ...] | None = None,
    stops: Sequence[str] = (),
    rule: Rule = point_mass,
    draw: Draw = "point",
) -> list[Decoded]:
    """Answer prompts together; each answer is what it would be alone (up to rounding).

    tree: shapes the drafts (given with a drafter). seeds: one per prompt. EOS stays in the output.
    eos_ids: the ids that end an answer; None: the target's own. stops: strings that end an answer
    with the token that completes one. draw: how the drafter is asked to draw siblings; the rule
    must be for that.
    """
    if not prompts or not all(prompts) or max_new_tokens < 1:
        raise UserError(
            "decoding needs prompts of at least one token and max_new_tokens of at least 1"
        )
    if (drafter is None) != (tree is None):
        raise UserError("give a drafter and the tree that shapes its drafts, or neither")
    if len(seeds) != len(prompts):
        raise UserError(f"give one seed per prompt: {len(prompts)}, not {len(seeds)}")
    loop = Loop(
        target,
        drafter,
        tree,
        sampling,
        SeededCoins(seeds),
        target.new_cache(),
        rule,
        draw,
        history_for(sampling, prompts, target.vocab_size, target.device),
        [Row(index, prompt) for index, prompt in enumerate(prompts)],
    )
    ends = target.eos_ids if eos_ids is None else eos_ids
    return decode_rows(loop, Ending(ends, max_new_tokens, stop_strings(target, stops)))


@torch.inference_mode()
def decode_rows(
    loop: Loop, ending: Ending, after: Callable[[], None] = lambda: None
) -> list[Decoded]:
    """Complete the loop's rows. Those that have ended leave the batch. `after` prefill and every
    round, the caller may look at them.
    """
    target, rows, playing = loop.target, loop.rows, loop
    began = clock(target)
    ids, lengths = padded([row.prompt for row in rows], target.device)
    states = target.prefill(ids, lengths, loop.cache, taps=loop.taps)
    root = first_token(loop, states, lengths)
    state = None if loop.drafter is None else loop.drafter.start(ids, lengths, states)
    for row, token in zip(rows, root.tolist(), strict=True):
        ending.take(row, [token])
    after()
    prefilled = clock(target)
    while stay := [i for i, row in enumerate(playing.rows) if row.finish is None]:
        if len(stay) < len(playing.rows):
            playing, state, root = narrow(playing, loop.coins, stay, state, root)
        played = play(playing, state, root)
        state, root = played.state, played.root
        write_down(playing, played, ending)
        after()
    return [answer_of(row, began, prefilled) for row in rows]


def answer_of(row: Row, began: float, prefilled: float) -> Decoded:
    """A row that has ended; one without rounds ended with prefill."""
    assert row.finish is not None, "the row goes on"
    decode_s = row.ended - prefilled if row.rounds else 0.0
    return Decoded(row.tokens, row.rounds, prefilled - began, decode_s, row.finish)


def first_token(loop: Loop, states: TargetStates, lengths: Tensor) -> Tensor:
    """The token [B] that prefill gives: the first root."""
    rows = torch.arange(len(lengths), device=lengths.device)
    laws = laws_of(loop, loop.target.logits(last_of(states.final, lengths))[:, None], None)
    root = laws.token(rows, torch.zeros_like(rows), loop.coins)
    if loop.history is not None:
        loop.history.add(root)
    return root


def laws_of(loop: Loop, logits: Tensor, proposal: Proposal | None) -> Laws:
    """What the target says at the nodes, from its logits [B, M+1, V]."""
    if loop.judge is not None:
        return loop.judge(loop.rows, logits, proposal)
    return Laws(logits, loop.sampling, loop.history, proposal)


def narrow(
    loop: Loop, coins: Coins, stay: list[int], state: Any, root: Tensor
) -> tuple[Loop, Any, Tensor]:
    """Go on with the rows that stay, each with its own of the whole batch's coins."""
    index = torch.tensor(stay, device=root.device)
    loop.cache.select(index)
    if loop.history is not None:
        loop.history.select(index)
    if loop.drafter is not None:
        state = loop.drafter.select(state, index)
    rows = [loop.rows[i] for i in stay]
    seats = torch.tensor([row.index for row in rows], device=root.device)
    return replace(loop, rows=rows, coins=SeatedCoins(coins, seats)), state, root[index]


def play(loop: Loop, state: Any, root: Tensor) -> Played:
    """One round: draft after the roots [B], verify in one pass, accept, commit."""
    target, cache = loop.target, loop.cache
    start = clock(target)
    proposal = draft(loop, state, root)
    drafted = clock(target)
    nodes = None
    if loop.tree is not None:
        proposal, nodes = lay_out(proposal, loop.tree)
    ids = torch.cat([root[:, None], proposal.tokens], dim=1)
    before = cache.mark(states=ids.shape[1] > 1)
    states = target.step(ids, cache, nodes, taps=loop.taps)
    laws = laws_of(loop, target.logits(states.final), proposal)
    verified = clock(target)
    verdict = loop.rule(laws, proposal, loop.coins)
    if loop.history is not None:
        loop.history.commit(proposal, verdict)
    committed = read(proposal, verdict)
    path = torch.cat([torch.zeros_like(verdict.next)[:, None], verdict.path], dim=1)  # [B, P+1]
    kept = [count + 1 for count in committed.counts]
    passes = 1 + target.settle(cache, before, ids, kept, path if committed.moved else None)
    if loop.drafter is not None:
        rows = torch.arange(len(root), device=root.device)[:, None]
        state = loop.drafter.commit(state, proposal, verdict, states.at(rows, path))
    seconds = drafted - start, verified - drafted
    return Played(proposal, committed, passes, verdict.next, state, *seconds, verified)


def draft(loop: Loop, state: Any, root: Tensor) -> Proposal:
    """What follows the roots; nothing without a drafter: the round is then one plain step."""
    if loop.drafter is None or loop.tree is None:
        none = root.new_zeros((len(root), 0))
        return Proposal(none, none, none.bool())
    plan = Plan(loop.tree, loop.sampling.for_drafts(), loop.coins, loop.draw)
    return loop.drafter.propose(state, root, plan)


def read(proposal: Proposal, verdict: Verdict) -> Committed:
    """Bring a verdict to the host, at once."""
    path = verdict.path
    depth = path.shape[1]
    drafts = proposal.tokens.gather(1, (path - 1).clamp(min=0))  # [B, P]
    numbers = torch.stack([verdict.length, verdict.next, proposal.valid.sum(dim=1)], dim=1)
    tokens, counts, drafted, moved = list[list[int]](), list[int](), list[int](), False
    for count, following, real, *rest in torch.cat([numbers, path, drafts], dim=1).tolist():
        tokens.append([*rest[depth : depth + count], following])
        counts.append(count)
        drafted.append(real)
        moved |= rest[:count] != list(range(1, count + 1))
    return Committed(tokens, counts, drafted, moved)


def write_down(loop: Loop, played: Played, ending: Ending) -> None:
    """What a round gave to every row."""
    committed = played.committed
    emitted = [
        ending.take(row, tokens) for row, tokens in zip(loop.rows, committed.tokens, strict=True)
    ]
    now = clock(loop.target)
    seconds = played.draft_s, played.verify_s, now - played.verified
    counts = zip(committed.drafted, committed.counts, emitted, strict=True)
    for row, numbers in zip(loop.rows, counts, strict=True):
        row.rounds.append(Round(*numbers, *seconds, played.passes))
        row.ended = now


def clock(target: Target) -> float:
    """Seconds, after the device has finished what it was given."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
