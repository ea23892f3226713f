"""Distilled rows to documents, and documents to packed batches."""

import hashlib
import random
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from draftsmith.data.prompts import first_key, keyed_number, listed
from draftsmith.data.rows import check_complete, read_rows
from draftsmith.drafters.slots import Batch
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig

PADDING_ID = 0  # any valid id: masks come from lengths, never from values


@dataclass(frozen=True)
class Document:
    """A prompt and its answer as tokens. `supervised` marks the answer."""

    key: str
    category: str
    ids: tuple[int, ...]
    supervised: tuple[bool, ...]
    greedy: bool
    finish_reason: Literal["stop", "length"]
    known: tuple[bool, ...] = ()  # tokens that another drafter guesses: no labels of this one


def documents_from_rows(
    rows: Iterable[Mapping[str, Any]], config: DataConfig
) -> tuple[list[Document], Counter[str]]:
    """Rows as documents of at most `max_length` tokens, and why others were dropped.

    Token ids are taken as they were generated: text is never tokenised again.
    """
    documents: list[Document] = []
    dropped: Counter[str] = Counter()
    for row in rows:
        reason = _reason_to_drop(row, config)
        if reason is None:
            documents.append(_document(row, config))
        else:
            dropped[reason] += 1
    return documents, dropped


def training_documents(folder: Path, config: DataConfig) -> tuple[list[Document], Counter[str]]:
    """Documents of a folder of rows, and why others were dropped; UserError when none is left."""
    rows = read_rows(folder)
    check_complete(folder)
    documents, dropped = documents_from_rows(rows, config)
    if not documents:
        raise UserError(
            f"{folder}: every row was dropped ({listed(dropped)}), no row is left to train on; "
            "relax data.max_length, data.min_supervised_tokens or data.cut_answers"
        )
    return documents, dropped


def split_held_out(
    documents: Sequence[Document], count: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training, held out): chosen by key, so that more or reordered documents change little.

    Answers to one prompt stay together, or training would have seen what is held out: the last
    prompt that is chosen may bring more than `count`.
    """
    if count >= len(documents):
        raise UserError(
            f"data.held_out: {count} documents are to be kept away from training and there are "
            f"only {len(documents)}; lower it, or give more prompts"
        )
    answers = Counter(first_key(document.key) for document in documents)
    prompts: set[str] = set()
    for prompt in sorted(answers, key=lambda key: keyed_number(seed, "held out", key)):
        if sum(answers[key] for key in prompts) >= count:
            break
        prompts.add(prompt)
    held = {document.key for document in documents if first_key(document.key) in prompts}
    train = [document for document in documents if document.key not in held]
    if not train:
        raise UserError(
            f"data.held_out: {count} documents are to be kept away from training, and with the "
            "other answers to their prompts that is all; give more prompts"
        )
    return train, [document for document in documents if document.key in held]


def fingerprint(documents: Sequence[Document]) -> str:
    """Digest of what is trained on: ids, their supervision and what is known, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(array("q", document.ids).tobytes() + bytes(document.supervised) + b";")
        digest.update(bytes(document.known))
    return digest.hexdigest()


def pack(documents: Sequence[Document], max_length: int) -> list[list[int]]:
    """Indices of documents for rows of at most `max_length` tokens: best fit, longest first.

    Every document goes to the fullest row that still has room: rows end up nearly full.
    """
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free tokens -> rows that have exactly so many
    room: list[int] = []  # the keys of with_room, ascending
    order = sorted(range(len(documents)), key=lambda i: (-len(documents[i].ids), i))
    for i in order:
        length = len(documents[i].ids)
        assert 0 < length <= max_length, f"a document of {length} tokens in rows of {max_length}"
        at = bisect_left(room, length)
        if at < len(room):
            free = room[at]
            row = with_room[free].pop()
            if not with_room[free]:
                del with_room[free], room[at]
            rows[row].append(i)
        else:
            free, row = max_length, len(rows)
            rows.append([i])
        if free - length not in with_room:
            insort(room, free - length)
        with_room.setdefault(free - length, []).append(row)
    return rows


class PackedRows:
    """Documents in packed rows: which rows an optimizer step sees, and their batches."""

    def __init__(self, documents: Sequence[Document], max_length: int) -> None:
        self.documents, self.max_length = documents, max_length
        self.rows = pack(documents, max_length)
        self.tokens = sum(len(document.ids) for document in documents)
        self.supervised = sum(sum(document.supervised) for document in documents)

    def __len__(self) -> int:
        return len(self.rows)

    def steps(self, epoch: int, rows_per_step: int, seed: int) -> list[list[int]]:
        """Row indices of every optimizer step of an epoch, shuffled by seed and epoch alone.

        Steps differ by one row at most: a short last one would be noisy at full learning rate.
        """
        order = list(range(len(self.rows)))
        random.Random(f"{seed} {epoch}").shuffle(order)
        count = -(-len(order) // rows_per_step)
        borders = [step * len(order) // count for step in range(count + 1)] if count else [0]
        return [order[a:b] for a, b in pairwise(borders)]

    def length(self, row: int) -> int:
        """Tokens of a row."""
        return sum(len(self.documents[i].ids) for i in self.rows[row])

    def batch(self, row_indices: Sequence[int]) -> Batch:
        """These rows, as wide as the longest of them.

        Positions restart at every document, and padding counts as one more document with positions
        of its own: attention that tells documents apart by their positions cannot look across.
        """
        width = max(self.length(row) for row in row_indices)
        shape = (len(row_indices), width)  # [B, T]
        ids = torch.full(shape, PADDING_ID)
        positions, documents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
        supervised, known = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
        for b, row in enumerate(row_indices):
            start = 0
            for number, i in enumerate(self.rows[row]):
                document = self.documents[i]
                end = start + len(document.ids)
                ids[b, start:end] = torch.tensor(document.ids)
                positions[b, start:end] = torch.arange(end - start)
                documents[b, start:end] = number
                supervised[b, start:end] = torch.tensor(document.supervised)
                if document.known:
                    known[b, start:end] = torch.tensor(document.known)
                start = end
            positions[b, start:] = torch.arange(width - start)
        return Batch(ids, positions, documents, supervised, known if known.any() else None)


def _reason_to_drop(row: Mapping[str, Any], config: DataConfig) -> str | None:
    prompt, answer = len(row["prompt_ids"]), len(row["response_ids"])
    if not answer:
        return "no assistant turn"
    if prompt >= config.max_length:
        return "answer truncated away"
    if row["finish_reason"] == "length" and config.cut_answers == "drop":
        return "answer cut by max_new_tokens"
    if sum(_document(row, config).supervised) < config.min_supervised_tokens:
        return f"fewer than {config.min_supervised_tokens} supervised tokens"
    return None


def _document(row: Mapping[str, Any], config: DataConfig) -> Document:
    prompt, answer = tuple(row["prompt_ids"]), tuple(row["response_ids"])
    supervised = [False] * len(prompt) + [True] * len(answer)
    if row["finish_reason"] == "length" and config.cut_answers == "mask_last":
        supervised[-1] = False
    ids = (prompt + answer)[: config.max_length]
    cut = len(ids) < len(prompt) + len(answer)
    return Document(
        key=row["key"],
        category=row["category"],
        ids=ids,
        supervised=tuple(supervised[: config.max_length]),
        greedy=row["temperature"] == 0.0,
        finish_reason="length" if cut else row["finish_reason"],
    )
