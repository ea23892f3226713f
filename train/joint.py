"""Medusa-2: the target's adapters and the heads, trained together (2401.10774, section 2.2).

    loss = (sum of the language model's losses + lambda_0 * sum of w_k times slot k's) / labels

The language model's loss is that of slot 0: the state before a root says the root. It is
cross-entropy on the text, or the KL divergence from the same network with its adapters off. First
the heads may learn alone, as in Medusa-1: the adapters change nothing yet, and get no gradient.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftsmith.drafters.projection import Sums
from draftsmith.drafters.slots import (
    Batch,
    Head,
    Roots,
    SlotStates,
    TargetStates,
    before_roots,
    label_roots,
)
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import AdapterConfig, ObjectiveConfig, Recipe
from draftsmith.train.objective import Objective

PREFIX = "adapter."  # of the names of the adapters' weights


@dataclass(frozen=True)
class Phase:
    """A part of the run with a learning-rate schedule of its own: steps `start` to `end` - 1."""

    joint: bool
    start: int
    end: int


def phase_at(recipe: Recipe, step: int, total: int) -> Phase:
    """Which phase a step of `total` is in."""
    if recipe.adapter is None:
        return Phase(False, 0, total)
    first = round(recipe.adapter.heads_first * total)
    return Phase(False, 0, first) if step < first else Phase(True, first, total)


def head_share(config: AdapterConfig, phase: Phase, step: int) -> float:
    """lambda_0 at a step of the joint phase."""
    if config.ramp == "none":
        return config.head_share
    done = (step - phase.start) / (phase.end - phase.start)
    return config.head_share * math.sin(math.pi / 2 * done)


@dataclass(frozen=True)
class Joint:
    """What the joint phase adds to a micro-batch."""

    share: float  # lambda_0
    teacher: TargetStates | None  # of the original; None: no loss reads it


class LanguageLoss(nn.Module):
    """The language model's part. It holds the adapters' weights, for whoever asks a module."""

    def __init__(self, config: AdapterConfig, target: Target, chunk: int) -> None:
        super().__init__()
        assert target.adapter is not None
        self.target, self.chunk = target, chunk
        self.adapter = nn.ParameterList(target.adapter.parameters.values())
        kind = "ce" if config.language == "text" else "kl"
        objective = ObjectiveConfig.model_validate({"loss": kind, "decay": 1.0})
        self.objective = Objective(objective, 1)

    def forward(
        self, batch: Batch, states: TargetStates, roots: Roots, teacher: TargetStates | None
    ) -> Tensor:
        """Summed over roots; `states` are the adapted target's, on the graph."""
        hidden = before_roots(states.final, roots)
        shared, own = self.target.head_weight, None
        adapter = self.target.adapter
        assert adapter is not None
        if adapter.adapts_head:
            tail, factor = adapter.head_term(hidden)
            hidden, own = torch.cat([hidden, tail.to(hidden.dtype)], dim=-1), factor[None]
        slots = SlotStates(hidden[:, None], Head(shared, own), label_roots(batch, roots))
        loss, _ = self.objective(slots, teacher or states, self.target, chunk=self.chunk)
        return loss

    def touched(self) -> Tensor:
        """Zero, with every adapter on its graph: processes wait for gradients of all weights."""
        return torch.stack([value.sum() for value in self.adapter]).sum() * 0.0

    def forget(self) -> None:
        """Drop the adapters' gradients: nothing was learned about them in this step."""
        for value in self.adapter:
            value.grad = None


def joined(heads: Tensor, language: Tensor, joint: Joint, sums: Sums) -> tuple[Tensor, Sums]:
    """The loss of both, and the heads' sums with it."""
    loss = language + joint.share * heads
    return loss, {**sums, "loss": loss.detach(), "language_loss": language.detach()}
