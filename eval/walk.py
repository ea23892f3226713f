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
from draftsmith.drafters.slots import NO_GUESS, SlotLabels, all_roots, label_slots
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Path, Tree, chain
from draftsmith.eval.summary import Acceptance, rates
from draftsmith.recipes.schema import Recipe

MISS, NO_SLOT = -1, -2  # in a rank table: no ranked guess fits; the slot is not valid
RANKS = 10  # guesses per slot that are ranked; a label further down counts as a miss


@dataclass(frozen=True)
class RankTable:
    """Ranks of the text's own tokens: for each document, one row per group, -1 where no ranked
    guess fits.
    """

    ranks: list[Tensor]  # per document [groups, K] int64: a rank, MISS or NO_SLOT
    documents: list[Document]
    guesses: int = RANKS  # guesses per slot that were ranked: a small draft vocabulary has fewer

    def accuracy(self) -> list[list[float]]:
        """[K][guesses]: how often slot k's guess of rank i is right, over all valid slots (tree
        search).
        """
        ranks = torch.cat(self.ranks)  # [N, K]
        valid = (ranks > NO_SLOT).sum(dim=0).clamp(min=1)
        hits = torch.stack([(ranks == rank).sum(dim=0) for rank in range(self.guesses)])
        return (hits / valid).T.tolist()


@dataclass
class WalkCounts:
    """Sums of a walk. Rounds in which slot k+1 was reached (the text still had a token for it and
    the slots before it were accepted: reached[k]), and in which it was accepted too (hit[k]).
    """

    depth: int
    rounds: int = 0
    emitted: int = 0
    taus: list[float] = field(default_factory=list)  # per answer that had a round
    reached: list[int] = field(init=False)
    hit: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.reached, self.hit = [0] * self.depth, [0] * self.depth

    @property
    def tau_micro(self) -> float:
        """Tokens per round over everything."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tau_macro(self) -> float:
        """Mean over answers of tokens per round."""
        return sum(self.taus) / len(self.taus) if self.taus else 0.0

    def acceptance(self) -> Acceptance:
        """By slot, as of decoded answers."""
        return rates(self.hit, self.reached)

    def add(self, other: "WalkCounts") -> None:
        """Sum two walks."""
        self.rounds += other.rounds
        self.emitted += other.emitted
        self.taus += other.taus
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
    rows: int,
    chunk: int,
    max_length: int,
) -> RankTable:
    """Rank every document's own tokens among each slot's best guesses, `rows` packed rows at a
    time. Rows are longer than `max_length` only where a document is.
    """
    length = max(max_length, max((len(document.ids) for document in documents), default=1))
    packed = PackedRows(documents, length)
    count = min(RANKS, drafter.width)
    ranks: list[Tensor] = [torch.empty(0, 0, dtype=torch.long)] * len(documents)
    for first in range(0, len(packed.rows), rows):
        index = list(range(first, min(first + rows, len(packed.rows))))
        batch = packed.batch(index).to(target.device)
        roots = all_roots(batch)
        best = drafter.guesses(
            batch,
            target.states(batch, drafter.taps),
            roots,
            slots=drafter.depth,
            count=count,
            chunk=chunk,
        )
        found = ranked(best, label_slots(batch, roots, drafter.depth)).cpu()
        at = batch.documents[roots.row, roots.position].cpu()
        row = roots.row.cpu()
        for place, i in enumerate(index):
            for number, document in enumerate(packed.rows[i]):
                ranks[document] = found[(row == place) & (at == number)]
    return RankTable(ranks, list(documents), count)


def ranked(best: Tensor, labels: SlotLabels) -> Tensor:
    """The place of every label [N, K] among its slot's guesses [N, K, count], or MISS or NO_SLOT.

    A slot without a guess is none: there was no draft that could miss.
    """
    fits = best == labels.label[..., None]
    found = torch.where(fits.any(dim=-1), fits.int().argmax(dim=-1), MISS)
    drafted = (best[..., 0] != NO_GUESS) & labels.valid
    return torch.where(drafted, found, NO_SLOT)


def recipe_ranks(
    recipe: Recipe, target: Target, drafter: Drafter, documents: Sequence[Document]
) -> RankTable:
    """`rank_table` with as much at once as the recipe trains with: what fits there fits here."""
    return rank_table(
        target,
        drafter,
        documents,
        rows=recipe.train.rows_per_micro_batch,
        chunk=recipe.train.chunk,
        max_length=recipe.data.max_length,
    )


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
            counts.reached[slot] += ranks[at][slot] > NO_SLOT and slot <= accepted
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
