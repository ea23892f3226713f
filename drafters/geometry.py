"""The measures of a target's layers, which a drafter with layers of its own copies."""

from dataclasses import dataclass, replace
from typing import Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DFlashConfig

ROPES = {  # kinds of rotary embedding that depend on nothing but a position, and what they read
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "llama3": {
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "yarn": {
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


@dataclass(frozen=True)
class Geometry:
    """One decoder layer's measures. `rope` holds transformers' `rope_parameters`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    max_positions: int
    rope: dict[str, Any]

    @property
    def layer_parameters(self) -> int:
        """Of a Qwen3-type layer: attention with q/k-norm, gated MLP, two norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.head_dim + 2 * self.hidden
        return attention + 3 * self.hidden * self.intermediate + norms


def geometry_of(text_config: Any) -> Geometry:
    """A text config's. What a family lacks is what Qwen3 would have in its place."""
    found: dict[str, Any] = text_config.to_dict()
    hidden, heads = int(found["hidden_size"]), int(found["num_attention_heads"])
    return Geometry(
        hidden=hidden,
        heads=heads,
        kv_heads=int(found.get("num_key_value_heads") or heads),
        head_dim=int(found.get("head_dim") or hidden // heads),
        intermediate=int(found.get("intermediate_size") or 3 * hidden),
        eps=float(found.get("rms_norm_eps") or 1e-6),
        max_positions=int(found.get("max_position_embeddings") or 32768),
        rope=rope_of(found),
    )


def own_geometry(config: DFlashConfig, shape: Geometry) -> Geometry:
    """The target's measures with those that a drafter has for itself. Raises UserError where heads
    do not share keys evenly, or a rotary embedding cannot turn them.
    """
    given: dict[str, Any] = {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate,
    }
    own = replace(shape, **{name: value for name, value in given.items() if value is not None})
    if own.heads % own.kv_heads:
        raise UserError(
            f"drafter.kv_heads: {own.heads} heads cannot share {own.kv_heads} keys evenly; give a "
            f"divisor of {own.heads}"
        )
    if own.head_dim % 2:
        raise UserError(f"drafter.head_dim: {own.head_dim} is odd; positions turn pairs, give even")
    return own


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters: of full attention where they differ by layer type. Kinds that look at the
    length of the text, or at pictures, become plain ones of the same base.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = given.get("full_attention") or given
    given = {"rope_theta": config.get("rope_theta") or 10000.0, **given}
    kind = given.get("rope_type", "default")
    kind = kind if kind in ROPES else "default"
    return {"rope_type": kind, **{key: given[key] for key in sorted(ROPES[kind]) if key in given}}
