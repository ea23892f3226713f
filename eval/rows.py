"""The answers of a batch in the making, and where they end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers.generation.stopping_criteria import StopStringCriteria

from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class Round:
    """One round of one row. Seconds are the whole batch's; `emitted` counts what reached the output
    (EOS, stop strings and the token limit cut it).
    """

    drafted: int
    accepted: int
    emitted: int
    draft_s: float
    verify_s: float
    overhead_s: float  # replays of states that cannot be cropped included
    passes: int = 1  # of the target: verification, and replays


@dataclass
class Row:
    """An answer in the making."""

    index: int  # among the prompts
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None
    ended: float = 0.0  # when its last round did


@dataclass(frozen=True)
class Ending:
    """An output ends with an end token, where `asked` says so after a token, or at the limit."""

    eos_ids: tuple[int, ...]
    limit: int
    asked: Callable[[Row], bool] | None = None

    def take(self, row: Row, new: list[int]) -> int:
        """Add to a row what of these tokens reaches the output; how many."""
        for count, token in enumerate(new, start=1):
            row.tokens.append(token)
            if token in self.eos_ids or (self.asked is not None and self.asked(row)):
                row.finish = "stop"
            elif len(row.tokens) == self.limit:
                row.finish = "length"
            if row.finish is not None:
                return count
        return len(new)


def stop_strings(target: Target, strings: Sequence[str]) -> Callable[[Row], bool] | None:
    """Whether a row's last token completes one of these strings, as transformers judges it: the
    string may begin in the prompt, and the token may go on behind it. None: no strings.
    """
    if not strings:
        return None
    if target.tokenizer is None or not all(strings):
        raise UserError("stop strings need the target's tokenizer, and none may be empty")
    criterion = StopStringCriteria(target.tokenizer, list(strings))

    def completed(row: Row) -> bool:
        ids = [*row.prompt, *row.tokens][-criterion.maximum_token_len :]
        return bool(criterion(torch.tensor([ids]), None))

    return completed
