"""Groups, slots and their labels. This file owns all index arithmetic: nothing else shifts an
index.

A group is a root: position r of a document whose token x[r] is supervised and whose x[r-1] is in
the same document. Slot k (1..K) of that group predicts x[r+k]; its teacher is the target's law at
position r+k-1. Slot k is valid when x[r+1..r+k] are all supervised and in the same document.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_GUESS = -1  # where a drafter's guesses end: no token


@dataclass(frozen=True)
class Batch:
    """Packed rows. `documents` numbers the documents of a row; -1 is padding."""

    ids: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64, restarting at every document
    documents: Tensor  # [B, T] int64
    supervised: Tensor  # [B, T] bool
    known: Tensor | None = None  # [B, T] bool: tokens that are no labels, another drafter has them
    # one per row: with what a drafter samples its groups; None: it takes all
    seeds: tuple[int, ...] | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        parts = (self.ids, self.positions, self.documents, self.supervised)
        known = None if self.known is None else self.known.to(device, non_blocking=True)
        moved = [part.to(device, non_blocking=True) for part in parts]
        return Batch(moved[0], moved[1], moved[2], moved[3], known, self.seeds)


@dataclass(frozen=True)
class TargetStates:
    """What the target computed for a batch."""

    final: Tensor  # [B, T, D], after the final norm: what lm_head sees
    layers: Tensor | None = None  # [B, T, n*D], tapped layer outputs

    def at(self, rows: Tensor, positions: Tensor) -> "TargetStates":
        """The states at these places of these rows (indices that broadcast)."""
        layers = None if self.layers is None else self.layers[rows, positions]
        return TargetStates(self.final[rows, positions], layers)


@dataclass(frozen=True)
class Roots:
    """Where the groups are."""

    row: Tensor  # [N] int64
    position: Tensor  # [N] int64, index into the row


@dataclass(frozen=True)
class SlotLabels:
    """What each slot should say, and which target position teaches it."""

    label: Tensor  # [N, K] int64; 0 where invalid
    teacher_row: Tensor  # [N, K] int64
    teacher_position: Tensor  # [N, K] int64; clamped into the row where invalid
    valid: Tensor  # [N, K] bool


@dataclass(frozen=True)
class Head:
    """How slot states become logits: `h[:, :D] @ shared.T + h[:, D:] @ own[k].T`, either term
    optional.

    `ids` maps the Vq rows to target token ids (ascending); None means all V rows in order.
    """

    shared: Tensor | None  # [Vq, D], frozen
    own: Tensor | None = None  # [K, Vq, R], trained
    ids: Tensor | None = None  # [Vq] int64

    @property
    def rows(self) -> int:
        """Vq: the tokens that drafts may use."""
        if self.shared is not None:
            return self.shared.shape[0]
        assert self.own is not None, "a head has a shared or an own term"
        return self.own.shape[1]


@dataclass(frozen=True)
class SlotStates:
    """A drafter's answer to a batch: the training waist."""

    hidden: Tensor  # [N, K, D (+ R)]
    head: Head
    labels: SlotLabels


def all_roots(batch: Batch) -> Roots:
    """Every position that may start a group: supervised, and not the first of its document."""
    before = torch.full_like(batch.documents, -2)
    before[:, 1:] = batch.documents[:, :-1]
    row, position = torch.nonzero(batch.supervised & (before == batch.documents), as_tuple=True)
    return Roots(row, position)


def sampled_roots(batch: Batch, count: int) -> Roots:
    """At most `count` roots of every row, of those that have a first slot; all without seeds.

    A document has its share of them, in proportion to how many it has. What is drawn for a row
    depends on its seed and its tokens alone.
    """
    every = all_roots(batch)
    useful = label_slots(batch, every, 1).valid[:, 0]
    row, position = every.row[useful], every.position[useful]
    if batch.seeds is None:
        return Roots(row, position)
    documents, sizes = batch.documents[row, position].cpu(), row.bincount().tolist()
    parts = documents.split(sizes)
    chosen = [
        sample_evenly(part, count, seed)
        for part, seed in zip(parts, batch.seeds, strict=False)  # last rows may have none
    ]
    index = torch.cat([torch.zeros(0, dtype=torch.bool), *chosen]).to(row.device)
    return Roots(row[index], position[index])


def sample_evenly(documents: Tensor, count: int, seed: int) -> Tensor:
    """Which `count` of n things to take, [n] bool, drawn without replacement from documents [n]
    (ascending): each gives its share of the count, rounded up or down by chance.
    """
    total = len(documents)
    if total <= count:
        return torch.ones(total, dtype=torch.bool)
    coins = torch.Generator().manual_seed(seed)
    offset, keys = (torch.rand(n, generator=coins, dtype=torch.float64) for n in (1, total))
    number = documents.unique_consecutive(return_inverse=True)[1]
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), number.bincount().cumsum(0)])
    quota = (offset + borders * count / total).floor().diff()  # the last border gives `count`
    order = (number + keys).argsort()  # shuffled within the documents
    place = torch.empty_like(order).scatter_(0, order, torch.arange(total)) - borders[number]
    return place < quota[number]


def label_slots(batch: Batch, roots: Roots, depth: int) -> SlotLabels:
    """Labels of slots 1..depth for every root."""
    length = batch.ids.shape[1]
    offsets = torch.arange(1, depth + 1, device=batch.ids.device)
    at = roots.position[:, None] + offsets  # [N, K] position of the label
    inside = at < length
    at = at.clamp(max=length - 1)
    row = roots.row[:, None].expand_as(at)
    same = batch.documents[row, at] == batch.documents[roots.row, roots.position][:, None]
    valid = (inside & same & batch.supervised[row, at]).cumprod(dim=1).bool()
    if batch.known is not None:
        valid = valid & ~batch.known[row, at]
    label = torch.where(valid, batch.ids[row, at], 0)
    return SlotLabels(label, row, at - 1, valid)


def label_roots(batch: Batch, roots: Roots) -> SlotLabels:
    """Labels of slot 0, the root itself, [N, 1]: the target's own state before it says it."""
    row, at = roots.row[:, None], roots.position[:, None]
    label = batch.ids[row, at]
    return SlotLabels(label, row, at - 1, torch.ones_like(label, dtype=torch.bool))


def before_roots(states: Tensor, roots: Roots) -> Tensor:
    """The state just before every root, [N, D] from [B, T, D]: what Medusa and MTP read."""
    return states[roots.row, roots.position - 1]


@dataclass(frozen=True)
class Entries:
    """Every position that has a state before it in its document, and groups among them.

    E entries in the order of rows and positions; N groups in that order too, whatever order the
    roots were given in.
    """

    row: Tensor  # [E] int64
    position: Tensor  # [E] int64, index into the row
    sizes: list[int]  # entries of every document
    groups: list[int]  # groups of every document
    root: Tensor  # [N] the entry of every group's root
    place: Tensor  # [N] the same, counted in its document from 0
    order: Tensor  # [N] group n is the order[n]-th of the given roots
    group: Tensor  # [E + 1] the group whose root an entry is; 0 where it is none

    @staticmethod
    def of(batch: Batch, roots: Roots) -> "Entries":
        """Lay entries and groups out. The documents' sizes are read to the host."""
        length = batch.ids.shape[1]
        enters = (batch.documents >= 0) & (batch.positions > 0)
        row, position = torch.nonzero(enters, as_tuple=True)
        names = torch.stack([row, batch.documents[row, position]])
        _, number, sizes = names.unique_consecutive(return_inverse=True, return_counts=True, dim=1)
        wanted, order = (roots.row * length + roots.position).sort()
        root = torch.searchsorted(row * length + position, wanted)
        groups = torch.bincount(number[root], minlength=len(sizes))
        place = root - (sizes.cumsum(0) - sizes)[number[root]]
        group = torch.zeros(len(row) + 1, dtype=torch.int64, device=row.device)
        group[root] = torch.arange(len(root), device=row.device)
        counts = torch.stack([sizes, groups]).tolist()
        return Entries(row, position, counts[0], counts[1], root, place, order, group)

    def tokens(self, batch: Batch) -> Tensor:
        """x[r], what slot 1 reads if an entry is its root: [E]."""
        return batch.ids[self.row, self.position]

    def states(self, states: Tensor) -> Tensor:
        """The state before every entry, [E, D] from [B, T, D]: what slot 1 reads."""
        return states[self.row, self.position - 1]

    def positions(self, batch: Batch) -> Tensor:
        """In the document, from 1: [E]."""
        return batch.positions[self.row, self.position]

    def tokens_of_slot(self, batch: Batch, slot: int) -> Tensor:
        """x[r + slot - 1], what slot 2, 3, .. reads: [N]. Behind a row's end, its last token: such
        slots are not valid.
        """
        at = (self.position[self.root] + slot - 1).clamp(max=batch.ids.shape[1] - 1)
        return batch.ids[self.row[self.root], at]

    def tokens_ahead(self, batch: Batch, count: int) -> Tensor:
        """x[r + count] if an entry is the root r: [E]. Behind a row's end, its last token."""
        at = (self.position + count).clamp(max=batch.ids.shape[1] - 1)
        return batch.ids[self.row, at]

    def states_of_slot(self, states: Tensor, slot: int) -> Tensor:
        """The target's state before the token that slot 2, 3, .. reads: at r + slot - 2, [N, D]."""
        at = (self.position[self.root] + slot - 2).clamp(max=states.shape[1] - 1)
        return states[self.row[self.root], at]

    def ahead(self, count: int) -> Tensor:
        """The group whose root is `count` tokens on, [N]. One that is there wherever the slots up
        to it are valid.
        """
        return self.group[(self.root + count).clamp(max=len(self.row))]


def guessed(batch: Batch, guess: Tensor) -> Tensor:
    """Which tokens [B, T] are the guess [B, T] at the position before, in the same document."""
    found = torch.zeros_like(batch.supervised)
    found[:, 1:] = guess[:, :-1] == batch.ids[:, 1:]
    return found & (batch.positions > 0)


def texts_to_roots(batch: Batch, roots: Roots) -> list[Tensor]:
    """Every root's document up to and with the root, [T] each on the CPU."""
    ids, positions = batch.ids.cpu(), batch.positions.cpu()
    return [
        ids[row, at - int(positions[row, at]) : at + 1]
        for row, at in zip(roots.row.tolist(), roots.position.tolist(), strict=True)
    ]


def tokens_up_to(batch: Batch, count: int, *, fill: int) -> Tensor:
    """The last `count` tokens up to and with every position, [B, T, count]; `fill` where its
    document has fewer.
    """
    back = torch.arange(count - 1, -1, -1, device=batch.ids.device)
    at = torch.arange(batch.ids.shape[1], device=batch.ids.device)[:, None] - back  # [T, count]
    inside = batch.positions[..., None] >= back
    return torch.where(inside, batch.ids[:, at.clamp(min=0)], fill)


def before_output(states: Tensor, row: int, *, prompt: int, output: int) -> Tensor:
    """The states that predict `output` tokens behind a prompt of `prompt`: [output, D]."""
    return states[row, prompt - 1 : prompt - 1 + output]
