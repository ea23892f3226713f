"""Every drafter there is: one literal table, one protocol."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor, nn

from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.draft_model import DraftModel
from draftsmith.drafters.lookup import PromptLookup
from draftsmith.drafters.medusa import MedusaHeads
from draftsmith.drafters.mtp import MtpModule
from draftsmith.drafters.ngram import NgramTable
from draftsmith.drafters.proposal import Draw, Plan, Proposal, Verdict
from draftsmith.drafters.slots import Batch, Head, Roots, SlotStates, TargetStates
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import (
    DFlashConfig,
    DrafterConfig,
    DraftModelConfig,
    MedusaConfig,
    MtpConfig,
    NgramConfig,
    PromptLookupConfig,
)


class Drafter(Protocol):
    """What decoding, measuring and keeping ask of a drafter, a torch module.

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

    Decoding is simulated, and trees are searched, on `guesses(batch, states, roots, ...)`: the best
    `count` tokens of slots 1..`slots` of every root, best first, if the text before each slot is
    what was drafted: [N, slots, count], NO_GUESS where there is none. `chunk` groups are projected
    to the vocabulary at once.

    `taps` are the target layers (0-based) whose outputs it reads: `states.layers` holds them,
    concatenated, wherever states are given. None are where it has no taps.

    `assistance()` gives the arguments with which transformers' assisted generation drafts the same
    way; None: it cannot.
    """

    depth: int  # K, the slots
    width: int  # guesses that a slot can rank
    taps: tuple[int, ...]  # target layers that it reads beside the final states
    draws: tuple[Draw, ...]  # how it can draw siblings, but for `point`

    @property
    def config(self) -> DrafterConfig: ...
    @property
    def draft_ids(self) -> Tensor | None: ...  # [Vq] target ids that it may draft; None: all
    @property
    def native_file(self) -> str | None: ...  # where its tensors are; None: it has none

    def __init__(self, config: Any, target: Target, draft_ids: Tensor | None) -> None: ...
    def to(self, where: Any) -> Self: ...
    def eval(self) -> Self: ...
    def start(self, ids: Tensor, lengths: Tensor, states: TargetStates) -> Any: ...
    def propose(self, state: Any, root: Tensor, plan: Plan) -> Proposal: ...
    def commit(
        self, state: Any, proposal: Proposal, verdict: Verdict, states: TargetStates
    ) -> Any: ...
    def select(self, state: Any, rows: Tensor) -> Any: ...
    def guesses(
        self,
        batch: Batch,
        states: TargetStates,
        roots: Roots,
        *,
        slots: int,
        count: int,
        chunk: int,
    ) -> Tensor: ...
    def cache_bytes_per_token(self) -> int: ...
    def assistance(self) -> dict[str, Any] | None: ...
    def native_tensors(self) -> dict[str, Tensor]: ...
    def load_native(self, tensors: Mapping[str, Tensor]) -> None: ...
    def native_config(self, meta: Mapping[str, Any]) -> dict[str, Any]: ...
    def native_extras(self, folder: Path) -> None: ...


class Learned(Drafter, Protocol):
    """What training asks beyond that.

    `reads_final`: whether its slots read the target's final states. Where neither they do nor the
    loss, the target's pass ends early.

    `roots(batch)` chooses the groups that it trains on: all, or what `batch.seeds` draws. It is
    called before the forward pass, for the denominator, and in it, and must say the same.
    """

    reads_final: bool

    def head(self) -> Head: ...
    def roots(self, batch: Batch) -> Roots: ...
    def slots(self, batch: Batch, states: TargetStates, roots: Roots) -> SlotStates: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Drawing(Drafter, Protocol):
    """What measuring asks of a drafter that draws: the logits of the first slot's law, for any of
    the roots (groups [n] -> [n, Vq]).
    """

    def first_logits(
        self, batch: Batch, states: TargetStates, roots: Roots
    ) -> Callable[[Tensor], Tensor]: ...


class Untrained(Drafter, Protocol):
    """What a drafter without gradient steps takes from the answers, if anything."""

    def count(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> None: ...


METHODS: dict[str, type[Drafter]] = {
    "dflash": DFlash,
    "draft_model": DraftModel,
    "medusa": MedusaHeads,
    "mtp": MtpModule,
    "ngram": NgramTable,
    "prompt_lookup": PromptLookup,
}
CONFIGS: dict[str, type[DrafterConfig]] = {
    "dflash": DFlashConfig,
    "draft_model": DraftModelConfig,
    "medusa": MedusaConfig,
    "mtp": MtpConfig,
    "ngram": NgramConfig,
    "prompt_lookup": PromptLookupConfig,
}


def build(config: DrafterConfig, target: Target, draft_ids: Tensor | None) -> Drafter:
    """A fresh drafter in fp32 on the target's device. draft_ids: ascending target ids, or None for
    all.
    """
    drafter = METHODS[config.kind](config, target, draft_ids)
    return drafter.to(target.device)


def trainable(drafter: Learned) -> dict[str, nn.Parameter]:
    """The drafter's own parameters by name."""
    return {name: value for name, value in drafter.named_parameters() if value.requires_grad}
