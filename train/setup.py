"""From a recipe and its rows to everything that the training loop holds."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from draftsmith.data.dataset import Document, PackedRows, split_held_out, training_documents
from draftsmith.data.features import FeatureCache
from draftsmith.data.rows import read_manifest
from draftsmith.data.vocab import most_frequent
from draftsmith.drafters.adapted import adapt
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dflash_mask import check_mask_token, propose_mask_token
from draftsmith.drafters.fingerprint import remembered
from draftsmith.drafters.methods import Learned, build, trainable
from draftsmith.drafters.projection import Sums
from draftsmith.drafters.slots import Batch, TargetStates, label_slots
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import (
    DFlashConfig,
    DrafterConfig,
    DraftModelConfig,
    MedusaConfig,
    MtpConfig,
    Recipe,
)
from draftsmith.train.boost import without_known
from draftsmith.train.joint import (
    PREFIX,
    Joint,
    LanguageLoss,
    Phase,
    head_share,
    joined,
    phase_at,
)
from draftsmith.train.objective import Objective
from draftsmith.train.parallel import Parallel, spread
from draftsmith.train.phases import Phases
from draftsmith.train.processes import Processes, start_processes
from draftsmith.train.progress import Journal, Meter
from draftsmith.train.pulse import Pulse
from draftsmith.train.rng import row_seed

PRECISION = ("dtype", "quantisation")  # of a fingerprint: what rounds the same weights


class SlotLoss(nn.Module):
    """The drafter under its objective: the one module that data parallelism wraps."""

    def __init__(self, drafter: Learned, target: Target, recipe: Recipe, phases: Phases) -> None:
        super().__init__()
        self.phases = phases
        self.drafter, self.target, self.chunk = drafter, target, recipe.train.chunk
        self.depth = recipe.drafter.trained_slots
        self.objective = Objective(recipe.objective, self.depth)
        self.language: LanguageLoss | None = None
        if recipe.adapter is not None:
            self.language = LanguageLoss(recipe.adapter, target, recipe.train.chunk)

    def denominator(self, batch: Batch, *, joint: bool = False) -> Tensor:
        """What this batch adds to the step's denominator; scalar. Of both losses together: labels
        of slot 0.
        """
        roots = self.drafter.roots(batch)
        if joint:
            return torch.tensor(float(len(roots.row)), device=batch.ids.device)
        labels = label_slots(batch, roots, self.depth)
        return self.objective.denominator(labels, self.drafter.head())

    def forward(
        self, batch: Batch, states: TargetStates, *, metrics: bool, joint: Joint | None = None
    ) -> tuple[Tensor, Sums]:
        """The batch's loss, summed and not yet divided, and its metrics as sums and counts.

        joint: where the target learns too; the states are then on its graph.
        """
        roots = self.drafter.roots(batch)
        teacher = states if joint is None else joint.teacher
        with self.phases.phase("drafter forward"):
            slots = self.drafter.slots(batch, states, roots)
        with self.phases.phase("projection and loss"):
            loss, sums = self.objective(
                slots,
                teacher or states,
                self.target,
                chunk=self.chunk,
                metrics=metrics and teacher is not None,
            )
            if self.language is None:
                return loss, sums
            if joint is None:
                return loss + self.language.touched(), sums
            return joined(loss, self.language(batch, states, roots, joint.teacher), joint, sums)


@dataclass
class Training:
    """A run while it trains. `step` counts the optimizer steps taken."""

    recipe: Recipe
    folder: Path
    processes: Processes
    target: Target
    drafter: Learned
    loss: SlotLoss
    parallel: Parallel  # `loss` and its optimizer, as the processes share them
    trained: int  # parameters
    rows: PackedRows
    held_out: list[Document]
    journal: Journal
    meter: Meter
    pulse: Pulse
    phases: Phases
    features: FeatureCache | None = None  # None: the target computes its states in every step
    step: int = 0
    seconds: float = 0.0  # spent in steps, and on the feature cache before them
    supervised: int = 0  # tokens learned from, up to the last log line
    grad_norm: float = 0.0  # before clipping, of the last step that was not skipped
    steps_per_epoch: int = field(init=False)
    total: int = field(init=False)  # steps of the whole run
    slow: set[int] = field(default_factory=set)  # processes that were said to be slow
    planned: tuple[int, list[list[int]]] = field(init=False)  # an epoch and its steps

    def __post_init__(self) -> None:
        self.planned = (0, self.plan(0))
        self.steps_per_epoch = len(self.planned[1])
        config = self.recipe.train
        self.total = min(config.epochs * self.steps_per_epoch, config.max_steps or sys.maxsize)

    @property
    def accelerator(self) -> Accelerator:
        """What the processes tell each other goes through it."""
        return self.processes.accelerator

    def wait(self) -> None:
        """Until all processes are here."""
        self.pulse.does("waiting", self.step)
        self.accelerator.wait_for_everyone()

    def plan(self, epoch: int) -> list[list[int]]:
        """Rows of every step of an epoch: a function of the seed and the epoch alone."""
        return self.rows.steps(epoch, self.recipe.train.rows_per_step, self.recipe.seed)

    def next_rows(self) -> list[int]:
        """Rows of the step to be taken, for all processes together."""
        epoch, index = divmod(self.step, self.steps_per_epoch)
        if self.planned[0] != epoch:
            self.planned = (epoch, self.plan(epoch))
        return self.planned[1][index]

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows of the step to be taken. What a drafter samples in a row depends on the row,
        the epoch and the recipe's seed alone.
        """
        epoch = self.step // self.steps_per_epoch
        seeds = tuple(row_seed(self.recipe.seed, epoch, row) for row in rows)
        return replace(self.rows.batch(rows), seeds=seeds).to(self.target.device)

    @property
    def phase(self) -> Phase:
        """That of the step to be taken."""
        return phase_at(self.recipe, self.step, self.total)

    def joint(self, batch: Batch) -> Joint | None:
        """What a batch needs where the target learns too: lambda_0, and what the original says."""
        config, phase = self.recipe.adapter, self.phase
        if config is None or not phase.joint:
            return None
        teacher = None
        if config.language == "original" or self.recipe.objective.loss != "ce":
            with self.target.original() as original:
                teacher = original.states(batch)
        return Joint(head_share(config, phase, self.step), teacher)

    def states(self, rows: Sequence[int], batch: Batch, *, metrics: bool) -> TargetStates:
        """The target's states of the batch of these rows: computed, or read from the cache. Only
        as far as they are read, but for a target that is spread, whose layers run to the end. On
        the graph of its adapters where these learn.
        """
        if self.phase.joint:
            return self.target.differentiable_states(batch, self.drafter.taps)
        if self.features is not None:
            return self.features.states(rows)
        taps = self.drafter.taps
        final = self.drafter.reads_final or self.loss.objective.taught or metrics
        final = final or (self.processes.target_is_sharded and bool(taps))
        return self.target.states(batch, taps, final=final)


def prepare(recipe: Recipe, run: Path) -> Training:
    """Load the target and the rows, build the drafter and its optimizer. Raises UserError."""
    processes = start_processes(recipe)
    accelerator = processes.accelerator
    journal = Journal(recipe, run, main=accelerator.is_main_process)
    documents, dropped = training_documents(run / "rows", recipe.data)
    for reason, number in sorted(dropped.items()):
        journal.say(f"{number} rows dropped: {reason}")
    training, held_out = split_held_out(documents, recipe.data.held_out, recipe.seed)
    target = Target.load(recipe.target, sharded=processes.target_is_sharded)
    check_origin(run / "rows", target, journal.say)
    check_ids(documents, target, run / "rows")
    training = without_known(recipe, target, training)
    set_seed(recipe.seed)
    ids = draft_ids(recipe, target, training)
    config = with_mask(recipe.drafter, target, documents, journal.say)
    drafter = cast(Learned, build(config, target, ids))  # it has trained_slots
    if isinstance(drafter, DFlash):
        drafter.begin(target)
    parameters = trainable(drafter)
    if recipe.adapter is not None:
        check_sharing(processes)
        adapters = adapt(target, recipe.adapter).parameters
        parameters |= {f"{PREFIX}{name}": value for name, value in adapters.items()}
    phases = Phases(target.device)
    loss = SlotLoss(drafter, target, recipe, phases)
    trained = sum(value.numel() for value in parameters.values())
    return Training(
        recipe=recipe,
        folder=run,
        processes=processes,
        target=target,
        drafter=drafter,
        loss=loss,
        parallel=spread(processes, loss, parameters, recipe),
        trained=trained,
        rows=PackedRows(training, recipe.data.max_length),
        held_out=held_out,
        journal=journal,
        meter=Meter(accelerator, target.device),
        phases=phases,
        pulse=Pulse(
            run / "ranks",
            accelerator.process_index,
            accelerator.num_processes,
            patience=recipe.train.patience,
        ),
    )


def check_sharing(processes: Processes) -> None:
    """Raises UserError where adapters would be spread over processes."""
    if processes.in_lockstep:
        raise UserError(
            f"adapter: a target that learns is not trained by {processes.sharing} here; use "
            "--accelerate ddp, or leave the adapter out"
        )


def check_origin(folder: Path, target: Target, say: Callable[[str], None]) -> None:
    """The rows must be this target's own answers; another precision is only named."""
    made = remembered(read_manifest(folder)["target"], target.fingerprint)
    differing = {
        key: f"{key} {made.get(key)} / {value}"
        for key, value in target.fingerprint.items()
        if made.get(key) != value
    }
    precision = [differing.pop(key) for key in PRECISION if key in differing]
    if differing:
        raise UserError(
            f"{folder}: the answers are another target's ({'; '.join(differing.values())}, rows / "
            "recipe); let this target answer, or name the target that did"
        )
    if precision:
        say(
            f"warning: the rows were made in another precision ({', '.join(precision)}; rows / "
            "recipe): they are nearly, not exactly, what this target says"
        )


def check_ids(documents: Sequence[Document], target: Target, folder: Path) -> None:
    """UserError for a token that the target does not have; looking it up would end in a crash."""
    for document in documents:
        largest = max(document.ids)
        if largest >= target.vocab_size:
            raise UserError(
                f"{folder}: the row of key {document.key!r} holds the token {largest} and "
                f"{target.name} has 0 to {target.vocab_size - 1}; remove its line and run "
                "`draftsmith data` again, which makes it anew"
            )


def draft_ids(recipe: Recipe, target: Target, documents: Sequence[Document]) -> Tensor | None:
    """The reduced draft vocabulary, counted on the training data; None for the whole."""
    match recipe.drafter:
        case (
            MedusaConfig(draft_vocab=int(size))
            | MtpConfig(draft_vocab=int(size))
            | DraftModelConfig(draft_vocab=int(size))
            | DFlashConfig(draft_vocab=int(size))
        ):
            always = target.eos_ids
            return torch.tensor(most_frequent(documents, size, target.vocab_size, always=always))
    return None


def with_mask(
    config: DrafterConfig,
    target: Target,
    documents: Sequence[Document],
    say: Callable[[str], None],
) -> DrafterConfig:
    """A block drafter's knobs with its mask token, which the data must not hold."""
    if not isinstance(config, DFlashConfig):
        return config
    used = {token for document in documents for token in document.ids}
    if config.mask_token_id is not None:
        check_mask_token(config.mask_token_id, target, used)
        return config
    token = propose_mask_token(target, used)
    say(f"drafter.mask_token_id: {token} is unused by {target.name} and the data, and is the mask")
    return config.model_copy(update={"mask_token_id": token})
