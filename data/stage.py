"""The data stage: prompts -> the target's answers, in the run's `rows` folder."""

from collections import Counter
from pathlib import Path
from textwrap import shorten

from draftsmith.data.dataset import Document, training_documents
from draftsmith.data.distill import distil
from draftsmith.data.prompts import Prompt, listed, load_prompts
from draftsmith.data.render import check_template, sample_text
from draftsmith.data.self_written import Sieve, find_opening, write_turns
from draftsmith.data.show import write_left_out
from draftsmith.drafters.speaker import Speaker, describe_speaker
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import Recipe

SAMPLES = 3  # self-written prompts that are shown


def prepare(recipe: Recipe, run: Path) -> None:
    """Distil the recipe's prompts into `run/rows`, going on from what is there, and show a row.

    Prompts that the target writes itself join them, by way of `run/self_written`.
    Raises UserError when no row is left to train on.
    """
    evaluated = load_prompts(recipe.data, split="test", seed=recipe.seed).prompts
    prompts = load_prompts(recipe.data, split="train", seed=recipe.seed, evaluated=evaluated)
    tell_dropped("prompts", prompts.dropped)
    here = recipe.data.distil.backend == "transformers"
    target = Target.load(recipe.target) if here else describe_speaker(recipe.target)
    asked = prompts.prompts
    if recipe.data.self_written.count:
        asked = asked + self_written(target, recipe, asked, evaluated, run / "self_written")
    summary = distil(target, asked, recipe.data, run / "rows", seed=recipe.seed)
    write_left_out(run / "rows", prompts.dropped)
    tell_dropped("prompts", summary.dropped)
    speed = f", {summary.tokens_per_second:,.0f} tokens/s" if summary.made else ""
    print(
        f"{summary.rows:,} answers, {summary.response_tokens:,} tokens, "
        f"{summary.cut:,} cut by data.distil.max_new_tokens{speed}"
    )
    first, shares = recipe.data.distil.share
    if shares > 1:
        folder = run / "rows"
        print(f"share {first} of {shares}; join all by `draftsmith data merge OUT {folder} ...`")
        return
    documents, dropped = training_documents(run / "rows", recipe.data)
    tell_dropped("rows", dropped)
    print(describe(documents, target))


def self_written(
    target: Speaker,
    recipe: Recipe,
    training: list[Prompt],
    evaluated: list[Prompt],
    folder: Path,
) -> list[Prompt]:
    """Let the target write prompts, show a few, and say why others were dropped."""
    check_template(target.tokenizer, recipe.data.thinking, name=target.name)
    opening = find_opening(target, recipe.data.thinking)
    turns = write_turns(target, opening, recipe.data, folder, seed=recipe.seed)
    found = Sieve(target.tokenizer, opening.end, training, evaluated).sift(turns)
    print(f"{len(turns):,} self-written turns sampled, {len(found.prompts):,} kept as prompts")
    tell_dropped("turns", found.dropped)
    for prompt in found.prompts[:SAMPLES]:
        print(f"  {prompt.key}: {shorten(prompt.messages[0]['content'], 160)}")
    return found.prompts


def describe(documents: list[Document], target: Speaker) -> str:
    """A sample of what will be trained on, and how much of everything is supervised."""
    sample = min(documents, key=lambda document: len(document.ids))
    tokens = sum(len(document.ids) for document in documents)
    supervised = sum(sum(document.supervised) for document in documents)
    return (
        f"a training row (key {sample.key}):\n"
        f"{sample_text(target.tokenizer, sample.ids, sample.supervised)}\n"
        f"{len(documents):,} rows, {tokens:,} tokens, {supervised / tokens:.0%} of them supervised"
    )


def tell_dropped(what: str, dropped: Counter[str]) -> None:
    """One line for what was left out, if anything was."""
    if dropped:
        print(f"{sum(dropped.values()):,} {what} left out: {listed(dropped)}")
