"""The training loop: a recipe and its rows to a drafter, resumable at any moment."""

import dataclasses
import functools
import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from draftsmith.data.features import FeatureCache
from draftsmith.drafters.adapter import FOLDER as ADAPTER
from draftsmith.drafters.adapter import MERGED
from draftsmith.drafters.checkpoint import save_drafter, target_metadata
from draftsmith.drafters.slots import Batch
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import cannot_write
from draftsmith.recipes.schema import Recipe
from draftsmith.train.fitting import fit_start
from draftsmith.train.gate import check_change, measure_change
from draftsmith.train.guard import check_end, measure_start
from draftsmith.train.parallel import PEAK
from draftsmith.train.resume import resume, save
from draftsmith.train.schedule import lr_share
from draftsmith.train.setup import Training, prepare
from draftsmith.train.watch import evaluate, introduce, log_step


def train(recipe: Recipe, run: Path) -> Path:
    """Train on run/rows, going on from where the run stopped; returns run/drafter.

    `accelerate launch` or torchrun start it on several devices. Raises UserError.
    """
    training = prepare(recipe, run)
    with training.pulse as pulse:
        try:
            resume(training)
            introduce(training)
            fit_start(training)
            cache_features(training)
            measure_start(training)
            fit(training)
            check_end(training)
            return finish(training)
        except RuntimeError as error:
            told = pulse.explain(error)
            if told is None:
                raise
            raise UserError(told) from error
        finally:
            training.journal.close()


def cache_features(t: Training) -> None:
    """Compute the target's states of all rows, or what is missing of them, where asked to."""
    if not t.recipe.train.feature_cache or t.step == t.total:
        return
    began = time.perf_counter()
    cache = FeatureCache(t.target, t.rows, t.folder / "features", taps=t.drafter.taps)
    t.journal.say(cache.check())
    missing = cache.missing()
    t.wait()  # nothing is written before all have looked
    t.pulse.does("computing the target's states", t.step)
    cache.fill(
        missing,
        share=(t.accelerator.process_index, t.accelerator.num_processes),
        shown=t.accelerator.is_main_process,
        in_lockstep=t.processes.target_is_sharded,
    )
    t.wait()
    t.features = cache
    t.seconds += time.perf_counter() - began


def fit(t: Training) -> None:
    """Take the steps that are left."""
    config = t.recipe.train
    t.journal.open(t.total, done=t.step)
    while t.step < t.total:
        take_step(t)
        if is_due(t, config.log_every):
            log_step(t)
        if is_due(t, config.eval_every):
            evaluate(t)
        if is_due(t, config.save_every):
            save(t)
        t.journal.advance()


def is_due(t: Training, every: int, *, ahead: int = 0) -> bool:
    """Whether what is done `every` so many steps, and at the end, is due `ahead` steps on."""
    step = t.step + ahead
    return step % every == 0 or step == t.total


def take_step(t: Training) -> None:
    """One optimizer step over all processes' rows; none is taken where nothing is supervised."""
    began = time.perf_counter()
    set_rates(t)
    with t.phases.phase("batches"):
        pieces = micro_batches(t)
    batches = [batch for _, batch in pieces]
    # Counted before any forward and over all processes: the loss does not depend on how rows are
    # spread over micro-batches and processes, and all processes skip an empty step together.
    joint = t.phase.joint
    own = torch.stack([t.loss.denominator(batch, joint=joint) for batch in batches]).sum()
    t.pulse.does("waiting", t.step)
    denominator = t.accelerator.reduce(own, reduction="sum")
    t.pulse.does("training", t.step)
    started = time.perf_counter()
    if denominator > 0:
        for rows, batch in pieces:
            with t.parallel.micro(last=batch is batches[-1]):
                loss = forward(t, rows, batch, denominator)
                if batch is batches[-1]:
                    count_own_work(t, batches, started)
                    t.pulse.does("waiting", t.step)
                with t.phases.phase("backward"):
                    t.parallel.backward(loss)
        apply_gradients(t)
    count(t, batches, own, seconds=time.perf_counter() - began, skipped=not denominator > 0)
    t.step += 1


def set_rates(t: Training) -> None:
    """Learning rates of the step to be taken, and whether the adapters' dropout is on."""
    phase = t.phase
    share = lr_share(t.step - phase.start, phase.end - phase.start, t.recipe.optim)
    for group in t.parallel.groups:
        group["lr"] = group.get(PEAK, t.recipe.optim.lr) * share
    if t.target.adapter is not None:
        t.target.adapter.train(phase.joint)


def micro_batches(t: Training) -> list[tuple[list[int], Batch]]:
    """This process's share of the step: rows and their batches.

    A process without any takes an unsupervised row along.
    """
    rows, size = t.next_rows(), t.recipe.train.rows_per_micro_batch
    processes = t.accelerator.num_processes
    own = rows[t.accelerator.process_index :: processes]
    pieces = [own[i : i + size] for i in range(0, len(own), size)]
    found = [(piece, t.batch(piece)) for piece in pieces]
    # The first process has most. Where passes are collective, all take as many.
    most = math.ceil(len(rows[::processes]) / size) if t.processes.in_lockstep else 1
    while len(found) < most:
        batch = t.batch(rows[:1])
        nothing = torch.zeros_like(batch.supervised)
        found.append((rows[:1], dataclasses.replace(batch, supervised=nothing)))
    return found


def forward(t: Training, rows: list[int], batch: Batch, denominator: Tensor) -> Tensor:
    """A micro-batch's share of the step's loss."""
    bf16 = t.recipe.train.precision == "bf16"
    metrics = is_due(t, t.recipe.train.log_every, ahead=1)
    autocast = torch.autocast(t.target.device.type, torch.bfloat16, enabled=bf16)
    with t.phases.phase("target forward"):
        joint = t.joint(batch)
        with autocast if joint else nullcontext():  # adapters compute as all that is trained does
            states = t.states(rows, batch, metrics=metrics)
    with autocast:
        loss, sums = t.parallel.model(batch, states, metrics=metrics, joint=joint)
    if "overlap" in sums:  # which only some steps have
        sums = {**sums, "overlap_valid": sums["valid"], "overlap_groups": sums["groups"]}
    t.meter.add(sums)
    # Gradients are averaged over processes, the loss is a sum over them.
    share: Tensor = loss * t.accelerator.num_processes / denominator
    return share


def count_own_work(t: Training, batches: list[Batch], began: float) -> None:
    """Add the time that this process took before it had to wait for others, and for how many
    positions. A GPU, which would have to be waited for, is looked at in the steps that are logged.
    """
    if t.accelerator.num_processes == 1:
        return
    if t.target.device.type == "cuda":
        if not is_due(t, t.recipe.train.log_every, ahead=1):
            return
        torch.cuda.synchronize()
    own = torch.zeros(2, t.accelerator.num_processes, dtype=torch.float64)
    own[0, t.accelerator.process_index] = time.perf_counter() - began
    own[1, t.accelerator.process_index] = sum(batch.ids.numel() for batch in batches)
    t.meter.add({"own_work": own})


def apply_gradients(t: Training) -> None:
    """Clip and step. Raises UserError for a gradient that is not finite."""
    if t.loss.language is not None and not t.phase.joint:
        t.loss.language.forget()
    with t.phases.phase("optimizer"):
        norm = t.parallel.step(t.recipe.optim.clip)
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient of step {t.step + 1} is not finite ({norm}): training diverged; "
            f"lower optim.lr ({t.recipe.optim.lr}), raise optim.warmup_steps, "
            "or use train.precision: fp32"
        )
    t.grad_norm = norm


def count(t: Training, batches: list[Batch], own: Tensor, *, seconds: float, skipped: bool) -> None:
    """Add a step to the counters; what all processes share is counted by the main one."""
    main = float(t.accelerator.is_main_process)
    shared = {"skipped": main * skipped, "seconds": main * seconds}
    t.meter.add({name: torch.tensor(value) for name, value in shared.items()})
    supervised = torch.stack([batch.supervised.sum() for batch in batches]).sum()
    tokens = torch.stack([(batch.documents >= 0).sum() for batch in batches]).sum()
    t.meter.add({"denominator": own, "tokens": tokens, "supervised": supervised})
    t.seconds += seconds


def adapted_metadata(t: Training) -> dict[str, Any]:
    """What the drafter's folder says about its adapter. Raises UserError where it costs more
    quality than the recipe allows.
    """
    config, adapter = t.recipe.adapter, t.target.adapter
    assert config is not None and adapter is not None
    adapter.train(False)
    rows = t.recipe.train.rows_per_micro_batch
    change = measure_change(t.target, t.held_out, config.gate, rows=rows)
    t.journal.write({"kind": "gate", "step": t.step, **asdict(change)})
    check_change(change, config.gate, t.journal.say)
    target = {**target_metadata(t.target), "adapter": adapter.digest()}
    return {"target": target, "change": asdict(change)}


def write_adapter(t: Training, folder: Path) -> None:
    """The adapter, and the merged target where it was asked for: training ends with that."""
    adapter = t.target.adapter
    assert adapter is not None and t.recipe.adapter is not None
    adapter.save(folder / ADAPTER, t.target.name)
    if t.recipe.adapter.merged:
        adapter.merge()
        t.target.model.save_pretrained(folder / MERGED)
        t.target.tokenizer.save_pretrained(folder / MERGED)


def finish(t: Training) -> Path:
    """Write the drafter in its native format."""
    folder = t.folder / "drafter"
    with t.parallel.whole():
        if t.accelerator.is_main_process:
            recipe = t.recipe.model_dump(mode="json")
            metadata = {"target": target_metadata(t.target), "recipe": recipe, "steps": t.step}
            beside = None
            if t.recipe.adapter is not None:
                metadata |= adapted_metadata(t)
                beside = functools.partial(write_adapter, t)
            try:
                save_drafter(t.drafter, folder, metadata, beside)
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{cannot_write(folder, error)}; training is finished and kept"
                ) from error
    t.wait()
    return folder
