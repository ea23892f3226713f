"""Which decoder layer of a target an MTP block is made of, and whether one can be: no weights are
needed to tell.
"""

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.mtp_attention import OURS, register
from draftsmith.drafters.reach import layer_types, reaches
from draftsmith.drafters.shallow import shallow_config
from draftsmith.recipes.errors import UserError

State = Callable[[int], Mapping[str, Tensor]]

FULL = "full_attention"
PARTS = {"norm": "last norm", "rotary_emb": "rotary positions"}  # of a decoder, by name


def start_layer(config: Any) -> int:
    """The last layer of the type that the config names for MTP layers, else of full attention; the
    last one where types are not told apart.
    """
    kinds, layers = layer_types(config), int(config.num_hidden_layers)
    named: list[str] = getattr(config, "mtp_layer_types", None) or [FULL]
    if kinds is None or named[0] not in kinds:
        return layers - 1
    return max(place for place, kind in enumerate(kinds) if kind == named[0])


def one_layer(config: Any, place: int) -> Any:
    """A text config with this layer alone, its attention ours."""
    config = shallow_config(config, [place])
    first = config.to_dict().get("first_k_dense_replace")  # DeepSeek: layers from here on are MoE
    if first is not None and place >= first:
        config.first_k_dense_replace = 0
    register()
    config._attn_implementation = OURS
    return config


def rotary(base: Any, config: Any) -> Callable[[Tensor, Tensor], Any]:
    """(states, positions) -> the cosines and sines that the layer takes."""
    module = base.rotary_emb
    if "layer_type" not in inspect.signature(module.forward).parameters:
        return lambda states, positions: module(states, positions)
    (kind,) = layer_types(config) or ("",)
    return lambda states, positions: module(states, positions, kind)


def check_layer(
    base: Any, config: Any, stack: nn.ModuleList | None, name: str, state_of: State | None = None
) -> None:
    """UserError unless a block can be made of a layer of this decoder (which may be on the meta
    device). state_of: a layer's plain tensors; None: they are as they stand in the stack.
    """
    reason = refusal(base, config, stack, state_of)
    if reason is not None:
        raise UserError(
            f"drafter.kind: no mtp block can be made of the layers of {name}: {reason}; take "
            "another kind"
        )


def refusal(
    base: Any, config: Any, stack: nn.ModuleList | None, state_of: State | None
) -> str | None:
    """Why not, if not."""
    if stack is None:
        return "they are no stack"
    for part, called in PARTS.items():
        if part not in dict(base.named_children()):
            return f"the decoder has no {called} ({part})"
    place = start_layer(config)
    own = one_layer(config, place)
    if not reaches(own):
        return "they have no attention"
    with torch.device("meta"):
        layer = type(stack[place])(own, 0)
    state = stack[place].state_dict() if state_of is None else state_of(place)
    theirs = {key: value.shape for key, value in state.items()}
    if {key: value.shape for key, value in layer.state_dict().items()} != theirs:
        return "a first layer has other weights than a last one"
    return why_unreached(base, own, layer)


def why_unreached(base: Any, config: Any, layer: nn.Module) -> str | None:
    """Run two tokens through a layer without weights: why our attention is not called, if so."""
    seen = SimpleNamespace(context=None)

    def first(key: Tensor, value: Tensor) -> None:
        seen.context = []

    seen.first, seen.reached = first, False
    device = next(base.parameters()).device
    states = torch.zeros((1, 2, config.hidden_size), device=device)
    positions = torch.arange(2, device=device)[None]
    turned = rotary(base, config)(states, positions)
    given = [value.to("meta") for value in turned] if isinstance(turned, tuple) else turned
    problem = "they do not use transformers' attention interface"
    try:
        layer(
            states.to("meta"),
            attention_mask=None,
            position_ids=positions.to("meta"),
            position_embeddings=given,
            chain=seen,
        )
    except UserError as error:
        return str(error)
    except Exception as error:  # whatever a family does; it only matters whether it came so far
        problem = f"one does not run alone ({' '.join(str(error).split())[:100]})"
    return None if seen.context is not None else problem
