"""One loss, one optimizer, one or many processes: what differs between them, behind one protocol.

Gradients are averaged over processes everywhere. Weights and moments leave and enter whole, in
fp32, under the drafter's own names: a checkpoint does not tell how many processes wrote it.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from draftsmith.recipes.schema import OptimConfig, Recipe
from draftsmith.train.joint import PREFIX
from draftsmith.train.processes import Processes

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
PEAK = "peak"  # of an optimizer's group: its learning rate where the schedule is at 1
Tensors = dict[str, Tensor]


class Parallel(Protocol):
    """The drafter's weights and their optimizer, spread over processes or not.

    Every process calls every method; what is gathered arrives at the main process alone.
    """

    model: nn.Module  # called for the loss

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, whose learning rates may be set."""

    def micro(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch's forward and backward pass; the last one of a step is told."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss."""

    def step(self, clip: float) -> float:
        """Clip the gradients to this norm, step, forget them. Returns the norm that they had;
        where it is not finite, one must not go on.
        """

    def weights(self) -> Tensors:
        """Trained weights, on the CPU."""

    def moments(self) -> Tensors:
        """AdamW's state, as `exp_avg.NAME` and so on; empty before the first step."""

    def load(self, weights: Tensors, moments: Tensors) -> None:
        """Go on from these."""

    def whole(self) -> AbstractContextManager[None]:
        """The drafter's weights are there as a whole while the block runs; they are not changed."""


class Copies:
    """One process, or several that each hold a copy."""

    def __init__(
        self,
        accelerator: Accelerator,
        loss: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        config: OptimConfig,
        peaks: Mapping[str, float],
    ) -> None:
        self.accelerator, self.parameters = accelerator, parameters
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            # torch speaks of a successor of broadcast_buffers that is not there yet.
            made = adamw(parameters, config, peaks)
            self.model, self.optimizer = accelerator.prepare(loss, made)
        several = accelerator.num_processes > 1
        assert isinstance(self.model, DistributedDataParallel) == several, type(self.model)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """AdamW's."""
        found: list[dict[str, Any]] = self.optimizer.param_groups
        return found

    def micro(self, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients are averaged once in a step."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient."""
        self.accelerator.backward(loss)

    def step(self, clip: float) -> float:
        """Nothing moves where the norm is not finite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), clip))
        if torch.isfinite(torch.tensor(norm)):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return norm

    def weights(self) -> Tensors:
        """They are here."""
        return {name: value.detach().cpu() for name, value in self.parameters.items()}

    def moments(self) -> Tensors:
        """They are here."""
        return {
            f"{kind}.{name}": self.optimizer.state[value][kind].detach().cpu()
            for name, value in self.parameters.items()
            if value in self.optimizer.state
            for kind in MOMENTS
        }

    def load(self, weights: Tensors, moments: Tensors) -> None:
        """Every process reads everything."""
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(weights[name])
        load_moments(self.optimizer, self.parameters, moments, lambda tensor, _: tensor)

    def whole(self) -> AbstractContextManager[None]:
        """They always are."""
        return nullcontext()


def spread(
    processes: Processes, loss: nn.Module, parameters: Mapping[str, nn.Parameter], recipe: Recipe
) -> Parallel:
    """The loss and its trained parameters (by name), as these processes share them."""
    agree(processes, parameters)
    if processes.sharing == "fsdp2":
        from draftsmith.train.fsdp import Fsdp

        return Fsdp(processes, loss, recipe.optim)
    if processes.sharing in ("zero2", "zero3"):
        from draftsmith.train.zero import Zero

        return Zero(processes, loss, parameters, recipe)
    peaks = {} if recipe.adapter is None else {PREFIX: recipe.adapter.lr}
    return Copies(processes.accelerator, loss, parameters, recipe.optim, peaks)


@torch.no_grad()
def agree(processes: Processes, parameters: Mapping[str, nn.Parameter]) -> None:
    """All start from the main process's weights."""
    if processes.accelerator.num_processes > 1:
        for value in parameters.values():
            torch.distributed.broadcast(value.data, 0)


def adamw(
    parameters: Mapping[str, nn.Parameter],
    config: OptimConfig,
    peaks: Mapping[str, float] | None = None,
) -> torch.optim.AdamW:
    """AdamW on trained weights, which are fp32; biases and norms are not decayed. peaks: learning
    rates, where they are not `optim.lr`, of names with these prefixes; groups keep theirs as PEAK.
    """
    wrong = [name for name, value in parameters.items() if value.dtype != torch.float32]
    assert not wrong, f"trained weights must be fp32: {wrong}"
    groups: list[dict[str, Any]] = []
    left = dict(parameters)
    for prefix, peak in {**(peaks or {}), "": config.lr}.items():
        mine = {name: left.pop(name) for name in list(left) if name.startswith(prefix)}
        free = {name for name, value in mine.items() if value.ndim < 2 or name.endswith("bias")}
        decayed = [value for name, value in mine.items() if name not in free]
        rate = {"lr": peak, PEAK: peak}
        groups += [
            {"params": decayed, "weight_decay": config.weight_decay, **rate},
            {"params": [mine[name] for name in sorted(free)], "weight_decay": 0.0, **rate},
        ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        fused=True,  # in one pass; on CPU and CUDA repeatable bit for bit
    )


def load_moments(
    optimizer: Any,
    parameters: Mapping[str, nn.Parameter],
    tensors: Tensors,
    place: Callable[[Tensor, nn.Parameter], Tensor],
) -> None:
    """Give AdamW its state back, in fp32. place: a moment, laid out as its parameter is."""
    names = {id(value): name for name, value in parameters.items()}
    ordered: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]

    def state_of(value: nn.Parameter) -> Tensors:
        found = {kind: tensors[f"{kind}.{names[id(value)]}"] for kind in MOMENTS}
        return {k: one if k == "step" else place(one, value) for k, one in found.items()}

    state = {
        index: state_of(value)
        for index, value in enumerate(ordered)
        if f"step.{names[id(value)]}" in tensors
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    kept = [tensor for slots in optimizer.state.values() for tensor in slots.values()]
    wrong = {tensor.dtype for tensor in (*ordered, *kept)} - {torch.float32}
    assert not wrong, f"weights and moments must be fp32 after resume, found {wrong}"
