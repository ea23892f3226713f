"""Arms, and their interleaved measurement: each prompt by every arm in turn, in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from draftsmith.data.bar import Bar
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.proposal import Draw
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.decode import Decoded, clock, decode
from draftsmith.eval.rows import Round
from draftsmith.eval.rules import RULES
from draftsmith.eval.summary import Trial
from draftsmith.eval.verify import RuleSpec, point_mass

PLAIN, GENERATE, ASSISTED = "plain", "transformers.generate", "transformers assisted"


@dataclass(frozen=True)
class Arm:
    """One way of decoding. `baseline` names the arm that its speedup is over."""

    name: str
    baseline: str
    sampling: Sampling
    engine: Literal["draftsmith", "transformers"] = "draftsmith"
    drafter: Drafter | None = None
    tree: Tree | None = None
    rule: RuleSpec = point_mass
    draw: Draw = "point"
    assistance: Mapping[str, Any] | None = None  # what `transformers` drafts with

    @property
    def acceptance(self) -> str:
        """How tokens are accepted, or chosen where nothing is drafted."""
        if self.drafter is None:
            return "none (greedy)" if self.sampling.greedy else "none (sampling)"
        return "greedy" if self.sampling.greedy and self.rule.lossless else self.rule.described


@dataclass(frozen=True)
class BenchPrompt:
    """A rendered evaluation prompt."""

    key: str
    category: str
    ids: list[int]
    text: str  # the last turn, for people


def greedy_arms(drafter: Drafter, kind: str, chain: Tree, tree: Tree) -> list[Arm]:
    """The baselines, the chain of all slots, and the searched tree."""
    greedy, assistance = Sampling(), drafter.assistance()
    arms = [Arm(PLAIN, PLAIN, greedy), Arm(GENERATE, PLAIN, greedy, engine="transformers")]
    if assistance is not None:
        arms.append(replace(arms[1], name=ASSISTED, assistance=assistance))
    return arms + drafted_arms(drafter, kind, chain, tree, greedy, PLAIN, "")


def sampled_arms(
    drafter: Drafter, kind: str, chain: Tree, tree: Tree, sampling: Sampling
) -> list[Arm]:
    """Plain sampling at a temperature, point-mass drafts, and drawn ones where it can draw."""
    suffix = f" T={sampling.temperature:g}"
    plain = Arm(PLAIN + suffix, PLAIN + suffix, sampling)
    arms = drafted_arms(drafter, kind, chain, tree, sampling, plain.name, suffix)
    return [plain, *arms, *(drawn for arm in arms for drawn in drawn_arms(drafter, arm))]


def drawn_arms(drafter: Drafter, arm: Arm) -> list[Arm]:
    """The arm with drafts drawn from q, by the best rule for that; none where it cannot draw."""
    assert arm.tree is not None
    draw: Draw = "chain" if arm.tree.is_chain else "without_replacement"
    if draw not in drafter.draws:
        draw = "without_replacement"
    rule = "token" if draw == "chain" else "without_replacement"
    if draw not in drafter.draws:
        return []
    return [replace(arm, name=f"{arm.name}, drawn", draw=draw, rule=RULES[rule])]


def drafted_arms(
    drafter: Drafter,
    kind: str,
    chain: Tree,
    tree: Tree,
    sampling: Sampling,
    baseline: str,
    suffix: str,
) -> list[Arm]:
    """The chain of all slots, and what the search chose where that is another shape."""
    arms = [Arm(f"{kind} chain{suffix}", baseline, sampling, drafter=drafter, tree=chain)]
    if tree.paths != chain.paths:
        shape = f"chain of {tree.nodes}" if tree.is_chain else "tree"
        arms.append(Arm(f"{kind} {shape}{suffix}", baseline, sampling, drafter=drafter, tree=tree))
    return arms


def measure(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    *,
    max_new_tokens: int,
    repeats: int,
    seed: int,
) -> dict[str, list[Trial]]:
    """Decode every prompt with every arm, `repeats` times; the order of arms rotates."""
    trials: dict[str, list[Trial]] = {arm.name: [] for arm in arms}
    for arm in arms:  # warm-up, thrown away
        run_arm(target, arm, prompts[0].ids, max_new_tokens=min(16, max_new_tokens), seed=seed)
    total = repeats * len(prompts) * len(arms)
    with Bar("measure", total, "answers") as bar:
        for repeat in range(repeats):
            for index, prompt in enumerate(prompts):
                for arm in rotated(arms, repeat + index):
                    decoded = run_arm(
                        target,
                        arm,
                        prompt.ids,
                        max_new_tokens=max_new_tokens,
                        seed=seed + repeat * len(prompts) + index,
                    )
                    trials[arm.name].append(Trial(index, prompt.category, decoded))
                    bar.advance()
    return trials


def rotated(arms: Sequence[Arm], start: int) -> list[Arm]:
    """The arms in turn, another one first each time."""
    start %= len(arms)
    return [*arms[start:], *arms[:start]]


def run_arm(
    target: Target, arm: Arm, prompt_ids: list[int], *, max_new_tokens: int, seed: int
) -> Decoded:
    """One answer by one arm."""
    if arm.engine == "transformers":
        return generate(
            target, prompt_ids, max_new_tokens=max_new_tokens, assistance=arm.assistance
        )
    return decode(
        target,
        arm.drafter,
        prompt_ids,
        sampling=arm.sampling,
        max_new_tokens=max_new_tokens,
        tree=arm.tree,
        seed=seed,
        rule=arm.rule,
        draw=arm.draw,
    )


class TokenClock:
    """A streamer that notes when `generate` hands over the prompt and what follows."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        """The prompt first, then one token at a time, or those of a round."""
        self.times.append(clock(self.target))
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left to note."""


@torch.inference_mode()
def generate(
    target: Target,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    assistance: Mapping[str, Any] | None = None,
) -> Decoded:
    """Greedy `transformers.generate`, with its default cache and every processor off.

    Timed from inside by a streamer: prefill ends when the first token is handed over, decoding
    when the last one is, so that setting up and leaving `generate` is not held against it. With
    assistance (what it takes to draft) its first round is prefill, and counts as that.
    """
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
        repetition_penalty=1.0,
        use_cache=True,
    )
    ids = torch.tensor([prompt_ids], device=target.device)
    streamer = TokenClock(target)
    began = clock(target)
    output = target.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        streamer=streamer,
        **(assistance or {}),
    )
    tokens = output[0, len(prompt_ids) :].tolist()
    times, counts = streamer.times[1:], streamer.counts[2:]  # the first are the prompt's
    steps = [later - earlier for earlier, later in pairwise(times)]
    finish: Literal["stop", "length"] = "stop" if tokens[-1] in target.eos_ids else "length"
    rounds = [
        Round(count - 1, count - 1, count, 0.0, seconds, 0.0)
        for count, seconds in zip(counts, steps, strict=True)
    ]
    return Decoded(tokens, rounds, times[0] - began, times[-1] - times[0], finish)
