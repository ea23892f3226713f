"""The drafter sharded by DeepSpeed: ZeRO's stages 2 and 3.

DeepSpeed sees the trained weights alone, as parameters of one module, and gathers them for its
forward and backward pass. Of what it can do, it is asked for sharding and nothing else: weights,
gradients and moments stay fp32 (its bf16 mode rounds weights and gradients), compute is cast by
torch, the step's denominator and the learning rate come from the loop.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.recipes.schema import Recipe
from draftsmith.train.parallel import MOMENTS, Tensors, adamw
from draftsmith.train.processes import Processes


class Trained(nn.Module):
    """A loss with its trained weights as its only parameters: DeepSpeed sees nothing frozen."""

    def __init__(self, loss: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.held = (loss,)  # in a tuple, so that it is no submodule
        for number, value in enumerate(parameters.values()):
            self.register_parameter(f"trained_{number}", value)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """The loss."""
        return self.held[0](*arguments, **options)


class Zero:
    """As `Parallel` says."""

    def __init__(
        self,
        processes: Processes,
        loss: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        recipe: Recipe,
    ) -> None:
        accelerator = processes.accelerator
        self.main, self.rank = accelerator.is_main_process, accelerator.process_index
        self.ranks, self.parameters = accelerator.num_processes, parameters
        self.stage = 3 if processes.sharing == "zero3" else 2
        self.deepspeed = import_deepspeed(accelerator.device)
        count = sum(value.numel() for value in parameters.values())
        self.model, self.optimizer, _, _ = self.deepspeed.initialize(
            model=Trained(loss, parameters),
            optimizer=adamw(parameters, recipe.optim),
            config=settings(self.stage, count, accelerator.device, recipe),
            dist_init_required=False,
        )
        assert self.model.zero_optimization_stage() == self.stage
        assert (self.stage == 3) == all(hasattr(p, "ds_id") for p in parameters.values())
        self.states = self.make_states()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Of the optimizer inside DeepSpeed's."""
        found: list[dict[str, Any]] = self.optimizer.param_groups
        return found

    def micro(self, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced in every micro-batch and divided among processes."""
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient."""
        self.model.backward(loss, scale_wrt_gas=False)

    def step(self, clip: float) -> float:
        """DeepSpeed clips by itself, and steps whatever the norm is."""
        assert clip == self.model.gradient_clipping()
        self.model.step()
        return float(self.model.get_global_grad_norm())

    def weights(self) -> Tensors:
        """Gathered one by one."""
        kept = {}
        for name, value in self.parameters.items():
            with self.deepspeed.zero.GatheredParameters(value, enabled=self.stage == 3):
                if self.main:
                    kept[name] = value.detach().cpu().clone()
        return kept

    def moments(self) -> Tensors:
        """Gathered one by one."""
        step, kept = self.states[0]["step"], {}
        if not step:
            return {}
        for name, value in self.parameters.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                found = self.deepspeed.utils.safe_get_full_optimizer_state(value, kind)
                if self.main:
                    kept[f"{kind}.{name}"] = found.cpu()
            if self.main:
                kept[f"step.{name}"] = step.detach().cpu().clone()
        return kept

    def load(self, weights: Tensors, moments: Tensors) -> None:
        """Every process reads everything and keeps its part."""
        for name, value in self.parameters.items():
            self.put(value, weights[name])
        for name, value in self.parameters.items() if moments else ():
            for kind in MOMENTS[:2]:
                self.put(value, moments[f"{kind}.{name}"], kind)
            for state in self.states:
                state["step"].copy_(moments[f"step.{name}"])

    @torch.no_grad()
    def put(self, value: nn.Parameter, whole: Tensor, kind: str | None = None) -> None:
        """Set a weight, or one of its moments."""
        utils, whole = self.deepspeed.utils, whole.to(self.model.device)
        if self.stage == 3:
            mine = part(whole, self.rank, self.ranks)
            if kind is None:  # the optimizer may have a copy of its own
                with self.deepspeed.zero.GatheredParameters(value, modifier_rank=0):
                    value.copy_(whole)
                utils.safe_set_local_fp32_param(value, mine)
            else:
                utils.safe_set_local_optimizer_state(value, mine, kind)
        elif kind is None:
            value.copy_(whole)
            utils.safe_set_full_fp32_param(value, whole)
        else:
            utils.safe_set_full_optimizer_state(value, whole, kind)

    def make_states(self) -> list[Tensors]:
        """AdamW's state as before the first step. Where AdamW makes it in that step, stage 2 finds
        the moments of the first group of weights alone.
        """
        inner, states = self.optimizer, []
        stage_3 = self.stage == 3
        flat = (
            inner.fp32_partitioned_groups_flat if stage_3 else inner.single_partition_of_fp32_groups
        )
        for value in flat:
            state = {kind: torch.zeros_like(value, requires_grad=False) for kind in MOMENTS[:2]}
            state["step"] = torch.zeros((), device=value.device)
            inner.optimizer.state[value] = state
            states.append(state)
        if not stage_3:
            inner._lazy_init_hp_params_optimizer_state()
        return states

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gathered."""
        values = list(self.parameters.values())
        with self.deepspeed.zero.GatheredParameters(values, enabled=self.stage == 3):
            yield


def part(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A process's part of a tensor, as stage 3 divides it: flat, padded at the end."""
    size = -(-whole.numel() // ranks)
    flat = nn.functional.pad(whole.flatten(), (0, size * ranks - whole.numel()))
    return flat[size * rank : size * (rank + 1)]


def settings(stage: int, count: int, device: torch.device, recipe: Recipe) -> dict[str, Any]:
    """DeepSpeed's config."""
    buckets = {"reduce_bucket_size": count, "allgather_bucket_size": count}
    if stage == 3:
        # Nothing is so small that every process would keep it.
        buckets = {"reduce_bucket_size": count, "stage3_param_persistence_threshold": 0}
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return {
        "train_micro_batch_size_per_gpu": 1,  # the loop accumulates by itself
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.optim.clip,
        "zero_optimization": {"stage": stage, "overlap_comm": device.type == "cuda", **buckets},
        "zero_allow_untested_optimizer": True,
        **({"torch_autocast": autocast} if recipe.train.precision == "bf16" else {}),
        "steps_per_print": 10**9,
    }


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, for this device and quiet."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # Its collectives go by names that torch has renamed.
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated")
    # On CPUs it would compile collectives of its own for a minute; gloo has them.
    deepspeed.ops.__compatible_ops__.pop("deepspeed_shm_comm", None)
    return deepspeed
