"""What asking a target needs of it: its tokenizer and its end tokens, and no weights."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftsmith.drafters.target import eos_ids, hub_errors, locate, make_fingerprint
from draftsmith.recipes.schema import TargetConfig


class Speaker(Protocol):
    """A target, or what is known of one that others serve."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def config(self) -> Any: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def fingerprint(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Weightless:
    """A target that answers elsewhere."""

    name: str
    tokenizer: Any
    config: Any
    eos_ids: tuple[int, ...]
    vocab_size: int  # rows of the embedding
    fingerprint: dict[str, str]


def describe_speaker(config: TargetConfig) -> Weightless:
    """Read config and tokenizer, as `Target.load` finds them. Raises UserError as it does."""
    source = locate(config)
    options: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    with hub_errors(config.model):
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        shape = AutoConfig.from_pretrained(source, **options)
    with torch.device("meta"):
        trusted = config.trust_remote_code
        model: Any = AutoModelForCausalLM.from_config(shape, trust_remote_code=trusted)
    with suppress(OSError):  # where it has none of its own, the config's values stand
        revision = config.revision or "main"
        model.generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    return Weightless(
        name=config.model,
        tokenizer=tokenizer,
        config=model.config.get_text_config(),
        eos_ids=eos_ids(model, tokenizer),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        fingerprint=make_fingerprint(config, model, tokenizer),
    )
