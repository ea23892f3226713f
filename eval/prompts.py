"""The evaluation prompts, rendered."""

from collections import Counter
from collections.abc import Sequence

from draftsmith.data.prompts import Prompt, listed, load_prompts
from draftsmith.data.render import TemplateRefusal, check_template, render_prompt
from draftsmith.drafters.target import Target
from draftsmith.eval.bench import BenchPrompt
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe


def evaluation_prompts(
    target: Target, recipe: Recipe, *, drafts: int = 0
) -> tuple[list[BenchPrompt], Counter[str]]:
    """The recipe's evaluation prompts, at most `eval.prompts`, and why others were left out.

    drafts: the depth of the deepest other drafter, which needs room too.
    """
    check_template(target.tokenizer, recipe.data.thinking, name=target.name)
    loaded = load_prompts(recipe.data, split="test", seed=recipe.seed)
    dropped = Counter(loaded.dropped)
    rendered: list[BenchPrompt] = []
    for prompt in spread(loaded.prompts):
        if recipe.eval.prompts is not None and len(rendered) == recipe.eval.prompts:
            break
        try:
            ids = render_prompt(
                target.tokenizer, prompt.messages, recipe.data.thinking, tools=prompt.tools
            )
        except TemplateRefusal as reason:
            dropped[str(reason)] += 1
            continue
        if len(ids) > recipe.data.max_prompt_tokens:
            dropped[f"longer than {recipe.data.max_prompt_tokens} tokens"] += 1
            continue
        text = str(prompt.messages[-1]["content"])
        rendered.append(BenchPrompt(prompt.key, prompt.category, ids, text))
    if not rendered:
        raise UserError(
            f"{recipe.data.eval_prompts}: no evaluation prompt is left. Dropped: {listed(dropped)}"
        )
    check_positions(target, rendered, recipe, max(drafts, recipe.drafter.depth))
    return rendered, dropped


def spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Categories in turn, so that the first few prompts cover them evenly."""
    seen: Counter[str] = Counter()
    turns: list[tuple[int, int]] = []
    for index, prompt in enumerate(prompts):
        turns.append((seen[prompt.category], index))
        seen[prompt.category] += 1
    return [prompts[index] for _, index in sorted(turns)]


def check_positions(
    target: Target, prompts: Sequence[BenchPrompt], recipe: Recipe, drafts: int
) -> None:
    """UserError when a prompt, its answer and the drafts exceed the target's positions."""
    room = target.config.to_dict().get("max_position_embeddings")
    needed = max(len(prompt.ids) for prompt in prompts) + recipe.eval.max_new_tokens + drafts
    if room is not None and needed > room:
        raise UserError(
            f"{target.name} has {room} positions and the longest evaluation prompt needs, with its "
            f"answer and drafts, {needed}; lower eval.max_new_tokens or data.max_prompt_tokens"
        )
