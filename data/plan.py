"""What a recipe will do and need, said before any weight is loaded; what cannot work is refused."""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from draftsmith.data.counts import (
    count_evaluated,
    estimate_lengths,
    estimate_steps,
    estimate_tokens,
    find_overlap,
    prompts_here,
    written_length,
)
from draftsmith.data.memory import ALONE, BYTES, FROZEN, FULL, answering_memory
from draftsmith.data.needs import (
    TRAINED,
    adapted_parameters,
    estimate_memory,
    trained_parameters,
)
from draftsmith.drafters.dflash import spread_taps
from draftsmith.drafters.geometry import own_geometry
from draftsmith.drafters.mtp_families import check_family, check_supported
from draftsmith.drafters.mtp_files import find
from draftsmith.drafters.mtp_layer import check_layer
from draftsmith.drafters.quantised import check_spread
from draftsmith.drafters.target import (
    TargetShape,
    decoder_of,
    describe,
    layer_stack,
    locate,
    pick_device,
    skeleton,
)
from draftsmith.recipes.entry import run_folder
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import (
    DFlashConfig,
    DistilConfig,
    DrafterConfig,
    DraftModelConfig,
    EvalConfig,
    MedusaConfig,
    MtpConfig,
    Recipe,
    TargetConfig,
)
from draftsmith.recipes.sharing import Shares

ROW_BYTES = 14  # of a row's file per token: its id and its text


@dataclass(frozen=True)
class Plan:
    """Counts and bytes. Token and step counts are upper bounds until the answers are there."""

    trained: int  # parameters
    frozen: int
    prompts: int | None  # with all self-written ones; None: not counted, they are on the Hub
    eval_prompts: int | None
    tokens: int | None
    steps: int | None
    training: dict[str, int]  # memory of a training step, by part
    answering: dict[str, int]  # memory of a batch of answers
    memory_total: int  # of the device
    disk: dict[str, int]
    disk_free: int
    notes: tuple[str, ...]


def make_plan(recipe: Recipe, shares: Shares = ALONE) -> Plan:
    """Check a recipe against its target's config, its prompts and this machine.

    Raises UserError for what cannot work.
    """
    check_steps(recipe)
    check_adapter(recipe)
    check_trackers(recipe)
    check_graphs(recipe)
    shape = describe(recipe.target)
    check_target(recipe, shape)
    check_spread(recipe.target.load_in or shape.quantisation, sharded=shares.target_is_sharded)
    evaluated = prompts_here(recipe, "test")
    asked = prompts_here(recipe, "train", evaluated)
    lengths = None if asked is None else estimate_lengths(recipe, asked)
    check_held_out(recipe, lengths)
    tokens = None if lengths is None else estimate_tokens(recipe, lengths)
    steps = estimate_steps(recipe, tokens)
    trained = trained_parameters(recipe.drafter, shape) + adapted_parameters(recipe, shape)
    longest = recipe.data.max_prompt_tokens if lengths is None else max(lengths)
    plan = Plan(
        trained=trained,
        frozen=shape.parameters,
        prompts=None if lengths is None else len(lengths),
        eval_prompts=count_evaluated(recipe, evaluated),
        tokens=tokens,
        steps=steps,
        training=estimate_memory(recipe, shape, trained, shares),
        answering={}
        if recipe.data.distil.backend != "transformers"
        else answering_memory(recipe, shape, longest),
        memory_total=device_memory(recipe),
        disk=estimate_disk(recipe, shape, trained, tokens or 0),
        disk_free=free_disk(run_folder(recipe)),
        notes=(*find_notes(recipe, steps), *find_overlap(asked)),
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
    written, distil = data.self_written, data.distil
    if written.count and distil.backend == "openai" and distil.server.api == "chat":
        raise UserError(
            "data.self_written.count: servers that are asked by chat write no user turns; set it "
            "to 0, or data.distil.server.api: completions"
        )
    if written.count and distil.share != (1, 1):
        raise UserError(
            "data.self_written.count: prompts that are written in shares would not be the same on "
            "every machine; set it to 0, or distil.share: [1, 1]"
        )
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


def check_adapter(recipe: Recipe) -> None:
    """What a target that learns rules out."""
    if recipe.adapter is None:
        return
    if not isinstance(recipe.drafter, MedusaConfig):
        raise UserError(
            f"adapter: a target is adapted beside Medusa's heads, not {recipe.drafter.kind}; take "
            "drafter.kind: medusa, or adapter: null"
        )
    if recipe.train.feature_cache:
        raise UserError(
            "train.feature_cache: the states of a target that learns change in every step; set it "
            "to false, or adapter: null"
        )
    if recipe.adapter.merged and recipe.target.load_in is not None:
        raise UserError(
            f"adapter.merged: adapters over {recipe.target.load_in} weights stay beside them, for "
            "merging rounds them away; set it to false, or target.load_in: null"
        )


def check_trackers(recipe: Recipe) -> None:
    """A tracker that is not installed would only be missed after the target is loaded."""
    for name in recipe.train.trackers:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.trackers: {name} is not installed; "
                f"run `pip install 'draftsmith[{name}]'` or leave it out"
            )


def check_graphs(recipe: Recipe) -> None:
    """UserError where there are no CUDA graphs."""
    device = pick_device(recipe.target.device)
    if recipe.eval.graphs and device.type != "cuda":
        raise UserError(
            f"eval.graphs: CUDA graphs need a CUDA device, and the target is on {device}; set it "
            "to false"
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
    if isinstance(recipe.drafter, MtpConfig):
        check_layer_of(recipe.target, recipe.drafter)
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
            | DFlashConfig(draft_vocab=int(rows))
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
        case DFlashConfig():
            check_block_drafter(drafter, shape, name)
        case DraftModelConfig(models=()) if not shape.layer_parameters:
            raise UserError(
                f"drafter.models: {name} has no stack of layers that a shallow copy could be made "
                "of; name a ready draft model"
            )
        case DraftModelConfig(models=(), layers=layers) if layers > shape.layers:
            raise UserError(
                f"drafter.layers: {layers} is more than the {shape.layers} of {name}; give fewer"
            )


def check_layer_of(target: TargetConfig, drafter: MtpConfig) -> None:
    """Whether an MTP block can be made of the target's layers, and is in its files where it starts
    from there (of a target that is still to be downloaded, the latter is seen later).
    """
    model = skeleton(target)
    text = model.config.get_text_config()
    if drafter.start == "checkpoint":
        check_supported(text.model_type)
    base, layers = decoder_of(model), text.num_hidden_layers
    check_layer(base, text, layer_stack(base, layers), target.model)
    folder = Path(locate(target))
    if drafter.start == "checkpoint" and folder.is_dir():
        for depth in range(drafter.depths):
            found = find(folder, layers, depth)
            check_family(drafter, text.model_type, found.name)


def check_block_drafter(config: DFlashConfig, shape: TargetShape, name: str) -> None:
    """Measures, taps, layers and the mask token."""
    own_geometry(config, shape.geometry)
    taps = config.taps or spread_taps(shape.layers, config.layers)
    if taps[-1] > shape.layers - 2:
        raise UserError(
            f"drafter.taps: {taps[-1]} is no layer that can be tapped of the {shape.layers} of "
            f"{name}; allowed: 0 to {shape.layers - 2} (the last is what the head reads)"
        )
    if config.start == "target" and config.layers > shape.layers:
        raise UserError(
            f"drafter.layers: {config.layers} is more than the {shape.layers} of {name}; give "
            "fewer, or start: random"
        )
    if config.mask_token_id is not None and config.mask_token_id >= shape.vocab_size:
        raise UserError(
            f"drafter.mask_token_id: {config.mask_token_id} is no row of {name}, which has "
            f"{shape.vocab_size}"
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


def check_held_out(recipe: Recipe, prompts: Sequence[object] | None) -> None:
    """Something must be left to train on."""
    if prompts is not None and len(prompts) <= recipe.data.held_out:
        raise UserError(
            f"data.held_out: {recipe.data.held_out} documents are kept away from training and "
            f"there are only {len(prompts)} prompts; lower it, or give more prompts"
        )


def device_memory(recipe: Recipe) -> int:
    """Bytes of the device that will train."""
    device = pick_device(recipe.target.device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def estimate_disk(recipe: Recipe, shape: TargetShape, trained: int, tokens: int) -> dict[str, int]:
    """Bytes that the run will write, by part."""
    kept = recipe.train.keep_checkpoints + 1  # a new one is whole before an old one goes
    turns = recipe.data.self_written.count * written_length(recipe) * ROW_BYTES
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
    width = shape.hidden_size * (1 + tapped_layers(recipe.drafter))
    return max(0, tokens * width * BYTES[recipe.target.dtype] - there)


def tapped_layers(drafter: DrafterConfig) -> int:
    """Target layers that a drafter reads beside the final states."""
    return len(drafter.taps) or drafter.layers if isinstance(drafter, DFlashConfig) else 0


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
    certain = plan.training[FROZEN] + plan.training[TRAINED]
    if certain > plan.memory_total:
        raise UserError(
            f"weights, gradients and optimizer need {size(certain)} of memory and the device has "
            f"{size(plan.memory_total)}; take a smaller target, or a smaller drafter"
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


def answering_lines(plan: Plan, recipe: Recipe) -> list[tuple[str, str]]:
    """What answering the prompts takes here, or who does it instead."""
    if not plan.answering:
        given = f"given with the prompts of {recipe.data.prompts}; that the target said them is "
        given += "taken on trust"
        urls = recipe.data.distil.urls
        return [("answers", f"from {', '.join(urls)}" if urls else given)]
    knob = "data.distil.batch_size"
    needed = peak(plan, plan.answering, "for a batch of answers", knob)
    return [("memory", needed), *parts(plan.answering)]


def render(plan: Plan, recipe: Recipe) -> str:
    """The plan as text."""
    step = "a training step" if recipe.drafter.trained_slots else "use"
    whole = sum(plan.disk.values())
    count = recipe.data.self_written.count
    written = f" (up to {count:,} self-written)" if count else ""
    at_most = "" if plan.tokens is None else "at most "
    adapted = "" if recipe.adapter is None else ", the target's adapters among them"
    lines = [
        ("run", str(run_folder(recipe))),
        ("target", f"{recipe.target.model}, {plan.frozen:,} parameters frozen"),
        ("drafter", f"{recipe.drafter.kind}, {plan.trained:,} parameters trained{adapted}"),
        (
            "prompts",
            f"{number(plan.prompts)} to train on{written}, {number(plan.eval_prompts)} to report "
            "on",
        ),
        ("tokens", at_most + number(plan.tokens)),
        ("steps", at_most + number(plan.steps)),
        *answering_lines(plan, recipe),
        ("memory", peak(plan, plan.training, f"for {step}", "train.rows_per_micro_batch")),
        *parts(plan.training),
        ("disk", f"about {size(whole)}, {size(plan.disk_free)} are free"),
        *parts(plan.disk),
        *(("note", note) for note in plan.notes),
    ]
    return "\n".join(f"{name:9}{text}" for name, text in lines)
