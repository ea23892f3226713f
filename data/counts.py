"""What a recipe's prompts amount to, before anything is fetched or loaded."""

import json
from collections.abc import Sequence
from math import ceil

from draftsmith.data.prompts import EVALUATED, Message, Prompt, PromptSet, Split, load_prompts
from draftsmith.recipes.files import user_path
from draftsmith.recipes.schema import Recipe

CHARACTERS = 3.5  # per token of a prompt: a cautious guess, no tokenizer is asked
TEMPLATE_TOKENS = 40  # what a chat template adds to a prompt


def is_here(source: str) -> bool:
    """Whether prompts can be read without a network."""
    written = source.startswith((".", "/", "~")) or source.endswith(".jsonl")
    return source == "starter" or written or user_path(source).exists()


def prompts_here(recipe: Recipe, split: Split, but: PromptSet | None = None) -> PromptSet | None:
    """The prompts of a split, without those that others ask; None where they are on the Hub."""
    source = recipe.data.prompts if split == "train" else recipe.data.eval_prompts
    if not is_here(source):
        return None
    evaluated = () if but is None else but.prompts
    return load_prompts(recipe.data, split=split, seed=recipe.seed, evaluated=evaluated)


def count_evaluated(recipe: Recipe, found: PromptSet | None) -> int | None:
    """Evaluation prompts that the report will use."""
    if found is None:
        return None
    return min(len(found.prompts), recipe.eval.prompts or len(found.prompts))


def find_overlap(asked: PromptSet | None) -> tuple[str, ...]:
    """Whether prompts to train on are to be evaluated on."""
    count = 0 if asked is None else asked.dropped[EVALUATED]
    if not count:
        return ()
    return (f"training prompts that are evaluation prompts too are left out: {count:,}",)


def estimate_lengths(recipe: Recipe, asked: PromptSet) -> list[int]:
    """Tokens of every prompt, at most as many as the recipe allows; self-written ones are full.

    Every later turn of a conversation is a prompt too, with all answers before it.
    """
    most = recipe.data.max_prompt_tokens
    given = [min(length, most) for prompt in asked.prompts for length in by_turn(recipe, prompt)]
    return given + [written_length(recipe)] * recipe.data.self_written.count


def written_length(recipe: Recipe) -> int:
    """Tokens of a self-written prompt in its template, as long as it may be."""
    longest = recipe.data.self_written.max_new_tokens + TEMPLATE_TOKENS
    return min(longest, recipe.data.max_prompt_tokens)


def by_turn(recipe: Recipe, prompt: Prompt) -> list[int]:
    """Tokens of a conversation up to each of the answers that it is asked for."""
    if prompt.given:
        return [estimate_length(prompt.messages[: one.after]) for one in prompt.given]
    told = [{"content": json.dumps(prompt.tools)}] if prompt.tools else []
    lengths = [estimate_length([*prompt.messages, *told])]
    for later in prompt.later:
        answered = lengths[-1] + recipe.data.distil.max_new_tokens
        lengths.append(answered + estimate_length(later))
    return lengths


def estimate_length(messages: Sequence[Message]) -> int:
    """Tokens of messages, by their characters."""
    said = "".join(str(message["content"]) for message in messages)
    return ceil(len(said) / CHARACTERS) + TEMPLATE_TOKENS


def estimate_tokens(recipe: Recipe, lengths: Sequence[int]) -> int:
    """Tokens of prompts and answers, every answer as long as it may be."""
    return sum(lengths) + recipe.data.distil.max_new_tokens * len(lengths)


def estimate_steps(recipe: Recipe, tokens: int | None) -> int | None:
    """Optimizer steps, every packed row full."""
    train = recipe.train
    if not recipe.drafter.trained_slots:
        return 0
    if tokens is None:
        return train.max_steps
    per_epoch = ceil(ceil(tokens / recipe.data.max_length) / train.rows_per_step)
    return min(train.epochs * per_epoch, train.max_steps or train.epochs * per_epoch)
