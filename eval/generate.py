"""Our decoding loop in transformers: `model.generate(**inputs,
custom_generate=speculate(drafter))`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.decode import decode
from draftsmith.recipes.errors import UserError

PROCESSORS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
CRITERIA = (MaxLengthCriteria, EosTokenCriteria)


def speculate(drafter: Drafter, tree: Tree | None = None) -> Callable[..., Any]:
    """A `custom_generate` callable that drafts with `tree` (default: the chain of all slots).

    Greedy or sampled with temperature, top_k, top_p; batch 1; output as plain `generate` gives it.
    """
    drafts = tree or chain(drafter.depth)
    wrapped: list[Target] = []

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        check(input_ids, logits_processor, stopping_criteria)
        if not wrapped or wrapped[0].model is not model:
            wrapped[:] = [Target.from_model(model, None, name=type(model).__name__)]
        prompt = visible(input_ids, model_kwargs.get("attention_mask"))
        decoded = decode(
            wrapped[0],
            drafter,
            prompt,
            sampling=sampling_of(generation_config),
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            tree=drafts.to(wrapped[0].device),
            seed=int(torch.randint(2**62, (1,))),
            eos_ids=eos_of(generation_config),
        )
        new = torch.tensor([decoded.tokens], device=input_ids.device)
        sequences = torch.cat([input_ids, new], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    return loop


def check(input_ids: Tensor, processors: Any, criteria: Any) -> None:
    """Refuse what this loop would silently leave out."""
    if input_ids.shape[0] != 1:
        raise UserError(f"speculate decodes one prompt at a time, not {input_ids.shape[0]}")
    foreign = [p for p in processors if not isinstance(p, PROCESSORS)]
    foreign += [c for c in criteria if not isinstance(c, CRITERIA)]
    if foreign:
        names = ", ".join(type(one).__name__ for one in foreign)
        raise UserError(
            f"speculate does not apply {names}; it supports temperature, top_k, top_p, "
            "max_new_tokens and eos_token_id"
        )


def visible(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    """The prompt's ids without padding."""
    row: list[int] = (input_ids[0] if mask is None else input_ids[0][mask[0].bool()]).tolist()
    return row


def sampling_of(config: Any) -> Sampling:
    """A generation config's law."""
    if not config.do_sample:
        return Sampling()
    top_p = 1.0 if config.top_p is None else config.top_p
    return Sampling(
        1.0 if config.temperature is None else config.temperature, config.top_k or 0, top_p
    )


def eos_of(config: Any) -> tuple[int, ...]:
    """A generation config's end tokens."""
    given = config.eos_token_id
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)
