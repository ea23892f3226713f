"""A block drafter's folder in speculators' layout, which vLLM serves by the folder alone.

The tensors are z-lab's. The config nests the layers' measures, counts the embedding as layer 0
(a tap is one more than the layer whose output it is), and names the target (the verifier). With a
reduced vocabulary it also has `d2t` (offsets: target id = draft id + d2t[draft id]), `t2d` and the
rows of the head; ours are rows of the target's.

vLLM reads `sliding_window_non_causal` as the causality of all layers, full ones too: it is true in
what is written here, and where layers are full it says nothing to others.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from draftsmith.drafters.dflash_format import check_folder, expected_shapes
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text

VERSION = "0.9.0"  # of speculators, whose layout this is
OUTSIDE = (  # of z-lab's config: no measures of layers
    "architectures",
    "block_size",
    "num_target_layers",
    "dflash_config",
    "dtype",
)
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "verifier_norm.weight")
VOCABULARY = ("d2t", "t2d")


def speculators_config(
    config: Mapping[str, Any], *, verifier: str, architectures: list[str]
) -> dict[str, Any]:
    """config.json of z-lab's layout -> of speculators'. verifier: the target's folder or Hub id."""
    own = config["dflash_config"]
    proposal = {"proposal_type": "greedy", "speculative_tokens": own["block_size"] - 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {**proposal, "accept_tolerance": 0.0, "verifier_accept_k": 1},
            ],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": {k: v for k, v in config.items() if k not in OUTSIDE},
        "block_size": own["block_size"],
        "target_hidden_size": config["hidden_size"],
        "draft_vocab_size": config["vocab_size"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
    }


def export_speculators(
    source: Path, folder: Path, *, verifier: str, architectures: list[str]
) -> None:
    """Write what speculators and vLLM read; it drafts from the whole vocabulary. Raises UserError
    where the source is not z-lab's layout.
    """
    try:
        check_folder(source)
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: no block drafter in z-lab's layout ({error})") from error
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    made = speculators_config(config, verifier=verifier, architectures=architectures)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_text(folder / "config.json", json.dumps(made, indent=1) + "\n")
    check_speculators(folder)


def check_speculators(folder: Path) -> None:
    """Raises ValueError for a folder that speculators or vLLM refuses or misreads."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        check_config(config)
        want = expected_shapes(native_view(config))
    except (KeyError, TypeError) as error:
        raise ValueError(f"config.json: {error} is missing or of another type") from error
    tensors = load_file(folder / "model.safetensors")
    have = {name: tuple(one.shape) for name, one in tensors.items()}
    extra = {*TARGETS_OWN, *VOCABULARY}
    wrong = sorted(n for n in want.keys() | have.keys() - extra if want.get(n) != have.get(n))
    if wrong:
        raise ValueError(
            f"model.safetensors: {', '.join(wrong)} is missing, left over or misshapen"
        )
    reduced = config["draft_vocab_size"] < config["transformer_layer_config"]["vocab_size"]
    absent = [name for name in (*VOCABULARY, "lm_head.weight") if name not in have]
    if reduced and absent:
        raise ValueError(f"model.safetensors: a reduced vocabulary needs {', '.join(absent)}")


def check_config(config: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the field, for a config that is misread; KeyError for missing."""
    layers, made = config["transformer_layer_config"], config["speculators_config"]
    taps, block = config["aux_hidden_state_layer_ids"], config["block_size"]
    kinds = layers.get("layer_types") or []
    drafted = [one["speculative_tokens"] for one in made["proposal_methods"]]
    demands = {
        "speculators_model_type": config["speculators_model_type"] == "dflash",
        "architectures": config["architectures"] == ["DFlashDraftModel"],
        "speculators_config.algorithm": made["algorithm"] == "dflash",
        "speculators_config.proposal_methods": drafted == [block - 1],
        "speculators_config.verifier": bool(made["verifier"]["name_or_path"]),
        "transformer_layer_config.model_type": layers["model_type"] == "qwen3",
        "transformer_layer_config.layer_types": set(kinds) <= {"full_attention"},
        "transformer_layer_config.attention_bias": not layers.get("attention_bias"),
        "sliding_window_non_causal": config["sliding_window_non_causal"] is True,
        "sample_from_anchor": not config.get("sample_from_anchor"),
        "target_hidden_size": config.get("target_hidden_size") in (None, layers["hidden_size"]),
        "aux_hidden_state_layer_ids": len(taps) > 0 and taps == sorted({*taps}) and taps[0] > 0,
        "mask_token_id": 0 <= config["mask_token_id"] < layers["vocab_size"],
        "draft_vocab_size": 0 < config["draft_vocab_size"] <= layers["vocab_size"],
    }
    wrong = [name for name, holds in demands.items() if not holds]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)} would not mean the same to all readers")


def native_view(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config of speculators says in z-lab's words. Raises ValueError for what they lack."""
    if config.get("sample_from_anchor"):
        raise ValueError("it drafts from the root's own place, which is not supported")
    # They leave out what is Qwen3's default.
    layers: dict[str, Any] = Qwen3Config(**config["transformer_layer_config"]).to_dict()
    return {
        **layers,
        "dflash_config": {
            "block_size": config["block_size"],
            "target_layer_ids": [tap - 1 for tap in config["aux_hidden_state_layer_ids"]],
            "mask_token_id": config["mask_token_id"],
        },
    }


def split_tensors(
    tensors: Mapping[str, Tensor], head: Tensor, embedding: Tensor
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Tensors of speculators' layout -> (the drafter's own, its vocabulary [Vq] or None for all).

    What is the target's must be the target's: head and embedding [V, D]. Raises ValueError.
    """
    ids = None
    if "d2t" in tensors:
        offsets = tensors["d2t"].long()
        ids = offsets + torch.arange(len(offsets))
        if "t2d" in tensors and not torch.equal(tensors["t2d"].bool().nonzero()[:, 0], ids):
            raise ValueError("its d2t and t2d name different tokens")
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(head):
            raise ValueError("its d2t names tokens that the target has not")
    rows = head.cpu() if ids is None else head.cpu()[ids]
    for name, want in (("lm_head.weight", rows), ("embed_tokens.weight", embedding.cpu())):
        have = tensors.get(name)
        if have is not None and (
            have.shape != want.shape or not torch.allclose(have.float(), want.float(), atol=1e-2)
        ):
            raise ValueError(f"its {name} is not the target's")
    left = {*TARGETS_OWN, *VOCABULARY}
    return {name: value for name, value in tensors.items() if name not in left}, ids
