"""Starting a block drafter from its target: layers from evenly spread layers, the fused context
from the mean of the taps.

What a layer of a Llama has not is approximated. Its queries and keys have no norm: with a norm of
ones, what stays is their direction, and attention is as sharp as in a layer whose queries and keys
have the length sqrt(d). Biases of projections are left out. The context has one norm for all
layers, the mean of theirs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.dflash_layers import DraftLayer
from draftsmith.drafters.quantised import plain_state
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
    stack = target.decoder_layers()
    chosen = [stack[at] for at in spread(target.layers, len(layers))]
    for layer, source in zip(layers, chosen, strict=True):
        copy_layer(layer, source, target.name)
    copy(norm, weight_of(target.base.norm), "norm", target.name)
    weight_of(hidden_norm).copy_(torch.stack([norm_of(one) for one in chosen]).mean(0))
    taps = fc.in_features // fc.out_features
    fc.weight.copy_(torch.eye(fc.out_features).repeat(1, taps) / taps)


def copy_layer(layer: nn.Module, source: nn.Module, name: str) -> None:
    """A target's layer into a drafter's."""
    assert isinstance(layer, DraftLayer)
    state = plain_state(source, name)
    for path in COPIED:
        copy(layer.get_submodule(path), state.get(f"{path}.weight"), path, name)
    for path in WHERE_PRESENT:
        if f"{path}.weight" in state:
            copy(layer.get_submodule(path), state[f"{path}.weight"], path, name)


def copy(to: nn.Module, weight: Tensor | None, path: str, name: str) -> None:
    """A weight of the same shape. Raises UserError."""
    if weight is None or weight.shape != weight_of(to).shape:
        raise UserError(
            f"drafter.start: the layers of {name} have no {path} of a Llama's shape, from which a "
            "drafter could start; use start: random"
        )
    weight_of(to).copy_(weight)


def norm_of(layer: Any) -> Tensor:
    """The weight of a layer's first norm, fp32."""
    return weight_of(layer.input_layernorm).float()


def weight_of(module: nn.Module) -> Tensor:
    """A module's weight."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
