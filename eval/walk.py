"""The walk: simulate decoding on held-out answers without decoding.

Start at an answer's first token (it comes from prefill and is not counted), see how far the drafts
match the text, jump by accepted + 1, and count only tokens that the text still has. On greedy text
in fp32 this gives exactly the rounds that greedy decoding makes. On text sampled from the target it
is equal in law under the point-mass rule, since the text is the target's own draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.data.dataset import Document, PackedRows
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.projection import top_tokens
from draftsmith.drafters.slots import Head, all_roots
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Path, Tree, chain

MISS, NO_SLOT = -1, -2  # in a rank table: no ranked guess fits; the slot is not valid
RANKS = 10  # guesses per slot that are ranked; a label further down counts as a miss


@dataclass(frozen=True)
class RankTable:
    """Ranks of the text's own tokens: for each document, one row per group, -1 where no ranked
    guess fits.
    """

    ranks: list[Tensor]  # per document [groups, K] int64: a rank, MISS or NO_SLOT
    documents: list[Document]

    def accuracy(self) -> list[list[float]]:
        """[K][RANKS]: how often slot k's guess of rank i is right, over all valid slots (tree
        search).
        """
        ranks = torch.cat(self.ranks)  # [N, K]
        valid = (ranks > NO_SLOT).sum(dim=0).clamp(min=1)
        hits = torch.stack([(ranks == rank).sum(dim=0) for rank in range(RANKS)])  # [RANKS, K]
        return (hits / valid).T.tolist()


@dataclass
class WalkCounts:
    """Sums of a walk. Rounds in which the text still had a token for slot k+1 (offered[k]), in
    which the slots before it were accepted as well (reached[k]), and it too (hit[k]).
    """

    depth: int
    rounds: int = 0
    emitted: int = 0
    taus: list[float] = field(default_factory=list)  # per answer that had a round
    offered: list[int] = field(init=False)
    reached: list[int] = field(init=False)
    hit: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.offered, self.reached, self.hit = ([0] * self.depth for _ in range(3))

    @property
    def tau_micro(self) -> float:
        """Tokens per round over everything."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tau_macro(self) -> float:
        """Mean over answers of tokens per round."""
        return sum(self.taus) / len(self.taus) if self.taus else 0.0

    def conditional(self) -> list[float]:
        """Acceptance of slot k given that it was reached."""
        return [h / r if r else 0.0 for h, r in zip(self.hit, self.reached, strict=True)]

    def joint(self) -> list[float]:
        """Share of the rounds that had a token for slot k in which slots 1..k were accepted."""
        return [h / o if o else 0.0 for h, o in zip(self.hit, self.offered, strict=True)]

    def add(self, other: "WalkCounts") -> None:
        """Sum two walks."""
        self.rounds += other.rounds
        self.emitted += other.emitted
        self.taus += other.taus
        self.offered = [a + b for a, b in zip(self.offered, other.offered, strict=True)]
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.hit = [a + b for a, b in zip(self.hit, other.hit, strict=True)]


@dataclass(frozen=True)
class WalkResult:
    """A walk over many answers."""

    total: WalkCounts
    by_category: dict[str, WalkCounts]


@torch.no_grad()
def rank_table(
    target: Target,
    drafter: Drafter,
    documents: Sequence[Document],
    *,
    rows: int = 4,
    chunk: int = 128,
    max_length: int = 1024,
) -> RankTable:
    """Rank every document's own tokens among each slot's best guesses, `rows` packed rows at a
    time.
    """
    length = max(max_length, max((len(document.ids) for document in documents), default=1))
    packed = PackedRows(documents, length)
    ranks: list[Tensor] = [torch.empty(0, 0, dtype=torch.long)] * len(documents)
    for first in range(0, len(packed.rows), rows):
        index = list(range(first, min(first + rows, len(packed.rows))))
        batch = packed.batch(index).to(target.device)
        roots = all_roots(batch)
        slots = drafter.slots(batch, target.states(batch), roots)
        count = min(RANKS, head_rows(slots.head))
        best = top_tokens(slots.hidden, slots.head, count, chunk=chunk, adjust=target.adjust)
        fits = best == slots.labels.label[..., None]
        found = torch.where(fits.any(dim=-1), fits.int().argmax(dim=-1), MISS)
        found = torch.where(slots.labels.valid, found, NO_SLOT).cpu()
        at = batch.documents[roots.row, roots.position].cpu()
        row = roots.row.cpu()
        for number, i in enumerate(index):
            for slot, document in enumerate(packed.rows[i]):
                ranks[document] = found[(row == number) & (at == slot)]
    return RankTable(ranks, list(documents))


def head_rows(head: Head) -> int:
    """Vq: tokens that drafts may use."""
    rows = head.own[0] if head.shared is None else head.shared  # type: ignore[index]
    return rows.shape[0]


def walk(table: RankTable, tree: Tree | None = None) -> WalkResult:
    """Walk every document with this tree (default: the chain of all slots)."""
    depth = next((ranks.shape[1] for ranks in table.ranks if ranks.numel()), 1)
    paths = set((tree or chain(depth)).paths)
    total, by_category = WalkCounts(depth), dict[str, WalkCounts]()
    for ranks, document in zip(table.ranks, table.documents, strict=True):
        counts = walk_one(ranks.tolist(), paths, depth)
        total.add(counts)
        by_category.setdefault(document.category, WalkCounts(depth)).add(counts)
    return WalkResult(total, by_category)


def walk_one(ranks: list[list[int]], paths: set[Path], depth: int) -> WalkCounts:
    """One answer: ranks[i] belongs to the i-th answer token as root; the last needs no round."""
    counts, at, last = WalkCounts(depth), 0, len(ranks) - 1
    deepest = max(map(len, paths))
    while at < last:
        accepted = matched(ranks[at], paths)
        for slot in range(deepest):
            offered = ranks[at][slot] > NO_SLOT
            counts.offered[slot] += offered
            counts.reached[slot] += offered and slot <= accepted
            counts.hit[slot] += slot < accepted
        emitted = min(accepted + 1, last - at)
        counts.rounds += 1
        counts.emitted += emitted
        at += emitted
    if counts.rounds:
        counts.taus.append(counts.emitted / counts.rounds)
    return counts


def matched(ranks: list[int], paths: set[Path]) -> int:
    """Length of the longest path of the tree whose guesses are the text's own tokens."""
    path: Path = ()
    for rank in ranks:
        if rank < 0 or (*path, rank) not in paths:
            break
        path = (*path, rank)
    return len(path)
