"""Quantised weights: how a target is loaded in them, and how a layer of them becomes plain again.

bitsandbytes quantises the linear layers of the decoder: nf4 (QLoRA, 2305.14314, with its double
quantisation) or int8 (LLM.int8, 2208.07339). Embedding, norms and head stay in `target.dtype`, so
states, logits and the teacher's law have that dtype too: no other part of the house sees a
quantised number, but those that copy layers, and they ask `plain_state`.

On CPUs with AVX-512 bf16, bitsandbytes lays nf4 weights out anew at the first pass without a
gradient and from then on multiplies in bf16, whatever the states are, and without a gradient. That
is switched off: training and decoding do the same sums, fp32 stays fp32, and LoRA learns.
"""

import importlib.util
import logging
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.fingerprint import NONE
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetConfig

OURS = "bitsandbytes"  # whose quantised layers are read here
SWITCH = "support_avx512bf16_for_cpu"  # of a layer: whether it may lay its weights out anew
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Bytes per weight. nf4: half a byte, a byte per block of 64, and 4 per 256 of those. int8: its
# scales are one number per row.
WIDTHS = {"nf4": 0.5 + (1 + 4 / 256) / 64, "fp4": 0.5 + (1 + 4 / 256) / 64, "int8": 1.0}


def check_quantiser(config: TargetConfig) -> None:
    """Raises UserError where what quantises is not installed."""
    if config.load_in is not None and importlib.util.find_spec(OURS) is None:
        raise UserError(
            f"target.load_in: {config.load_in} needs bitsandbytes, which is not installed; run "
            "`pip install 'draftsmith[bitsandbytes]'`, or leave load_in out"
        )


def check_twice(config: TargetConfig, loaded: Any) -> None:
    """Raises UserError for a checkpoint that is quantised already (`loaded`: its own config)."""
    there = quantisation_of(loaded)
    if config.load_in is not None and there != NONE:
        raise UserError(
            f"target.load_in: the weights of {config.model} are {there} already; leave load_in "
            "out, they are loaded as they are"
        )


def check_spread(method: str, *, sharded: bool) -> None:
    """Raises UserError for quantised layers that are to be spread over processes."""
    if sharded and method != NONE:
        raise UserError(
            f"target.load_in: layers in {method} are not spread over processes here; share the "
            "work by DDP or zero2, or leave the target unquantised"
        )


def load_options(config: TargetConfig, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` needs beside the rest, to quantise while it reads."""
    if config.load_in is None:
        return {}
    from transformers import BitsAndBytesConfig

    quiet()
    if config.load_in == "int8":
        asked = BitsAndBytesConfig(load_in_8bit=True)
    else:
        asked = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, config.dtype),
        )
    return {"quantization_config": asked, "device_map": {"": device}}


def quiet() -> None:
    """Leave out what bitsandbytes says in every pass of every layer."""
    logging.getLogger(OURS).setLevel(logging.ERROR)


def quantisation_of(config: Any) -> str:
    """How the weights that a transformers config describes are quantised: `none`, `nf4`, `fp4`,
    `int8`, or another method's name.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return NONE
    values = found if isinstance(found, dict) else found.to_dict()
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if "bitsandbytes" not in method and not {"load_in_4bit", "load_in_8bit"} & set(values):
        return method
    if values.get("load_in_8bit"):
        return "int8"
    return str(values.get("bnb_4bit_quant_type") or "fp4")


def bytes_per_weight(quantisation: str, width: int) -> float:
    """Of the layers' linear weights, where a plain weight has `width` bytes. A method that is not
    known here counts as plain.
    """
    return WIDTHS.get(quantisation, float(width))


def settle(model: nn.Module) -> None:
    """Keep nf4 weights as they are stored, whatever processor this is."""
    for module in model.modules():
        if hasattr(module, SWITCH):
            setattr(module, SWITCH, False)


def is_quantised(module: nn.Module) -> bool:
    """Whether this is a linear layer of bitsandbytes."""
    return type(getattr(module, "weight", None)).__name__ in ("Params4bit", "Int8Params")


@torch.no_grad()
def plain_weight(module: nn.Module) -> Tensor:
    """A linear layer's weight [out, in]: itself, or de-quantised, fp32."""
    weight: Any = module.weight
    if not is_quantised(module):
        assert isinstance(weight, Tensor)
        return weight
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    state = getattr(module, "state", None)  # int8: where the scales are after the first pass
    return dequantize_bnb_weight(weight, state).float()  # type: ignore[no-any-return]


def plain_state(module: nn.Module, name: str) -> dict[str, Tensor]:
    """A module's state with de-quantised weights, under the names that it has unquantised.

    Raises UserError for layers that are quantised in another way. name: the target's.
    """
    state: dict[str, Tensor] = dict(module.state_dict())
    for path, child in module.named_modules():
        if not is_quantised(child):
            continue
        prefix = f"{path}." if path else ""
        extras = (f"{prefix}weight.", f"{prefix}SCB", f"{prefix}weight_format")
        state = {key: value for key, value in state.items() if not key.startswith(extras)}
        state[f"{prefix}weight"] = plain_weight(child)
    strange = [key for key, value in state.items() if value.dtype not in PLAIN]
    if strange:
        raise UserError(
            f"{name}: its layers are quantised in a way that cannot be undone here ({strange[0]} "
            f"is {str(state[strange[0]].dtype).removeprefix('torch.')}), so a drafter cannot start "
            "from them; start it at random, or give the unquantised model (with target.load_in)"
        )
    return state


def count_parameters(model: nn.Module) -> int:
    """Numbers that the weights stand for; two of nf4 lie in a byte."""
    states = ((value, getattr(value, "quant_state", None)) for value in model.parameters())
    return sum(value.numel() if state is None else prod(state.shape) for value, state in states)
