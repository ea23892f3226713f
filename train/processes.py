"""The processes that a launcher started, and how they share the work (`recipes/sharing.py`).

`accelerate launch` says how by its environment; torchrun alone means ddp.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType

from draftsmith.drafters.target import pick_device
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sharing import Shares, Sharing, asked_sharing

# What Accelerate must have made of it on GPUs. On CPUs it knows several processes and no more
# (MULTI_CPU), and the rest is done here in the same way.
TYPES: dict[Sharing, DistributedType] = {
    "alone": DistributedType.NO,
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
}


@dataclass(frozen=True)
class Processes:
    """Who trains together, and how."""

    accelerator: Accelerator
    sharing: Sharing

    @property
    def target_is_sharded(self) -> bool:
        """Whether every process holds a part of the target's layers alone."""
        return self.shares.target_is_sharded

    @property
    def shares(self) -> Shares:
        """In numbers."""
        return Shares(self.sharing, self.accelerator.num_processes)

    @property
    def in_lockstep(self) -> bool:
        """Whether passes are collective: processes must make equally many."""
        return self.sharing in ("fsdp2", "zero2", "zero3")


def start_processes(recipe: Recipe) -> Processes:
    """The processes that train together; one unless a launcher started more. Raises UserError."""
    device = pick_device(recipe.target.device)
    sharing = asked_sharing(os.environ)
    # transformers reads this, and would load nothing where the target is spread by us.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        device_placement=False,
        mixed_precision="no",  # the loop casts by itself
        kwargs_handlers=[
            # Buffers are frozen rows of the target's head: equal everywhere, and large.
            DistributedDataParallelKwargs(broadcast_buffers=False),
            InitProcessGroupKwargs(timeout=timedelta(seconds=recipe.train.patience)),
        ],
    )
    if accelerator.num_processes == 1:
        return Processes(accelerator, "alone")
    if device.index is not None:
        raise UserError(
            f"target.device: {recipe.target.device} is one device and there are "
            f"{accelerator.num_processes} processes; use auto"
        )
    check_type(sharing, accelerator.distributed_type, device)
    return Processes(accelerator, sharing)


def check_type(sharing: Sharing, found: DistributedType, device: torch.device) -> None:
    """Accelerate falls back in silence where a device or a launcher lacks something. Raises
    UserError.
    """
    wanted = DistributedType.MULTI_CPU if device.type == "cpu" else TYPES[sharing]
    if found != wanted:
        raise UserError(
            f"accelerate: {sharing} on {device.type} was asked for and Accelerate made "
            f"{found.value} of it instead of {wanted.value}; check the config file that "
            "`accelerate launch` was given, or use --accelerate"
        )
