"""Attention of an MTP block, in the place of transformers' own.

While training, slot k of a root r sees the slot-1 entries of its document up to r and slots 2..k of
its own root, as it does when served. All roots of a document share the former: the cost is K times
that of causal attention, and documents that share a row cost what they cost alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from draftsmith.drafters.reach import Reach
from draftsmith.drafters.slots import Entries
from draftsmith.recipes.errors import UserError

OURS = "draftsmith_mtp"  # transformers' name for `attend`
QUERIES = 1024  # roots of a document whose scores are held; of more, backward computes them anew

Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass
class Chain:
    """What is remembered of a batch's slots: call a block once for every slot, in order."""

    entries: Entries
    reach: Reach
    context: list[Pair] | None = None  # of slot 1, by document: [1, Hkv, e, d]
    own: list[Pair] = field(default_factory=list)  # of slots 2, ..: [1, Hkv, N, d]

    def first(self, key: Tensor, value: Tensor) -> None:
        """Remember slot 1, [1, Hkv, E, d]."""
        sizes = self.entries.sizes
        self.context = list(zip(key.split(sizes, 2), value.split(sizes, 2), strict=True))

    def sees_itself(self, size: int) -> Tensor:
        """[1, 1, e, e] bool: what slot 1 sees of its document."""
        at = torch.arange(1, size + 1, device=self.entries.row.device)
        return ((at <= at[:, None]) & self.reach.sees(at[:, None], at))[None, None]

    def seen(self) -> Iterator[Tensor]:
        """By document, [g, e] bool: the slot-1 entries that the slot at hand sees."""
        places = self.entries.place.split(self.entries.groups)
        for size, place in zip(self.entries.sizes, places, strict=True):
            at = torch.arange(1, size + 1, device=place.device)
            root = place[:, None] + 1
            yield (at <= root) & self.reach.sees(root + len(self.own), at)


def register() -> None:
    """Make `attend` known to transformers."""
    AttentionInterface.register(OURS, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    chain: Chain | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Queries [B, H, M, d], keys and values [B, Hkv, S, d] -> [B, M, H, d], in transformers' form.

    Windows are in the masks. Raises UserError for sinks, which are not.
    """
    if s_aux is not None:
        raise UserError("they have attention sinks")
    if chain is None:
        out = plain(query, key, value, attention_mask, scaling, softcap)
    elif chain.context is None:
        chain.first(key, value)
        out = causal(query, chain, scaling, softcap)
    else:
        chain.own.append((key, value))
        out = merged(query, chain, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention over keys, [B, H, M, d]."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    scores = scores_of(query, key, scaling, softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    return weighted(scores.softmax(dim=-1), value).flatten(1, 2)


def causal(query: Tensor, chain: Chain, scaling: float, softcap: float | None) -> Tensor:
    """Slot 1: every document alone, [1, H, E, d]."""
    assert chain.context is not None
    found = list[Tensor]()
    for part, pair in zip(query.split(chain.entries.sizes, 2), chain.context, strict=True):
        size = part.shape[2]
        if softcap is None and chain.reach.covers(size + 1):
            out = F.scaled_dot_product_attention(
                part, *pair, is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            out = plain(part, *pair, chain.sees_itself(size), scaling, softcap)
        found.append(out)
    return torch.cat(found, dim=2)


def merged(query: Tensor, chain: Chain, scaling: float, softcap: float | None) -> Tensor:
    """Slots 2, ..: one softmax over the document's entries and the root's own, [1, H, N, d]."""
    assert chain.context is not None, "slot 1 comes first"
    own = [torch.stack(part, dim=3) for part in zip(*chain.own, strict=True)]  # [1, Hkv, N, j, d]
    groups = chain.entries.groups
    parts = zip(*(one.split(groups, 2) for one in (query, *own)), strict=True)
    found = list[Tensor]()
    for part, sees, pair in zip(parts, chain.seen(), chain.context, strict=True):
        if 0 < len(sees) <= QUERIES:
            found.append(both(part, pair, sees, scaling, softcap))
        elif len(sees):
            cut = zip(*(one.split(QUERIES, 2) for one in part), strict=True)
            for piece, seen in zip(cut, sees.split(QUERIES), strict=True):
                again = checkpoint(both, piece, pair, seen, scaling, softcap, use_reentrant=False)
                found.append(again)
    return torch.cat(found, dim=2)


def both(
    part: tuple[Tensor, ...], context: Pair, sees: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """part: queries [1, H, g, d], their own keys and values [1, Hkv, g, j, d]. They see entries of
    the context [1, Hkv, e, d] where `sees` [g, e] says so, and their own: [1, H, g, d].
    """
    (query, own_key, own_value), (key, value) = part, context
    far = scores_of(query, key, scaling, softcap)  # [1, Hkv, G, g, e]
    far = far.masked_fill(~sees, float("-inf"))
    near = torch.einsum("bhgrd,bhrjd->bhgrj", grouped(query, key), own_key) * scaling
    law = torch.cat([far, capped(near, softcap)], dim=-1).softmax(dim=-1)
    far, near = law.split([key.shape[2], own_key.shape[3]], dim=-1)
    out = weighted(far, value) + torch.einsum("bhgrj,bhrjd->bhgrd", near, own_value)
    return out.flatten(1, 2)


def grouped(query: Tensor, key: Tensor) -> Tensor:
    """[B, H, M, d] -> [B, Hkv, H / Hkv, M, d]: the heads that share keys together."""
    batch, _, count, width = query.shape
    return query.reshape(batch, key.shape[1], -1, count, width)


def scores_of(query: Tensor, key: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """[B, H, M, d] on [B, Hkv, S, d] -> [B, Hkv, G, M, S]."""
    heads = grouped(query, key)
    scores = heads.flatten(2, 3) @ key.mT * scaling
    return capped(scores.view(*heads.shape[:4], -1), softcap)


def weighted(law: Tensor, value: Tensor) -> Tensor:
    """[B, Hkv, G, M, S] on [B, Hkv, S, d] -> [B, Hkv, G, M, d]."""
    return (law.flatten(2, 3).to(value.dtype) @ value).view(*law.shape[:4], -1)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores under a family's soft-cap (Gemma 2)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
