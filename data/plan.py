"""What a recipe will do and need, said before any weight is loaded; what cannot work is refused."""

import importlib.util
import os
import shutil
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import psutil
import torch

from draftsmith.data.needs import BYTES, FROZEN, FULL, TRAINED, estimate_memory, trained_parameters
from draftsmith.data.prompts import load_prompts
from draftsmith.drafters.target import TargetShape, describe, pick_device
from draftsmith.recipes.entry import run_folder
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.schema import (
    DistilConfig,
    DrafterConfig,
    DraftModelConfig,
    EvalConfig,
    MedusaConfig,
    MtpConfig,
    Recipe,
)

ROW_BYTES = 14  # of a row's file per token: its id and its text
CHARACTERS = 3.5  # per token of a prompt: a cautious guess, no tokenizer is asked
TEMPLATE_TOKENS = 40  # what a chat template adds to a prompt


@dataclass(frozen=True)
class Plan:
    """Counts and bytes. Token and step counts are upper bounds until the answers are there."""

    trained: int  # parameters
    frozen: int
    prompts: int | None  # with all self-written ones; None: not counted, they are on the Hub
    eval_prompts: int | None
    tokens: int | None
    steps: int | None
    memory: dict[str, int]  # of a training step, by part
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
    given, characters = count_prompts(recipe)
    prompts = None if given is None else given + recipe.data.self_written.count
    eval_prompts = count_eval_prompts(recipe)
    check_held_out(recipe, prompts)
    tokens = None if given is None else estimate_tokens(recipe, given, characters)
    trained = trained_parameters(recipe.drafter, shape)
    plan = Plan(
        trained=trained,
        frozen=shape.parameters,
        prompts=prompts,
        eval_prompts=eval_prompts,
        tokens=tokens,
        steps=estimate_steps(recipe, tokens),
        memory=estimate_memory(recipe, shape, trained),
        memory_total=device_memory(recipe),
        disk=estimate_disk(recipe, shape, trained, tokens or 0),
        disk_free=free_disk(run_folder(recipe)),
        notes=find_notes(recipe, estimate_steps(recipe, tokens)),
    )
    check_room(plan)
    return plan


def check_steps(recipe: Recipe) -> None:
    """Knobs that must fit each other."""
    data = recipe.data
    if recipe.drafter.trained_slots:
        check_training(recipe)
    if data.max_prompt_tokens >= data.max_length:
        raise UserError(
            f"data.max_prompt_tokens: {data.max_prompt_tokens} leaves no room for an answer in "
            f"rows of data.max_length ({data.max_length}); lower the first or raise the second"
        )
    written = data.self_written
    if written.count and written.max_new_tokens >= data.max_prompt_tokens:
        raise UserError(
            f"data.self_written.max_new_tokens: turns of {written.max_new_tokens} tokens leave no "
            "room for the template in prompts of data.max_prompt_tokens "
            f"({data.max_prompt_tokens}); lower the first or raise the second"
        )


def check_training(recipe: Recipe) -> None:
    """Knobs of gradient steps."""
    train, slots = recipe.train, recipe.drafter.trained_slots
    if train.rows_per_step % train.rows_per_micro_batch:
        raise UserError(
            f"train.rows_per_micro_batch: {train.rows_per_micro_batch} does not divide "
            f"train.rows_per_step ({train.rows_per_step}); give one of its divisors"
        )
    weights = len(recipe.objective.slot_weights)
    if recipe.objective.weights != "list" and weights:
        raise UserError(
            f"objective.slot_weights: not used with objective.weights: {recipe.objective.weights}; "
            "write objective.weights: list, or leave them out"
        )
    if recipe.objective.weights == "list" and weights != slots:
        raise UserError(
            f"objective.slot_weights: {weights} given for {slots} slots; give one weight per slot"
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
    name = recipe.target.model
    if shape.template is None:
        raise UserError(
            f"target.model: the tokenizer of {name} has no chat template, so it cannot be asked to "
            "answer prompts; give an instruction-tuned model"
        )
    check_drafter(recipe.drafter, shape, name)
    longest = {"data.distil.max_new_tokens": recipe.data.distil.max_new_tokens}
    longest["eval.max_new_tokens"] = recipe.eval.max_new_tokens + recipe.drafter.depth
    for key, answer in longest.items():
        if recipe.data.max_prompt_tokens + answer > shape.max_positions:
            raise UserError(
                f"{key}: prompts of up to {recipe.data.max_prompt_tokens} tokens and answers of "
                f"{answer} exceed the {shape.max_positions} positions of {name}; "
                f"lower it or data.max_prompt_tokens"
            )


def check_drafter(drafter: DrafterConfig, shape: TargetShape, name: str) -> None:
    """What of a drafter the target's shape rules out."""
    match drafter:
        case (
            MedusaConfig(draft_vocab=int(rows))
            | MtpConfig(draft_vocab=int(rows))
            | DraftModelConfig(draft_vocab=int(rows))
        ) if rows > shape.vocab_size:
            raise UserError(
                f"drafter.draft_vocab: {rows} is more than the {shape.vocab_size} "
                f"tokens of {name}; give fewer, or null for all"
            )
        case MedusaConfig(projection="low_rank", rank=rank) if rank > shape.hidden_size:
            raise UserError(
                f"drafter.rank: {rank} is more than the hidden size of {name} "
                f"({shape.hidden_size}), a low rank is less"
            )
        case MtpConfig() if not shape.layer_parameters:
            raise UserError(
                f"drafter.kind: {name} has no stack of layers that an mtp block could be made of; "
                "take another kind"
            )
        case DraftModelConfig(models=()) if not shape.layer_parameters:
            raise UserError(
                f"drafter.models: {name} has no stack of layers that a shallow copy could be made "
                "of; name a ready draft model"
            )
        case DraftModelConfig(models=(), layers=layers) if layers > shape.layers:
            raise UserError(
                f"drafter.layers: {layers} is more than the {shape.layers} of {name}; give fewer"
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
    if steps and optim.warmup_steps >= steps:
        found.append(f"optim.warmup_steps ({optim.warmup_steps}) outlasts the training")
    if recipe.train.feature_cache and recipe.train.epochs == 1:
        found.append("train.feature_cache saves no time in one epoch, only in those after it")
    if distil.temperature == 0 and distil.greedy_share > 0:
        found.append(
            "data.distil.greedy_share does nothing at temperature 0, all answers are greedy"
        )
    match recipe.drafter:
        case DraftModelConfig(models=(_, *_)):
            found.append(
                "drafter.models are ready: layers, embedding, draft_vocab, boosts do nothing"
            )
    written = recipe.data.self_written
    if written.count > 1 and written.temperature == 0:
        found.append("data.self_written: every turn is the same at temperature 0, one is kept")
    return tuple(found)


def is_here(source: str) -> bool:
    """Whether prompts can be read without a network."""
    return source == "starter" or source.startswith((".", "/", "~")) or user_path(source).exists()


def count_prompts(recipe: Recipe) -> tuple[int | None, int]:
    """Training prompts but the self-written, and their characters; None where on the Hub."""
    if not is_here(recipe.data.prompts) and not recipe.data.prompts.endswith(".jsonl"):
        return None, 0
    prompts = load_prompts(recipe.data, split="train", seed=recipe.seed).prompts
    texts = [str(message["content"]) for prompt in prompts for message in prompt.messages]
    return len(prompts), sum(map(len, texts))


def count_eval_prompts(recipe: Recipe) -> int | None:
    """Evaluation prompts that the report will use; None where they are on the Hub."""
    source = recipe.data.eval_prompts
    if not is_here(source) and not source.endswith(".jsonl"):
        return None
    found = len(load_prompts(recipe.data, split="test", seed=recipe.seed).prompts)
    return min(found, recipe.eval.prompts or found)


def check_held_out(recipe: Recipe, prompts: int | None) -> None:
    """Something must be left to train on."""
    if prompts is not None and prompts <= recipe.data.held_out:
        raise UserError(
            f"data.held_out: {recipe.data.held_out} documents are kept away from training and "
            f"there are only {prompts} prompts; lower it, or give more prompts"
        )


def estimate_tokens(recipe: Recipe, given: int, characters: int) -> int:
    """Tokens of prompts and answers; every answer and self-written prompt as long as it may be."""
    data = recipe.data
    asked = min(characters / CHARACTERS + TEMPLATE_TOKENS * given, data.max_prompt_tokens * given)
    answered = data.distil.max_new_tokens * (given + data.self_written.count)
    return round(asked + written_tokens(recipe) + answered)


def written_tokens(recipe: Recipe) -> int:
    """Tokens of the self-written prompts in their template, every one kept and full."""
    written = recipe.data.self_written
    longest = min(written.max_new_tokens + TEMPLATE_TOKENS, recipe.data.max_prompt_tokens)
    return written.count * longest


def estimate_steps(recipe: Recipe, tokens: int | None) -> int | None:
    """Optimizer steps, every packed row full."""
    train = recipe.train
    if not recipe.drafter.trained_slots:
        return 0
    if tokens is None:
        return train.max_steps
    per_epoch = ceil(ceil(tokens / recipe.data.max_length) / train.rows_per_step)
    return min(train.epochs * per_epoch, train.max_steps or train.epochs * per_epoch)


def device_memory(recipe: Recipe) -> int:
    """Bytes of the device that will train."""
    device = pick_device(recipe.target.device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def estimate_disk(recipe: Recipe, shape: TargetShape, trained: int, tokens: int) -> dict[str, int]:
    """Bytes that the run will write, by part."""
    kept = recipe.train.keep_checkpoints + 1  # a new one is whole before an old one goes
    turns = written_tokens(recipe) * ROW_BYTES
    features = {"features": estimate_features(recipe, shape, tokens)}
    return {
        **({"self-written turns": turns} if turns else {}),
        "rows": tokens * ROW_BYTES,
        **(features if recipe.train.feature_cache else {}),
        "checkpoints": kept * trained * 3 * FULL,
        "drafter": 2 * trained * FULL,  # the new one is whole before the old one goes
        "report and log": 8 << 20,
    }


def estimate_features(recipe: Recipe, shape: TargetShape, tokens: int) -> int:
    """Bytes of the feature cache that are not written yet."""
    shards = (run_folder(recipe) / "features").glob("shard-*")
    there = sum(shard.stat().st_size for shard in shards)
    return max(0, tokens * shape.hidden_size * BYTES[recipe.target.dtype] - there)


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
        cache = " or leave out train.feature_cache" if "features" in plan.disk else ""
        raise UserError(
            f"the run needs {size(sum(plan.disk.values()))} of disk and {size(plan.disk_free)} are "
            "free; free some, give another folder (runs=FOLDER), or lower train.keep_checkpoints"
            + cache
        )
    certain = plan.memory[FROZEN] + plan.memory[TRAINED]
    if certain > plan.memory_total:
        raise UserError(
            f"the weights alone need {size(certain)} of memory and the device has "
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


def render(plan: Plan, recipe: Recipe) -> str:
    """The plan as text."""
    step = "a training step" if recipe.drafter.trained_slots else "use"
    needed, whole = sum(plan.memory.values()), sum(plan.disk.values())
    tight = " (may not fit: lower train.rows_per_micro_batch)" if needed > plan.memory_total else ""
    count = recipe.data.self_written.count
    written = f" (up to {count:,} self-written)" if count else ""
    at_most = "" if plan.tokens is None else "at most "
    lines = [
        ("run", str(run_folder(recipe))),
        ("target", f"{recipe.target.model}, {plan.frozen:,} parameters frozen"),
        ("drafter", f"{recipe.drafter.kind}, {plan.trained:,} parameters trained"),
        (
            "prompts",
            f"{number(plan.prompts)} to train on{written}, {number(plan.eval_prompts)} to report "
            "on",
        ),
        ("tokens", at_most + number(plan.tokens)),
        ("steps", at_most + number(plan.steps)),
        ("memory", f"about {size(needed)} of {size(plan.memory_total)} in {step}{tight}"),
        *(("", f"{size(count):>10}  {part}") for part, count in plan.memory.items()),
        ("disk", f"about {size(whole)}, {size(plan.disk_free)} are free"),
        *(("", f"{size(count):>10}  {part}") for part, count in plan.disk.items()),
        *(("note", note) for note in plan.notes),
    ]
    return "\n".join(f"{name:9}{text}" for name, text in lines)
