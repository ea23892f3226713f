"""Is the output the target's? One teacher-forced pass over prompt and output can tell."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from draftsmith.drafters.methods import Drafter, Drawing
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.slots import (
    NO_GUESS,
    Batch,
    TargetStates,
    all_roots,
    before_output,
    label_slots,
)
from draftsmith.drafters.target import Target

TOKENS_AT_ONCE = 8192  # of a padded batch: bounds the memory of a pass
ROUNDING = 4  # units in the last place of the largest logit that rounding may shift
LOGITS_AT_ONCE = 256  # positions projected to the vocabulary together


@dataclass(frozen=True)
class Answer:
    """A prompt and what was decoded after it."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True)
class Divergence:
    """An emitted token that is not the argmax: its place in the output, and by how much it lost."""

    position: int
    margin: float  # logits
    best: float  # the winner's logit

    def rounding(self, dtype: torch.dtype) -> float:
        """The margin that rounding can turn."""
        return ROUNDING * torch.finfo(dtype).eps * abs(self.best)


@dataclass(frozen=True)
class LawScore:
    """Evidence that tokens were drawn from the target's law.

    `excess` sums log p(token) - E[log p] over the output: under the law a martingale, whose
    variance is `variance`. Favouring likely (drafted) tokens makes it positive. `impossible` counts
    tokens of p = 0.
    """

    excess: float
    variance: float
    impossible: int

    @property
    def z(self) -> float:
        """Standard errors away from the law's own expectation."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0 else 0.0

    def __add__(self, other: "LawScore") -> "LawScore":
        return LawScore(
            self.excess + other.excess,
            self.variance + other.variance,
            self.impossible + other.impossible,
        )


def greedy_divergences(target: Target, answers: Sequence[Answer]) -> list[list[Divergence]]:
    """Tokens that are not the target's argmax at their own context, one list per answer.

    Every token is judged on the output before it, so that one divergence does not count twice.
    """
    found: list[list[Divergence]] = [[] for _ in answers]
    for index, start, logits in output_logits(target, answers):
        tokens = output_slice(answers[index], start, logits)
        best = logits.argmax(dim=-1)  # the first of equals, as decoding takes it
        top, mine = (logits.gather(1, ids[:, None])[:, 0] for ids in (best, tokens))
        for at in torch.nonzero(best != tokens)[:, 0].tolist():
            found[index].append(Divergence(start + at, float(top[at] - mine[at]), float(top[at])))
    return found


def law_score(target: Target, answers: Sequence[Answer], sampling: Sampling) -> LawScore:
    """How well the outputs fit the law that `sampling` asks for."""
    total = LawScore(0.0, 0.0, 0)
    for index, start, logits in output_logits(target, answers):
        p = standardise(logits.double(), sampling)  # [n, V]
        tokens = output_slice(answers[index], start, logits)
        score = score_tokens(p, tokens)
        total += replace(score, impossible=beyond_support(logits, tokens, sampling, target.dtype))
    return total


def beyond_support(logits: Tensor, tokens: Tensor, sampling: Sampling, dtype: torch.dtype) -> int:
    """Tokens that top-k or top-p leave out, and that no rounding of `dtype` could have let in.

    logits [n, V] float64. Rounding may swap tokens whose logits are within the slack, and may shift
    the log-odds of the mass before a token by the slack.
    """
    slack = ROUNDING * torch.finfo(dtype).eps * logits.amax(-1).abs()  # [n]
    mine = logits.gather(1, tokens[:, None])[:, 0]
    before = logits > (mine + slack)[:, None]  # surely more likely
    beyond = torch.zeros_like(mine, dtype=torch.bool)
    if sampling.top_k:
        beyond |= before.sum(-1) >= sampling.top_k
    if sampling.top_p < 1:
        p = standardise(logits, Sampling(sampling.temperature, sampling.top_k))
        mass = (p * before).sum(-1)
        beyond |= mass.logit(1e-12) - slack / sampling.temperature >= math.log(
            sampling.top_p / (1 - sampling.top_p)
        )
    return int(beyond.sum())


def score_tokens(p: Tensor, tokens: Tensor) -> LawScore:
    """The score of tokens [n] under laws p [n, V]; tokens of p = 0 are only counted."""
    mine = p.gather(1, tokens[:, None])[:, 0]
    possible = mine > 0
    log = p.clamp_min(torch.finfo(p.dtype).tiny).log()
    mean = (p * log).sum(-1)
    variance = (p * (log - mean[:, None]) ** 2).sum(-1)
    excess = mine.clamp_min(torch.finfo(p.dtype).tiny).log() - mean
    return LawScore(
        float(excess[possible].sum()), float(variance[possible].sum()), int((~possible).sum())
    )


def output_slice(answer: Answer, start: int, logits: Tensor) -> Tensor:
    """The emitted tokens that these logits [n, V] belong to."""
    return torch.tensor(answer.output[start : start + logits.shape[0]], device=logits.device)


@torch.no_grad()
def output_logits(target: Target, answers: Sequence[Answer]) -> Iterator[tuple[int, int, Tensor]]:
    """Stretches of every output: the answer's index, the stretch's start, fp32 logits [n, V]."""
    for group in grouped(answers):
        states = target.states(batch_of(target, [answers[index] for index in group]))
        for row, index in enumerate(group):
            answer = answers[index]
            prompt, output = len(answer.prompt), len(answer.output)
            hidden = before_output(states.final, row, prompt=prompt, output=output)
            for start in range(0, hidden.shape[0], LOGITS_AT_ONCE):
                logits = target.logits(hidden[start : start + LOGITS_AT_ONCE])
                yield index, start, logits.float()


@torch.no_grad()
def first_slot_alpha(
    target: Target,
    drafter: Drafter,
    answers: Sequence[Answer],
    sampling: Sampling,
    *,
    drawn: bool = False,
) -> float | None:
    """Leviathan's alpha: mean of sum(min(p, q)) over every context of the outputs.

    q is the first slot's; a point-mass draft y has p(y). A context counts whether or not a round
    started there. drawn: whether drafts are drawn from q.
    """
    measure_overlap = drawn_overlap if drawn else slot_overlap
    total, count = 0.0, 0
    for group in grouped(answers):
        batch = batch_of(target, [answers[index] for index in group])
        states = target.states(batch, drafter.taps)
        overlap, n = measure_overlap(target, drafter, batch, states, sampling)
        total, count = total + overlap, count + n
    return total / count if count else None


def slot_overlap(
    target: Target, drafter: Drafter, batch: Batch, states: TargetStates, sampling: Sampling
) -> tuple[float, int]:
    """Sum of p(first guess) and number of contexts in a batch; without a guess nothing overlaps."""
    roots = all_roots(batch)
    labels = label_slots(batch, roots, 1)
    guess = drafter.guesses(batch, states, roots, slots=1, count=1, chunk=LOGITS_AT_ONCE)[:, 0, 0]
    groups = torch.nonzero(labels.valid[:, 0] & (guess != NO_GUESS))[:, 0]
    total = 0.0
    for start in range(0, len(groups), LOGITS_AT_ONCE):
        chosen = groups[start : start + LOGITS_AT_ONCE]
        context = states.final[labels.teacher_row[chosen, 0], labels.teacher_position[chosen, 0]]
        p = standardise(target.logits(context).float(), sampling)  # [n, V]
        total += float(p.gather(1, guess[chosen][:, None]).sum())
    return total, int(labels.valid.sum())


def drawn_overlap(
    target: Target, drafter: Drafter, batch: Batch, states: TargetStates, sampling: Sampling
) -> tuple[float, int]:
    """Sum of sum(min(p, q)) and number of contexts in a batch."""
    roots = all_roots(batch)
    labels = label_slots(batch, roots, 1)
    logits = cast(Drawing, drafter).first_logits(batch, states, roots)
    groups = torch.nonzero(labels.valid[:, 0])[:, 0]
    total = 0.0
    for start in range(0, len(groups), LOGITS_AT_ONCE):
        chosen = groups[start : start + LOGITS_AT_ONCE]
        q = standardise(logits(chosen).float(), sampling)  # [n, Vq]
        context = states.final[labels.teacher_row[chosen, 0], labels.teacher_position[chosen, 0]]
        p = standardise(target.logits(context).float(), sampling)  # [n, V]
        p = p if drafter.draft_ids is None else p[:, drafter.draft_ids]
        total += float(torch.minimum(p[:, : q.shape[1]], q[:, : p.shape[1]]).sum())
    return total, len(groups)


def grouped(answers: Sequence[Answer]) -> Iterator[list[int]]:
    """Indices of answers of similar length, at most TOKENS_AT_ONCE padded tokens together."""
    size = [len(answer.prompt) + len(answer.output) for answer in answers]
    group: list[int] = []
    for index in sorted(range(len(answers)), key=size.__getitem__):
        if group and (len(group) + 1) * size[index] > TOKENS_AT_ONCE:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def batch_of(target: Target, answers: Sequence[Answer]) -> Batch:
    """One answer a row, padded at the end; outputs are supervised."""
    length = max(len(answer.prompt) + len(answer.output) for answer in answers)
    ids = torch.zeros(len(answers), length, dtype=torch.long)
    documents = torch.full_like(ids, -1)
    supervised = torch.zeros_like(ids, dtype=torch.bool)
    for row, answer in enumerate(answers):
        end = len(answer.prompt) + len(answer.output)
        ids[row, :end] = torch.tensor(answer.prompt + answer.output)
        documents[row, :end] = 0
        supervised[row, len(answer.prompt) : end] = True
    positions = torch.arange(length).expand_as(ids)  # causal: the padding behind is never seen
    return Batch(ids, positions, documents, supervised).to(target.device)
