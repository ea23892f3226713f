"""Prompts and settings for a tiny target that answers."""

import random
from typing import Any

from draftsmith.data.prompts import Prompt
from draftsmith.recipes.schema import DataConfig, DistilConfig
from tests.tiny import EOS

ENDS = (EOS, *range(20, 288, 9))  # many end tokens, so that random answers end at different times
MIXED = {"temperature": 1.0, "greedy_share": 0.5, "top_p": 0.95, "top_k": 50}


def make_prompts(count: int) -> list[Prompt]:
    numbers = random.Random(0)
    texts = ["".join(numbers.choices("abcdefgh ", k=numbers.randint(1, 30))) for _ in range(count)]
    return [
        Prompt(f"k{i}", "c", ({"role": "user", "content": f"{i} {text}"},))
        for i, text in enumerate(texts)
    ]


def make_config(**knobs: Any) -> DataConfig:
    return DataConfig(distil=DistilConfig(**{"max_new_tokens": 20, "batch_size": 8} | knobs))
