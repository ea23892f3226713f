"""Every drafter there is: one literal table, one protocol."""

from typing import Any, Protocol

from torch import Tensor, nn

from draftsmith.drafters.medusa import MedusaHeads
from draftsmith.drafters.proposal import Plan, Proposal, Verdict
from draftsmith.drafters.slots import Batch, Head, Roots, SlotStates, TargetStates
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import MedusaConfig


class Drafter(Protocol):
    """What training and decoding ask of a drafter.

    Decoding works on a batch of B rows, whose contexts have lengths of their own:

    `start(ids [B, T], lengths [B], states)` after prefill. Prompts are padded at the end: row b's
    is ids[b, :lengths[b]], and its states are states.final[b, :lengths[b]] ([B, T, D]); what lies
    behind is any token and any number. The root of the first round is the token after the prompt.
    Gives a state that holds every row.

    `propose(state, root [B], plan)` gives a proposal of at most plan.tree.nodes nodes. Rows may
    have fewer: `valid` tells (no valid node at all is a plain step), and what invalid nodes hold is
    ignored. The loop cuts off nodes behind the last one that is valid in any row.

    `commit(state, proposal, verdict, states)` after verification, with the proposal as it was fed.
    states.final [B, P+1, D] are the target's states at the root and along the accepted path, of
    which the first verdict.length[b] + 1 are row b's; the rest is padding. Row b has grown by its
    old root and those drafts; verdict.next is its new root. Gives the next state.

    `select(state, rows [b])` keeps these rows of the batch, in this order: the others have ended.
    """

    depth: int

    def head(self) -> Head: ...
    def slots(self, batch: Batch, states: TargetStates, roots: Roots) -> SlotStates: ...
    def start(self, ids: Tensor, lengths: Tensor, states: TargetStates) -> Any: ...
    def propose(self, state: Any, root: Tensor, plan: Plan) -> Proposal: ...
    def commit(
        self, state: Any, proposal: Proposal, verdict: Verdict, states: TargetStates
    ) -> Any: ...
    def select(self, state: Any, rows: Tensor) -> Any: ...
    def cache_bytes_per_token(self) -> int: ...


METHODS = {"medusa": MedusaHeads}
CONFIGS = {"medusa": MedusaConfig}


def build(config: MedusaConfig, target: Target, draft_ids: Tensor | None) -> MedusaHeads:
    """A fresh drafter in fp32 on the target's device. draft_ids: ascending target ids, or None for
    all.
    """
    drafter = METHODS[config.kind](config, target, draft_ids)
    return drafter.to(target.device)


def trainable(drafter: nn.Module) -> dict[str, nn.Parameter]:
    """The drafter's own parameters by name."""
    return {name: value for name, value in drafter.named_parameters() if value.requires_grad}
