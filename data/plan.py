"""What a recipe will do and need, said before any weight is loaded; what cannot work is refused."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import psutil
import torch

from draftsmith.data.counts import count_evaluated, estimate_lengths, find_overlap, prompts_here
from draftsmith.data.memory import FULL, answering_memory, training_memory
from draftsmith.drafters.target import TargetShape, describe, pick_device
from draftsmith.recipes.entry import run_folder
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DistilConfig, EvalConfig, MedusaConfig, Recipe

ROW_BYTES = 14  # of a row's file per token: its id and its text
CERTAIN = ("frozen weights", "trained weights, gradients, optimizer")  # of a step's memory


@dataclass(frozen=True)
class Plan:
    """Counts and bytes. Token and step counts are upper bounds until the answers are there."""

    trained: int  # parameters
    frozen: int
    prompts: int | None  # None: not counted, they are on the Hub
    eval_prompts: int | None
    tokens: int | None
    steps: int | None
    training: dict[str, int]  # memory of a training step, by part
    answering: dict[str, int]  # memory of a batch of answers
    memory_total: int  # of the device
    disk: dict[str, int]
    disk_free: int
    notes: tuple[str, ...]


def make_plan(recipe: Recipe) -> Plan:
    """Check a recipe against its target's config, its prompts and this machine.

    Raises UserError for what cannot work.
    """
    check_steps(recipe)
    check_trackers(recipe)
    shape = describe(recipe.target)
    check_target(recipe, shape)
    evaluated = prompts_here(recipe, "test")
    asked = prompts_here(recipe, "train", evaluated)
    lengths = None if asked is None else estimate_lengths(recipe, asked)
    check_held_out(recipe, lengths)
    tokens = None if lengths is None else estimate_tokens(recipe, lengths)
    steps = estimate_steps(recipe, tokens)
    trained = trained_parameters(recipe.drafter, shape)
    longest = recipe.data.max_prompt_tokens if lengths is None else max(lengths)
    plan = Plan(
        trained=trained,
        frozen=shape.parameters,
        prompts=None if lengths is None else len(lengths),
        eval_prompts=count_evaluated(recipe, evaluated),
        tokens=tokens,
        steps=steps,
        training=training_memory(recipe, shape, trained),
        answering=answering_memory(recipe, shape, longest),
        memory_total=device_memory(recipe),
        disk=estimate_disk(recipe, trained, tokens or 0),
        disk_free=free_disk(run_folder(recipe)),
        notes=(*find_notes(recipe, steps), *find_overlap(asked)),
    )
    check_room(plan)
    return plan


def check_steps(recipe: Recipe) -> None:
    """Knobs that must fit each other."""
    train, data, drafter = recipe.train, recipe.data, recipe.drafter
    if train.rows_per_step % train.rows_per_micro_batch:
        raise UserError(
            f"train.rows_per_micro_batch: {train.rows_per_micro_batch} does not divide "
            f"train.rows_per_step ({train.rows_per_step}); give one of its divisors"
        )
    if data.max_prompt_tokens >= data.max_length:
        raise UserError(
            f"data.max_prompt_tokens: {data.max_prompt_tokens} leaves no room for an answer in "
            f"rows of data.max_length ({data.max_length}); lower the first or raise the second"
        )
    weights = len(recipe.objective.slot_weights)
    if recipe.objective.weights != "list" and weights:
        raise UserError(
            f"objective.slot_weights: not used with objective.weights: {recipe.objective.weights}; "
            "write objective.weights: list, or leave them out"
        )
    if recipe.objective.weights == "list" and weights != drafter.heads:
        raise UserError(
            f"objective.slot_weights: {weights} given, drafter.heads is {drafter.heads}; "
            "give one weight per head"
        )


def check_trackers(recipe: Recipe) -> None:
    """A tracker that is not installed would only be missed after the target is loaded."""
    for name in recipe.train.trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.trackers: {name} is not installed; "
                f"run `pip install 'draftsmith[{name}]'` or leave it out"
            )


def check_target(recipe: Recipe, shape: TargetShape) -> None:
    """What the target's config and tokenizer rule out."""
    name, drafter = recipe.target.model, recipe.drafter
    if shape.template is None:
        raise UserError(
            f"target.model: the tokenizer of {name} has no chat template, so it cannot be asked to "
            "answer prompts; give an instruction-tuned model"
        )
    if drafter.draft_vocab is not None and drafter.draft_vocab > shape.vocab_size:
        raise UserError(
            f"drafter.draft_vocab: {drafter.draft_vocab} is more than the {shape.vocab_size} "
            f"tokens of {name}; give fewer, or null for all"
        )
    if drafter.projection == "low_rank" and drafter.rank > shape.hidden_size:
        raise UserError(
            f"drafter.rank: {drafter.rank} is more than the hidden size of {name} "
            f"({shape.hidden_size}), a low rank is less"
        )
    longest = {"data.distil.max_new_tokens": recipe.data.distil.max_new_tokens}
    longest["eval.max_new_tokens"] = recipe.eval.max_new_tokens + drafter.heads
    for key, answer in longest.items():
        if recipe.data.max_prompt_tokens + answer > shape.max_positions:
            raise UserError(
                f"{key}: prompts of up to {recipe.data.max_prompt_tokens} tokens and answers of "
                f"{answer} exceed the {shape.max_positions} positions of {name}; "
                f"lower it or data.max_prompt_tokens"
            )


def find_notes(recipe: Recipe, steps: int | None) -> tuple[str, ...]:
    """What works, but is likely not meant."""
    optim, distil = recipe.optim, recipe.data.distil
    filters: dict[str, DistilConfig | EvalConfig] = {"data.distil": distil, "eval": recipe.eval}
    found = [
        f"{block}: top_p and top_k do nothing at temperature 0"
        for block, knobs in filters.items()
        if knobs.temperature == 0 and (knobs.top_p < 1 or knobs.top_k > 0)
    ]
    if steps is not None and optim.warmup_steps >= steps:
        found.append(f"optim.warmup_steps ({optim.warmup_steps}) outlasts the training")
    if distil.temperature == 0 and distil.greedy_share > 0:
        found.append(
            "data.distil.greedy_share does nothing at temperature 0, all answers are greedy"
        )
    return tuple(found)


def check_held_out(recipe: Recipe, prompts: Sequence[object] | None) -> None:
    """Something must be left to train on."""
    if prompts is not None and len(prompts) <= recipe.data.held_out:
        raise UserError(
            f"data.held_out: {recipe.data.held_out} documents are kept away from training and "
            f"there are only {len(prompts)} prompts; lower it, or give more prompts"
        )


def estimate_tokens(recipe: Recipe, lengths: Sequence[int]) -> int:
    """Tokens of prompts and answers, every answer as long as it may be."""
    return sum(lengths) + recipe.data.distil.max_new_tokens * len(lengths)


def estimate_steps(recipe: Recipe, tokens: int | None) -> int | None:
    """Optimizer steps, every packed row full."""
    train = recipe.train
    if tokens is None:
        return train.max_steps
    per_epoch = ceil(ceil(tokens / recipe.data.max_length) / train.rows_per_step)
    return min(train.epochs * per_epoch, train.max_steps or train.epochs * per_epoch)


def trained_parameters(config: MedusaConfig, shape: TargetShape) -> int:
    """Parameters of the Medusa heads (a test counts the real ones)."""
    size, rows = shape.hidden_size, config.draft_vocab or shape.vocab_size
    extra = {"shared": 0, "low_rank": config.rank * (size + rows), "own": rows * size}
    return config.heads * (size * size + size + extra[config.projection])


def device_memory(recipe: Recipe) -> int:
    """Bytes of the device that will train."""
    device = pick_device(recipe.target.device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def estimate_disk(recipe: Recipe, trained: int, tokens: int) -> dict[str, int]:
    """Bytes that the run will write, by part."""
    kept = recipe.train.keep_checkpoints + 1  # a new one is whole before an old one goes
    return {
        "rows": tokens * ROW_BYTES,
        "checkpoints": kept * trained * 3 * FULL,
        "drafter": 2 * trained * FULL,  # the new one is whole before the old one goes
        "report and log": 8 << 20,
    }


def free_disk(folder: Path) -> int:
    """Free bytes where a folder is or will be. Raises UserError where nothing can be written."""
    here = folder.absolute()
    while not here.exists():
        here = here.parent
    if not here.is_dir():
        raise UserError(f"runs: {here} is a file; give a folder (runs=FOLDER)")
    if not os.access(here, os.W_OK):
        raise UserError(
            f"runs: no permission to write to {here}; give another folder (runs=FOLDER)"
        )
    return shutil.disk_usage(here).free


def check_room(plan: Plan) -> None:
    """Refuse what this machine cannot hold."""
    if sum(plan.disk.values()) > plan.disk_free:
        raise UserError(
            f"the run needs {size(sum(plan.disk.values()))} of disk and {size(plan.disk_free)} are "
            "free; free some, give another folder (runs=FOLDER), or lower train.keep_checkpoints"
        )
    certain = sum(plan.training[part] for part in CERTAIN)
    if certain > plan.memory_total:
        raise UserError(
            f"weights, gradients and optimizer need {size(certain)} of memory and the device has "
            f"{size(plan.memory_total)}; take a smaller target, or drafter.projection: shared"
        )


def size(count: int) -> str:
    """Bytes for people."""
    for unit, power in (("GB", 30), ("MB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count / 1024:.0f} kB"


def number(count: int | None) -> str:
    """A count for people."""
    return "not known before the prompts are loaded" if count is None else f"{count:,}"


def peak(plan: Plan, memory: dict[str, int], when: str, knob: str) -> str:
    """How much memory is needed, and what to lower where that is too much."""
    needed, total = sum(memory.values()), plan.memory_total
    tight = f" (may not fit: lower {knob})" if needed > total else ""
    return f"about {size(needed)} of {size(total)} {when}{tight}"


def parts(sizes: dict[str, int]) -> list[tuple[str, str]]:
    """Lines of a sum."""
    return [("", f"{size(count):>10}  {part}") for part, count in sizes.items()]


def render(plan: Plan, recipe: Recipe) -> str:
    """The plan as text."""
    whole = sum(plan.disk.values())
    at_most = "" if plan.tokens is None else "at most "
    lines = [
        ("run", str(run_folder(recipe))),
        ("target", f"{recipe.target.model}, {plan.frozen:,} parameters frozen"),
        ("drafter", f"{recipe.drafter.kind}, {plan.trained:,} parameters trained"),
        (
            "prompts",
            f"{number(plan.prompts)} to train on, {number(plan.eval_prompts)} to report on",
        ),
        ("tokens", at_most + number(plan.tokens)),
        ("steps", at_most + number(plan.steps)),
        ("memory", peak(plan, plan.answering, "for a batch of answers", "data.distil.batch_size")),
        *parts(plan.answering),
        ("", peak(plan, plan.training, "for a training step", "train.rows_per_micro_batch")),
        *parts(plan.training),
        ("disk", f"about {size(whole)}, {size(plan.disk_free)} are free"),
        *parts(plan.disk),
        *(("note", note) for note in plan.notes),
    ]
    return "\n".join(f"{name:9}{text}" for name, text in lines)
