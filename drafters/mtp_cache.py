"""Decoding with an MTP block: its cache, and drafts that read its own states.

The cache holds slot-1 entries, which are made of the target's true states, for every token of the
committed text but the first; behind them, while a round lasts, those of the drafts. Accepted drafts
become slot-1 entries at the start of the next round, in the pass that reads its root.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.layout import Nodes, chain_nodes
from draftsmith.drafters.mtp_block import MtpBlock
from draftsmith.drafters.proposal import Proposal, Verdict
from draftsmith.drafters.reach import masks
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.tree import Tree

Map = Callable[[Tensor], Tensor]


@dataclass
class MtpState:
    """Between rounds: what is cached, and what has been accepted since."""

    cache: TargetCache
    lengths: list[int]  # per row: cached entries
    tokens: Tensor  # [B, P] accepted and not cached yet, of which
    counts: list[int]  # are the row's
    hidden: Tensor  # [B, P + 1, D], the target's state before each of them and before the root

    @property
    def known(self) -> list[int]:
        """Entries of every row once its new root is read: the root's position."""
        return [n + count + 1 for n, count in zip(self.lengths, self.counts, strict=True)]

    def after(self, proposal: Proposal, verdict: Verdict, states: TargetStates) -> "MtpState":
        """A round on: its root is cached, its accepted drafts are not."""
        tokens = proposal.tokens.gather(1, (verdict.path - 1).clamp(min=0))
        return MtpState(self.cache, self.known, tokens, verdict.length.tolist(), states.final)

    def select(self, rows: Tensor) -> "MtpState":
        """These rows of the batch."""
        self.cache.select(rows)
        lengths, counts = ([one[i] for i in rows.tolist()] for one in (self.lengths, self.counts))
        return MtpState(self.cache, lengths, self.tokens[rows], counts, self.hidden[rows])


@dataclass(frozen=True)
class Feed:
    """Where a pass's tokens lie: the last of `nodes`, behind `known` entries of every row."""

    known: list[int]
    nodes: Nodes
    ahead: int = 0  # how far behind its root the token is that an entry reads


def feed(
    block: MtpBlock, cache: TargetCache, embedded: Tensor, hidden: Tensor, given: Feed
) -> Tensor:
    """The block on embeddings and states [B, M, D], which the cache then holds: [B, M, D]."""
    batch, count = embedded.shape[:2]
    known, nodes, device = given.known, given.nodes, embedded.device
    extent = cache.open(batch, count, device)
    uniform = min(known) == max(known)
    starts: Tensor | int = known[0]
    if not uniform:
        starts = torch.tensor(known, device=device)[:, None]
    positions = starts + nodes.depth  # [R, M'] in entries; a text's first token has none
    always = count > 1 or not block.reach.covers(extent.longest + count)
    found = masks({"": block.reach}, nodes, positions, starts, max(known), always=always)
    mask = None if found is None else found[""][:, :, -count:]
    at = (positions[:, -count:] + 1 + given.ahead).expand(batch, -1)
    hidden = hidden.to(block.fc.weight.dtype)
    out: Tensor = block(embedded, hidden, at, mask=mask, cache=cache.cache)
    cache.close(count)
    return out


@dataclass
class Reader:
    """A block that reads tokens behind what a cache holds, for one round."""

    block: MtpBlock
    embed: Map  # token ids [..] -> [.., D]
    recycle: Map  # a block's output -> what the next slot reads
    cache: TargetCache
    read: list[int] = field(default_factory=list)  # the drafted nodes that are cached, in order
    states: dict[int, Tensor] = field(default_factory=dict)  # node -> recycled state [B, D]

    def feed(self, tokens: Tensor, hidden: Tensor, nodes: Nodes, known: list[int]) -> Tensor:
        """Read tokens [B, M], the last of these nodes, which lie behind `known` entries; states
        [B, M, D].
        """
        return feed(self.block, self.cache, self.embed(tokens), hidden, Feed(known, nodes))

    def read_root(self, state: MtpState, root: Tensor) -> Tensor:
        """Read what was accepted and the new root [B]; the block's output there, [B, D]."""
        self.cache.crop(state.lengths)
        rows = torch.arange(len(root), device=root.device)
        last = torch.tensor(state.counts, device=root.device)
        tokens = torch.cat([state.tokens, root[:, None]], dim=1)
        tokens[rows, last] = root
        nodes = chain_nodes(tokens.shape[1], root.device)
        out = self.feed(tokens, state.hidden, nodes, state.lengths)[rows, last]
        self.cache.crop(state.known)
        self.states[0] = self.recycle(out)
        return out

    def read_nodes(self, nodes: list[int], tokens: Tensor, tree: Tree, known: list[int]) -> Tensor:
        """Read drafted nodes of tokens [B, M]; the block's outputs [B, n, D]."""
        self.read += nodes
        parents = tree.parent[torch.tensor(nodes) - 1].tolist()
        hidden = torch.stack([self.states[parent] for parent in parents], dim=1)
        picked = tokens[:, [node - 1 for node in nodes]]
        out = self.feed(picked, hidden, self.layout(tree, tokens.device), known)
        recycled = self.recycle(out)
        self.states |= {node: recycled[:, place] for place, node in enumerate(nodes)}
        return out

    def layout(self, tree: Tree, device: torch.device) -> Nodes:
        """How the nodes that were read lie behind the root's entry."""
        if tree.is_chain:
            return chain_nodes(len(self.read), device)
        at = torch.tensor(self.read, device=device)
        return Nodes(tree.depth[at - 1][None] - 1, tree.visible[at][:, at][None])


def begin(reader: Reader, ids: Tensor, lengths: Tensor, final: Tensor) -> MtpState:
    """After prefill of ids [B, T]: read all tokens of every prompt but its first."""
    counts = [length - 1 for length in lengths.tolist()]
    if max(counts) > 0:
        nodes = chain_nodes(ids.shape[1] - 1, ids.device)
        reader.feed(ids[:, 1:], final[:, :-1], nodes, [0] * len(ids))
        reader.cache.crop(counts)
    else:
        reader.cache.extent.set(counts)
    rows = torch.arange(len(ids), device=ids.device)
    return MtpState(
        reader.cache, counts, ids[:, :0], [0] * len(ids), final[rows, lengths - 1][:, None]
    )
