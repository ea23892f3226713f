"""MTP layers with weights of their own, one for every slot (DeepSeek-V3, 2412.19437, section 2.2).

Depth 1 reads the target's states; depth k reads the states of depth k - 1, at every position: with
its root at r, the embedding of x[r+k-1]. It attends to depth-k entries alone, of roots up to its
own, and each depth has a cache. What a depth remembers of the last roots rests on drafts; it is
read anew once their tokens are known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.grow import grow
from draftsmith.drafters.layout import chain_nodes
from draftsmith.drafters.mtp_attention import Chain
from draftsmith.drafters.mtp_block import MtpBlock
from draftsmith.drafters.mtp_cache import Feed, feed
from draftsmith.drafters.proposal import Plan, Proposal, Verdict
from draftsmith.drafters.slots import Batch, Entries, Roots, TargetStates
from draftsmith.recipes.errors import UserError

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stack:
    """The depths, and what they share."""

    blocks: Sequence[MtpBlock]
    embed: Map  # token ids [..] -> [.., D]
    recycle: Callable[[MtpBlock, Tensor], Tensor]  # a block's output -> what the next one reads
    logits: Callable[[MtpBlock, Tensor], Tensor]  # a block's outputs [B, D] -> [B, Vq]


@dataclass
class DepthState:
    """Between rounds. An entry is a root; roots 1, 2, .. of a text have entries 0, 1, .."""

    caches: list[TargetCache]  # by depth
    settled: list[int]  # per row: entries that every depth holds, made of committed tokens
    tokens: Tensor  # [B, P] the tokens behind those, up to the root, of which
    counts: list[int]  # are the row's
    hidden: Tensor  # [B, P + 1, D], the target's state before each of them and before the root
    root: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # of the round

    def select(self, rows: Tensor) -> "DepthState":
        """These rows of the batch."""
        for cache in self.caches:
            cache.select(rows)
        settled, counts = ([one[i] for i in rows.tolist()] for one in (self.settled, self.counts))
        return DepthState(self.caches, settled, self.tokens[rows], counts, self.hidden[rows])


def depth_groups(stack: Stack, batch: Batch, final: Tensor, roots: Roots, depth: int) -> Tensor:
    """What the head reads, [N, depth, D], from the target's states [B, T, D]."""
    entries = Entries.of(batch, roots)
    hidden = entries.states(final).to(stack.blocks[0].fc.weight.dtype)
    found, positions = [], entries.positions(batch)
    for ahead, block in enumerate(stack.blocks[:depth]):
        if len(positions):  # the layers of transformers do not take nothing
            read = stack.embed(entries.tokens_ahead(batch, ahead))
            chain = Chain(entries, block.reach)
            out = block(read[None], hidden[None], positions[None] + ahead, chain=chain)[0]
            hidden = stack.recycle(block, out)
            found.append(block.norm(out)[entries.root])
        else:
            found.append(hidden)
    return torch.stack(found, dim=1)[entries.order.argsort()]


def begin_depths(stack: Stack, ids: Tensor, lengths: Tensor, final: Tensor) -> DepthState:
    """After prefill of ids [B, T] of these lengths [B]: every depth reads the prompts."""
    known, last = lengths.tolist(), len(stack.blocks)
    settled = [max(0, length - last) for length in known]
    caches = [TargetCache(block.layer_config) for block in stack.blocks]
    if max(settled) > 0:
        hidden, width = final[:, :-1], ids.shape[1] - 1
        for ahead, (block, cache) in enumerate(zip(stack.blocks, caches, strict=True)):
            at = (torch.arange(width, device=ids.device) + 1 + ahead).clamp(max=width)
            given = Feed([0] * len(ids), chain_nodes(width, ids.device), ahead)
            out = feed(block, cache, stack.embed(ids[:, at]), hidden, given)
            hidden = stack.recycle(block, out)
            cache.crop(settled)
    else:
        for cache in caches:
            cache.extent.set(settled)
    pending = [length - 1 - start for length, start in zip(known, settled, strict=True)]
    texts = [row[start + 1 : end] for row, start, end in zip(ids, settled, known, strict=True)]
    before = [row[start:end] for row, start, end in zip(final, settled, known, strict=True)]
    return DepthState(caches, settled, padded_rows(texts), pending, padded_rows(before))


def propose_depths(
    stack: Stack, state: DepthState, root: Tensor, plan: Plan, ids: Tensor | None
) -> Proposal:
    """A chain of drafts, each from the depth of its slot. Raises UserError for trees."""
    if not plan.tree.is_chain:
        raise UserError("MTP layers with weights of their own draft chains; give no tree")
    rows, width = torch.arange(len(root), device=root.device), state.hidden.shape[1]
    last = torch.tensor(state.counts, device=root.device)
    text = root.new_zeros((len(root), width + len(stack.blocks)))
    text[:, : width - 1] = state.tokens
    text[rows, last] = root
    state.root, hidden = root, state.hidden.to(stack.blocks[0].fc.weight.dtype)

    def read(ahead: int) -> Tensor:
        nonlocal hidden
        block, cache = stack.blocks[ahead], state.caches[ahead]
        cache.crop(state.settled)
        given = Feed(state.settled, chain_nodes(width, root.device), ahead)
        out = feed(block, cache, stack.embed(text[:, ahead : ahead + width]), hidden, given)
        hidden = stack.recycle(block, out)
        return stack.logits(block, out[rows, last])

    def below(nodes: list[int], tokens: Tensor) -> Tensor:
        (node,) = nodes
        text[rows, last + node] = tokens[:, node - 1]
        return read(node)[:, None]

    return grow(plan, read(0), below, ids)


def commit_depths(
    state: DepthState, proposal: Proposal, verdict: Verdict, states: TargetStates
) -> DepthState:
    """A round on: entries that rest on drafts are forgotten, those before them are kept."""
    drafts = proposal.tokens.gather(1, (verdict.path - 1).clamp(min=0))
    depth, settled = len(state.caches), []
    texts, before = [], []
    for row, accepted in enumerate(verdict.length.tolist()):
        start, count = state.settled[row], state.counts[row]
        position = start + count + 1  # of the old root
        kept = max(start, position - depth + 1)
        settled.append(kept)
        own = state.tokens[row, :count], state.root[row : row + 1], drafts[row, :accepted]
        texts.append(torch.cat(own)[kept - start :])
        seen = state.hidden[row, : count + 1], states.final[row, : accepted + 1]
        before.append(torch.cat(seen)[kept - start :])
    counts = [len(text) for text in texts]
    return DepthState(state.caches, settled, padded_rows(texts), counts, padded_rows(before))


def padded_rows(rows: Sequence[Tensor]) -> Tensor:
    """Rows [n, ..] of lengths of their own as one tensor, zero behind their ends."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
