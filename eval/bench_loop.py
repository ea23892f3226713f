"""Our decoding loop against transformers': plain, and assisted by the same draft model.

    python -m draftsmith.eval.bench_loop [DRAFTER] [--prompts N] [--max-new-tokens N] [--threads N]

Greedy, batch 1, the same prompts, each by every arm in turn; the draft model drafts as many tokens
in both. Without DRAFTER (a draft model's folder, or its run's) two layers of the target stand in:
such drafts are mostly wrong, and what is compared are costs.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from draftsmith.drafters.checkpoint import load_drafter, read_metadata
from draftsmith.drafters.methods import Drafter, build
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import chain
from draftsmith.eval.arms import ASSISTED, GENERATE, PLAIN, Candidate, greedy_arms
from draftsmith.eval.bench import measure
from draftsmith.eval.prompts import evaluation_prompts
from draftsmith.eval.results import Results
from draftsmith.eval.stage import stored_recipe
from draftsmith.eval.subjects import drafter_folder
from draftsmith.eval.summary import (
    Trial,
    mean_milliseconds,
    prompt_totals,
    speedup,
    speedup_interval,
    tau_micro,
    tokens_per_second,
)
from draftsmith.recipes.entry import Parser, guard
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.schema import DraftModelConfig, Recipe

RECIPE = "smollm2-135m_draft_model"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """What to measure."""
    parser = Parser(prog="python -m draftsmith.eval.bench_loop", description=__doc__)
    parser.add_argument("drafter", nargs="?", help="a draft model's folder, or its run's")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


def open_drafter(options: argparse.Namespace) -> tuple[Recipe, Target, Drafter]:
    """The given draft model; else two layers of the target that nobody trained."""
    overrides = [
        *(f"eval.prompts={options.prompts}", f"eval.max_new_tokens={options.max_new_tokens}"),
    ]
    if options.drafter is None:
        recipe = load_recipe(RECIPE, overrides)
        target = Target.load(recipe.target)
        config = DraftModelConfig(kind="draft_model", layers=2)
        return recipe, target, build(config, target, None).to(target.dtype).eval()
    folder = drafter_folder(options.drafter)
    recipe = stored_recipe(read_metadata(folder), folder, overrides)
    target = Target.load(recipe.target)
    return recipe, target, load_drafter(folder, target)


@contextmanager
def same_length(candidate: Candidate) -> Iterator[None]:
    """Let transformers draft as many tokens as we do, every round, whatever it thinks of them."""
    assistance = candidate.assistance
    if assistance is None or "assistant_model" not in assistance:
        raise UserError("give a single draft model of the target's vocabulary size")
    config: Any = assistance["assistant_model"].generation_config
    fixed = {
        "num_assistant_tokens": candidate.drafter.depth,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    before = {name: getattr(config, name) for name in fixed}
    config.update(**fixed)
    try:
        yield
    finally:
        config.update(**before)


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    torch.set_num_threads(options.threads)
    recipe, target, drafter = open_drafter(options)
    straight = chain(drafter.depth).to(target.device)
    candidate = Candidate("draft_model", drafter, straight, straight)
    arms = greedy_arms(candidate)
    prompts, _ = evaluation_prompts(target, recipe, drafts=drafter.depth)
    with same_length(candidate):
        trials = measure(
            target,
            arms,
            prompts,
            Results(None, {}),
            max_new_tokens=recipe.eval.max_new_tokens,
            repeats=options.repeats,
            seed=recipe.seed,
        )
    print(
        f"\n{target.name}, {recipe.target.dtype}, {options.threads} threads, "
        f"{len(prompts)} prompts of at most {recipe.eval.max_new_tokens} tokens, "
        f"{drafter.depth} drafts a round"
    )
    for arm in arms:
        print(sentence(arm.name, trials[arm.name]))
    print(versus("plain, ours over transformers'", trials[GENERATE], trials[PLAIN]))
    ours = trials["draft_model chain"]
    print(versus("drafted, ours over transformers' assisted", trials[ASSISTED], ours))


def sentence(name: str, trials: Sequence[Trial]) -> str:
    """One arm's speed, and where its rounds go."""
    rate, tau = tokens_per_second(prompt_totals(trials, prefill=False)), tau_micro(trials)
    parts = mean_milliseconds(trials)
    whole = sum(parts.values())
    spent = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
    share = 100 * parts["overhead"] / whole if whole else 0.0
    return (
        f"{name:24}{rate or 0.0:7.1f} tokens/s, tau {tau or 0.0:.3f}; ms a round: {spent}; "
        f"overhead {share:.1f} %"
    )


def versus(what: str, slow: Sequence[Trial], fast: Sequence[Trial]) -> str:
    """A quotient of seconds per token and its interval, prefill not counted."""
    one, other = prompt_totals(slow, prefill=False), prompt_totals(fast, prefill=False)
    bounds = speedup_interval(one, other)
    shown = "" if bounds is None else f" (95 %: {bounds[0]:.2f} to {bounds[1]:.2f})"
    return f"{what}: {speedup(one, other) or 0.0:.2f}x{shown}"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    return guard(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
