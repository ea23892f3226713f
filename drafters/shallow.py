"""A shallow copy of a target: its width, a few of its layers, its embedding and head."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.slots import Batch
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError


def spread(total: int, count: int) -> list[int]:
    """`count` of `total` layers, the first and the last among them (of one: the last)."""
    if count == 1:
        return [total - 1]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]


def shallow_copy(target: Target, layers: int, *, own: bool) -> Any:
    """A causal language model of the target's class, in fp32, started from its layers.

    own: whether embedding and head are copies to be trained; else they are the target's very own.
    """
    if layers > target.layers:
        raise UserError(
            f"drafter.layers: {layers} is more than the {target.layers} of {target.name}; "
            "give fewer"
        )
    chosen = spread(target.layers, layers)
    net: Any = type(target.model)(shallow_config(target.model.config, chosen)).float()
    net.get_decoder().load_state_dict(renumbered(target, chosen))
    outer, inner = net.get_output_embeddings(), net.get_input_embeddings()
    if own:
        outer.weight.data.copy_(target.head_weight)
    else:
        inner.weight = target.model.get_input_embeddings().weight
        outer.weight = target.head_weight
    return net.to(target.device).eval()  # no dropout: it learns one law


def shallow_config(config: Any, chosen: list[int]) -> Any:
    """The config with these layers alone; lists with one entry per layer are cut likewise."""
    small = copy.deepcopy(config)
    vars(small).pop("quantization_config", None)  # copies are plain
    text = small.get_text_config()
    total = text.num_hidden_layers
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == total:
            setattr(text, name, [value[layer] for layer in chosen])
    text.num_hidden_layers = len(chosen)
    return small


def renumbered(target: Target, chosen: list[int]) -> dict[str, Tensor]:
    """The state of the target's decoder with these layers as 0, 1, ..."""
    stack = target.decoder_layers()
    (prefix,) = [f"{name}." for name, child in target.base.named_children() if child is stack]
    state = {}
    for name, value in target.base.state_dict().items():
        if not name.startswith(prefix):
            state[name] = value
    for place, layer in enumerate(chosen):
        for name, value in target.layer_state(layer).items():
            state[f"{prefix}{place}.{name}"] = value
    return state


def states(net: Any, batch: Batch) -> Tensor:
    """Final states [B, T, D] of packed rows, differentiable; documents are kept apart by their
    positions.
    """
    embedding = net.get_input_embeddings()
    other = next(v for v in net.get_decoder().parameters() if v is not embedding.weight)
    embedded = embedding(batch.ids).to(other.dtype)
    output = net.get_decoder()(
        inputs_embeds=embedded, position_ids=batch.positions, use_cache=False
    )
    return output.last_hidden_state  # type: ignore[no-any-return]


def distinct_tensors(net: nn.Module) -> dict[str, Tensor]:
    """The model's state without the second names of tied weights."""
    seen: set[int] = set()
    found = {}
    for name, value in net.state_dict().items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            found[name] = value
    return found


def load_distinct(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Take over what `distinct_tensors` gave; weights that are the target's own stay so. Raises
    ValueError for other names or shapes.
    """
    expected = distinct_tensors(net)
    if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in tensors.items()}:
        raise ValueError("its tensors are not those of the model that it describes")
    own = {value.data_ptr() for value in net.parameters() if value.requires_grad}
    with torch.no_grad():
        for name, value in expected.items():
            if value.data_ptr() in own:
                value.copy_(tensors[name])
