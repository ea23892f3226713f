"""The feature cache: the frozen target's states of the packed rows, computed once.

    features/manifest.json             what they were made from
             shard-00000.safetensors   32 rows: `{row}.final` [T, D] and, where layers are tapped,
                                       `{row}.layers` [T, n*D]; in the target's own dtype

Every row goes through the target alone and without padding. So a row's states depend on nothing but
itself, and a resumed cache is the undisturbed one bit for bit. Training without the cache computes
other batches: the two are equal up to rounding. A shard is there whole or not at all; a killed run
goes on with the first that is missing.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftsmith.data.bar import Bar
from draftsmith.data.dataset import PackedRows, fingerprint
from draftsmith.data.plan import free_disk, size
from draftsmith.drafters.fingerprint import remembered
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import cannot_write, sync, write_text
from draftsmith.recipes.stages import flat

FORMAT = 1
MANIFEST = "manifest.json"
ROWS_PER_SHARD = 32


class FeatureCache:
    """The states of all rows in a folder. `check` it, `fill` it, and read it with `states`."""

    def __init__(
        self, target: Target, rows: PackedRows, folder: Path, *, taps: tuple[int, ...] = ()
    ) -> None:
        self.target, self.rows, self.folder, self.taps = target, rows, folder, taps

    def check(self) -> str:
        """What is there, what is to come and the room for it, in words. Writes nothing.

        Raises UserError for states of anything else, and for a disk that is too small.
        """
        check_manifest(self.folder, self.manifest())
        missing = self.missing()
        needed, free = sum(map(self.shard_bytes, missing)), free_disk(self.folder)
        if needed > free:
            raise UserError(
                f"{self.folder}: the target's states need {size(needed)} of disk and {size(free)} "
                "are free; free some, give another folder (runs=FOLDER), or leave out "
                "train.feature_cache"
            )
        if not missing:
            return f"features: {len(self.rows)} rows are read from {self.folder}"
        left = sum(len(self.rows_of(shard)) for shard in missing)
        return (
            f"features: {left} of {len(self.rows)} rows to compute, {size(needed)}; {size(free)} "
            f"are free in {self.folder}"
        )

    def fill(
        self,
        missing: Sequence[int],
        *,
        share: tuple[int, int] = (0, 1),
        shown: bool = True,
        in_lockstep: bool = False,
    ) -> None:
        """Compute the missing shards. Raises UserError where they cannot be written.

        `share` (rank, ranks) divides the shards. All ranks must have looked what is missing before
        one fills. in_lockstep: all ranks make equally many passes, for a target that is spread.
        """
        rank, ranks = share
        shares = [[shard for shard in missing if shard % ranks == one] for one in range(ranks)]
        counts = [sum(len(self.rows_of(shard)) for shard in one) for one in shares]
        shards, count = shares[rank], counts[rank]
        if shards:
            self.write(shards, count, shown=shown)
        for _ in range(max(counts) - count if in_lockstep else 0):
            self.compute(0)

    def write(self, shards: Sequence[int], count: int, *, shown: bool) -> None:
        """Compute these shards, of `count` rows."""
        try:
            text = json.dumps(self.manifest(), indent=2, sort_keys=True)
            write_text(self.folder / MANIFEST, text + "\n")
            with Bar("features", count, "rows", quiet=not shown) as bar:
                for shard in shards:
                    self.fill_shard(shard, bar)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{cannot_write(self.folder, error)}: its whole shards are kept; or leave out "
                "train.feature_cache"
            ) from error

    def fill_shard(self, shard: int, bar: Bar) -> None:
        """Compute a shard and write it: beside its place, synced, then renamed into it."""
        tensors: dict[str, Tensor] = {}
        for row in self.rows_of(shard):
            tensors |= self.compute(row)
            bar.count_tokens(self.rows.length(row))
            bar.advance()
        path = self.path(shard)
        partial = path.with_name(f".{path.name}.partial")  # the next try overwrites it
        save_file(tensors, partial)
        sync(partial)
        os.replace(partial, path)
        sync(self.folder)

    def compute(self, row: int) -> dict[str, Tensor]:
        """The states of a row, under their names in the file."""
        states = self.target.states(self.rows.batch([row]).to(self.target.device), self.taps)
        found = {f"{row}.final": states.final[0].cpu()}
        if states.layers is not None:
            found[f"{row}.layers"] = states.layers[0].cpu()
        return found

    def states(self, rows: Sequence[int]) -> TargetStates:
        """The states of these rows, laid out as `PackedRows.batch` does: zeros behind a row's end.

        Raises UserError for a file that cannot be read.
        """
        final = self.read(rows, "final")
        return TargetStates(final, self.read(rows, "layers") if self.taps else None)

    def read(self, rows: Sequence[int], name: str) -> Tensor:
        """One kind of states, as wide as the longest row: [B, T, D] on the target's device."""
        found = []
        for row in rows:
            path = self.path(row // ROWS_PER_SHARD)
            try:
                with safe_open(path, framework="pt") as file:
                    found.append(file.get_tensor(f"{row}.{name}"))
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{path}: cannot be read ({error}); run again, what is missing is computed anew"
                ) from error
        return pad_sequence(found, batch_first=True).to(self.target.device)

    def manifest(self) -> dict[str, Any]:
        """All that the states depend on."""
        return {
            "format": FORMAT,
            "target": self.target.fingerprint,
            "documents": fingerprint(self.rows.documents)[:16],
            "packing": hashlib.sha256(json.dumps(self.rows.rows).encode()).hexdigest()[:16],
            "max_length": self.rows.max_length,
            "rows": len(self.rows),
            "rows_per_shard": ROWS_PER_SHARD,
            "taps": list(self.taps),
            "dtype": str(self.target.dtype).removeprefix("torch."),
        }

    def missing(self) -> list[int]:
        """Shards that are not there, or damaged."""
        count = -(-len(self.rows) // ROWS_PER_SHARD)
        return [shard for shard in range(count) if not is_whole(self.path(shard))]

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"shard-{shard:05d}.safetensors"

    def rows_of(self, shard: int) -> range:
        """The rows of a shard."""
        first = shard * ROWS_PER_SHARD
        return range(first, min(first + ROWS_PER_SHARD, len(self.rows)))

    def shard_bytes(self, shard: int) -> int:
        """Bytes of a shard's numbers; its header adds about a hundred a row."""
        tokens = sum(map(self.rows.length, self.rows_of(shard)))
        width = self.target.hidden_size * (1 + len(self.taps))
        return int(tokens * width * self.target.dtype.itemsize)


def check_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises UserError for a folder that holds the states of anything else."""
    path, again = folder / MANIFEST, "remove the folder, it is made anew"
    if not path.is_file():
        if any(folder.glob("shard-*")):
            raise UserError(f"{folder}: no {MANIFEST} says whose states these are; {again}")
        return
    try:
        there = json.loads(path.read_bytes())
        there = flat({**there, "target": remembered(there["target"], manifest["target"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: is damaged ({error}); {again}") from error
    here = flat(manifest)
    differing = [
        f"{name} {there.get(name)} / {here.get(name)}"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if differing:
        raise UserError(
            f"{folder}: its states were computed from something else ({'; '.join(differing)}; "
            f"there / here); {again}"
        )


def is_whole(path: Path) -> bool:
    """Whether a shard is there and as long as its header says."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
