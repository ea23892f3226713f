"""Medusa heads (Cai et al., 2401.10774, section 2.1): K independent heads on the target's final
state.

Head k reads the state before the root and guesses the k-th token after the root:
`logits_k = W_k (h + SiLU(A_k h + b_k))`. A_k and b_k start at zero, so every head starts as the
target's own head. W_k is the frozen shared head (default), that plus a low-rank correction, or one
trained matrix per slot.

The root itself is known when drafting; Medusa's heads do not look at it. With `reads_root` they do:
`h + SiLU(A_k h + C_k e + b_k)`, e the root's embedding scaled to unit mean square, C_k from zero.
It is the first of the dependences that Hydra's heads have (Ankner et al., 2402.05109, section 3);
slots stay independent of each other, so any tree of guesses still costs one pass of the heads.

Files keep FasterDecoding's layout: `{i}.0.linear.weight`, `{i}.0.linear.bias` and, for own
full-vocabulary heads, `{i}.1.weight`; `config.json` is the superset that vLLM <= 0.32 reads. What
that layout cannot say (draft vocabulary, low-rank factors, C_k) lies under key names of our own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.layout import last_of
from draftsmith.drafters.projection import slot_logits, top_tokens
from draftsmith.drafters.proposal import Draw, Plan, Proposal, Verdict
from draftsmith.drafters.slot_proposal import propose_slots
from draftsmith.drafters.slots import (
    Batch,
    Head,
    Roots,
    SlotStates,
    TargetStates,
    all_roots,
    before_roots,
    label_slots,
)
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import MedusaConfig


@dataclass
class MedusaState:
    """What a decoding carries from round to round: the state that the heads read."""

    hidden: Tensor  # [B, D]


class MedusaHeads(nn.Module):
    """K residual heads; `depth` is K."""

    native_file = "medusa_lm_head.safetensors"
    draws: tuple[Draw, ...] = ("chain", "iid", "without_replacement")
    reads_final = True
    taps: tuple[int, ...] = ()
    rows: Tensor  # [Vq, D], the target's head rows that drafts may use
    draft_ids: Tensor | None  # [Vq] their target ids; None: all
    embedding: Tensor  # [V, D], the target's; held where heads read the root

    def __init__(self, config: MedusaConfig, target: Target, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config, self.depth, self.adjust = config, config.heads, target.adjust
        size = target.hidden_size
        self.weight = nn.Parameter(torch.zeros(config.heads, size, size))  # [K, D, D]
        self.bias = nn.Parameter(torch.zeros(config.heads, size))  # [K, D]
        self.root_weight: nn.Parameter | None = None  # [K, D, D]
        if config.reads_root:
            self.root_weight = nn.Parameter(torch.zeros(config.heads, size, size))
            self.register_buffer("embedding", target.embedding, persistent=False)  # [V, D]
        rows = (
            target.head_weight
            if draft_ids is None
            else target.head_weight[draft_ids.to(target.device)]
        )
        self.register_buffer("rows", rows.detach(), persistent=False)  # [Vq, D]
        self.width = rows.shape[0]
        self.register_buffer("draft_ids", draft_ids, persistent=False)  # [Vq] or None
        self.down: nn.Parameter | None = None  # [K, R, D]
        self.own: nn.Parameter | None = None  # [K, Vq, R or D]
        if config.projection == "low_rank":
            self.down = nn.Parameter(torch.randn(config.heads, config.rank, size) / size**0.5)
            self.own = nn.Parameter(torch.zeros(config.heads, rows.shape[0], config.rank))
        if config.projection == "own":
            self.own = nn.Parameter(rows.detach().float().repeat(config.heads, 1, 1))

    def head(self) -> Head:
        """How these slot states become logits."""
        shared = None if self.config.projection == "own" else self.rows
        return Head(shared, self.own, self.draft_ids)

    def states(self, hidden: Tensor, roots: Tensor) -> Tensor:
        """Target states [N, D] before the roots [N] (token ids) -> slot states [N, K, D (+ R)]."""
        hidden = hidden.to(self.weight.dtype)
        # One matrix product for all heads: a batched one is ten times slower in bf16 on CPUs.
        turned = nn.functional.linear(hidden, self.weight.flatten(0, 1), self.bias.flatten())
        if self.root_weight is not None:
            seen = self.embedding[roots].to(hidden.dtype)
            seen = nn.functional.rms_norm(seen, seen.shape[-1:])
            turned = turned + nn.functional.linear(seen, self.root_weight.flatten(0, 1))
        state: Tensor = hidden[:, None] + nn.functional.silu(turned).view(-1, *self.bias.shape)
        if self.down is None:
            return state
        return torch.cat(
            [state, torch.einsum("nkd,krd->nkr", state, self.down).to(state.dtype)], dim=-1
        )

    def roots(self, batch: Batch) -> Roots:
        """All: a group costs one state."""
        return all_roots(batch)

    def slots(self, batch: Batch, states: TargetStates, roots: Roots) -> SlotStates:
        """The training waist: one group per root."""
        tokens = batch.ids[roots.row, roots.position]
        hidden = self.states(before_roots(states.final, roots), tokens)
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
        head = self.head()
        head = Head(head.shared, None if head.own is None else head.own[:slots], head.ids)
        tokens = batch.ids[roots.row, roots.position]
        hidden = self.states(before_roots(states.final, roots), tokens)[:, :slots]
        return top_tokens(hidden, head, count, chunk=chunk, adjust=self.adjust)

    def first_logits(
        self, batch: Batch, states: TargetStates, roots: Roots
    ) -> Callable[[Tensor], Tensor]:
        """Of the first heads at these roots."""
        tokens, hidden = batch.ids[roots.row, roots.position], before_roots(states.final, roots)
        head = self.head()
        first = Head(head.shared, None if head.own is None else head.own[:1], head.ids)

        def logits(groups: Tensor) -> Tensor:
            found = self.states(hidden[groups], tokens[groups])[:, :1]
            return slot_logits(found, first, self.adjust)[:, 0]

        return logits

    def start(self, ids: Tensor, lengths: Tensor, states: TargetStates) -> MedusaState:
        """After prefill, ids [B, T]: the heads read the state at the prompt's last token."""
        return MedusaState(last_of(states.final, lengths))

    @torch.no_grad()
    def propose(self, state: MedusaState, root: Tensor, plan: Plan) -> Proposal:
        """Guesses of every slot, or draws from its law, laid out as the tree."""
        logits = slot_logits(self.states(state.hidden, root), self.head(), self.adjust)
        return propose_slots(logits, plan, self.draft_ids)

    def commit(
        self, state: MedusaState, proposal: Proposal, verdict: Verdict, states: TargetStates
    ) -> MedusaState:
        """states.final [B, P+1, D] at the root and along the path; the last accepted one is read
        next.
        """
        rows = torch.arange(verdict.length.shape[0], device=verdict.length.device)
        return MedusaState(states.final[rows, verdict.length])

    def select(self, state: MedusaState, rows: Tensor) -> MedusaState:
        """These rows of the batch."""
        return MedusaState(state.hidden[rows])

    def assistance(self) -> dict[str, Any] | None:
        """None: transformers cannot draft with heads."""
        return None

    def cache_bytes_per_token(self) -> int:
        """None: the heads carry one state per row, however long the context."""
        return 0

    def named_slices(self) -> dict[str, Tensor]:
        """Views of the parameters, head by head, under their names in files."""
        views: dict[str, Tensor] = {}
        for i in range(self.depth):
            views[f"{i}.0.linear.weight"] = self.weight[i]
            views[f"{i}.0.linear.bias"] = self.bias[i]
            if self.root_weight is not None:
                views[f"{i}.root.weight"] = self.root_weight[i]
            if self.own is not None:
                views[self.own_key(i)] = self.own[i]
            if self.down is not None:
                views[f"{i}.low_rank.down"] = self.down[i]
        return views

    def own_key(self, i: int) -> str:
        """`{i}.1.weight` only for what that name means elsewhere: a whole [V, D] projection."""
        if self.config.projection == "low_rank":
            return f"{i}.low_rank.up"
        return f"{i}.1.weight" if self.draft_ids is None else f"{i}.draft_rows.weight"

    def native_tensors(self) -> dict[str, Tensor]:
        """Tensors under their names in files, on the CPU."""
        return {k: v.detach().contiguous().cpu() for k, v in self.named_slices().items()}

    @torch.no_grad()
    def load_native(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `native_tensors` gave. Raises ValueError for other names or shapes."""
        expected = self.named_slices()
        if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in tensors.items()}:
            raise ValueError(f"{self.native_file} holds other tensors than its drafter has")
        for name, view in expected.items():
            view.copy_(tensors[name])

    def native_config(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """config.json: what FasterDecoding and vLLM <= 0.32 read."""
        own = self.config.projection == "own" and self.draft_ids is None
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "medusa_num_heads": self.depth,
            "medusa_num_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": not own,
            "hidden_size": self.weight.shape[-1],
            "vocab_size": meta["target"]["vocab_size"],
            "base_model_name_or_path": meta["target"]["model"],
            "version": "2",
        }

    def native_extras(self, folder: Path) -> None:
        """None."""
