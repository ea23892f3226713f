"""Is an export what it was made from? It is read as the engine reads it, drafts, and decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafters.engine_files import Export, Source
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import NO_GUESS, Batch, all_roots
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import chain
from draftsmith.eval.assemble import judge_greedy
from draftsmith.eval.check import Answer, greedy_divergences
from draftsmith.eval.decode import decode
from draftsmith.eval.exports import check_read
from draftsmith.recipes.errors import UserError

CHUNK = 64  # groups whose guesses are looked up at once
ROUNDED = 0.03  # of guesses that rounding may turn in half precision


@dataclass(frozen=True)
class Finding:
    """What was compared."""

    guesses: int
    unlike: int  # guesses that are not the drafter's own
    tokens: int
    rounds: int  # of decoding with the export
    verdict: str
    engine_tokens: (
        int | None
    )  # decoded by the engine itself; None: it is no library of this process

    def sentence(self) -> str:
        """For people."""
        same = f"{self.guesses - self.unlike:,} of {self.guesses:,} guesses are the drafter's own"
        tau = f"{self.tokens:,} tokens in {self.rounds:,} passes"
        engine = (
            "the engine itself is not run here"
            if self.engine_tokens is None
            else f"the engine itself decoded {self.engine_tokens:,} tokens, the target's own"
        )
        return f"{same}; decoded {tau}: {self.verdict}; {engine}"


def check_export(
    export: Export, source: Source, folder: Path, prompts: Sequence[Sequence[int]], count: int
) -> Finding:
    """Read the export back, compare its guesses on the target's own answers with the drafter's, and
    decode. Raises UserError where anything differs beyond rounding.
    """
    target, again = source.target, check_read(export, source, folder)
    plain = [answer(target, None, prompt, count) for prompt in prompts]
    found = [answer(target, again, prompt, count) for prompt in prompts]
    pairs = [compare(target, source.drafter, again, one.prompt + one.output) for one in plain]
    guesses, unlike = (sum(column) for column in zip(*pairs, strict=True))
    allowed = 0.0 if target.dtype == torch.float32 else ROUNDED
    if unlike > allowed * guesses:
        raise UserError(f"{folder}: {unlike} of {guesses} guesses are not those of {source.folder}")
    spoken = [Answer(one.prompt, one.output) for one in found]
    divergences = [one for each in greedy_divergences(target, spoken) for one in each]
    tokens = sum(len(one.output) for one in found)
    good, verdict = judge_greedy(divergences, tokens, target.dtype)
    if not good:
        raise UserError(f"{folder}: decoding with it does not give the target's output ({verdict})")
    own = None if export.run is None else run_engine(export, source, folder, plain, count)
    rounds = sum(one.rounds for one in found)
    return Finding(guesses, unlike, tokens, rounds, verdict, own)


@dataclass(frozen=True)
class Spoken:
    """A prompt, what was decoded after it, and in how many passes."""

    prompt: list[int]
    output: list[int]
    rounds: int


def answer(target: Target, drafter: Drafter | None, prompt: Sequence[int], count: int) -> Spoken:
    """Greedy, by a chain."""
    tree = None if drafter is None else chain(drafter.depth).to(target.device)
    ids = list(prompt)
    found = decode(target, drafter, ids, sampling=Sampling(), max_new_tokens=count, tree=tree)
    return Spoken(ids, found.tokens, len(found.rounds))


@torch.no_grad()
def compare(target: Target, own: Drafter, again: Drafter, ids: list[int]) -> tuple[int, int]:
    """Best guesses of all slots on a text: how many, and how many differ. Where the drafter may not
    say a token, the export's guess of it is no fault.
    """
    mine, theirs = (guesses(target, one, ids) for one in (own, again))
    slots = min(mine.shape[1], theirs.shape[1])
    mine, theirs = mine[:, :slots], theirs[:, :slots]
    counted = (mine != NO_GUESS) & (theirs != NO_GUESS)
    if own.draft_ids is not None:
        counted &= torch.isin(theirs, own.draft_ids.to(theirs.device))
    return int(counted.sum()), int((counted & (mine != theirs)).sum())


def guesses(target: Target, drafter: Drafter, ids: list[int]) -> Tensor:
    """The best guess of every slot of every root, [N, K]."""
    row = torch.tensor([ids], device=target.device)
    supervised = torch.ones_like(row, dtype=torch.bool)
    supervised[:, 0] = False
    positions = torch.arange(len(ids), device=target.device)[None]
    batch = Batch(row, positions, torch.zeros_like(row), supervised)
    states = target.states(batch, drafter.taps)
    found = drafter.guesses(
        batch, states, all_roots(batch), slots=drafter.depth, count=1, chunk=CHUNK
    )
    return found[..., 0]


def run_engine(
    export: Export, source: Source, folder: Path, plain: Sequence[Spoken], count: int
) -> int:
    """Decode with the engine itself; returns its tokens. Raises UserError."""
    assert export.run is not None
    target, spoken = source.target, []
    for one in plain:
        prompt = torch.tensor([one.prompt], device=target.device)
        try:
            out = export.run(folder, source, prompt, count)
        except ValueError as error:
            raise UserError(f"{folder}: {error}") from error
        spoken.append(Answer(one.prompt, out[0, prompt.shape[1] :].tolist()))
    divergences = [one for each in greedy_divergences(target, spoken) for one in each]
    tokens = sum(len(one.output) for one in spoken)
    good, verdict = judge_greedy(divergences, tokens, target.dtype)
    if not good:
        raise UserError(f"{folder}: the engine's output is not the target's ({verdict})")
    return tokens
