"""MTP layers as engines read them.

Families that come with such a layer (Qwen3-Next, DeepSeek-V3, ..) have it in their own checkpoint:
there it is put back into a copy of the target. vLLM and SGLang have no class for plain dense
targets; MiMo's, whose block is Qwen2's, computes the same for those without norms of heads.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from draftsmith.drafters.engine_files import (
    Source,
    check_tensors,
    check_values,
    copy_files,
    dtype_name,
    read_config,
    read_tensors,
    refuse,
    write_files,
)
from draftsmith.drafters.methods import build
from draftsmith.drafters.mtp import MtpModule
from draftsmith.drafters.mtp_files import (
    LAYOUTS,
    checkpoint_folder,
    find,
    read_block,
    swapped,
)
from draftsmith.drafters.mtp_stitch import stitch
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig

NATIVE = {  # families with such a layer, by who loads it
    "vLLM": ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "exaone_moe"),
    "SGLang": ("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "exaone_moe"),
    "TensorRT-LLM": ("qwen3_next", "qwen3_5", "deepseek_v3", "glm4_moe", "exaone_moe"),
}
BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
MIMO = LAYOUTS["mtp_layers"]
PREFIX = MIMO.at(0)
COPIES = ("model.embed_tokens.weight", "lm_head.weight")
LAYER = {  # of a block of Qwen2's; D hidden, q and kv widths of the heads, F of the MLP
    "self_attn.q_proj.weight": ("q", "D"),
    "self_attn.k_proj.weight": ("kv", "D"),
    "self_attn.v_proj.weight": ("kv", "D"),
    "self_attn.o_proj.weight": ("D", "q"),
    "self_attn.q_proj.bias": ("q",),
    "self_attn.k_proj.bias": ("kv",),
    "self_attn.v_proj.bias": ("kv",),
    "mlp.gate_proj.weight": ("F", "D"),
    "mlp.up_proj.weight": ("F", "D"),
    "mlp.down_proj.weight": ("D", "F"),
    "input_layernorm.weight": ("D",),
    "post_attention_layernorm.weight": ("D",),
    "token_layernorm.weight": ("D",),
    "hidden_layernorm.weight": ("D",),
    "final_layernorm.weight": ("D",),
}
KEPT = (  # of the target's config
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
)


# --- vLLM, SGLang, TensorRT-LLM ---


def write_mtp_vllm(source: Source, folder: Path) -> None:
    """In a copy of the target, or as MiMo's, with the embedding and head that vLLM insists on."""
    block = mtp_of(source, "vLLM")
    if is_native(source.target, "vLLM"):
        return write_stitched(source, folder)
    shape = source.target.config.to_dict()
    heads, size = shape["num_attention_heads"], shape["hidden_size"]
    if width_of(shape) * heads != size:
        raise refuse(
            "vLLM",
            f"its class for such layers takes heads of {size} / {heads} numbers, and this target's "
            f"have {width_of(shape)}; export --to transformers, or --to sglang",
        )
    tensors = mimo_tensors(block, source.target, "vLLM")
    embedding = source.target.embedding.detach()
    head = source.target.head_weight.detach().clone()
    tensors |= dict(zip(COPIES, (embedding, head), strict=True))
    write_files(folder, mimo_config(source.target, block), tensors)


def write_sglang(source: Source, folder: Path) -> None:
    """In a copy of the target, or as MiMo's alone: SGLang shares embedding and head."""
    block = mtp_of(source, "SGLang")
    if is_native(source.target, "SGLang"):
        return write_stitched(source, folder)
    write_files(
        folder, mimo_config(source.target, block), mimo_tensors(block, source.target, "SGLang")
    )


def write_mtp_tensorrt(source: Source, folder: Path) -> None:
    """In a copy of the target."""
    mtp_of(source, "TensorRT-LLM")
    if not is_native(source.target, "TensorRT-LLM"):
        raise refuse(
            "TensorRT-LLM",
            f"it has MTP for {', '.join(NATIVE['TensorRT-LLM'])} alone; export --to transformers",
        )
    write_stitched(source, folder)


def read_served(folder: Path, source: Source) -> MtpModule:
    """From either of the two."""
    config = read_config(folder)
    if config.get("architectures") == ["MiMoForCausalLM"]:
        return read_mimo(folder, source, config)
    made = fresh(source)
    first, weights = made.block.hidden_first, list[dict[str, Tensor]]()
    try:
        for depth, block in enumerate(made.blocks):
            found = find(folder, source.target.layers, depth)
            weights.append(read_block(found, block.state_dict(), hidden_first=first))
    except UserError as error:
        raise ValueError(str(error)) from error
    return filled(made, weights)


def write_stitched(source: Source, folder: Path) -> None:
    """A copy of the target's checkpoint with this layer in it."""
    module, target = mtp_of(source, "a family's own class"), source.target
    files = checkpoint_folder(target.model.config.name_or_path)
    folder.rmdir()
    weights = [block.state_dict() for block in module.blocks]
    first = module.block.hidden_first
    stitch(files, weights, folder, layers=target.layers, hidden_first=first)


# --- MiMo's layout ---


def mimo_config(target: Target, module: MtpModule) -> dict[str, Any]:
    """A config that engines take for MiMo's. Geometry is the target's."""
    found = target.config.to_dict()
    rope = dict(found["rope_parameters"])
    scaling = None if rope["rope_type"] == "default" else rope
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        **{name: found[name] for name in KEPT},
        "head_dim": width_of(found),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
        "use_sliding_window": False,
        "dtype": dtype_name(module.block.fc.weight),
    }


def mimo_tensors(module: MtpModule, target: Target, engine: str) -> dict[str, Tensor]:
    """The block under MiMo's names, biases of 0 where the target has none. Raises UserError for
    one that Qwen2's block does not compute.
    """
    block = module.block
    if len(module.blocks) > 1:
        raise refuse(engine, "MiMo's class has one layer; train with drafter.depths=1")
    weights = swapped(block.state_dict(), block.hidden_first != MIMO.hidden_first)
    named = {MIMO.theirs(name): value.detach() for name, value in weights.items()}
    sizes = sides(target.config.to_dict())
    for name in BIASES:
        width = sizes[LAYER[name][0]]
        named.setdefault(name, block.fc.weight.new_zeros(width))
    more = sorted(named.keys() - LAYER.keys() - {"input_proj.weight"})
    if more:
        raise refuse(
            engine,
            f"it has no MTP class for plain targets of this family, and MiMo's has no "
            f"{', '.join(more[:3])}; export --to transformers, or push it, which brings the "
            "decoding loop along",
        )
    if target.config.to_dict().get("hidden_act", "silu") != "silu" or not agrees(module, named):
        raise refuse(engine, "MiMo's block computes something else here; export --to transformers")
    return {PREFIX + name: value for name, value in named.items()}


def agrees(module: MtpModule, named: Mapping[str, Tensor]) -> bool:
    """Whether Qwen2's block with MiMo's norms gives what ours gives, on a few random states."""
    block, size = module.block, module.block.fc.in_features // 2
    source = torch.Generator().manual_seed(0)
    embedded, hidden = (torch.randn(1, 6, size, generator=source) for _ in range(2))
    positions = torch.arange(4, 10)[None]
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    where = block.fc.weight
    device, kind = where.device, where.dtype
    block.float()
    try:
        with torch.no_grad():
            ours = block.norm(
                block(
                    embedded.to(device),
                    hidden.to(device),
                    positions.to(device),
                    mask=causal.to(device),
                )
            )
    finally:
        block.to(kind)
    config = Qwen2Config(**mimo_config(module.target, module))
    config._attn_implementation = "eager"
    theirs = mimo_forward(config, {k: v.float().cpu() for k, v in named.items()}, embedded, hidden)
    return torch.allclose(ours.float().cpu(), theirs, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def mimo_forward(
    config: Any, named: Mapping[str, Tensor], embedded: Tensor, hidden: Tensor
) -> Tensor:
    """What MiMo's class computes of embeddings and states [1, M, D] at positions from 4 on."""
    layer: Any = Qwen2DecoderLayer(config, 0)
    inner = {name: named[name] for name in layer.state_dict()}
    layer.load_state_dict(inner)
    count = embedded.shape[1]
    positions = torch.arange(4, 4 + count)[None]

    def norm(values: Tensor, name: str) -> Tensor:
        weight = named[f"{name}.weight"]
        return torch.nn.functional.rms_norm(values, weight.shape, weight, config.rms_norm_eps)

    read = [norm(hidden, "hidden_layernorm"), norm(embedded, "token_layernorm")]
    joined = torch.nn.functional.linear(torch.cat(read, dim=-1), named["input_proj.weight"])
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    rotate = Qwen2RotaryEmbedding(config)(joined, positions)
    out = layer(joined, attention_mask=mask, position_ids=positions, position_embeddings=rotate)
    return norm(out[0] if isinstance(out, tuple) else out, "final_layernorm")


def read_mimo(folder: Path, source: Source, config: Mapping[str, Any]) -> MtpModule:
    """The layer of MiMo's files. Raises ValueError."""
    target, tensors = source.target, read_tensors(folder)
    shape = target.config.to_dict()
    check_values(
        config,
        {name: shape[name] for name in KEPT}
        | {"num_nextn_predict_layers": 1, "model_type": "qwen2"},
    )
    sizes = sides(shape)
    expected = {PREFIX + name: tuple(sizes[one] for one in LAYER[name]) for name in LAYER}
    expected[f"{PREFIX}input_proj.weight"] = (sizes["D"], 2 * sizes["D"])
    if COPIES[0] in tensors:
        expected |= dict.fromkeys(COPIES, (sizes["V"], sizes["D"]))
    check_tensors(tensors, expected)
    made = fresh(source)
    wanted = {name: PREFIX + MIMO.theirs(name) for name in made.block.state_dict()}
    left = {name for name in expected if name not in (*wanted.values(), *COPIES)}
    if any(bool(tensors[name].any()) for name in left):
        raise ValueError(f"{', '.join(sorted(left))} is not 0, and the target's layers have none")
    weights = {name: tensors[theirs] for name, theirs in wanted.items()}
    return filled(made, [swapped(weights, made.block.hidden_first != MIMO.hidden_first)])


# --- transformers ---


def write_transformers(source: Source, folder: Path) -> None:
    """The native folder: `use_mtp` reads it."""
    mtp_of(source, "transformers")
    copy_files(source.folder, folder, without=("draftsmith.json", "README.md"))


def read_transformers(folder: Path, source: Source) -> MtpModule:
    """The layer as transformers' `MtpModel` loads it. Raises ValueError."""
    config, made = read_config(folder), fresh(source)
    layers = len(made.blocks)
    check_values(
        config, {"num_mtp_layers": layers, "mtp_hidden_states_first": made.block.hidden_first}
    )
    tensors, expected = read_tensors(folder), made.named_weights()
    check_tensors(tensors, {name: tuple(value.shape) for name, value in expected.items()})
    made.load_native(tensors)
    return made.to(source.target.dtype).eval()


@torch.no_grad()
def run_transformers(folder: Path, source: Source, prompt: Tensor, count: int) -> Tensor:
    """`generate(use_mtp=True)`, the target's class told of the layer for that long."""
    model = source.target.model
    with told_of_layer(model, folder):
        found: Tensor = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            use_mtp=True,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=source.target.eos_ids[0] if source.target.eos_ids else 0,
        )
    return found


@contextmanager
def told_of_layer(model: Any, folder: Path) -> Iterator[None]:
    """What transformers asks of a target whose family has no such layer."""
    config = model.config
    told = ("num_mtp_layers", "mtp_layer_types", "mtp_hidden_states_first")
    names = (*told, "name_or_path", "dtype")
    before = {name: getattr(config, name) for name in names if hasattr(config, name)}
    ignored = model._keys_to_ignore_on_load_unexpected
    written = read_config(folder)
    for name in told:
        setattr(config, name, written[name])
    config.name_or_path, config.dtype = str(folder), model.dtype
    first = config.num_hidden_layers  # of ours on, where there are several
    layers = range(first, first + int(written["num_mtp_layers"]))
    several = [rf"model\.layers\.{layer}\..*" for layer in layers]
    model._keys_to_ignore_on_load_unexpected = [r"^mtp\.", *several]
    try:
        yield
    finally:
        model._keys_to_ignore_on_load_unexpected = ignored
        for name in names:
            if name in before:
                setattr(config, name, before[name])
            else:
                delattr(config, name)


# --- shared ---


def mtp_of(source: Source, engine: str) -> MtpModule:
    """The module. Raises UserError where it is applied again to other states than engines do."""
    module = source.drafter
    assert isinstance(module, MtpModule)
    if module.config.recycles != "post_norm":
        raise refuse(
            engine,
            "it feeds the layer its own states after the norm, and this drafter was trained with "
            "those before it; train with drafter.recycles=post_norm",
        )
    if (module.config.reads, module.config.position_shift) != ("post_norm", 0):
        raise refuse(
            engine,
            "it feeds the layer the target's states after the last norm, at the token's own "
            "position; train with drafter.reads=post_norm and drafter.position_shift=0",
        )
    return module


def is_native(target: Target, engine: str) -> bool:
    """Whether the engine knows the target's family as one with such a layer."""
    return str(target.config.model_type).removesuffix("_text") in NATIVE[engine]


def width_of(shape: Mapping[str, Any]) -> int:
    """Numbers of a head."""
    return int(shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"])


def sides(shape: Mapping[str, Any]) -> dict[str, int]:
    """What the letters of LAYER stand for."""
    heads, width = shape["num_attention_heads"], width_of(shape)
    return {
        "D": shape["hidden_size"],
        "F": shape["intermediate_size"],
        "V": shape["vocab_size"],
        "q": heads * width,
        "kv": (shape.get("num_key_value_heads") or heads) * width,
    }


def fresh(source: Source) -> MtpModule:
    """A module like the source's, with all tokens and other weights."""
    config = source.drafter.config
    assert isinstance(config, MtpConfig)
    made = build(
        config.model_copy(update={"start": "random", "draft_vocab": None}), source.target, None
    )
    assert isinstance(made, MtpModule)
    return made


@torch.no_grad()
def filled(module: MtpModule, weights: Sequence[Mapping[str, Tensor]]) -> MtpModule:
    """With these weights, by depth, in the target's dtype."""
    for block, own in zip(module.blocks, weights, strict=True):
        for name, value in block.state_dict().items():
            value.copy_(own[name])
    return module.to(module.target.dtype).eval()
