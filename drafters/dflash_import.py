"""Reading a block drafter that was made elsewhere, in z-lab's layout or speculators'."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.drafters.dflash import DFlash, scalars_of
from draftsmith.drafters.dflash_speculators import native_view, split_tensors
from draftsmith.drafters.geometry import Geometry, geometry_of, rope_of
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DFlashConfig

SAME = {"hidden_size": "hidden", "rms_norm_eps": "eps"}  # as the target's, by a config's names
SCALARS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
OWN = {  # knobs, by a config's names
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate",
}


def import_dflash(folder: Path, target: Target) -> DFlash:
    """The drafter of a folder in either layout, for decoding or further training. Raises UserError
    where it is none, is for another target, or has what ours have not.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors, ids = load_file(folder / "model.safetensors"), None
        if "speculators_model_type" in config:
            tensors, ids = split_tensors(tensors, target.head_weight, target.embedding)
            config = native_view(config)
        knobs = read_config(config, geometry_of(target.config))
        knobs = knobs.model_copy(update={"draft_vocab": None if ids is None else len(ids)})
        check_scalars(config, target)
        made = DFlash(knobs, target, ids)
        made.load_native(tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: no block drafter for {target.name} ({reason(error)})"
        ) from error
    return made.to(target.device)


def check_scalars(config: Mapping[str, Any], target: Target) -> None:
    """Raises ValueError where it was trained on otherwise scaled embeddings or logits."""
    wanted, own = scalars_of(target), config.get("dflash_config", {})
    for name in SCALARS:
        given = own.get(name, config.get(name))
        plain = None if name == "final_logit_softcapping" else 1.0
        if (plain if given is None else given) != wanted.get(name, plain):
            raise ValueError(f"its {name} is {given}, and the target's {wanted.get(name, plain)}")


def reason(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, KeyError):
        return f"its config.json has no {error}"
    if isinstance(error, ValidationError):
        detail = error.errors()[0]
        return " ".join([*map(str, detail["loc"]), detail["msg"]])
    return " ".join(str(error).split())


def read_config(config: Mapping[str, Any], shape: Geometry) -> DFlashConfig:
    """Our knobs. Raises ValueError for a network that is not ours, KeyError for what is missing."""
    own, layers = config.get("dflash_config", {}), config["num_hidden_layers"]
    differing = [name for name, mine in SAME.items() if config[name] != getattr(shape, mine)]
    if rope_of(dict(config)) != shape.rope:
        differing.append("rope_parameters")
    if differing:
        raise ValueError(f"its {', '.join(differing)} is not that of the target's layers")
    measures = {knob: config[name] for name, knob in OWN.items()}
    given = {knob: one for knob, one in measures.items() if one != getattr(shape, knob)}
    kinds = config.get("layer_types") or ["full_attention"] * layers
    if set(kinds) != {"full_attention"} or config.get("attention_bias"):
        raise ValueError("it has sliding layers or biases, which are not supported")
    return DFlashConfig(
        kind="dflash",
        block_size=own.get("block_size") or config["block_size"],
        layers=layers,
        taps=tuple(own["target_layer_ids"]),
        mask_token_id=own["mask_token_id"],
        **given,
    )
