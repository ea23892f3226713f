"""The files of a block drafter in z-lab's layout, and what they must satisfy to mean the same to
every reader (vLLM, SGLang, TensorRT-LLM, z-lab's own code).

Engines load what fits and leave the rest random: what they do not check is checked here.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors import safe_open

from draftsmith.drafters.geometry import Geometry

LAYER = {  # tensors of a layer and their shapes
    "self_attn.q_proj.weight": ("heads", "D"),
    "self_attn.k_proj.weight": ("kv", "D"),
    "self_attn.v_proj.weight": ("kv", "D"),
    "self_attn.o_proj.weight": ("D", "heads"),
    "self_attn.q_norm.weight": ("d",),
    "self_attn.k_norm.weight": ("d",),
    "mlp.gate_proj.weight": ("F", "D"),
    "mlp.up_proj.weight": ("F", "D"),
    "mlp.down_proj.weight": ("D", "F"),
    "input_layernorm.weight": ("D",),
    "post_attention_layernorm.weight": ("D",),
}
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' names
SINGLE_MEANING = ("is_causal", "causal", "use_swa", "sample_from_anchor")  # readers differ in them


def native_config(
    shape: Geometry,
    *,
    layers: int,
    block_size: int,
    taps: tuple[int, ...],
    mask_token_id: int,
    vocab_size: int,
    target_layers: int,
    dtype: str,
) -> dict[str, Any]:
    """config.json. Both spellings of the block size and of the rotary embedding are written."""
    rope = dict(shape.rope)
    old = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    scaling = None if rope["rope_type"] == "default" else {**old, "rope_type": rope["rope_type"]}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": shape.max_positions,
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": target_layers,
        "dflash_config": {
            "target_layer_ids": list(taps),
            "mask_token_id": mask_token_id,
            "block_size": block_size,
        },
        "dtype": dtype,
    }


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a config asks for."""
    hidden, width = config["hidden_size"], config["head_dim"]
    size = {
        "D": hidden,
        "d": width,
        "F": config["intermediate_size"],
        "heads": config["num_attention_heads"] * width,
        "kv": config["num_key_value_heads"] * width,
    }
    taps = len(config["dflash_config"]["target_layer_ids"])
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, sides in LAYER.items():
            found[f"layers.{layer}.{name}"] = tuple(size[side] for side in sides)
    return found


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the field, for a config that some reader refuses or misreads."""
    own = config["dflash_config"]
    taps, layers, block = own["target_layer_ids"], config["num_hidden_layers"], own["block_size"]
    deepest = config["num_target_layers"] - 2
    rope = config["rope_parameters"]
    demands = {
        "architectures": config["architectures"] == ["DFlashDraftModel"],
        "model_type": config["model_type"] == "qwen3",
        "layer_types": config["layer_types"] == ["full_attention"] * layers,
        "attention_bias": config["attention_bias"] is False,
        "block_size": config["block_size"] == block >= 2,
        "dflash_config.target_layer_ids": len(taps) > 0
        and all(low < high for low, high in pairwise([-1, *taps, deepest + 1])),
        "dflash_config.mask_token_id": 0 <= own["mask_token_id"] < config["vocab_size"],
        "rope_theta": config["rope_theta"] == rope["rope_theta"],
        "rope_scaling": (config["rope_scaling"] is None) == (rope["rope_type"] == "default"),
        "dtype": config["dtype"] in DTYPES.values(),
        **{name: name not in config and name not in own for name in SINGLE_MEANING},
    }
    wrong = [name for name, holds in demands.items() if not holds]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)} would not mean the same to all readers")


def check_folder(folder: Path) -> None:
    """Raises ValueError for a folder that some reader of the layout refuses or misreads."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        check_config(config)
        want = expected_shapes(config)
    except (KeyError, TypeError) as error:
        raise ValueError(f"config.json: {error} is missing or of another type") from error
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        have = {name: tuple(one.get_shape()) for name, one in slices.items()}
        dtypes = {DTYPES.get(one.get_dtype()) for one in slices.values()}
    wrong = sorted({name for name in want.keys() | have.keys() if want.get(name) != have.get(name)})
    if wrong:
        raise ValueError(
            f"model.safetensors: {', '.join(wrong)} is missing, left over or misshapen"
        )
    if dtypes != {config["dtype"]}:
        raise ValueError(f"model.safetensors: its numbers are not all {config['dtype']}")
