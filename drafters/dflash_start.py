"""Starting a block drafter from its target: layers from evenly spread layers, the fused context
from the mean of the taps.

What a layer of a Llama has not is approximated. Its queries and keys have no norm: with a norm of
ones, what stays is their direction, and attention is as sharp as in a layer whose queries and keys
have the length sqrt(d). Biases of projections are left out. The context has one norm for all
layers, the mean of theirs.
"""

import torch
from torch import Tensor, nn

from draftsmith.drafters.dflash_layers import DraftLayer
from draftsmith.drafters.shallow import spread
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError

COPIED = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
WHERE_PRESENT = ("self_attn.q_norm", "self_attn.k_norm")


@torch.no_grad()
def start_from_target(
    target: Target,
    layers: nn.ModuleList,
    fc: nn.Linear,
    hidden_norm: nn.Module,
    norm: nn.Module,
) -> None:
    """Copy the target's weights into a drafter's modules. Raises UserError where its layers are of
    another type.
    """
    if len(layers) > target.layers:
        raise UserError(
            f"drafter.layers: {len(layers)} is more than the {target.layers} of {target.name}; "
            "give fewer, or start: random"
        )
    norms = []
    for layer, place in zip(layers, spread(target.layers, len(layers)), strict=True):
        source = target.layer_state(place)
        copy_layer(layer, source, target.name)
        norms.append(source["input_layernorm.weight"].float())
    copy(norm, dict(target.base.norm.state_dict()), "", target.name)
    weight_of(hidden_norm).copy_(torch.stack(norms).mean(0))
    taps = fc.in_features // fc.out_features
    fc.weight.copy_(torch.eye(fc.out_features).repeat(1, taps) / taps)


def copy_layer(layer: nn.Module, source: dict[str, Tensor], name: str) -> None:
    """A target's layer into a drafter's."""
    assert isinstance(layer, DraftLayer)
    for path in COPIED:
        copy(layer.get_submodule(path), source, f"{path}.", name)
    for path in WHERE_PRESENT:
        if f"{path}.weight" in source:
            copy(layer.get_submodule(path), source, f"{path}.", name)


def copy(to: nn.Module, source: dict[str, Tensor], prefix: str, name: str) -> None:
    """The weight under this prefix, of the same shape. Raises UserError."""
    weight = source.get(f"{prefix}weight")
    if weight is None or weight.shape != weight_of(to).shape:
        raise UserError(
            f"drafter.start: the layers of {name} have no {prefix or 'norm.'}weight of a Llama's "
            "shape, from which a drafter could start; use start: random"
        )
    weight_of(to).copy_(weight)


def weight_of(module: nn.Module) -> Tensor:
    """A module's weight."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
