"""An MTP layer in speculators' layout: the tensors are the family's under other names, the config
nests the target's and names it (the verifier). Embedding and head stay the target's.
"""

from pathlib import Path
from typing import Any

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
from draftsmith.drafters.export_mtp import filled, fresh, mtp_of
from draftsmith.drafters.mtp import MtpModule
from draftsmith.drafters.mtp_files import LAYOUTS, swapped

VERSION = "0.9.0"  # of speculators, whose layout this is
LAYERS = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # of `mtp_model_classes`
LAYOUT = LAYOUTS["speculators"]


def write_mtp_speculators(source: Source, folder: Path) -> None:
    """The layer, and a config that names the target. Raises UserError."""
    module, text = mtp_of(source, "speculators"), source.target.config
    if len(module.blocks) > 1:
        raise refuse("speculators", "its format has one layer; train with drafter.depths=1")
    if text.model_type not in LAYERS:
        raise refuse(
            "speculators",
            f"it has MTP layers for {', '.join(LAYERS)}, and the target is of {text.model_type}; "
            "export --to transformers",
        )
    block = module.block
    weights = swapped(block.state_dict(), block.hidden_first != LAYOUT.hidden_first)
    named = {LAYOUT.at(0) + LAYOUT.theirs(name): value for name, value in weights.items()}
    write_files(folder, speculators_config(source, module), named)


def speculators_config(source: Source, module: MtpModule) -> dict[str, Any]:
    """config.json."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": module.depth}
    return {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {
                "name_or_path": source.meta["target"]["model"],
                "architectures": [type(source.target.model).__name__],
            },
        },
        "transformer_layer_config": source.target.config.to_diff_dict(),
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "dtype": dtype_name(module.block.fc.weight),
    }


def read_mtp_speculators(folder: Path, source: Source) -> MtpModule:
    """What speculators makes of such a folder. Raises ValueError."""
    config, tensors, made = read_config(folder), read_tensors(folder), fresh(source)
    wanted = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    check_values(config, {**wanted, "architectures": ["MTPDraftModel"]})
    shape = source.target.config
    check_values(
        config.get("transformer_layer_config") or {},
        {"model_type": shape.model_type, "hidden_size": shape.hidden_size},
    )
    names = {name: LAYOUT.at(0) + LAYOUT.theirs(name) for name in made.block.state_dict()}
    sizes = {names[name]: tuple(value.shape) for name, value in made.block.state_dict().items()}
    check_tensors(tensors, sizes)
    weights = {name: tensors[theirs] for name, theirs in names.items()}
    return filled(made, [swapped(weights, made.block.hidden_first != LAYOUT.hidden_first)])
