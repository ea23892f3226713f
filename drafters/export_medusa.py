"""Medusa heads as engines read them.

vLLM up to 0.32 has names of its own, drafts chains of argmaxes, and takes a shared head or one per
slot, of all tokens or of some (`token_map`). It drops biases unless `medusa_fc_bias` is there, and
any key with "num" and "layers" (or "heads") in it means its number of layers (or heads).

FasterDecoding, TensorRT-LLM's engine backend and TGI read one projection of all tokens per slot.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.engine_files import (
    Source,
    check_tensors,
    check_values,
    dtype_name,
    read_config,
    read_tensors,
    refuse,
    write_files,
)
from draftsmith.drafters.medusa import MedusaHeads
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import MedusaConfig

WEIGHTS, PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
FASTER_HEADS = 5  # FasterDecoding's loader makes so many, whatever the file holds
BASES = {
    "FasterDecoding": ("LlamaForCausalLM", "MistralForCausalLM"),
    "TensorRT-LLM": ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
}


# --- vLLM up to 0.32 ---


def write_vllm(source: Source, folder: Path) -> None:
    """config.json and model.safetensors under vLLM's names."""
    heads = medusa_of(source, "vLLM")
    shared = heads.config.projection == "shared"
    tensors = residual_blocks(heads, "blocks.{}.layers.0.{}")
    if shared:
        tensors["lm_head.weight"] = heads.rows
    else:
        tensors |= {f"lm_heads.{i}.weight": row for i, row in enumerate(projections(heads))}
    if heads.draft_ids is not None:
        tensors["token_map"] = heads.draft_ids
    write_files(folder, vllm_config(heads, source.target), tensors)


def vllm_config(heads: MedusaHeads, target: Target) -> dict[str, Any]:
    """Every field that vLLM's MedusaConfig and model read."""
    scale = float(target.config.to_dict().get("logit_scale") or 1.0)
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": heads.width,
        "num_heads": heads.depth,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "original_lm_head": heads.config.projection == "shared",
        "logit_scale": scale,
        "dtype": dtype_name(heads.weight),
    }


def read_vllm(folder: Path, source: Source) -> MedusaHeads:
    """The heads that vLLM computes with."""
    target = source.target
    config, tensors = read_config(folder), read_tensors(folder)
    check_values(
        config,
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
        },
    )
    renamed = [
        key
        for key in config
        if key not in ("num_heads", "num_hidden_layers")
        and "num" in key
        and ("heads" in key or "layers" in key)
    ]
    if renamed:
        raise ValueError(f"config.json: vLLM takes {renamed[0]} for its number of heads or layers")
    count, rows = config["num_heads"], config["truncated_vocab_size"]
    size, shared = target.hidden_size, config["original_lm_head"]
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(count):
        expected[f"blocks.{i}.layers.0.weight"] = (size, size)
        expected[f"blocks.{i}.layers.0.bias"] = (size,)
        if not shared:
            expected[f"lm_heads.{i}.weight"] = (rows, size)
    if shared:
        expected["lm_head.weight"] = (rows, size)
    if rows < target.vocab_size:
        expected["token_map"] = (rows,)
    check_tensors(tensors, expected)
    names = (
        (["lm_head.weight"] * count) if shared else [f"lm_heads.{i}.weight" for i in range(count)]
    )
    return rebuilt(
        target,
        torch.stack([tensors[f"blocks.{i}.layers.0.weight"] for i in range(count)]),
        torch.stack([tensors[f"blocks.{i}.layers.0.bias"] for i in range(count)]),
        torch.stack([tensors[name] for name in names]),
        tensors.get("token_map"),
    )


# --- one projection of all tokens per slot ---


def write_faster(source: Source, folder: Path) -> None:
    """What FasterDecoding's `MedusaModel.from_pretrained` reads."""
    heads = medusa_of(source, "FasterDecoding")
    check_base("FasterDecoding", source.target)
    if heads.depth != FASTER_HEADS:
        raise refuse(
            "FasterDecoding",
            f"its loader makes {FASTER_HEADS} heads, and this drafter has {heads.depth}; train "
            f"with drafter.heads={FASTER_HEADS}",
        )
    tensors = whole_projections(heads, source.target, "FasterDecoding")
    torch.save(tensors, folder / PICKLE)
    write_files(folder, faster_config(heads, source), tensors, WEIGHTS)


def faster_config(heads: MedusaHeads, source: Source) -> dict[str, Any]:
    """What FasterDecoding's MedusaConfig says."""
    return {
        "model_type": "medusa",
        "medusa_num_heads": heads.depth,
        "medusa_num_layers": 1,
        "base_model_name_or_path": source.meta["target"]["model"],
        "version": "2",
    }


def read_faster(folder: Path, source: Source) -> MedusaHeads:
    """From the pickle, which inference reads; the safetensors file must hold the same."""
    config = read_config(folder)
    check_values(config, {"medusa_num_heads": FASTER_HEADS, "medusa_num_layers": 1})
    try:
        tensors = torch.load(folder / PICKLE, weights_only=True)
    except Exception as error:  # pickle's own kinds, and torch's
        raise ValueError(f"{PICKLE} cannot be read ({error})") from error
    beside = read_tensors(folder, WEIGHTS)
    if tensors.keys() != beside.keys() or any(
        not torch.equal(tensors[name], beside[name]) for name in tensors
    ):
        raise ValueError(f"{PICKLE} and {WEIGHTS} differ")
    return from_whole(tensors, FASTER_HEADS, source.target)


def write_tensorrt(source: Source, folder: Path) -> None:
    """What the Medusa converters of TensorRT-LLM's engine backend read."""
    heads = medusa_of(source, "TensorRT-LLM")
    check_base("TensorRT-LLM", source.target)
    config = {
        **faster_config(heads, source),
        "hidden_size": source.target.hidden_size,
        "vocab_size": source.target.vocab_size,
        "num_medusa_heads": heads.depth,
        "num_medusa_layers": 1,
    }
    tensors = whole_projections(heads, source.target, "TensorRT-LLM")
    write_files(folder, config, tensors, WEIGHTS)


def read_tensorrt(folder: Path, source: Source) -> MedusaHeads:
    """The heads of the safetensors file."""
    target = source.target
    config = read_config(folder)
    check_values(config, {"num_medusa_layers": 1, "hidden_size": target.hidden_size})
    return from_whole(read_tensors(folder, WEIGHTS), config["num_medusa_heads"], target)


def whole_projections(heads: MedusaHeads, target: Target, engine: str) -> dict[str, Tensor]:
    """FasterDecoding's names, a projection [V, D] for every slot."""
    if heads.config.projection == "own" and heads.draft_ids is not None:
        raise refuse(
            engine,
            "it projects to all tokens, and this drafter trained projections of "
            f"{heads.width} of them; train with drafter.draft_vocab=null",
        )
    tensors = residual_blocks(heads, "{}.0.linear.{}")
    for i, rows in enumerate(projections(heads)):
        whole = rows
        if heads.draft_ids is not None:
            whole = target.head_weight.detach().clone()
            whole[heads.draft_ids] = rows.to(whole.dtype)
        tensors[f"{i}.1.weight"] = whole
    return {name: value.detach().contiguous().cpu() for name, value in tensors.items()}


def from_whole(tensors: Mapping[str, Tensor], count: int, target: Target) -> MedusaHeads:
    """The heads of `whole_projections`. Raises ValueError."""
    size, rows = target.hidden_size, target.vocab_size
    expected: dict[str, tuple[int, ...]] = {}
    for i in range(count):
        expected[f"{i}.0.linear.weight"], expected[f"{i}.0.linear.bias"] = (size, size), (size,)
        expected[f"{i}.1.weight"] = (rows, size)
    check_tensors(tensors, expected)
    weight, bias, own = (
        torch.stack([tensors[f"{i}.{name}"] for i in range(count)])
        for name in ("0.linear.weight", "0.linear.bias", "1.weight")
    )
    return rebuilt(target, weight, bias, own, None)


# --- shared ---


def medusa_of(source: Source, engine: str) -> MedusaHeads:
    """The heads. Raises UserError where they read more than the state."""
    heads = source.drafter
    assert isinstance(heads, MedusaHeads)
    if heads.root_weight is not None:
        raise refuse(
            engine,
            "its heads also read the root's embedding, which no other engine computes; train with "
            "drafter.reads_root=false, or export --to transformers",
        )
    return heads


def check_base(engine: str, target: Target) -> None:
    """Raises UserError for a target that the engine has no Medusa for."""
    found = type(target.model).__name__
    if found not in BASES[engine]:
        raise refuse(engine, f"its Medusa takes {', '.join(BASES[engine])}, and this is {found}")


def residual_blocks(heads: MedusaHeads, name: str) -> dict[str, Tensor]:
    """Weight and bias of every head; `name` takes the head's number and which of the two."""
    found = {}
    for i in range(heads.depth):
        found[name.format(i, "weight")] = heads.weight[i]
        found[name.format(i, "bias")] = heads.bias[i]
    return found


def projections(heads: MedusaHeads) -> list[Tensor]:
    """One matrix [Vq, D] for every slot, corrections added in."""
    kind, rows, dtype = heads.config.projection, heads.rows, heads.weight.dtype
    if kind == "shared":
        return [rows.clone() for _ in range(heads.depth)]
    assert heads.own is not None
    if kind == "own":
        return list(heads.own.detach())
    assert heads.down is not None
    pairs = zip(heads.own.detach().float(), heads.down.detach().float(), strict=True)
    return [(rows.float() + up @ down).to(dtype) for up, down in pairs]


@torch.no_grad()
def rebuilt(
    target: Target, weight: Tensor, bias: Tensor, own: Tensor, ids: Tensor | None
) -> MedusaHeads:
    """Heads with these weights [K, D, D], biases [K, D] and projections [K, Vq, D]."""
    config = MedusaConfig(heads=len(weight), projection="own")
    made = MedusaHeads(config, target, ids).to(target.device, target.dtype).eval()
    assert made.own is not None
    pairs: list[tuple[Tensor, Tensor]] = [
        (made.weight, weight),
        (made.bias, bias),
        (made.own, own),
    ]
    for mine, theirs in pairs:
        mine.copy_(theirs)
    return made
