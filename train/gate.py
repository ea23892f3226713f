"""What an adapter changed of its target, measured on held-out answers before anything is exported.

The original, which is the network with its adapters off, is the judge. Every figure is a mean over
documents with a 95 % bootstrap interval.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from draftsmith.data.dataset import Document
from draftsmith.drafters.card import told_change
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import all_roots, before_roots, label_roots
from draftsmith.drafters.target import Target
from draftsmith.eval.check import LOGITS_AT_ONCE, Answer, batch_of, grouped
from draftsmith.eval.decode import decode
from draftsmith.eval.lossy import Estimate, agreement, estimate, log_likelihoods
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import GateConfig


@dataclass(frozen=True)
class Change:
    """An adapted target beside its original."""

    kl: Estimate  # nats per token: KL(original || adapted) over held-out answers
    perplexity: float  # of the adapted target on held-out answers,
    perplexity_before: float  # and of the original
    # nats per token of held-out answers: the adapted target's log-likelihood less the original's
    text: Estimate
    # nats per token under the original, of the adapted target's own greedy answers less those of
    # the original's
    answers: Estimate
    agreement: Estimate  # of these two answers, share of tokens in common order
    identical: Estimate  # share of answers that are the same, token by token
    documents: int
    asked: int  # prompts that both answered


def measure_change(
    target: Target, held_out: Sequence[Document], config: GateConfig, *, rows: int
) -> Change:
    """Compare the target, its adapter on, with its original. Dropout must be off."""
    texts = [whole for whole in map(split, held_out) if whole.output]
    kl, text, total, before, tokens = laws_of(target, texts, rows)
    asked = [one.prompt for one in texts[: config.answers]]
    mine = answers_to(target, asked, config)
    with target.original() as original:
        theirs = answers_to(original, asked, config)
        own, plain = (log_likelihoods(original, answers) for answers in (mine, theirs))
    pairs = [(a.output, b.output) for a, b in zip(mine, theirs, strict=True)]
    return Change(
        kl=estimate(kl),
        perplexity=math.exp(-total / tokens),
        perplexity_before=math.exp(-before / tokens),
        text=estimate(text),
        answers=estimate([a - b for a, b in zip(own, plain, strict=True)]),
        agreement=estimate([agreement(a, b) for a, b in pairs]),
        identical=estimate([float(a == b) for a, b in pairs]),
        documents=len(texts),
        asked=len(asked),
    )


def split(document: Document) -> Answer:
    """A held-out document as its prompt and its answer."""
    first = next((at for at, one in enumerate(document.supervised) if one), len(document.ids))
    return Answer(list(document.ids[:first]), list(document.ids[first:]))


@torch.no_grad()
def laws_of(
    target: Target, texts: Sequence[Answer], rows: int
) -> tuple[list[float], list[float], float, float, int]:
    """By text: mean KL(original || adapted), and mean log p of its tokens, adapted less original;
    then the sums of both log p, and the tokens. `rows` texts go through the target together.
    """
    sums = torch.zeros(len(texts), 3, dtype=torch.float64)  # KL, log p adapted, log p original
    for group in grouped(texts):
        for first in range(0, len(group), rows):
            some = group[first : first + rows]
            sums[some] = pass_over(target, [texts[index] for index in some])
    lengths = torch.tensor([len(one.output) for one in texts], dtype=torch.float64)
    kl, change = sums[:, 0] / lengths, (sums[:, 1] - sums[:, 2]) / lengths
    _, adapted, before = sums.sum(0).tolist()
    return kl.tolist(), change.tolist(), adapted, before, int(lengths.sum())


def pass_over(target: Target, texts: Sequence[Answer]) -> torch.Tensor:
    """Sums over each text's answer, [B, 3]: KL, log p of the adapted target and of the original."""
    batch = batch_of(target, texts)
    roots = all_roots(batch)
    labels = label_roots(batch, roots).label
    adapted = before_roots(target.states(batch).final, roots)
    with target.original() as original:
        before = before_roots(original.states(batch).final, roots)
    found = torch.zeros(len(texts), 3, dtype=torch.float64)
    for at in torch.arange(len(labels), device=labels.device).split(LOGITS_AT_ONCE):
        q = target.logits(adapted[at]).double().log_softmax(-1)
        with target.original() as original:
            p = original.logits(before[at]).double().log_softmax(-1)
        columns = [
            (p.exp() * (p - q)).sum(-1),
            q.gather(1, labels[at])[:, 0],
            p.gather(1, labels[at])[:, 0],
        ]
        found.index_add_(0, roots.row[at].cpu(), torch.stack(columns, dim=1).cpu())
    return found


def answers_to(target: Target, prompts: Sequence[list[int]], config: GateConfig) -> list[Answer]:
    """Greedy answers, by plain decoding."""
    limit = config.max_new_tokens
    return [
        Answer(ids, decode(target, None, ids, sampling=Sampling(), max_new_tokens=limit).tokens)
        for ids in prompts
    ]


def check_change(change: Change, config: GateConfig, say: Callable[[str], None]) -> None:
    """Say what was found. Raises UserError where it is more than the recipe allows."""
    for line in told_change(asdict(change)):
        say(f"adapted target: {line}")
    reasons = []
    if config.max_kl is not None and change.kl.mean > config.max_kl:
        reasons.append(f"KL {change.kl.mean:.3f} is over adapter.gate.max_kl ({config.max_kl})")
    if config.max_fall is not None and -change.answers.mean > config.max_fall:
        reasons.append(
            f"its answers are {-change.answers.mean:.3f} nats per token less likely, over "
            f"adapter.gate.max_fall ({config.max_fall})"
        )
    if reasons:
        raise UserError(
            f"the drafter is not written: the adapted target is too far from its original "
            f"({'; '.join(reasons)}); under another name lower adapter.lr, or use "
            "adapter.language: original; null as a limit accepts any change"
        )
