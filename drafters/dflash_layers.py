"""The layers of a block drafter: Qwen3's, under its names, and the rotary embedding.

Attention is given from outside: what a block sees beside itself differs between training, where it
is a stretch of a packed row, and decoding, where it is a cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftsmith.drafters.geometry import Geometry

Rope = tuple[Tensor, Tensor]  # cosine and sine [.., T, 1, d] of positions, fp32
# Queries [N, B, H, d], keys and values [N, B, Hkv, d] of blocks -> what they gather [N, B, H, d].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Root mean square norm. It computes in its weight's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] -> [.., size]."""
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class BlockAttention(nn.Module):
    """Projections of grouped-query attention with q/k-norm."""

    def __init__(self, shape: Geometry) -> None:
        super().__init__()
        self.head_dim, hidden = shape.head_dim, shape.hidden
        self.q_proj = nn.Linear(hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """[.., T, D] -> [.., T, H, d]."""
        return rotated(self.q_norm(self.split(self.q_proj(x))), rope)

    def keys(self, x: Tensor, rope: Rope) -> Tensor:
        """[.., T, D] -> [.., T, Hkv, d]."""
        return rotated(self.k_norm(self.split(self.k_proj(x))), rope)

    def values(self, x: Tensor) -> Tensor:
        """[.., T, D] -> [.., T, Hkv, d]."""
        return self.split(self.v_proj(x)).to(self.k_norm.weight.dtype)

    def split(self, x: Tensor) -> Tensor:
        """[.., heads * d] -> [.., heads, d]."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Geometry) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., D]."""
        mixed: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class DraftLayer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, shape: Geometry) -> None:
        super().__init__()
        self.self_attn = BlockAttention(shape)
        self.mlp = GatedMLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, rope: Rope, attend: Attend, *, skip: int = 0) -> Tensor:
        """Blocks [N, B, D] -> [N, B - skip, D]: the first places give keys and values alone."""
        seen, attention = self.input_layernorm(x), self.self_attn
        asking: Rope = (rope[0][:, skip:], rope[1][:, skip:])
        q, k = attention.queries(seen[:, skip:], asking), attention.keys(seen, rope)
        gathered = attend(q, k, attention.values(seen))  # [N, B - skip, H, d]
        x = x[:, skip:] + attention.o_proj(gathered.flatten(-2))
        mixed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + mixed

    def context(self, features: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values [.., T, Hkv, d] of context features [.., T, D], which are not normed by
        this layer.
        """
        return self.self_attn.keys(features, rope), self.self_attn.values(features)


class Rotary:
    """Rotary embedding of positions. No module: its frequencies stay fp32 wherever it goes."""

    def __init__(self, shape: Geometry) -> None:
        config = Qwen3Config(
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            rope_parameters=dict(shape.rope),
        )
        rotary = Qwen3RotaryEmbedding(config)
        self.frequencies: Tensor = rotary.inv_freq  # [d / 2]
        self.scale = float(rotary.attention_scaling)

    def __call__(self, positions: Tensor) -> Rope:
        """Of positions [.., T]."""
        self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]  # [.., T, 1, d]
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotated(x: Tensor, rope: Rope) -> Tensor:
    """Heads [.., T, H, d] turned by their positions, in their own dtype."""
    cos, sin = rope
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
