"""The DFlash block drafter (2602.06036): all slots in one pass of a few layers over a block of the
root and mask tokens, which reads the target's states in every layer.

Outputs of some target layers (`taps`) are fused into one context feature per position,
c = RMSNorm(W [h; ..; h]). In every layer the context gives keys and values W_k c, W_v c at its
true positions; the block [root, mask, .., mask] attends to the context before the root, and to
itself in both directions. Slot k predicts the token at its own place, through the target's frozen
embedding and head. The root's own states are not there yet when it drafts, so in training the
context ends before the anchor too.

Files keep z-lab's layout (`dflash_format.py`). A reduced draft vocabulary is a choice of rows of
the target's head and lies in our metadata; the weights stay valid with all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.dflash_attention import attention, gather
from draftsmith.drafters.dflash_format import check_config, native_config
from draftsmith.drafters.dflash_layers import Attend, DraftLayer, RMSNorm, Rope, Rotary
from draftsmith.drafters.dflash_mask import check_mask_token, propose_mask_token
from draftsmith.drafters.dflash_start import start_from_target
from draftsmith.drafters.export import assistant_model
from draftsmith.drafters.geometry import geometry_of, own_geometry
from draftsmith.drafters.projection import slot_logits, top_tokens
from draftsmith.drafters.proposal import Draw, Plan, Proposal, Verdict
from draftsmith.drafters.slot_proposal import propose_slots
from draftsmith.drafters.slots import (
    Batch,
    Head,
    Roots,
    SlotStates,
    TargetStates,
    label_slots,
    sampled_roots,
)
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DFlashConfig

Contexts = list[tuple[Tensor, Tensor]]  # keys and values [.., T, Hkv, d] of every layer


@dataclass
class DFlashState:
    """What a decoding carries: every layer's keys and values of the committed text, without its
    root.
    """

    cache: TargetCache


class DFlash(nn.Module):
    """The block drafter.

    `depth`, its slots, may be lowered after training (the paper's ablation: a drafter trained on
    blocks of 16 drafts blocks of 8 almost as well as one trained on them, but not the reverse).
    """

    native_file = "model.safetensors"
    draws: tuple[Draw, ...] = ("chain", "iid", "without_replacement")
    reads_final = False
    rows: Tensor  # [Vq, D], the target's head rows that drafts may use
    embedding: Tensor  # [V, D], the target's
    draft_ids: Tensor | None  # [Vq] their target ids; None: all

    def __init__(self, config: DFlashConfig, target: Target, draft_ids: Tensor | None) -> None:
        super().__init__()
        mask = config.mask_token_id
        mask = propose_mask_token(target) if mask is None else check_mask_token(mask, target, ())
        self.config = config.model_copy(update={"mask_token_id": mask})
        self.mask_token_id, self.depth = mask, config.depth
        self.taps = config.taps or spread_taps(target.layers, config.layers)
        self.shape = own_geometry(config, geometry_of(target.config))
        self.target_layers = target.layers
        self.adjust, self.rotary = target.adjust, Rotary(self.shape)
        self.embedding_scale = target.embedding_scale
        self.scalars = scalars_of(target)
        hidden = self.shape.hidden
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, self.shape.eps)
        self.layers = nn.ModuleList(DraftLayer(self.shape) for _ in range(config.layers))
        self.norm = RMSNorm(hidden, self.shape.eps)
        self.register_buffer("embedding", target.embedding, persistent=False)
        rows = target.head_weight
        rows = rows if draft_ids is None else rows[draft_ids.to(target.device)]
        self.register_buffer("rows", rows.detach(), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.width = rows.shape[0]

    @property
    def block_size(self) -> int:
        """B: the root and the slots."""
        return self.depth + 1

    def begin(self, target: Target) -> None:
        """Before the first training: weights from the target, where its knobs say so. Raises
        UserError where the target's layers are of another type.
        """
        if self.config.start == "target":
            parts = self.layers, self.fc, self.hidden_norm, self.norm
            start_from_target(target, *parts, tap=self.taps[-1], mask=self.mask_token_id)

    def head(self) -> Head:
        """How slot states become logits."""
        return Head(self.rows, None, self.draft_ids)

    # --- the network ---

    def contexts(self, features: Tensor, positions: Tensor) -> Contexts:
        """Keys and values of tapped states [.., T, n*D] at their true positions [.., T]."""
        fused = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        rope = self.rotary(positions)
        return [layer.context(fused, rope) for layer in self.draft_layers]

    def blocks(self, roots: Tensor, positions: Tensor, attend: Callable[[int], Attend]) -> Tensor:
        """States [N, K, D] of the slots of blocks that start with these tokens [N] at these
        positions [N].
        """
        ids = roots.new_full((len(roots), self.block_size), self.mask_token_id)
        ids[:, 0] = roots
        x = nn.functional.embedding(ids, self.embedding).to(self.fc.weight.dtype)
        x = x * self.embedding_scale if self.embedding_scale != 1.0 else x
        rope: Rope = self.rotary(positions[:, None] + torch.arange(ids.shape[1], device=ids.device))
        for number, layer in enumerate(self.draft_layers):
            # Nobody reads what the last layer makes of the root.
            x = layer(x, rope, attend(number), skip=int(number == len(self.layers) - 1))
        states: Tensor = self.norm(x)
        return states

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """The layers, typed."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    def read(self, batch: Batch, states: TargetStates) -> Contexts:
        """Every layer's keys and values of packed rows."""
        assert states.layers is not None, "the target's states come without the tapped layers"
        return self.contexts(states.layers, batch.positions)

    def states(self, batch: Batch, contexts: Contexts, roots: Roots) -> Tensor:
        """Slot states [N, K, D] of these roots of packed rows."""
        over = attention(batch, roots, self.block_size)

        def attend(layer: int) -> Attend:
            return lambda q, k, v: over(q, k, v, *contexts[layer])

        at = roots.row, roots.position
        return self.blocks(batch.ids[at], batch.positions[at], attend)

    # --- training and measuring ---

    def roots(self, batch: Batch) -> Roots:
        """Anchors, drawn anew in every epoch."""
        return sampled_roots(batch, self.config.anchors_per_row)

    def slots(self, batch: Batch, states: TargetStates, roots: Roots) -> SlotStates:
        """The training waist: one block per root."""
        hidden = self.states(batch, self.read(batch, states), roots)
        return SlotStates(hidden, self.head(), label_slots(batch, roots, self.depth))

    def guesses(
        self,
        batch: Batch,
        states: TargetStates,
        roots: Roots,
        *,
        slots: int,
        count: int,
        chunk: int,
    ) -> Tensor:
        """The best guesses of slots 1..`slots` of every root, [N, slots, count]."""
        contexts, head = self.read(batch, states), self.head()
        found = [roots.row.new_empty((0, slots, count))]
        for at in torch.arange(len(roots.row), device=roots.row.device).split(chunk):
            hidden = self.states(batch, contexts, Roots(roots.row[at], roots.position[at]))
            hidden = hidden[:, :slots]
            found.append(top_tokens(hidden, head, count, chunk=chunk, adjust=self.adjust))
        return torch.cat(found)

    def first_logits(
        self, batch: Batch, states: TargetStates, roots: Roots
    ) -> Callable[[Tensor], Tensor]:
        """Of the first slots of these roots."""
        contexts = self.read(batch, states)

        def logits(groups: Tensor) -> Tensor:
            chosen = Roots(roots.row[groups], roots.position[groups])
            hidden = self.states(batch, contexts, chosen)[:, :1]
            return slot_logits(hidden, self.head(), self.adjust)[:, 0]

        return logits

    # --- decoding ---

    def start(self, ids: Tensor, lengths: Tensor, states: TargetStates) -> DFlashState:
        """After prefill: the prompts' states are read."""
        cache = TargetCache(self.cache_config())
        cache.extent.set([0] * len(ids))
        self.append(cache, states, lengths.tolist())
        return DFlashState(cache)

    @torch.no_grad()
    def append(self, cache: TargetCache, states: TargetStates, counts: list[int]) -> None:
        """Cache the first counts[row] of the tapped states [B, M, n*D] behind every row."""
        assert states.layers is not None, "the target's states come without the tapped layers"
        batch, count = states.layers.shape[:2]
        before, extent = cache.lengths, cache.open(batch, count, states.layers.device)
        places = torch.arange(count, device=states.layers.device)[None] + extent.starts
        contexts = self.contexts(states.layers, places)
        for layer, parts in zip(cache.buffered, contexts, strict=True):
            layer.update(*(part.transpose(1, 2) for part in parts))
        cache.close(count)
        cache.crop([length + new for length, new in zip(before, counts, strict=True)])

    @torch.no_grad()
    def propose(self, state: DFlashState, root: Tensor, plan: Plan) -> Proposal:
        """One pass over the block; guesses of every slot, or draws from its law, as the tree."""
        hidden = self.block_states(state.cache, root)[:, : len(plan.tree.paths[-1])]
        return propose_slots(slot_logits(hidden, self.head(), self.adjust), plan, self.draft_ids)

    def block_states(self, cache: TargetCache, root: Tensor) -> Tensor:
        """States of the slots [B, K, D] behind the cached contexts. Nothing of the block stays
        cached.
        """
        lengths = torch.tensor(cache.lengths, device=root.device)
        extent = cache.open(len(root), self.block_size, root.device)
        mask = None
        if min(cache.lengths) < extent.longest:
            end = (lengths + self.block_size)[:, None, None, None]
            mask = torch.arange(extent.longest + self.block_size, device=root.device) < end

        def attend(layer: int) -> Attend:
            def over(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                every = cache.buffered[layer].update(k.transpose(1, 2), v.transpose(1, 2))
                return gather(q, every[0].transpose(1, 2), every[1].transpose(1, 2), mask)

            return over

        return self.blocks(root, lengths, attend)

    def commit(
        self, state: DFlashState, proposal: Proposal, verdict: Verdict, states: TargetStates
    ) -> DFlashState:
        """The states of the old root and of the accepted drafts are read."""
        self.append(state.cache, states, (verdict.length + 1).tolist())
        return state

    def select(self, state: DFlashState, rows: Tensor) -> DFlashState:
        """These rows of the batch."""
        state.cache.select(rows)
        return state

    def assistance(self) -> dict[str, Any] | None:
        """transformers' own class of this network. It drafts from all tokens, and is no match for
        a drafter that may use some.
        """
        if self.draft_ids is not None:
            return None
        model = assistant_model(self.native_config({}), self.native_tensors())
        return {"assistant_model": model.to(self.rows.device), "speculation_type": "dflash"}

    def cache_bytes_per_token(self) -> int:
        """Keys and values of every layer."""
        width = 2 * self.shape.kv_heads * self.shape.head_dim
        return len(self.layers) * width * self.fc.weight.element_size()

    def cache_config(self) -> Any:
        """What transformers makes a cache from."""
        from transformers import Qwen3Config

        return Qwen3Config(num_hidden_layers=len(self.layers), hidden_size=self.shape.hidden)

    # --- files ---

    def native_tensors(self) -> dict[str, Tensor]:
        """Tensors under z-lab's names, on the CPU, in the target's dtype."""
        dtype = self.rows.dtype
        return {
            name: value.detach().to(dtype).contiguous().cpu()
            for name, value in self.state_dict().items()
        }

    @torch.no_grad()
    def load_native(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `native_tensors` gave. Raises ValueError for other names or shapes."""
        expected = self.state_dict()
        if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in tensors.items()}:
            raise ValueError(f"{self.native_file} holds other tensors than its drafter has")
        for name, view in expected.items():
            view.copy_(tensors[name])

    def native_config(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of z-lab's layout."""
        config = native_config(
            self.shape,
            layers=len(self.layers),
            block_size=self.block_size,
            taps=self.taps,
            mask_token_id=self.mask_token_id,
            vocab_size=self.embedding.shape[0],
            target_layers=self.target_layers,
            dtype=str(self.rows.dtype).removeprefix("torch."),
        )
        config["dflash_config"] |= self.scalars
        check_config(config)
        return config

    def native_extras(self, folder: Path) -> None:
        """None."""


def scalars_of(target: Target) -> dict[str, float]:
    """What a target does to embeddings and logits, under z-lab's names; nothing where it does
    nothing.
    """
    found = {
        "input_embedding_scale": (target.embedding_scale, 1.0),
        "output_multiplier": (target.logit_scale, 1.0),
        "final_logit_softcapping": (target.logit_cap, None),
    }
    return {name: value for name, (value, plain) in found.items() if value not in (plain, None)}


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """The published choice: `count` layers of the target from its second to its third-to-last, of
    one the middle. Raises UserError where they are too few.
    """
    if count == 1:
        found = [layers // 2]
    else:
        found = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    if len(set(found)) < count or not 0 <= found[0] <= found[-1] <= layers - 2:
        raise UserError(
            f"drafter.taps: {count} taps do not spread over the {layers} layers of the target; "
            f"name layers between 0 and {layers - 2}, or lower drafter.layers"
        )
    return tuple(found)
