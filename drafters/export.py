"""A block drafter's folder in the layout that plain transformers reads.

From 5.15 on, transformers drafts with `MuseGlimmerAssistantModel`, which is the network of z-lab's
layout under a flat config and two other names:

    target.generate(**inputs, assistant_model=AutoModel.from_pretrained(FOLDER),
                    speculation_type="dflash")

It drafts from the whole vocabulary, one prompt at a time.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from draftsmith.drafters.dflash_format import check_folder
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text

KEPT = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "hidden_act",
    "layer_types",
    "vocab_size",  # vLLM wants it
    "block_size",
    "dtype",
)
RENAMED = {
    "fc.weight": "encoder.fc.weight",
    "hidden_norm.weight": "encoder.output_norm_enc.weight",
}


def assistant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of z-lab's layout -> of transformers'."""
    own = config["dflash_config"]
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **{name: config[name] for name in KEPT},
        "target_layer_ids": list(own["target_layer_ids"]),
        "mask_token_id": own["mask_token_id"],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def assistant_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under transformers' names."""
    return {RENAMED.get(name, name): value for name, value in tensors.items()}


def assistant_model(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The drafter as a transformers model, from z-lab's config and tensors."""
    made: Any = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**assistant_config(config)))
    made.load_state_dict(assistant_tensors(tensors))
    return made.to(getattr(torch, config["dtype"])).eval()


def export_assistant(source: Path, folder: Path) -> None:
    """Write what transformers reads. Raises UserError where the source is not z-lab's layout."""
    try:
        check_folder(source)
    except (OSError, ValueError) as error:
        raise UserError(f"{source}: no block drafter in z-lab's layout ({error})") from error
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    tensors = assistant_tensors(load_file(source / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_text(folder / "config.json", json.dumps(assistant_config(config), indent=1) + "\n")
