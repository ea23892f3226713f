"""What MTP layers in checkpoints read and hand on, family by family.

Where transformers has a family's MTP forward pass, a test compares ours with it; MiMo's is its own
modelling file's, Nemotron-H's module is two layers and is not supported.
"""

from dataclasses import dataclass
from typing import Literal

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig

Side = Literal["post_norm", "pre_norm"]  # of the norm before the head


@dataclass(frozen=True)
class Family:
    """`layout` names the tensors (and says which half of the projection comes first)."""

    layout: str  # of `mtp_files.LAYOUTS`
    reads: Side = "post_norm"  # slot 1's state, the target's
    recycles: Side = "post_norm"  # a later slot's state, the layer's own
    position_shift: Literal[0, -1] = 0


FAMILIES = {  # by `model_type` of the text config
    "deepseek_v3": Family("next layer"),
    "glm4_moe": Family("next layer"),
    "qwen3_next": Family("mtp"),
    "qwen3_5_text": Family("mtp"),
    "qwen3_5_moe_text": Family("mtp"),
    "exaone_moe": Family("mtp"),
    "mellum": Family("mtp"),
    "mimo": Family("mtp_layers"),
}
UNSUPPORTED = {
    "nemotron_h": "its MTP module is an attention layer and an MoE layer; one layer is supported",
    "ernie4_5_moe": "its MTP layer has no norm before the head",
}


def check_family(config: MtpConfig, model_type: str, layout: str) -> None:
    """UserError unless the knobs are those that a checkpoint's MTP layer was trained with."""
    if model_type in UNSUPPORTED:
        raise UserError(
            f"drafter.start: checkpoint does not work for {model_type}: {UNSUPPORTED[model_type]}; "
            "use start: last_layer"
        )
    family = FAMILIES.get(model_type, Family(layout))
    for knob in ("reads", "recycles", "position_shift"):
        given, wanted = getattr(config, knob), getattr(family, knob)
        if given != wanted:
            raise UserError(
                f"drafter.{knob}: {given}, and the MTP layers of {model_type} were trained with "
                f"{wanted}; write {knob}: {wanted}"
            )
