"""A separate draft model: any causal language model with the target's vocabulary (Leviathan et al.,
2211.17192; Chen et al., 2302.01318), or several whose trees are merged (SpecInfer, 2305.09781).

Either ready models are taken as they are, or one is distilled: a shallow copy of the target, as
wide, trained on the target's own answers. In training it has one slot: its state at the root says
the token after it. In decoding it writes token by token, so slot k reads its state at r + k - 1.

A distilled one is kept as a plain Hugging Face folder.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.drafters.context import Context
from draftsmith.drafters.forest import merge
from draftsmith.drafters.projection import Adjust, slot_logits, top_tokens
from draftsmith.drafters.proposal import Draw, Plan, Proposal, Verdict
from draftsmith.drafters.shallow import distinct_tensors, load_distinct, shallow_copy, states
from draftsmith.drafters.slots import (
    Batch,
    Head,
    Roots,
    SlotLabels,
    SlotStates,
    TargetStates,
    all_roots,
    label_slots,
)
from draftsmith.drafters.target import Target
from draftsmith.drafters.writer import Page, Writer
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DraftModelConfig, TargetConfig

MERGED: tuple[Draw, ...] = ("without_replacement",)


@dataclass
class Draft:
    """What a decoding carries: the text, and what every model has read of it."""

    context: Context
    pages: list[Page]


class DraftModel(nn.Module):
    """One model to be trained (`net`), or ready ones (`ready`)."""

    taps: tuple[int, ...] = ()
    reads_final = False

    def __init__(self, config: DraftModelConfig, target: Target, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config, self.depth, self.target = config, config.depth, target
        self.register_buffer("draft_ids", draft_ids, persistent=False)  # [Vq] or None
        self.draft_ids: Tensor | None
        self.ready = [load_ready(name, target) for name in config.models]
        self.nets = nn.ModuleList(model.model for model in self.ready)
        if not config.models:
            own = config.embedding == "own"
            self.nets.append(shallow_copy(target, config.layers, own=own))
        frozen = None if config.models or config.embedding == "own" else self.head_rows().detach()
        self.register_buffer("rows", frozen, persistent=False)  # [Vq, D] of the frozen head
        self.rows: Tensor | None
        merged = len(config.models) > 1  # their siblings have laws of their own
        self.draws: tuple[Draw, ...] = MERGED if merged else ("chain", *MERGED, "iid")
        self.width = len(self.writers[0].head if config.models else self.head_rows())

    @property
    def native_file(self) -> str | None:
        """Ready models are named, not copied."""
        return None if self.config.models else "model.safetensors"

    @property
    def net(self) -> Any:
        """The distilled model."""
        assert not self.config.models, "ready models are not trained"
        return self.nets[0]

    # --- training ---

    def head(self) -> Head:
        """How states become logits."""
        own = self.head_rows()[None] if self.rows is None else None
        return Head(self.rows, own, self.draft_ids)

    def head_rows(self) -> Tensor:
        """The rows of the head that drafts may use, [Vq, D]."""
        weight: Tensor = self.net.get_output_embeddings().weight
        return weight if self.draft_ids is None else weight[self.draft_ids]

    def roots(self, batch: Batch) -> Roots:
        """All: its own pass goes over every position anyway."""
        return all_roots(batch)

    def slots(self, batch: Batch, states_: TargetStates, roots: Roots) -> SlotStates:
        """The training waist: one slot, the model's own state at every root."""
        labels = label_slots(batch, roots, 1)
        return SlotStates(at_slots(states(self.net, batch), labels), self.head(), labels)

    def count(self, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> None:
        """Ready models learn nothing from answers."""

    # --- decoding ---

    @cached_property
    def writers(self) -> list[Writer]:
        """The models as they decode. A distilled one is frozen by this."""
        if self.config.models:
            return [ready_writer(model, self.target.vocab_size) for model in self.ready]
        model = Target.from_model(self.net, self.target.tokenizer, name="the draft model")
        return [Writer(model, self.head_rows().detach(), self.draft_ids)]

    def start(self, ids: Tensor, lengths: Tensor, states: TargetStates) -> Draft:
        """After prefill: every model reads the prompts."""
        pages = [writer.start(ids, lengths) for writer in self.writers]
        return Draft(Context.of(ids, lengths), pages)

    @torch.no_grad()
    def propose(self, state: Draft, root: Tensor, plan: Plan) -> Proposal:
        """Every model's drafts in the plan's shape, merged."""
        texts = state.context.texts(root)
        pairs = zip(self.writers, state.pages, strict=True)
        trees = [writer.propose(page, texts, plan) for writer, page in pairs]
        return merge(trees, self.target.vocab_size)

    def commit(
        self, state: Draft, proposal: Proposal, verdict: Verdict, states: TargetStates
    ) -> Draft:
        """Every model keeps what it has read of the accepted path."""
        after = state.context.after(proposal, verdict)
        pairs = zip(self.writers, state.pages, strict=True)
        return Draft(after, [writer.commit(page, after) for writer, page in pairs])

    def select(self, state: Draft, rows: Tensor) -> Draft:
        """These rows of the batch."""
        pairs = zip(self.writers, state.pages, strict=True)
        pages = [writer.select(page, rows) for writer, page in pairs]
        return Draft(state.context.select(rows), pages)

    def own_states(self, batch: Batch) -> tuple[Tensor, Head, Adjust]:
        """Final states [B, T, D] of the first model, and how they become logits."""
        if self.config.models:
            writer = self.writers[0]
            return writer.states(batch), writer.as_head(), writer.model.adjust
        head = Head(self.head_rows(), None, self.draft_ids)
        return states(self.net, batch), head, self.target.adjust

    def first_logits(
        self, batch: Batch, states_: TargetStates, roots: Roots
    ) -> Callable[[Tensor], Tensor]:
        """Of the first model's laws after the roots."""
        hidden, head, adjust = self.own_states(batch)
        at = hidden[roots.row, roots.position][:, None]  # [N, 1, D]
        return lambda groups: slot_logits(at[groups], head, adjust)[:, 0]

    def guesses(
        self,
        batch: Batch,
        states_: TargetStates,
        roots: Roots,
        *,
        slots: int,
        count: int,
        chunk: int,
    ) -> Tensor:
        """The likeliest tokens of every slot, given the text before it: [N, slots, count]. Of
        several models the first one's.
        """
        labels = label_slots(batch, roots, slots)
        hidden, head, adjust = self.own_states(batch)
        return top_tokens(at_slots(hidden, labels), head, count, chunk=chunk, adjust=adjust)

    def assistance(self) -> dict[str, Any] | None:
        """One model of the target's vocabulary size; how much it drafts, transformers chooses."""
        (model, *others), size = self.writers, self.target.vocab_size
        if others or model.model.vocab_size != size:
            return None
        return {"assistant_model": model.model.model}

    def cache_bytes_per_token(self) -> int:
        """Of all models."""
        return sum(writer.cache_bytes_per_token() for writer in self.writers)

    # --- files ---

    def native_tensors(self) -> dict[str, Tensor]:
        """The distilled model under transformers' names, on the CPU."""
        found = distinct_tensors(self.net)
        return {name: value.detach().contiguous().cpu() for name, value in found.items()}

    def load_native(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `native_tensors` gave. Raises ValueError for other names or shapes."""
        if not self.config.models:
            load_distinct(self.net, dict(tensors))

    def native_config(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """config.json: the distilled model's own."""
        if self.config.models:
            return {"model_type": "draft_models", "models": list(self.config.models)}
        config: dict[str, Any] = json.loads(self.net.config.to_json_string())
        return {**config, "architectures": [type(self.net).__name__], "dtype": "float32"}

    def native_extras(self, folder: Path) -> None:
        """What else makes a plain Hugging Face folder."""
        if not self.config.models and self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)
            self.net.generation_config.save_pretrained(folder)


def at_slots(hidden: Tensor, labels: SlotLabels) -> Tensor:
    """States [B, T, D] -> [N, K, D]: slot k reads the state at its teacher's position."""
    return hidden[labels.teacher_row, labels.teacher_position]


def load_ready(name: str, target: Target, *, knob: str = "drafter.models") -> Target:
    """A ready draft model in the target's dtype, on its device. Raises UserError unless it has the
    target's vocabulary. knob: how the user named it.
    """
    dtype, device = str(target.dtype).removeprefix("torch."), str(target.device)
    with called(knob):
        config = TargetConfig.model_validate({"model": name, "dtype": dtype, "device": device})
        model = Target.load(config)
        if model.new_cache().recurrent:
            raise UserError(
                f"target.model: {name} keeps a state that cannot be rolled back; give a draft "
                "model of attention layers alone"
            )
    check_vocabulary(model, target, knob)
    return model


@contextmanager
def called(knob: str) -> Iterator[None]:
    """Loading errors name the knob that the user gave."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("target.model", knob, 1)) from error


def check_vocabulary(model: Target, target: Target, knob: str = "drafter.models") -> None:
    """Token ids must mean the same to both. Raises UserError."""
    if target.tokenizer is None:  # a model in memory: nobody can tell
        return
    mine, theirs = (one.tokenizer.get_vocab() for one in (model, target))
    every = sorted(mine.keys() | theirs.keys())
    unlike = [token for token in every if mine.get(token) != theirs.get(token)]
    if unlike:
        token = unlike[0]
        raise UserError(
            f"{knob}: {model.name} has another vocabulary than {target.name}: "
            f"{len(unlike)} tokens differ, such as {token!r} ({mine.get(token, 'absent')} / "
            f"{theirs.get(token, 'absent')}); give a model with the target's tokenizer, or leave "
            "it out"
        )


def ready_writer(model: Target, vocab: int) -> Writer:
    """Rows of padding that only one of the two has are left out."""
    rows = model.head_weight[:vocab]
    ids = None if len(rows) == vocab else torch.arange(len(rows), device=rows.device)
    return Writer(model, rows, ids)
