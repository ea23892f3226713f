"""Every drafter there is: one literal table, one protocol."""

from typing import Any, Protocol

from torch import Tensor, nn

from draftsmith.drafters.medusa import MedusaHeads
from draftsmith.drafters.proposal import Plan, Proposal, Verdict
from draftsmith.drafters.slots import Batch, Head, Roots, SlotStates, TargetStates
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import MedusaConfig


class Drafter(Protocol):
    """What training and decoding ask of a drafter (MedusaHeads shows the shapes)."""

    depth: int

    def head(self) -> Head: ...
    def slots(self, batch: Batch, states: TargetStates, roots: Roots) -> SlotStates: ...
    def start(self, ids: Tensor, states: TargetStates) -> Any: ...
    def propose(self, state: Any, root: Tensor, plan: Plan) -> Proposal: ...
    def commit(
        self, state: Any, proposal: Proposal, verdict: Verdict, states: TargetStates
    ) -> Any: ...
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
