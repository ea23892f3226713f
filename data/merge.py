"""Rows of several machines as one folder.

Machines that ran one recipe with `data.distil.share` have one plan, and their rows together are
what one machine would have made. Folders of other prompts can join too, if all else agrees.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.distill import digest
from draftsmith.data.rows import (
    DROPPED,
    MANIFEST,
    ROWS,
    Row,
    RowFile,
    check_drop,
    count_missing,
    dropped_rows,
    finished_rows,
    read_manifest,
    rounds,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import write_text
from draftsmith.recipes.stages import compare, flat


@dataclass(frozen=True)
class Merged:
    """What lies in the folder now."""

    rows: int
    dropped: int
    repeated: int  # rows of keys that were there already
    missing: int  # that no machine has made yet


def merge(out: Path, folders: Sequence[Path]) -> Merged:
    """Add the rows of folders to `out`, which may be one of them. Raises UserError before anything
    is written where they cannot be mixed.
    """
    names = sorted({one.relative_to(folder) for folder in folders for one in rounds(folder)})
    parts = {
        name: [folder / name for folder in folders if (folder / name / MANIFEST).is_file()]
        for name in names
    }
    for folder in folders:
        read_manifest(folder)  # or there is nothing to merge
    # All is checked before anything is written.
    plans = {name: agreed_manifest(found) for name, found in parts.items()}
    merged = [merge_round(out / name, parts[name], plans[name]) for name in names]
    return Merged(
        rows=sum(one.rows for one in merged),
        dropped=sum(one.dropped for one in merged),
        repeated=sum(one.repeated for one in merged),
        missing=sum(one.missing for one in merged),
    )


def agreed_manifest(folders: Sequence[Path]) -> dict[str, Any]:
    """The manifest of all together. Raises UserError for rows that cannot be mixed."""
    manifests = [read_manifest(folder) for folder in folders]
    for folder, other in zip(folders[1:], manifests[1:], strict=True):
        then, now = ({k: v for k, v in m.items() if k != "prompts"} for m in (manifests[0], other))
        if differences := compare(flat(then), flat(now)):
            raise UserError(
                f"{folders[0]} (there) and {folder} (here) were made differently and cannot be "
                f"mixed: {'; '.join(differences)}"
            )
    asked = asked_prompts(folders)
    if all(manifest["prompts"] == manifests[0]["prompts"] for manifest in manifests):
        return manifests[0]
    for folder in folders:
        if count_missing(folder) > 0:
            raise UserError(
                f"{folder}: {count_missing(folder)} of its rows are missing, and its prompts are "
                "not those of the others; let `draftsmith data` finish it first"
            )
    return manifests[0] | {"prompts": digest(asked.items())}


def asked_prompts(folders: Sequence[Path]) -> dict[str, list[int]]:
    """Token ids by key. Raises UserError for a key that means two prompts."""
    asked: dict[str, list[int]] = {}
    for folder in folders:
        for key, row in (dropped_rows(folder) | finished_rows(folder)).items():
            if asked.setdefault(key, row["prompt_ids"]) != row["prompt_ids"]:
                raise UserError(
                    f"{folder}: its key {key!r} is another prompt than in the other folders; "
                    "rename it in the prompts of one of them"
                )
    return asked


def merge_round(out: Path, folders: Sequence[Path], manifest: dict[str, Any]) -> Merged:
    """Add the rows of one round; of several for a key, the first one found is kept."""
    repeated = 0
    with RowFile(out / ROWS) as rows:
        for folder in folders:
            found = finished_rows(folder)
            new = [row for key, row in found.items() if key not in rows.keys]
            repeated += len(found) - len(new) if folder.resolve() != out.resolve() else 0
            rows.append(new)
        losses: dict[str, Row] = {}
        for folder in folders:
            losses |= dropped_rows(folder)
        losses = {key: loss for key, loss in losses.items() if key not in rows.keys}
        if losses:
            with RowFile(out / DROPPED, check_drop) as dropped:
                dropped.append([loss for key, loss in losses.items() if key not in dropped.keys])
        write_text(out / MANIFEST, json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        return Merged(len(rows.keys), len(losses), repeated, max(0, count_missing(out)))
