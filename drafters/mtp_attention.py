"""Attention of an MTP block, in the place of transformers' own.

While training, slot k of a root r sees the slot-1 entries of its document up to r and slots 2..k of
its own root, as it does when served. All roots of a row share the former: the cost is K times that
of causal attention.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

OURS = "draftsmith_mtp"  # transformers' name for `attend`
QUERIES = 256  # roots whose scores are held at once

Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass
class Chain:
    """What is remembered of a batch's slots: call a block once for every slot, in order."""

    first: Tensor  # [B, 1, T, T] bool, what slot 1 sees
    sees: Tensor  # [B, 1, R, T] bool, the slot-1 entries that the slot at hand sees
    context: Pair | None = None  # of slot 1, [B, Hkv, T, d]
    own: list[Pair] = field(default_factory=list)  # of slots 2, .., [B, Hkv, R, d] each


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

    Windows are in the masks.
    """
    assert s_aux is None, "attention sinks are not supported"
    if chain is None:
        out = plain(query, key, value, attention_mask, scaling, softcap)
    elif chain.context is None:
        chain.context = key, value
        out = plain(query, key, value, chain.first, scaling, softcap)
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


def merged(query: Tensor, chain: Chain, scaling: float, softcap: float | None) -> Tensor:
    """One softmax over the context's entries and the root's own, [B, H, R, d], some roots at a
    time: backward computes their scores anew.
    """
    assert chain.context is not None, "slot 1 comes first"
    own = [torch.stack(part, dim=3) for part in zip(*chain.own, strict=True)]  # [B, Hkv, R, j, d]
    cut = (part.split(QUERIES, 2) for part in (query, *own, chain.sees))
    pieces = [
        checkpoint(both, *piece, *chain.context, scaling, softcap, use_reentrant=False)
        for piece in zip(*cut, strict=True)
    ]
    return torch.cat(pieces, dim=2)


def both(
    query: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    sees: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Queries [B, H, R, d] on the context's entries [B, Hkv, T, d] where they see them [B, 1, R,
    T], and on their own [B, Hkv, R, j, d].
    """
    far = scores_of(query, key, scaling, softcap)  # [B, Hkv, G, R, T]
    far = far.masked_fill(~sees[:, :, None], float("-inf"))
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
