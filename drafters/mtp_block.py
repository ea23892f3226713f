"""The module of multi-token prediction: what it reads, a decoder layer of the target's own kind,
and a norm (DeepSeek-V3, 2412.19437, section 2.2).

    u = fc [norm(embedding); norm(state)],   h = layer(u),   the head reads norm(h)

The layer runs through its own transformers class, so that whatever a family does between queries
and output (norms of heads, biases, gates) is done here too; only its attention is ours.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.mtp_attention import OURS, Chain, register
from draftsmith.drafters.mtp_files import checkpoint_folder, find, read_block
from draftsmith.drafters.reach import layer_types, reaches
from draftsmith.drafters.shallow import shallow_config
from draftsmith.drafters.slots import Batch
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig

FULL = "full_attention"
# Largest root mean square of what a copied layer reads. Slot 1 hits after 70 steps of one row,
# lr 1e-3, on SmolLM2-135M: 18 % with about 4, 13 % with 30, 16 % with 1 and with random weights.
SIZE = 4.0


class MtpBlock(nn.Module):
    """fc, three norms and a layer, in fp32. `reach` is how far the layer's attention looks back."""

    def __init__(self, config: MtpConfig, target: Target) -> None:
        super().__init__()
        self.hidden_first = config.order == "hidden_first"
        self.shift = config.position_shift
        self.place = start_layer(target)
        self.layer_config = one_layer(target, self.place)
        self.reach = next(iter(reaches(self.layer_config).values()))
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = new_norm(target)
        self.pre_fc_norm_hidden = new_norm(target)
        self.layer = type(target.decoder_layers()[self.place])(self.layer_config, 0).float()
        self.norm = new_norm(target)
        self.rotate = rotary(target, self.layer_config)
        self.cache_argument = target.cache_argument
        if config.start == "checkpoint":
            take_over(self, target)
        else:
            initialise(self, target, copied=config.start == "last_layer")

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        positions: Tensor,
        *,
        mask: Tensor | None = None,
        chain: Chain | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Embeddings and states [B, M, D] at positions [B, M] -> states [B, M, D], before `norm`.

        mask: [B or 1, 1, M, S] bool over the keys in the cache and these. In training, `chain`
        holds masks and keys instead.
        """
        read = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        joined = self.fc(torch.cat(read[::-1] if self.hidden_first else read, dim=-1))
        at = (positions + self.shift).clamp(min=0)
        out = self.layer(
            joined,
            attention_mask=mask,
            position_ids=at,
            position_embeddings=self.rotate(joined, at),
            chain=chain,
            **{self.cache_argument: cache},
        )
        state: Tensor = out[0] if isinstance(out, tuple) else out
        return state


def start_layer(target: Target) -> int:
    """The last layer of full attention; the last one where types are not told apart."""
    kinds = layer_types(target.config)
    if kinds is None or FULL not in kinds:
        return target.layers - 1
    return max(place for place, kind in enumerate(kinds) if kind == FULL)


def one_layer(target: Target, place: int) -> Any:
    """The target's text config with this layer alone, its attention ours. Raises UserError for a
    layer without attention.
    """
    config = shallow_config(target.config, [place])
    if not reaches(config):
        raise UserError(
            f"drafter.kind: {target.name} has no attention layer that an mtp block could be made "
            "of; take another kind"
        )
    first = config.to_dict().get("first_k_dense_replace")  # DeepSeek: layers from here on are MoE
    if first is not None and place >= first:
        config.first_k_dense_replace = 0
    register()
    config._attn_implementation = OURS
    return config


def new_norm(target: Target) -> Any:
    """A norm like the target's last one, in fp32, its weights as new."""
    norm = copy.deepcopy(target.base.norm).float()
    norm.load_state_dict(type(target.base.norm)(target.hidden_size).state_dict())
    return norm.requires_grad_()


def rotary(target: Target, config: Any) -> Callable[[Tensor, Tensor], Any]:
    """(states, positions) -> the cosines and sines that the layer takes."""
    module = target.base.rotary_emb
    if "layer_type" not in inspect.signature(module.forward).parameters:
        return lambda states, positions: module(states, positions)
    (kind,) = layer_types(config) or ("",)
    return lambda states, positions: module(states, positions, kind)


@torch.no_grad()
def initialise(block: MtpBlock, target: Target, *, copied: bool) -> None:
    """Start values. The last norm is the target's: its head reads what comes out.

    copied: the layer is the target's. It reads the state alone, brought back to what it was before
    the target's last norm; the embedding comes in with the first step. What the layer usually reads
    may be large (a size of 30 in SmolLM2-135M): both it and what the layer adds to it are scaled
    down to `SIZE` then, which its norms do not notice, so that the embedding is heard soon.
    """
    block.norm.load_state_dict(target.base.norm.state_dict())
    deviation = float(target.config.initializer_range)
    if not copied:
        for value in [block.fc.weight, *block.layer.parameters()]:
            if value.ndim > 1:
                value.normal_(std=deviation)
        return
    block.layer.load_state_dict(target.layer_state(block.place))
    final, wanted = usual_states(target, block.place)
    scale = target.base.norm(torch.ones_like(final[:1]))[0].float()
    undone = scale / (scale**2 + 1e-6)  # a weight of 0 stays one
    read = nn.functional.rms_norm(final.float(), final.shape[-1:]) * undone
    size = wanted.clamp(max=SIZE)
    state = torch.diag(undone * size / sizes(read).median())
    for name, value in block.layer.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            value.mul_(size / wanted)
    halves = [torch.zeros_like(state), state]
    block.fc.weight.copy_(torch.cat(halves[::-1] if block.hidden_first else halves, dim=1))


@torch.no_grad()
def take_over(block: MtpBlock, target: Target) -> None:
    """The MTP layer that lies in the target's own files. Raises UserError."""
    found = find(checkpoint_folder(target.model.config.name_or_path), target.layers)
    expected = block.state_dict()
    for name, value in read_block(found, expected, hidden_first=block.hidden_first).items():
        expected[name].copy_(value)


def usual_states(target: Target, place: int) -> tuple[Tensor, Tensor]:
    """Final states [n, D] of a few tokens, and how large the states are that a layer reads."""
    ids = torch.arange(64, device=target.device)[None] * 97 % target.vocab_size
    where = torch.arange(64, device=target.device)[None]
    batch = Batch(ids, where, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))
    states = target.states(batch, (place - 1,) if place else ())
    before = target.embedding[ids] if states.layers is None else states.layers
    return states.final[0], sizes(before.float()).median()


def sizes(states: Tensor) -> Tensor:
    """Root mean squares, [..] from [.., D]."""
    return states.pow(2).mean(dim=-1).sqrt()
