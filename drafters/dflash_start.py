"""Starting a block drafter from its target, so that untrained it already says something.

Its first layer hands every slot the target's last tapped state before the root: all heads look
where the context ends, and values and output projection pass on what they see there. Its last
layer has the MLP of the target's last layer, its norm is the target's: what the head then reads is
nearly the target's own state before the root, as Medusa's heads (2401.10774) start. Training turns
it into what comes after the root. Everything else starts without effect, from copies of the
target's layers.

Looking at a place takes keys that do not depend on what is there. States of a language model have
such a part (a few outlying channels, much the same everywhere); a linear fit finds a direction in
which contexts are 1 and the tokens of a block -1, on the states of a few random tokens.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.drafters.dflash_layers import DraftLayer
from draftsmith.drafters.shallow import spread
from draftsmith.drafters.slots import Batch
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError

COPIED = (
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)
HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
WHERE_FITTING = ("self_attn.q_norm", "self_attn.k_norm")
SAMPLE = 512  # tokens that the fit sees
RIDGE = 10.0
SHARPNESS = 1.6  # of queries and keys: scores reach its square times sqrt(d)
NOISE = 0.02  # on what would else be of rank one
SOFTNESS = 0.5  # of the norm: what is confident and wrong is slow to unlearn
PAIRS = (1, 11)  # rotary pairs that tell neighbouring places apart, over a block's length


@torch.no_grad()
def start_from_target(
    target: Target,
    layers: nn.ModuleList,
    fc: nn.Linear,
    hidden_norm: nn.Module,
    norm: nn.Module,
    *,
    tap: int,
    mask: int,
) -> None:
    """Write the start into a drafter's modules; `tap` is its last one. Raises UserError where the
    target's layers are of another type.
    """
    if len(layers) > target.layers:
        raise UserError(
            f"drafter.layers: {len(layers)} is more than the {target.layers} of {target.name}; "
            "give fewer, or start: random"
        )
    for layer, place in zip(layers, spread(target.layers, len(layers)), strict=True):
        copy_layer(layer, target.layer_state(place), target.name)
    copy(norm, dict(target.base.norm.state_dict()), "", target.name)
    weight_of(norm).mul_(SOFTNESS)
    hidden = fc.out_features
    fc.weight.zero_()
    fc.weight[:, -hidden:] = torch.eye(hidden)
    weight_of(hidden_norm).fill_(1.0)
    first, *others = layers
    assert isinstance(first, DraftLayer)
    for layer in others:
        weight_of(layer.get_submodule("self_attn.o_proj")).zero_()
    for layer in layers[:-1]:
        weight_of(layer.get_submodule("mlp.down_proj")).zero_()
    look_back(first, target, tap=tap, mask=mask)


def look_back(layer: DraftLayer, target: Target, *, tap: int, mask: int) -> None:
    """Let a layer's attention pass on the context's last feature."""
    attention, head_dim = layer.self_attn, layer.self_attn.head_dim
    states = sample_states(target, tap)  # [n, D]
    features, tokens = F.rms_norm(states, states.shape[-1:]), block_tokens(target)
    weight_of(layer.input_layernorm).fill_(1.0)
    masked = F.rms_norm(target.embedding[mask].float().cpu(), states.shape[-1:])
    turned = torch.zeros(head_dim)
    turned[PAIRS[0] : min(PAIRS[1], head_dim // 2)] = 1.0
    keys = torch.outer(turned, place_direction(features, tokens, masked))  # [d, D]
    queries = torch.outer(turned, masked / masked.square().sum())
    for projection, one in ((attention.k_proj, keys), (attention.q_proj, queries)):
        weight = projection.weight
        noise = torch.randn_like(weight) * NOISE / weight.shape[1] ** 0.5
        weight.copy_(one.repeat(len(weight) // head_dim, 1) + noise)
    for module in (attention.q_norm, attention.k_norm):
        module.weight.fill_(SHARPNESS)
    passed = principal(features, attention.v_proj.out_features)  # [Hkv * d, D]
    attention.v_proj.weight.copy_(passed)
    heads = passed.unflatten(0, (-1, head_dim))  # [Hkv, d, D]
    ratio = attention.o_proj.in_features // attention.v_proj.out_features
    size = states.square().mean(-1).sqrt().median()
    spread_out = heads.repeat_interleave(ratio, dim=0).flatten(0, 1) / ratio
    attention.o_proj.weight.copy_(size * spread_out.T)


def sample_states(target: Target, tap: int) -> Tensor:
    """The tapped states of random tokens, [n, D] in fp32 on the CPU."""
    coins = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (4, SAMPLE // 4), generator=coins).to(target.device)
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    batch = Batch(ids, places, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    layers = target.states(batch, (tap,)).layers
    assert layers is not None
    return layers[:, 1:].flatten(0, 1).float().cpu()


def block_tokens(target: Target) -> Tensor:
    """Normed embeddings of some tokens, [n, D]."""
    coins = torch.Generator().manual_seed(1)
    some = torch.randint(target.vocab_size, (4 * SAMPLE,), generator=coins)
    rows = target.embedding[some.to(target.device)].float().cpu()
    return F.rms_norm(rows, rows.shape[-1:])


def place_direction(features: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Where contexts [n, D] are 1, and tokens [m, D] and the mask [D] -1: least squares, [D]."""
    given = torch.cat([features, tokens, mask.expand(len(features), -1)])
    wanted = torch.cat([torch.ones(len(features)), -torch.ones(len(given) - len(features))])
    square = given.T @ given + RIDGE * torch.eye(given.shape[1])
    found: Tensor = torch.linalg.solve(square, given.T @ wanted)
    return found


def principal(features: Tensor, count: int) -> Tensor:
    """Orthogonal rows [count, D] that keep most of features [n, D]; all of them where they can."""
    size = features.shape[1]
    if count >= size:
        return torch.eye(count, size)
    vectors: Tensor = torch.linalg.eigh(features.T @ features).eigenvectors
    return vectors[:, -count:].T


def copy_layer(layer: nn.Module, source: dict[str, Tensor], name: str) -> None:
    """A target's layer into a drafter's. Of its attention, what fits; a head more than once where
    there are more.
    """
    assert isinstance(layer, DraftLayer)
    for path in COPIED:
        copy(layer.get_submodule(path), source, f"{path}.", name)
    for path in (*HEADS, *WHERE_FITTING):
        given = source.get(f"{path}.weight")
        if given is not None:
            copy_heads(weight_of(layer.get_submodule(path)), given, layer.self_attn.head_dim)


def copy_heads(to: Tensor, weight: Tensor, head_dim: int) -> None:
    """Rows of heads, every head as often as it takes; nothing where that does not fit."""
    times = len(to) // len(weight)
    if len(weight) * times == len(to) and weight.shape[1:] == to.shape[1:]:
        heads = weight.unflatten(0, (-1, head_dim))
        to.copy_(heads.repeat_interleave(times, dim=0).flatten(0, 1))


def copy(to: nn.Module, source: dict[str, Tensor], prefix: str, name: str) -> None:
    """The weight under this prefix, of the same shape. Raises UserError."""
    weight = source.get(f"{prefix}weight")
    if weight is None or weight.shape != weight_of(to).shape:
        raise UserError(
            f"drafter.start: the layers of {name} have no {prefix or 'norm.'}weight of this "
            "drafter's shape, from which it could start; use start: random, or leave "
            "drafter.intermediate out"
        )
    weight_of(to).copy_(weight)


def weight_of(module: nn.Module) -> Tensor:
    """A module's weight."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
