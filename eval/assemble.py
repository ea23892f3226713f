"""From trials, checks and costs to the report's arms and samples."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from draftsmith.data.dataset import Document
from draftsmith.drafters.fingerprint import NONE
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.arms import Arm
from draftsmith.eval.bench import BenchPrompt
from draftsmith.eval.check import (
    Answer,
    Divergence,
    first_slot_alpha,
    greedy_divergences,
    law_score,
)
from draftsmith.eval.decode import Decoded
from draftsmith.eval.gap import explain_gap
from draftsmith.eval.lossy import Quality, measure_quality
from draftsmith.eval.report import BY_DESIGN, ArmReport, Piece, Sample
from draftsmith.eval.summary import (
    Trial,
    acceptance,
    acceptance_by_category,
    mean_milliseconds,
    percentiles,
    prompt_totals,
    rounds_of,
    speedup,
    speedup_interval,
    tau_by_category,
    tau_macro,
    tau_micro,
    token_seconds,
    tokens_per_second,
)
from draftsmith.eval.theory import RoundCost, predicted_speedup
from draftsmith.eval.walk import RankTable, recipe_ranks, walk
from draftsmith.recipes.schema import Recipe

Z_LIMIT = 4.0  # standard errors; a right sampler passes it in 15,999 of 16,000 reports


@dataclass(frozen=True)
class Verdicts:
    """What the checks of an arm's output found."""

    lossless: bool
    sentence: str
    alpha: float | None
    tau_walk: float | None


@dataclass(frozen=True)
class Memory:
    """What was found before: arms mostly give the same answers, which need judging once."""

    divergences: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Divergence]] = field(
        default_factory=dict
    )
    tables: dict[tuple[str | None, str], RankTable] = field(default_factory=dict)  # drafter, plain
    alphas: dict[Hashable, float | None] = field(default_factory=dict)


def check_arm(
    recipe: Recipe,
    target: Target,
    arm: Arm,
    trials: Sequence[Trial],
    plain: Sequence[Trial],
    prompts: Sequence[BenchPrompt],
    memory: Memory,
) -> Verdicts:
    """Judge an arm's output, and simulate its rounds on the plain arm's answers."""
    answers = answers_of(trials, prompts)
    lossless, sentence = judge(target, arm, answers, memory)
    alpha = tau = None
    if arm.drafter is not None and arm.drafter.config.walks:
        alpha = known_alpha(target, arm, answers, memory)
        if arm.draw == "point" and arm.batch == 1 and arm.rule.lossless:
            # A text does not say which drafts were drawn, nor what a lossy rule would accept.
            tau = walked_tau(recipe, target, arm, plain, prompts, memory)
    return Verdicts(lossless, sentence, alpha, tau)


def known_alpha(
    target: Target, arm: Arm, answers: Sequence[Answer], memory: Memory
) -> float | None:
    """The first slot's alpha over an arm's answers; a pass only over answers that are new."""
    assert arm.drafter is not None
    drawn = arm.draw != "point"
    texts = tuple((tuple(answer.prompt), tuple(answer.output)) for answer in answers)
    key = (arm.kind, drawn, arm.sampling, texts)
    if key not in memory.alphas:
        memory.alphas[key] = first_slot_alpha(
            target, arm.drafter, answers, arm.sampling, drawn=drawn
        )
    return memory.alphas[key]


def walked_tau(
    recipe: Recipe,
    target: Target,
    arm: Arm,
    plain: Sequence[Trial],
    prompts: Sequence[BenchPrompt],
    memory: Memory,
) -> float | None:
    """The walk over the plain arm's answers with an arm's tree."""
    assert arm.drafter is not None
    key = (arm.kind, arm.baseline)
    if key not in memory.tables:
        documents = documents_of(plain, prompts, greedy=arm.sampling.greedy)
        memory.tables[key] = recipe_ranks(recipe, target, arm.drafter, documents)
    return walk(memory.tables[key], arm.tree).total.tau_micro or None


def answers_of(trials: Sequence[Trial], prompts: Sequence[BenchPrompt]) -> list[Answer]:
    """Every answer; equal answers of repeats once."""
    seen = {(trial.prompt, tuple(trial.decoded.tokens)) for trial in trials}
    return [Answer(prompts[prompt].ids, list(tokens)) for prompt, tokens in sorted(seen)]


def documents_of(
    trials: Sequence[Trial], prompts: Sequence[BenchPrompt], *, greedy: bool
) -> list[Document]:
    """Answers as documents for the walk."""
    documents = []
    for trial in trials:
        prompt, tokens = prompts[trial.prompt], trial.decoded.tokens
        supervised = (False,) * len(prompt.ids) + (True,) * len(tokens)
        ids = (*prompt.ids, *tokens)
        documents.append(
            Document(prompt.key, prompt.category, ids, supervised, greedy, trial.decoded.finish)
        )
    return documents


def judge(target: Target, arm: Arm, answers: Sequence[Answer], memory: Memory) -> tuple[bool, str]:
    """Whether the output is the target's own, and the finding in words."""
    tokens = sum(len(answer.output) for answer in answers)
    if arm.sampling.greedy:
        return judge_greedy(remembered(target, answers, memory), tokens, target.dtype)
    score = law_score(target, answers, arm.sampling)
    passed = score.impossible == 0 and abs(score.z) <= Z_LIMIT
    sentence = (
        f"{tokens} tokens: {score.impossible} outside the law's support, "
        f"log p off its expectation by {score.z:+.2f} standard errors (at most {Z_LIMIT:g})"
    )
    return passed, sentence


def remembered(target: Target, answers: Sequence[Answer], memory: Memory) -> list[Divergence]:
    """Divergences of these answers; a pass only over those that are new."""
    known = memory.divergences
    new = [a for a in answers if (tuple(a.prompt), tuple(a.output)) not in known]
    for answer, found in zip(new, greedy_divergences(target, new), strict=True):
        known[tuple(answer.prompt), tuple(answer.output)] = found
    return [d for a in answers for d in known[tuple(a.prompt), tuple(a.output)]]


def judge_greedy(found: Sequence[Divergence], tokens: int, dtype: torch.dtype) -> tuple[bool, str]:
    """fp32: no divergence at all. Half precision: none beyond what rounding can turn."""
    if not found:
        return True, f"every one of {tokens} tokens is the target's argmax"
    worst = max(divergence.margin for divergence in found)
    beyond = [d for d in found if dtype == torch.float32 or d.margin > d.rounding(dtype)]
    name = str(dtype).removeprefix("torch.")
    cause = f"{len(beyond)} beyond {name} rounding" if beyond else f"all within {name} rounding"
    return (
        not beyond,
        f"{len(found)} of {tokens} tokens are not the argmax of a whole-answer pass "
        f"(largest margin {worst:.3g} logits), {cause}",
    )


def arm_report(
    target: Target,
    arm: Arm,
    trials: Sequence[Trial],
    plain: Sequence[Trial],
    verdicts: Verdicts,
    cost: RoundCost | None,
    quality: Quality | None = None,
) -> ArmReport:
    """All figures of one arm."""
    timed, baseline = prompt_totals(trials, prefill=False), prompt_totals(plain, prefill=False)
    whole, whole_baseline = prompt_totals(trials, prefill=True), prompt_totals(plain, prefill=True)
    depth = 0 if arm.tree is None else int(arm.tree.depth.max())
    slots, tau = acceptance(trials, depth), tau_micro(trials)
    gained, parts = speedup(baseline, timed), mean_milliseconds(trials)
    predicted = None
    if cost is not None and tau is not None:
        predicted = predicted_speedup(tau, cost, drafted=drafted_share(trials))
    return ArmReport(
        name=arm.name,
        engine=arm.engine,
        drafter=arm.kind,
        rule=arm.acceptance,
        draw=None if arm.drafter is None else arm.draw,
        temperature=arm.sampling.temperature,
        top_p=arm.sampling.top_p,
        top_k=arm.sampling.top_k,
        batch=arm.batch,
        dtype=str(target.dtype).removeprefix("torch."),
        quantisation=told_quantisation(target.fingerprint),
        device=str(target.device),
        threads=torch.get_num_threads(),
        baseline=arm.baseline,
        draft_tokens=depth or None,
        tree=tree_paths(arm.tree),
        prompts=len({trial.prompt for trial in trials}),
        tokens=int(timed.tokens.sum()),
        tokens_per_second=tokens_per_second(timed),
        tokens_per_second_with_prefill=tokens_per_second(whole),
        speedup=gained,
        speedup_interval=speedup_interval(baseline, timed),
        speedup_with_prefill=speedup(whole_baseline, whole),
        predicted_speedup=predicted,
        gap=explain_gap(
            gained, predicted, cost=cost, plain_ms=mean_milliseconds(plain), round_ms=parts
        ),
        tau_micro=tau,
        tau_macro=tau_macro(trials),
        tau_walk=verdicts.tau_walk,
        tau_by_category=tau_by_category(trials),
        alpha=verdicts.alpha,
        conditional_acceptance=slots.conditional,
        joint_acceptance=slots.joint,
        reached=slots.reached,
        conditional_by_category={
            name: of.conditional for name, of in acceptance_by_category(trials, depth).items()
        },
        lossless=verdicts.lossless if arm.rule.lossless else BY_DESIGN,
        check=verdicts.sentence,
        milliseconds=parts,
        overhead_share=parts["overhead"] / sum(parts.values()) if any(parts.values()) else 0.0,
        token_ms=percentiles(token_seconds(trials)),
        request_ms=percentiles([t.decoded.prefill_s + t.decoded.decode_s for t in trials]),
        drafter_bytes=drafter_bytes(arm.drafter, target),
        quality=quality,
    )


def told_quantisation(fingerprint: Mapping[str, str]) -> str:
    """What was done to the target's weights before it came here, and here."""
    here = fingerprint["quantisation"]
    kept = "" if here == NONE else f", linear layers in {here}"
    adapted = "" if fingerprint["adapter"] == NONE else ", adapted by LoRA"
    return f"weights {fingerprint['origin']}{kept}{adapted}"


def drafted_share(trials: Sequence[Trial]) -> float:
    """The share of rounds that had drafts."""
    rounds = rounds_of(trials)
    return sum(turn.drafted > 0 for turn in rounds) / len(rounds) if rounds else 1.0


def tree_paths(tree: Tree | None) -> list[list[int]] | None:
    """The nodes of a tree; None for a chain, which its length describes."""
    return None if tree is None or tree.is_chain else [list(path) for path in tree.paths]


def drafter_bytes(drafter: Drafter | None, target: Target) -> dict[str, int]:
    """Memory that the drafter adds: parameters and buffers that are not the target's own."""
    if not isinstance(drafter, nn.Module):
        return {"weights": 0, "cache_per_token": 0}
    own = list(target.model.parameters())
    shared = {tensor.untyped_storage().data_ptr() for tensor in own}
    held: dict[int, int] = {}
    for tensor in [*drafter.parameters(), *drafter.buffers()]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            held[storage.data_ptr()] = storage.nbytes()
    return {"weights": sum(held.values()), "cache_per_token": drafter.cache_bytes_per_token()}


def sample_of(tokenizer: Any, arm: Arm, trial: Trial, prompt: BenchPrompt) -> Sample:
    """One answer, cut where the drafter and the target took turns."""
    stretches = stretches_of(trial.decoded)
    texts = stretch_texts(tokenizer, [tokens for tokens, _, _ in stretches])
    pieces = [
        Piece(text, drafted, number)
        for text, (_, drafted, number) in zip(texts, stretches, strict=True)
        if text
    ]
    return Sample(arm.name, prompt.category, prompt.text, pieces)


def stretches_of(decoded: Decoded) -> list[tuple[list[int], bool, int]]:
    """Tokens, whether they were drafted, and the round's number; prefill's token is round 0."""
    stretches = [(decoded.tokens[:1], False, 0)]
    at = 1
    for number, turn in enumerate(decoded.rounds, start=1):
        drafted = min(turn.accepted, turn.emitted)
        stretches.append((decoded.tokens[at : at + drafted], True, number))
        stretches.append((decoded.tokens[at + drafted : at + turn.emitted], False, number))
        at += turn.emitted
    return stretches


def stretch_texts(tokenizer: Any, stretches: Sequence[list[int]]) -> list[str]:
    """Text of every stretch. A character that spans stretches goes to the one that completes it."""
    texts: list[str] = []
    ids: list[int] = []
    before = ""
    for stretch in stretches:
        ids += stretch
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = whole[len(before) :] if whole.startswith(before) else ""
        texts.append(new)
        before = whole if whole.startswith(before) else before
    return texts


def quality_of(
    target: Target,
    arm: Arm,
    trials: Sequence[Trial],
    plain: Sequence[Trial],
    prompts: Sequence[BenchPrompt],
) -> Quality:
    """An arm's first answer to every prompt beside plain decoding's."""

    def first(of: Sequence[Trial]) -> list[Answer]:
        answers = {trial.prompt: trial.decoded.tokens for trial in of if trial.repeat == 0}
        return [Answer(prompts[at].ids, answers[at]) for at in sorted(answers)]

    return measure_quality(target, arm, first(trials), first(plain))
