"""What a lossy rule costs in quality, paired with plain decoding on the same prompts. An exact arm
under the same measure shows what two runs of the target itself differ by.

The target itself is the judge: how likely it finds the outputs, and how far the law that a token is
emitted by lies from its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.drafters.methods import Drawing
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.slots import Batch, TargetStates, all_roots, label_slots
from draftsmith.drafters.target import Target
from draftsmith.eval.arms import Arm
from draftsmith.eval.check import LOGITS_AT_ONCE, Answer, batch_of, grouped, output_logits
from draftsmith.eval.rules_rejection import residual

DRAWS = 10_000  # of the bootstrap
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and its 95 % bootstrap interval (none of one prompt)."""

    mean: float
    interval: Interval


@dataclass(frozen=True)
class Quality:
    """A lossy arm beside plain decoding."""

    log_likelihood: Estimate  # nats per token of its outputs, under the target at temperature 1
    log_likelihood_change: Estimate  # against plain decoding's outputs, paired by prompt
    token_kl: Estimate | None  # nats; None: the drafter's law is not known at every context
    agreement: Estimate  # with plain decoding's answer, share of tokens in common order
    identical: Estimate  # share of answers that are plain decoding's, token by token


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Mean and percentile bootstrap over prompts."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if len(numbers) < 2:
        return Estimate(float(numbers.mean()), None)
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(len(numbers), (DRAWS, len(numbers)), generator=generator)
    edges = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = numbers[pick].mean(dim=1).quantile(edges).tolist()
    return Estimate(float(numbers.mean()), (low, high))


def measure_quality(
    target: Target, arm: Arm, mine: Sequence[Answer], plain: Sequence[Answer]
) -> Quality:
    """Judge an arm's answers beside plain decoding's; both one per prompt, in one order."""
    own, theirs = (log_likelihoods(target, answers) for answers in (mine, plain))
    kl = None if arm.rule.lossless else token_kl(target, arm, mine)
    pairs = [(a.output, b.output) for a, b in zip(mine, plain, strict=True)]
    return Quality(
        log_likelihood=estimate(own),
        log_likelihood_change=estimate([a - b for a, b in zip(own, theirs, strict=True)]),
        token_kl=None if kl is None else estimate(kl),
        agreement=estimate([agreement(a, b) for a, b in pairs]),
        identical=estimate([float(a == b) for a, b in pairs]),
    )


def agreement(mine: Sequence[int], plain: Sequence[int]) -> float:
    """Twice the tokens in common blocks over the tokens of both: 1 where they are equal."""
    return SequenceMatcher(None, mine, plain, autojunk=False).ratio()


def log_likelihoods(target: Target, answers: Sequence[Answer]) -> list[float]:
    """Mean log p of every answer's tokens, at temperature 1 whatever they were drawn at."""
    sums = [0.0] * len(answers)
    for index, start, logits in output_logits(target, answers):
        log_p = logits.double().log_softmax(dim=-1)
        sums[index] += float(log_p.gather(1, tokens_at(answers[index], start, logits)).sum())
    return [total / len(answer.output) for total, answer in zip(sums, answers, strict=True)]


def token_kl(target: Target, arm: Arm, answers: Sequence[Answer]) -> list[float] | None:
    """KL(law of the emitted token || target's law) by answer, a mean over its tokens.

    Drafts that are guesses: with typical acceptance a token follows from its context, so that its
    law is a point mass and the divergence -log p(token). Drawn drafts: over the contexts of the
    outputs, each taken as the start of a round, what the first draft's law and the rule make of p.
    None at temperature 0, where the target's law is a point mass too.
    """
    if arm.sampling.greedy or arm.drafter is None:
        return None
    if arm.draw == "point":
        return surprise(target, arm.sampling, answers)
    sums, counts = [0.0] * len(answers), [0] * len(answers)
    for group in grouped(answers):
        batch = batch_of(target, [answers[index] for index in group])
        row, kl = round_kls(target, arm, batch, target.states(batch, arm.drafter.taps))
        for at, index in enumerate(group):
            mine = kl[row == at]
            sums[index] += float(mine.sum())
            counts[index] += len(mine)
    return [total / max(1, count) for total, count in zip(sums, counts, strict=True)]


def surprise(target: Target, sampling: Sampling, answers: Sequence[Answer]) -> list[float]:
    """Mean -log p of every answer's tokens but the first, which prefill draws from p."""
    sums = [0.0] * len(answers)
    for index, start, logits in output_logits(target, answers):
        p = standardise(logits.double(), sampling)
        own = p.gather(1, tokens_at(answers[index], start, logits))[:, 0]
        own = own.clamp_min(torch.finfo(p.dtype).tiny)
        sums[index] -= float(own.log()[1 if start == 0 else 0 :].sum())
    return [total / len(answer.output) for total, answer in zip(sums, answers, strict=True)]


@torch.no_grad()
def round_kls(
    target: Target, arm: Arm, batch: Batch, states: TargetStates
) -> tuple[Tensor, Tensor]:
    """Of lenience, at every context of a batch that a first slot drafts at: its row [n], KL [n]."""
    assert arm.drafter is not None
    roots = all_roots(batch)
    labels = label_slots(batch, roots, 1)
    logits = cast(Drawing, arm.drafter).first_logits(batch, states, roots)
    lenience, ids = arm.rule.parameters["lenience"], arm.drafter.draft_ids
    groups = torch.nonzero(labels.valid[:, 0])[:, 0]
    found: list[Tensor] = []
    for chosen in groups.split(LOGITS_AT_ONCE):
        context = states.final[labels.teacher_row[chosen, 0], labels.teacher_position[chosen, 0]]
        p = standardise(target.logits(context).double(), arm.sampling)  # [n, V]
        q = whole_law(logits(chosen), arm.sampling, ids, p)
        out = lenient_law(p, q, lenience)
        tiny = torch.finfo(p.dtype).tiny
        ratio = out.clamp_min(tiny).log() - p.clamp_min(tiny).log()
        found.append(torch.where(out > 0, out * ratio, 0.0).sum(dim=-1))
    return labels.teacher_row[groups, 0], torch.cat(found) if found else groups.double()


def tokens_at(answer: Answer, start: int, logits: Tensor) -> Tensor:
    """The tokens [n, 1] that a stretch of logits [n, V] is about."""
    tokens = answer.output[start : start + logits.shape[0]]
    return torch.tensor(tokens, device=logits.device)[:, None]


def whole_law(logits: Tensor, sampling: Sampling, ids: Tensor | None, like: Tensor) -> Tensor:
    """A draft law over the target's vocabulary, [n, V]."""
    q = standardise(logits.double(), sampling)
    if ids is None and q.shape[1] == like.shape[1]:
        return q
    columns = torch.arange(q.shape[1], device=q.device) if ids is None else ids
    return torch.zeros_like(like).index_copy_(1, columns, q)


def lenient_law(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """min(q, p / l) is accepted; what is left comes from (p - l q)^+."""
    taken = torch.minimum(q, p / lenience)
    return taken + (1 - taken.sum(dim=-1, keepdim=True)) * residual(p, lenience * q)


def quality_from(value: dict[str, dict[str, Any] | None]) -> Quality:
    """What `asdict` made of a quality."""
    found = {name: None if one is None else Estimate(**one) for name, one in value.items()}
    return Quality(**found)  # type: ignore[arg-type]


def judged_arms(arms: Sequence[Arm]) -> list[Arm]:
    """Lossy arms, and beside those of one baseline the first exact arm of a drafter."""
    lossy = [arm for arm in arms if not arm.rule.lossless]
    exact: dict[str, Arm] = {}
    for arm in arms:
        if arm.drafter is not None and arm.rule.lossless:
            exact.setdefault(arm.baseline, arm)
    beside = [exact[name] for name in {arm.baseline: 0 for arm in lossy} if name in exact]
    return [*lossy, *beside]
