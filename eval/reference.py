"""transformers' own decoding as an arm, timed from the inside."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from draftsmith.drafters.target import Target
from draftsmith.eval.decode import Decoded, clock
from draftsmith.eval.rows import Round


class TokenClock:
    """A streamer that notes when `generate` hands over the prompt and what follows."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        """The prompt first, then one token of every row at a time, or those of a round."""
        self.times.append(clock(self.target))
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left to note."""


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    assistance: Mapping[str, Any] | None = None,
) -> list[Decoded]:
    """Greedy `transformers.generate`, with its default cache and every processor off.

    Timed from inside by a streamer: prefill ends when the first token is handed over, decoding
    when the last one is, so that setting up and leaving `generate` is not held against it. With
    assistance (what it takes to draft one prompt's answer) its first round is prefill, and counts
    as that.
    """
    ids, mask = left_padded(prompts, target.device)
    streamer = TokenClock(target)
    began = clock(target)
    output = target.model.generate(
        input_ids=ids,
        attention_mask=mask,
        generation_config=greedy_config(target, max_new_tokens),
        streamer=streamer,
        **(assistance or {}),
    )
    times, counts = streamer.times[1:], streamer.counts[2:]  # the first are the prompt's
    steps = [later - earlier for earlier, later in pairwise(times)]
    emitted = [count // len(prompts) for count in counts]
    answers = [ended(row, target.eos_ids) for row in output[:, ids.shape[1] :].tolist()]
    return [answer(tokens, emitted, steps, times[0] - began, target.eos_ids) for tokens in answers]


def generate(
    target: Target,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    assistance: Mapping[str, Any] | None = None,
) -> Decoded:
    """`generate_batch` of one prompt."""
    return generate_batch(
        target, [prompt_ids], max_new_tokens=max_new_tokens, assistance=assistance
    )[0]


def greedy_config(target: Target, max_new_tokens: int) -> GenerationConfig:
    """Plain greedy decoding."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=target.eos_ids[0] if target.eos_ids else 0,
        repetition_penalty=1.0,
        use_cache=True,
    )


def left_padded(prompts: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and mask [B, T], padding in front."""
    longest = max(map(len, prompts))
    lacking = [longest - len(prompt) for prompt in prompts]
    pairs = list(zip(prompts, lacking, strict=True))
    ids = torch.tensor([[*[0] * lack, *prompt] for prompt, lack in pairs])
    mask = torch.tensor([[0] * lack + [1] * len(prompt) for prompt, lack in pairs])
    return ids.to(device), mask.to(device)


def ended(tokens: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    """A row up to its first end token: what follows is padding."""
    at = next((at for at, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return tokens[: at + 1]


def answer(
    tokens: list[int],
    emitted: Sequence[int],
    steps: Sequence[float],
    prefill_s: float,
    eos_ids: tuple[int, ...],
) -> Decoded:
    """A row of the batch, its rounds those that gave it tokens: a round emits as many to every
    row.
    """
    rounds: list[Round] = []
    left = len(tokens) - 1
    for count, seconds in zip(emitted, steps, strict=True):
        if left <= 0:
            break
        rounds.append(Round(count - 1, min(count, left) - 1, min(count, left), 0.0, seconds, 0.0))
        left -= count
    finish: Literal["stop", "length"] = "stop" if tokens[-1] in eos_ids else "length"
    return Decoded(tokens, rounds, prefill_s, sum(turn.verify_s for turn in rounds), finish)
