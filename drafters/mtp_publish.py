"""From a trained MTP drafter's folder to a checkpoint of its target with the layer in it."""

from pathlib import Path

from torch import Tensor

from draftsmith.drafters.checkpoint import drafter_config, read_metadata, read_weights
from draftsmith.drafters.mtp_files import checkpoint_folder, own_layout
from draftsmith.drafters.mtp_stitch import stitch
from draftsmith.drafters.target import describe, locate
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig, TargetConfig

WEIGHTS = "model.safetensors"


def publish(drafter: Path, out: Path, *, target: str | None = None, link: bool = False) -> Path:
    """Write the target's checkpoint with a drafter's layers to `out`; the checkpoint it came from.

    target: its folder or Hub id, where it is not where the drafter was trained. No model is loaded.
    Raises UserError.
    """
    meta = read_metadata(drafter)
    config = drafter_config(meta)
    if not isinstance(config, MtpConfig):
        raise UserError(
            f"{drafter} is of kind {config.kind}; only mtp layers have a place in their "
            "target's checkpoint"
        )
    given = {**meta["recipe"]["target"], "device": "cpu"}
    target_config = TargetConfig.model_validate(given | ({"model": target} if target else {}))
    shape = describe(target_config)
    if (shape.hidden_size, shape.vocab_size) != (
        meta["target"]["hidden_size"],
        meta["target"]["vocab_size"],
    ):
        raise UserError(
            f"{drafter} was trained for {meta['target']['model']!r}, of another size than "
            f"{target_config.model!r}; give the target that it was trained for"
        )
    source = checkpoint_folder(locate(target_config))
    blocks = read_blocks(drafter, shape.layers, config.depths)
    first = config.order == "hidden_first"
    stitch(source, blocks, out, layers=shape.layers, hidden_first=first, link=link)
    return source


def read_blocks(drafter: Path, layers: int, depths: int) -> list[dict[str, Tensor]]:
    """The weights of every depth by the names of an `MtpBlock`."""
    layout, tensors = own_layout(depths), read_weights(drafter, WEIGHTS)
    found: list[dict[str, Tensor]] = []
    for depth in range(depths):
        prefix = layout.at(layers, depth)
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if not own:
            raise UserError(f"{drafter}/{WEIGHTS} holds no tensor {prefix}*; train again")
        found.append({layout.ours(name): value for name, value in own.items()})
    return found
