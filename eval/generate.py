"""Our decoding loop in transformers: `model.generate(**inputs,
custom_generate=speculate(drafter))`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.decode import Judge, Loop, decode_rows
from draftsmith.eval.processed import ProcessedLaws
from draftsmith.eval.rows import Ending, Row
from draftsmith.eval.verify import Laws, Rule, point_mass
from draftsmith.recipes.errors import UserError

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # in generate's order
OURS = {  # what generate adds to a text model's inputs, and this loop makes for itself
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "cache_position",
    "use_cache",
    "logits_to_keep",
}
STATEFUL = (  # processors that carry something from one call to the next
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
)
UNSUPPORTED = {
    "num_beams": 1,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}


def speculate(
    drafter: Drafter, tree: Tree | None = None, *, rule: Rule = point_mass
) -> Callable[..., Any]:
    """A `custom_generate` callable that drafts with `tree` (default: the chain of all slots).

    Output as plain `generate` gives it: greedy or sampled, batches padded on the left, any
    streamer, any logits processor and stopping criterion that is a function of a row's ids and
    logits. transformers asks for a tokenizer before it comes here, and loses the one it is given:
    pass stop strings as `stopping_criteria=[StopStringCriteria(tokenizer, [...])]`. The model is
    given back as it was. A cache that is passed in is neither read nor filled.
    """
    drafts = tree or chain(drafter.depth)
    wrapped: list[Target] = []

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        check(input_ids, logits_processor, generation_config, model_kwargs)
        # transformers 5.15 to 5.24 keeps the streamer from such a callable: it lies one frame up.
        streamer = streamer or sys._getframe(1).f_locals.get("streamer")
        with borrowed(model):
            if not wrapped or wrapped[0].model is not model:
                wrapped[:] = [Target.from_model(model, None, name=type(model).__name__)]
            target = wrapped[0]
            call = Call(input_ids, logits_processor, stopping_criteria, generation_config)
            rows = call.rows(model_kwargs.get("attention_mask"))
            sampling, judge = call.laws()
            coins = SeededCoins(torch.randint(2**62, (len(rows),)).tolist())
            playing = Loop(
                target,
                drafter,
                drafts.to(target.device),
                sampling,
                coins,
                target.new_cache(),
                rule,
                rows=rows,
                judge=judge,
            )
            decode_rows(playing, call.ending(), Stream(streamer, rows, call.pad))
        sequences = call.sequences(rows)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    return loop


def check(input_ids: Tensor, processors: Any, config: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse what this loop would silently leave out."""
    foreign = [name for name, value in model_kwargs.items() if value is not None]
    foreign = [name for name in foreign if name not in OURS]
    asked = config.to_dict()
    foreign += [name for name, usual in UNSUPPORTED.items() if asked.get(name) not in (usual, None)]
    foreign += [type(one).__name__ for one in processors if isinstance(one, STATEFUL)]
    if foreign or not input_ids.numel():
        names = ", ".join(foreign) or "prompts without tokens"
        raise UserError(f"speculate decodes prompts of tokens, and does not support {names}")


@contextmanager
def borrowed(model: Any) -> Iterator[None]:
    """Evaluate with a model, and give it back as it was: what trains, and which modules do."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


@dataclass(frozen=True)
class Call:
    """What `generate` was asked for.

    Processors and criteria may hold something for every row of the batch. They get a batch of its
    size in which every row is the one that is asked about, and its answer is taken.
    """

    input_ids: Tensor  # [B, T]
    processors: Any
    criteria: Any
    config: Any

    def rows(self, mask: Tensor | None) -> list[Row]:
        """The prompts without padding."""
        mask = torch.ones_like(self.input_ids) if mask is None else mask
        pairs = zip(self.input_ids, mask.bool().to(self.input_ids.device), strict=True)
        return [Row(index, ids[real].tolist()) for index, (ids, real) in enumerate(pairs)]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end tokens."""
        ends = [one for one in self.criteria if isinstance(one, EosTokenCriteria)]
        return tuple(int(token) for one in ends for token in one.eos_token_id)

    def ending(self) -> Ending:
        """Where the criteria end a row. All but the usual ones are asked after every token."""
        usual = (EosTokenCriteria, MaxLengthCriteria)
        others = [one for one in self.criteria if not isinstance(one, usual)]
        limits = [one for one in self.criteria if isinstance(one, MaxLengthCriteria)]
        limit = min(one.max_length for one in limits) - self.input_ids.shape[1]

        def asked(row: Row) -> bool:
            ids = self.context(row).expand(len(self.input_ids), -1)
            answers = [torch.as_tensor(one(ids, None)) for one in others]
            return any(bool(done[row.index] if done.dim() else done) for done in answers)

        return Ending(self.eos_ids, limit, asked if others else None)

    def context(self, row: Row) -> Tensor:
        """The ids [n] of a row as `generate` has them: its padding, its prompt and its tokens."""
        return torch.cat([self.input_ids[row.index], self.input_ids.new_tensor(row.tokens)])

    def laws(self) -> tuple[Sampling, Judge | None]:
        """How tokens are chosen. Where more than temperature, top-k and top-p is at work, by laws
        that have gone through the processors; drafts are then drawn without them.
        """
        known = warped(self.processors)
        if known is not None:
            return (known if self.config.do_sample else Sampling()), None
        sampling = Sampling(1.0) if self.config.do_sample else Sampling()

        def judge(rows: Sequence[Row], logits: Tensor, proposal: Proposal | None) -> Laws:
            def process(row: int, ids: Tensor, scores: Tensor) -> Tensor:
                size = len(self.input_ids)
                batch = scores.expand(size, -1).clone()
                done: Tensor = self.processors(ids.expand(size, -1), batch)
                return done[rows[row].index]

            contexts = [self.context(row) for row in rows]
            return ProcessedLaws(logits, sampling, process, contexts, proposal)

        return sampling, judge

    @property
    def pad(self) -> int | None:
        """What fills up a row that has ended before others: the end token, if nothing is said."""
        given: int | None = self.config.pad_token_id
        return next(iter(self.eos_ids), None) if given is None else given

    def sequences(self, rows: Sequence[Row]) -> Tensor:
        """Prompts and answers [B, T + N], as `generate` gives them."""
        longest = max(len(row.tokens) for row in rows)
        columns = [column(rows, at, self.pad) for at in range(longest)]
        new = torch.tensor(columns, dtype=self.input_ids.dtype, device=self.input_ids.device)
        return torch.cat([self.input_ids, new.T], dim=1)


def warped(processors: Sequence[Any]) -> Sampling | None:
    """The law of these processors, if they are temperature, top-k and top-p, in that order."""
    kinds = [type(one) for one in processors]
    if kinds != [kind for kind in WARPERS if kind in kinds]:
        return None
    values = dict(zip(kinds, processors, strict=True))
    heat, most, mass = (values.get(kind) for kind in WARPERS)
    return Sampling(
        1.0 if heat is None else heat.temperature,
        0 if most is None else most.top_k,
        1.0 if mass is None else mass.top_p,
    )


def column(rows: Sequence[Row], at: int, pad: int | None) -> list[int]:
    """Every row's token number `at`, padding where a row has ended."""
    if pad is None and any(len(row.tokens) <= at for row in rows):
        raise UserError("rows of a batch ended at different tokens; give pad_token_id for the rest")
    return [row.tokens[at] if at < len(row.tokens) else pad or 0 for row in rows]


class Stream:
    """Hands tokens to a streamer as `generate` does: one of every row at a time, as soon as no row
    lacks it.
    """

    def __init__(self, streamer: Any, rows: Sequence[Row], pad: int | None) -> None:
        self.streamer, self.rows, self.pad, self.sent = streamer, rows, pad, 0

    def __call__(self) -> None:
        """After every round."""
        if self.streamer is None:
            return
        missing = [len(row.tokens) for row in self.rows if row.finish is None]
        ready = min(missing or [max(len(row.tokens) for row in self.rows)])
        for at in range(self.sent, ready):
            self.streamer.put(torch.tensor(column(self.rows, at, self.pad)))
        self.sent = ready
        if not missing:
            self.streamer.end()
