"""How the processes that a launcher started share the work.

ddp      every process holds everything; gradients are averaged
fsdp2    the target's layers, the drafter's weights, gradients and moments are spread
zero2    the drafter's gradients and moments are spread (DeepSpeed)
zero3    as fsdp2, the drafter by DeepSpeed
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from draftsmith.recipes.errors import UserError

Sharing = Literal["alone", "ddp", "fsdp2", "zero2", "zero3"]


@dataclass(frozen=True)
class Shares:
    """A way and a number of processes."""

    sharing: Sharing = "alone"
    processes: int = 1

    @property
    def target_is_sharded(self) -> bool:
        """Whether every process holds a part of the target's layers alone."""
        return self.sharing in ("fsdp2", "zero3")


def asked_shares() -> Shares:
    """What the launcher of this process asks for; alone where there is none."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    return Shares(asked_sharing(os.environ), count) if count > 1 else Shares()


def asked_sharing(environment: Mapping[str, str]) -> Sharing:
    """What the launcher's environment asks for. Raises UserError for what is not supported."""
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        return zero_stage(environment)
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if environment.get("FSDP_VERSION", "1") != "2":
            raise UserError(
                "accelerate: FSDP version 1 was asked for; set fsdp_version: 2, or use "
                "--accelerate fsdp2"
            )
        return "fsdp2"
    return "ddp"


def zero_stage(environment: Mapping[str, str]) -> Sharing:
    """DeepSpeed's stage, from Accelerate's own fields or from a DeepSpeed config that they name."""
    from accelerate.utils import DeepSpeedPlugin, is_deepspeed_available

    if not is_deepspeed_available():
        raise UserError(
            "accelerate: DeepSpeed was asked for and is not installed; run "
            "`pip install 'draftsmith[deepspeed]'`, or use --accelerate fsdp2"
        )
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
        stage = DeepSpeedPlugin().zero_stage
    else:
        stage = int(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    found: dict[int, Sharing] = {2: "zero2", 3: "zero3"}
    if stage not in found:
        raise UserError(
            f"accelerate: DeepSpeed's ZeRO stage {stage} was asked for; allowed: 2, 3 "
            "(for stage 0 use --accelerate ddp)"
        )
    return found[stage]
