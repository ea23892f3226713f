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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.drafters.mtp_files import (
    INDEX,
    LAYOUTS,
    Found,
    find,
    has_layer,
    split,
    swapped,
    tensor_files,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import cannot_write, sync, write_text

ADDED = "model-mtp.safetensors"
CONFIG = "config.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def stitch(
    source: Path, weights: Mapping[str, Tensor], folder: Path, *, layers: int, hidden_first: bool
) -> None:
    """Copy the checkpoint `source` of so many layers to `folder`, with these weights of an
    `MtpBlock` (by its own names; hidden_first: the order of fc's columns). Raises UserError.
    """
    if folder.exists():
        raise UserError(f"{folder} exists; give a folder that does not")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        if has_layer(source, layers):
            overwrite(find(temporary, layers), weights, hidden_first)
        else:
            add(temporary, weights, hidden_first)
        os.chmod(temporary, 0o755)
        os.rename(temporary, folder)
        sync(folder.parent)
    except OSError as error:
        raise UserError(cannot_write(folder, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def overwrite(found: Found, weights: Mapping[str, Tensor], hidden_first: bool) -> None:
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


def add(folder: Path, weights: Mapping[str, Tensor], hidden_first: bool) -> None:
    """A file more, named in the index, and the number of layers in config.json."""
    layout, files = LAYOUTS["mtp"], tensor_files(folder)
    turned = swapped(weights, layout.hidden_first != hidden_first)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    named = {
        layout.prefix + layout.theirs(name): value.detach().cpu().to(dtype).contiguous()
        for name, value in turned.items()
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
    counts = {"num_nextn_predict_layers": 1, "num_mtp_layers": 1, "mtp_num_hidden_layers": 1}
    kinds = {"mtp_layer_types": ["full_attention"]} if "layer_types" in config else {}
    write_text(folder / CONFIG, json.dumps({**config, **counts, **kinds}, indent=2) + "\n")
