"""Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2), with one layer that is applied
again for every slot (FastMTP, 2509.18362; Nemotron 3 Super, 2604.12374).

With its root at r, slot 1 reads the target's state at r - 1 and the root's embedding, and says
x[r+1]. Slot k > 1 reads its own state of slot k - 1 and the embedding of x[r+k-1]. The layer
attends to slot-1 entries of the whole text before, and to the slots of its own round.

With `depths` every slot has a layer of its own instead (`mtp_depths.py`).

Files keep the `mtp.*` layout of Qwen3-Next: `mtp.fc`, `mtp.pre_fc_norm_embedding`,
`mtp.pre_fc_norm_hidden`, `mtp.norm` and `mtp.layers.0.*`; several layers that of DeepSeek-V3.
Embedding and head are the target's.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.grow import grow
from draftsmith.drafters.mtp_block import MtpBlock, before_norm
from draftsmith.drafters.mtp_cache import MtpState, Reader, begin
from draftsmith.drafters.mtp_depths import (
    DepthState,
    Stack,
    begin_depths,
    commit_depths,
    depth_groups,
    propose_depths,
)
from draftsmith.drafters.mtp_files import own_layout
from draftsmith.drafters.mtp_slots import Recursion
from draftsmith.drafters.projection import slot_logits, top_tokens
from draftsmith.drafters.proposal import Draw, Plan, Proposal, Verdict
from draftsmith.drafters.slots import (
    Batch,
    Head,
    Roots,
    SlotStates,
    TargetStates,
    all_roots,
    label_slots,
)
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import MtpConfig

CHUNK = 256  # groups whose likeliest tokens are looked up at once, where drafts are on-policy


class MtpModule(nn.Module):
    """One block for all slots, or one for each; `depth` is K."""

    native_file = "model.safetensors"
    draws: tuple[Draw, ...] = ("chain", "without_replacement", "iid")
    reads_final = True
    taps: tuple[int, ...] = ()
    rows: Tensor  # [Vq, D], the target's head rows that drafts may use
    draft_ids: Tensor | None  # [Vq] their target ids; None: all
    embedding: Tensor  # [V, D], the target's

    def __init__(self, config: MtpConfig, target: Target, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config, self.depth, self.target = config, config.draft_tokens, target
        self.blocks = nn.ModuleList(
            MtpBlock(config, target, place) for place in range(config.depths)
        )
        weight = target.head_weight.detach()
        rows = weight if draft_ids is None else weight[draft_ids.to(target.device)]
        self.undone: Tensor | None = None
        if config.reads == "pre_norm":
            self.undone = before_norm(target.base.norm, target.hidden_size, target.name)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("embedding", target.embedding.detach(), persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.width = rows.shape[0]

    @property
    def block(self) -> MtpBlock:
        """Of slot 1."""
        first: MtpBlock = self.blocks[0]  # type: ignore[assignment]
        return first

    @property
    def stack(self) -> Stack:
        """The depths, where each has weights of its own."""
        blocks: list[MtpBlock] = list(self.blocks)  # type: ignore[arg-type]
        return Stack(blocks, self.embed, self.recycled, self.logits_of)

    def head(self) -> Head:
        """How slot states become logits."""
        return Head(self.rows, None, self.draft_ids)

    def embed(self, ids: Tensor) -> Tensor:
        """[..] -> [.., D] in the block's dtype."""
        return self.embedding[ids].to(self.block.fc.weight.dtype)

    def read(self, final: Tensor) -> Tensor:
        """The target's states [.., D] as slot 1 reads them: where they are those before its last
        norm, up to their length, which the layer's own norm does not notice.
        """
        return final if self.undone is None else (final.float() * self.undone).to(final.dtype)

    def recycle(self, output: Tensor) -> Tensor:
        """The block's output as the next slot reads it."""
        return self.recycled(self.block, output)

    def recycled(self, block: MtpBlock, output: Tensor) -> Tensor:
        """A block's output as the next slot reads it."""
        if self.config.recycles == "pre_norm":
            return output
        normed: Tensor = block.norm(output)
        return normed

    # --- training ---

    def roots(self, batch: Batch) -> Roots:
        """All: states are mixed with those of later roots."""
        return all_roots(batch)

    def slots(self, batch: Batch, states: TargetStates, roots: Roots) -> SlotStates:
        """The training waist: one group per root."""
        hidden = self.groups(batch, states, roots, self.depth, self.config.recursion)
        return SlotStates(hidden, self.head(), label_slots(batch, roots, self.depth))

    def groups(
        self, batch: Batch, states: TargetStates, roots: Roots, depth: int, recursion: str
    ) -> Tensor:
        """What the head reads, [N, depth, D]."""
        if len(self.blocks) > 1:
            return depth_groups(self.stack, batch, self.read(states.final), roots, depth)
        final = self.read(states.final).to(self.block.fc.weight.dtype)
        run = Recursion(self.block, self.embed, self.recycle, batch, roots)
        run.first(final)
        for _ in range(1, depth):
            tokens = (
                self.likeliest(run.outputs[-1]) if recursion == "on_policy" else run.true_tokens()
            )
            run.next(tokens, run.mixed(final) if recursion == "mixed" else run.own())
        return run.groups()

    def likeliest(self, output: Tensor) -> Tensor:
        """The tokens [N] that outputs [N, D] draft greedily."""
        hidden = self.block.norm(output)[:, None]
        return top_tokens(hidden, self.head(), 1, chunk=CHUNK, adjust=self.target.adjust)[:, 0, 0]

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
        """The likeliest tokens of every slot, given the text before it, [N, slots, count]."""
        hidden = self.groups(batch, states, roots, slots, "teacher")
        return top_tokens(hidden, self.head(), count, chunk=chunk, adjust=self.target.adjust)

    def first_logits(
        self, batch: Batch, states: TargetStates, roots: Roots
    ) -> Callable[[Tensor], Tensor]:
        """Of the laws after the roots."""
        hidden = self.groups(batch, states, roots, 1, "teacher")
        return lambda groups: slot_logits(hidden[groups], self.head(), self.target.adjust)[:, 0]

    # --- decoding ---

    def reader(self, cache: TargetCache) -> Reader:
        """For one round."""
        return Reader(self.block, self.embed, self.recycle, cache)

    @torch.no_grad()
    def start(self, ids: Tensor, lengths: Tensor, states: TargetStates) -> MtpState | DepthState:
        """After prefill: the block reads the prompts."""
        if len(self.blocks) > 1:
            return begin_depths(self.stack, ids, lengths, self.read(states.final))
        reader = self.reader(TargetCache(self.block.layer_config))
        return begin(reader, ids, lengths, self.read(states.final))

    @torch.no_grad()
    def propose(self, state: MtpState | DepthState, root: Tensor, plan: Plan) -> Proposal:
        """Drafts in the plan's shape, each from the states of those before it."""
        if isinstance(state, DepthState):
            return propose_depths(self.stack, state, root, plan, self.draft_ids)
        reader, known = self.reader(state.cache), state.known
        first = self.logits(reader.read_root(state, root))

        def below(nodes: list[int], tokens: Tensor) -> Tensor:
            return self.logits(reader.read_nodes(nodes, tokens, plan.tree, known))

        return grow(plan, first, below, self.draft_ids)

    def logits(self, output: Tensor) -> Tensor:
        """The block's outputs [.., D] -> [.., Vq] in fp32."""
        return self.logits_of(self.block, output)

    def logits_of(self, block: MtpBlock, output: Tensor) -> Tensor:
        """A block's outputs [.., D] -> [.., Vq] in fp32."""
        hidden = block.norm(output)
        flat = slot_logits(hidden.flatten(0, -2)[:, None], self.head(), self.target.adjust)
        return flat.view(*output.shape[:-1], -1)

    def commit(
        self,
        state: MtpState | DepthState,
        proposal: Proposal,
        verdict: Verdict,
        states: TargetStates,
    ) -> MtpState | DepthState:
        """Forget the drafts; what was accepted is read anew from the target's states."""
        read = TargetStates(self.read(states.final))
        if isinstance(state, DepthState):
            return commit_depths(state, proposal, verdict, read)
        return state.after(proposal, verdict, read)

    def select(self, state: MtpState | DepthState, rows: Tensor) -> MtpState | DepthState:
        """These rows of the batch."""
        return state.select(rows)

    def assistance(self) -> dict[str, Any] | None:
        """None: transformers applies no layer again, and knows no draft vocabulary."""
        return None

    def cache_bytes_per_token(self) -> int:
        """Keys and values of its layers."""
        config = self.block.layer_config.to_dict()
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(2 * len(self.blocks) * heads * width * self.rows.element_size())

    # --- files ---

    def named_weights(self) -> dict[str, Tensor]:
        """The blocks' tensors under their names in files."""
        layout = own_layout(len(self.blocks))
        return {
            layout.at(self.target.layers, place) + layout.theirs(name): value
            for place, block in enumerate(self.blocks)
            for name, value in block.state_dict().items()
        }

    def native_tensors(self) -> dict[str, Tensor]:
        """Tensors under their names in files, on the CPU."""
        return {k: v.detach().contiguous().cpu() for k, v in self.named_weights().items()}

    @torch.no_grad()
    def load_native(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `native_tensors` gave. Raises ValueError for other names or shapes."""
        expected = self.named_weights()
        if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in tensors.items()}:
            raise ValueError(f"{self.native_file} holds other tensors than its drafter has")
        for name, value in expected.items():
            value.copy_(tensors[name])

    def native_config(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """config.json: the target's, and how many layers of what kind drafts have."""
        kinds = self.block.layer_config.to_dict().get("layer_types") or ["full_attention"]
        count = len(self.blocks)
        return {
            **self.target.config.to_dict(),
            "num_nextn_predict_layers": count,
            "num_mtp_layers": count,
            "mtp_num_hidden_layers": count,
            "mtp_layer_types": kinds * count,
            "mtp_hidden_states_first": self.block.hidden_first,
        }

    def native_extras(self, folder: Path) -> None:
        """None."""
