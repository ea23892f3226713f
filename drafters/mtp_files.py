"""MTP layers in a target's own checkpoint: transformers leaves them out, we read them from the
files.

Every family has names of its own, and some read the state first (`LAYOUTS`). Norms are kept as the
family keeps them: the block has the family's own classes.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.recipes.errors import UserError

MOST = 16  # MTP layers that are looked for
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EXPERT = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")  # fused in transformers' modules


@dataclass(frozen=True)
class Layout:
    """How a family names an MTP layer. `{n}` is the number of the target's layers and those before
    it, `{i}` that of those before it.
    """

    prefix: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    layer: str  # in front of what the decoder layer calls its own
    hidden_first: bool = False
    copies: tuple[str, ...] = ()  # of the target's embedding and head, which may be there

    def at(self, layers: int, depth: int = 0) -> str:
        """The prefix of the MTP layer of this depth (0-based), behind so many layers."""
        return self.prefix.format(n=layers + depth, i=depth)

    def first(self, layers: int, depth: int = 0) -> str:
        """The tensor by which such a layer is known."""
        return f"{self.at(layers, depth)}{self.fc}.weight"

    def theirs(self, name: str) -> str:
        """A tensor of `MtpBlock` as this family names it, behind the prefix."""
        known = {
            "fc": self.fc,
            "pre_fc_norm_embedding": self.embedding_norm,
            "pre_fc_norm_hidden": self.hidden_norm,
            "norm": self.norm,
        }
        first, _, rest = name.partition(".")
        return f"{known[first]}.{rest}" if first in known else f"{self.layer}{rest}"

    def ours(self, name: str) -> str:
        """A tensor of this family, without the prefix, as `MtpBlock` names it."""
        outer = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        for own in outer:
            if name == self.theirs(f"{own}.{name.rpartition('.')[2]}"):
                return f"{own}.{name.rpartition('.')[2]}"
        return f"layer.{name.removeprefix(self.layer)}"


LAYOUTS = {
    # Qwen3-Next, Qwen3.5, and what a drafter of a dense target is kept as
    "mtp": Layout(
        prefix="mtp.",
        fc="fc",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        norm="norm",
        layer="layers.0.",
    ),
    # DeepSeek-V3, GLM-4-MoE
    "next layer": Layout(
        prefix="model.layers.{n}.",
        fc="eh_proj",
        embedding_norm="enorm",
        hidden_norm="hnorm",
        norm="shared_head.norm",
        layer="",
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    # MiMo
    "mtp_layers": Layout(
        prefix="model.mtp_layers.{i}.",
        fc="input_proj",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        norm="final_layernorm",
        layer="",
        hidden_first=True,
    ),
    # speculators, whose drafters have a folder of their own
    "speculators": Layout(
        prefix="mtp_layers.{i}.",
        fc="input_proj",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        norm="final_layernorm",
        layer="",
    ),
}


@dataclass(frozen=True)
class Found:
    """An MTP layer in a checkpoint's files."""

    name: str  # of the layout
    layout: Layout
    prefix: str
    files: dict[str, Path]  # by the tensor's whole name; all tensors of the checkpoint

    @property
    def names(self) -> list[str]:
        """Its tensors, without the prefix."""
        n = len(self.prefix)
        return [name[n:] for name in self.files_of_layer()]

    def files_of_layer(self) -> list[str]:
        """Its tensors by their whole names."""
        return [name for name in self.files if name.startswith(self.prefix)]


def own_layout(depths: int) -> Layout:
    """The layout that a drafter of so many layers is kept in: `mtp.*` has room for one."""
    return LAYOUTS["mtp" if depths == 1 else "next layer"]


def find(folder: Path, layers: int, depth: int = 0) -> Found:
    """The MTP layer of this depth (0-based) of a checkpoint of so many layers. Raises UserError
    where there is none.
    """
    files = tensor_files(folder)
    for name, layout in LAYOUTS.items():
        own = (layout.prefix != "mtp." or depth == 0) and layout.first(layers, depth) in files
        if own:
            return Found(name, layout, layout.at(layers, depth), files)
    if depth > 0 and has_layer(folder, layers):
        raise UserError(
            f"drafter.depths: {folder} has {count_layers(folder, layers)} MTP layers; give as many "
            "or fewer"
        )
    tried = ", ".join(layout.first(layers) for layout in LAYOUTS.values())
    raise UserError(
        f"drafter.start: {folder} has no MTP layer (no tensor {tried}); use start: last_layer"
    )


def count_layers(folder: Path, layers: int) -> int:
    """How many MTP layers a checkpoint of so many layers has."""
    files = tensor_files(folder)
    found = (
        sum(
            layout.first(layers, depth) in files
            for depth in range(MOST if "{" in layout.prefix else 1)
        )
        for layout in LAYOUTS.values()
    )
    return max(found)


def has_layer(folder: Path, layers: int) -> bool:
    """Whether a checkpoint of so many layers has an MTP layer that we know."""
    files = tensor_files(folder)
    return any(layout.first(layers) in files for layout in LAYOUTS.values())


def tensor_files(folder: Path, *, single: str = SINGLE) -> dict[str, Path]:
    """Which file every tensor of a checkpoint is in. Raises UserError where it cannot be read."""
    index = folder / INDEX
    try:
        if index.is_file():
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in found.items()}
        with safe_open(folder / single, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / single)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"drafter.start: cannot read the weights in {folder} ({reason}); give a target with "
            f"safetensors, {SINGLE} or {INDEX}"
        ) from error


def checkpoint_folder(name_or_path: str) -> Path:
    """Where a loaded model's files are: its folder, or the Hub's cache of it."""
    path = Path(name_or_path)
    if path.is_dir():
        return path
    cached = try_to_load_from_cache(name_or_path, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    raise UserError(
        f"drafter.start: the files of {name_or_path} are not on this machine; give the target as a "
        "folder"
    )


def read_block(
    found: Found, expected: Mapping[str, Tensor], *, hidden_first: bool
) -> dict[str, Tensor]:
    """The parameters of an `MtpBlock` by its own names; expected: those names and their shapes.
    Raises UserError for tensors that are missing, of other shapes, or that the block lacks.
    """
    given = {name: load(found, name) for name in found.names if name not in found.layout.copies}
    wanted = {name: found.layout.theirs(name) for name in expected}
    fused = {name: fuse(given, theirs) for name, theirs in wanted.items()}
    missing = [wanted[name] for name, value in fused.items() if value is None]
    unlike = [
        f"{wanted[name]} {tuple(value.shape)}"
        for name, value in fused.items()
        if value is not None and value.shape != expected[name].shape
    ]
    known = {part for theirs in wanted.values() for part in parts(given, theirs)}
    unexpected = sorted(given.keys() - known)
    if missing or unlike or unexpected:
        raise UserError(
            f"drafter.start: the MTP layer {found.prefix}* is not one of the target's own layers: "
            f"missing {some(missing)}; unexpected {some(unexpected)}; other shapes {some(unlike)}"
        )
    tensors = {name: value for name, value in fused.items() if value is not None}
    return swapped(tensors, found.layout.hidden_first != hidden_first)


def load(found: Found, name: str) -> Tensor:
    """A tensor of the MTP layer."""
    whole = found.prefix + name
    with safe_open(found.files[whole], framework="pt") as file:
        value: Tensor = file.get_tensor(whole)
    return value


def swapped(tensors: Mapping[str, Tensor], other_order: bool) -> dict[str, Tensor]:
    """With the halves of fc's columns exchanged, where the order is another."""
    weight = tensors["fc.weight"]
    turned = torch.cat(weight.chunk(2, dim=1)[::-1], dim=1) if other_order else weight
    return {**tensors, "fc.weight": turned}


def parts(given: Collection[str], theirs: str) -> list[str]:
    """The tensors of a file that make up a parameter: itself, or those of every expert in turn."""
    match = EXPERT.fullmatch(theirs)
    if match is None or theirs in given:
        return [theirs]
    count = sum(f"{match[1]}.{i}.down_proj.weight" in given for i in range(len(given)))
    kinds = ["gate_proj", "up_proj"] if match[2] == "gate_up_proj" else ["down_proj"]
    return [f"{match[1]}.{i}.{kind}.weight" for i in range(count) for kind in kinds]


def fuse(given: Mapping[str, Tensor], theirs: str) -> Tensor | None:
    """A parameter from its parts; None where one is missing."""
    found = [given.get(name) for name in parts(given, theirs)]
    values = [value for value in found if value is not None]
    if not values or len(values) < len(found):
        return None
    if theirs in given:
        return values[0]
    if theirs.endswith("down_proj"):
        return torch.stack(values)
    return torch.stack([torch.cat(pair) for pair in zip(values[::2], values[1::2], strict=True)])


def split(given: Collection[str], theirs: str, value: Tensor) -> dict[str, Tensor]:
    """What `fuse` put together, apart again: the tensors of a file by their names."""
    names = parts(given, theirs)
    if names == [theirs]:
        return {theirs: value}
    count = 2 if "gate_up_proj" in theirs else 1
    pieces = [piece for expert in value for piece in expert.chunk(count)]
    return dict(zip(names, pieces, strict=True))


def some(names: list[str]) -> str:
    """The first few."""
    return "none" if not names else ", ".join(names[:4]) + (", .." if len(names) > 4 else "")
