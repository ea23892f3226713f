"""What a local target's folder holds, as one short digest: has somebody put other weights there?"""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

BLOCK = 64 << 10  # bytes
BLOCKS = 16  # read of every file, spread over all of it
LONGEST_HEADER = 32 << 20  # bytes; of a file that is no safetensors file, the length is anything


def folder_content(folder: Path) -> str:
    """Digest of config.json and of every safetensors file: its size, its header (names, shapes and
    dtypes) and a few sampled blocks. Whole files would take minutes.
    """
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.is_file() else b"")
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"\0{path.name}\0{size}\0".encode("utf-8", "surrogateescape"))
            digest.update(header(file))
            for start in block_starts(size):
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()[:16]


def header(file: BinaryIO) -> bytes:
    """The header of an open safetensors file: its length (8 bytes, little-endian) and its JSON."""
    length = file.read(8)
    return length + file.read(min(int.from_bytes(length, "little"), LONGEST_HEADER))


def block_starts(size: int) -> list[int]:
    """Where the sampled blocks begin: the first, the last, and evenly between them."""
    last = max(0, size - BLOCK)
    return sorted({last * number // (BLOCKS - 1) for number in range(BLOCKS)})
