"""A trained MTP layer put back into a copy of its target's checkpoint, in the family's own layout.

What is there already is overwritten in place, in its own dtype: every other byte of the files stays
what it is. Where the checkpoint has no such layer, a file is added for it, and an index that names
it. The folder is there whole or not at all.
"""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.drafters.mtp_files import (
    INDEX,
    SINGLE,
    Found,
    find,
    has_layer,
    own_layout,
    some,
    split,
    swapped,
    tensor_files,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import cannot_write, sync, write_text

Weights = Mapping[str, Tensor]  # of an `MtpBlock`, by its own names

RENAMED = "model-00001-of-00001.safetensors"
ADDED = "model-mtp.safetensors"
CONFIG = "config.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def stitch(
    source: Path,
    blocks: Sequence[Weights],
    folder: Path,
    *,
    layers: int,
    hidden_first: bool,
    link: bool = False,
) -> None:
    """Copy the checkpoint `source` of so many layers to `folder`, with the weights of an `MtpBlock`
    for every depth (by its own names; hidden_first: the order of fc's columns).

    link: files that stay as they are become links to those in `source`. Raises UserError.
    """
    if folder.exists():
        raise UserError(f"{folder} exists; give a folder that does not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    there = has_layer(source, layers)
    found = [find(source, layers, depth) for depth in range(len(blocks))] if there else []
    for one, weights in zip(found, blocks, strict=False):
        check_names(one, weights)
    touched = {one.files[name].name for one in found for name in one.files_of_layer()}
    touched |= set() if there else {CONFIG, INDEX}
    try:
        for path in sorted(source.iterdir()):
            take(path, temporary, link=link and path.name not in touched)
        if there:
            for depth, weights in enumerate(blocks):
                overwrite(find(temporary, layers, depth), weights, hidden_first)
        else:
            add(temporary, blocks, layers, hidden_first)
        os.chmod(temporary, 0o755)
        os.rename(temporary, folder)
        sync(folder.parent)
    except OSError as error:
        raise UserError(cannot_write(folder, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def take(path: Path, folder: Path, *, link: bool) -> None:
    """Copy a file or a folder into a folder, or link it there."""
    if link:
        (folder / path.name).symlink_to(path.resolve())
    elif path.is_dir():
        shutil.copytree(path, folder / path.name)
    else:
        shutil.copy(path, folder)


def check_names(found: Found, weights: Weights) -> None:
    """UserError, by name, unless the checkpoint's layer has these tensors and no others."""
    there = set(found.names)
    wanted = {
        part: tuple(value.shape)
        for name, whole in weights.items()
        for part, value in split(there, found.layout.theirs(name), whole).items()
    }
    missing = sorted(wanted.keys() - there)
    unexpected = sorted(there - wanted.keys() - set(found.layout.copies))
    unlike = [name for name in wanted if name in there and shape(found, name) != wanted[name]]
    if missing or unexpected or unlike:
        raise UserError(
            f"the MTP layer {found.prefix}* of the checkpoint is not the drafter's: missing "
            f"{some(missing)}; unexpected {some(unexpected)}; other shapes {some(unlike)}"
        )


def shape(found: Found, name: str) -> tuple[int, ...]:
    """Of a tensor of the layer."""
    with safe_open(found.files[found.prefix + name], framework="pt") as file:
        return tuple(file.get_slice(found.prefix + name).get_shape())


def overwrite(found: Found, weights: Weights, hidden_first: bool) -> None:
    """Put new numbers where the layer's old ones are."""
    turned = swapped(weights, found.layout.hidden_first != hidden_first)
    there = set(found.names)
    for name, value in turned.items():
        for theirs, part in split(there, found.layout.theirs(name), value).items():
            whole = found.prefix + theirs
            patch(found.files[whole], whole, part)


def patch(path: Path, name: str, value: Tensor) -> None:
    """Overwrite a tensor in a safetensors file: eight bytes say how long the header is, which says
    where the tensor lies behind it.
    """
    with open(path, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
        entry = header[name]
        if entry["dtype"] not in DTYPES:
            raise UserError(
                f"{path}: {name} is of {entry['dtype']}; supported are {', '.join(DTYPES)}"
            )
        data = value.detach().cpu().to(DTYPES[entry["dtype"]]).contiguous().view(torch.uint8)
        start, end = entry["data_offsets"]
        assert list(value.shape) == entry["shape"] and data.numel() == end - start
        file.seek(8 + length + start)
        file.write(data.numpy().tobytes())
    sync(path)


def add(folder: Path, blocks: Sequence[Weights], layers: int, hidden_first: bool) -> None:
    """A file more, named in the index, and the number of layers in config.json."""
    if (folder / SINGLE).exists() and not (folder / INDEX).is_file():
        os.rename(folder / SINGLE, folder / RENAMED)  # beside it, no index would be read
    layout, files = own_layout(len(blocks)), tensor_files(folder, single=RENAMED)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    named = {
        layout.at(layers, depth) + layout.theirs(name): value.detach().cpu().to(dtype).contiguous()
        for depth, weights in enumerate(blocks)
        for name, value in swapped(weights, layout.hidden_first != hidden_first).items()
    }
    save_file(named, folder / ADDED, metadata={"format": "pt"})
    sync(folder / ADDED)
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    sizes = sum(value.numel() * value.element_size() for value in named.values())
    if "total_size" in index["metadata"]:
        index["metadata"]["total_size"] += sizes
    index["weight_map"] = {name: path.name for name, path in files.items()} | dict.fromkeys(
        named, ADDED
    )
    write_text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    names = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
    more: dict[str, Any] = dict.fromkeys(names, len(blocks))
    if "layer_types" in config:
        more["mtp_layer_types"] = ["full_attention"] * len(blocks)
    write_text(folder / CONFIG, json.dumps({**config, **more}, indent=2) + "\n")
