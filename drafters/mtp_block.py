"""The module of multi-token prediction: what it reads, a decoder layer of the target's own kind,
and a norm (DeepSeek-V3, 2412.19437, section 2.2).

    u = fc [norm(embedding); norm(state)],   h = layer(u),   the head reads norm(h)

The layer runs through its own transformers class, so that whatever a family does between queries
and output (norms of heads, biases, gates) is done here too; only its attention is ours.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.mtp_attention import Chain
from draftsmith.drafters.mtp_families import check_family
from draftsmith.drafters.mtp_files import checkpoint_folder, find, read_block
from draftsmith.drafters.mtp_layer import check_layer, one_layer, rotary, start_layer
from draftsmith.drafters.reach import reaches
from draftsmith.drafters.target import Target, layer_stack
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig

ROUTERS = ("gate", "router", "shared_expert_gate")  # beside `experts`


class MtpBlock(nn.Module):
    """fc, three norms and a layer, in fp32. `reach` is how far the layer's attention looks back."""

    def __init__(self, config: MtpConfig, target: Target, depth: int = 0) -> None:
        """depth: which of the checkpoint's MTP layers it starts as, where it starts as one."""
        super().__init__()
        self.hidden_first = config.order == "hidden_first"
        self.shift = config.position_shift
        stack = layer_stack(target.base, target.layers)
        check_layer(target.base, target.config, stack, target.name, target.layer_state)
        self.place = start_layer(target.config)
        self.layer_config = one_layer(target.config, self.place)
        self.reach = next(iter(reaches(self.layer_config).values()))
        size = target.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = new_norm(target)
        self.pre_fc_norm_hidden = new_norm(target)
        self.layer = type(target.decoder_layers()[self.place])(self.layer_config, 0).float()
        self.norm = new_norm(target)
        self.rotate = rotary(target.base, self.layer_config)
        self.cache_argument = target.cache_argument
        if config.router == "frozen":
            freeze_router(self.layer, target.name)
        if config.start == "checkpoint":
            take_over(self, target, depth, config)
        else:
            initialise(self, target, copied=config.start == "last_layer")

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings and states [.., D] as the projection reads them, [.., 2D]."""
        read = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return torch.cat(read[::-1] if self.hidden_first else read, dim=-1)

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
        joined = self.fc(self.inputs(embedded, hidden))
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


def new_norm(target: Target) -> Any:
    """A norm like the target's last one, in fp32, its weights as new."""
    norm = copy.deepcopy(target.base.norm).float()
    norm.load_state_dict(type(target.base.norm)(target.hidden_size).state_dict())
    return norm.requires_grad_()


def freeze_router(layer: nn.Module, name: str) -> None:
    """What chooses the experts stays as it is. Raises UserError for a layer without experts."""
    routed = [one for one in layer.modules() if "experts" in dict(one.named_children())]
    routers = [
        child for one in routed for called, child in one.named_children() if called in ROUTERS
    ]
    if not routers:
        raise UserError(
            f"drafter.router: the layers of {name} have no router that could be frozen; leave it "
            "out"
        )
    for router in routers:
        router.requires_grad_(False)


def before_norm(norm: nn.Module, size: int, name: str) -> Tensor:
    """What takes a state that such a norm wrote back to what it read, up to its length: [D]
    factors. Raises UserError for a norm that does more than scale.
    """
    weight = next(norm.parameters())
    probe = torch.linspace(-1, 2, size, dtype=weight.dtype, device=weight.device)[None]
    scale = norm(torch.ones_like(probe))[0].float()
    plain = nn.functional.rms_norm(probe.float(), (size,)) * scale
    if not torch.allclose(
        norm(probe).float(), plain, rtol=0.02, atol=0.02 * float(scale.abs().max())
    ):
        raise UserError(
            f"drafter.reads: the last norm of {name} cannot be undone, it is no RMS norm; use "
            "post_norm"
        )
    undone: Tensor = scale / (scale**2 + 1e-6)  # a weight of 0 stays one
    return undone


@torch.no_grad()
def initialise(block: MtpBlock, target: Target, *, copied: bool) -> None:
    """Start values. The last norm is the target's: its head reads what comes out. A copied layer is
    the target's; what it reads is fitted to the data (`mtp_fit.py`).
    """
    block.norm.load_state_dict(target.base.norm.state_dict())
    deviation = float(target.config.initializer_range)
    if copied:
        block.layer.load_state_dict(target.layer_state(block.place))
    for value in [block.fc.weight, *(() if copied else block.layer.parameters())]:
        if value.ndim > 1:
            value.normal_(std=deviation)


@torch.no_grad()
def take_over(block: MtpBlock, target: Target, depth: int, config: MtpConfig) -> None:
    """An MTP layer that lies in the target's own files. Raises UserError."""
    found = find(checkpoint_folder(target.model.config.name_or_path), target.layers, depth)
    check_family(config, target.config.model_type, found.name)
    expected = block.state_dict()
    for name, value in read_block(found, expected, hidden_first=block.hidden_first).items():
        expected[name].copy_(value)
