"""Tiny models and tokenizers for tests: built from configs, never fetched."""

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.drafters.target import Target

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Special tokens come first, so that a model with a vocabulary of a dozen still has its end token.
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<think>",
    "</think>",
)
EOS = SPECIAL.index("<|im_end|>")


def tiny_tokenizer(
    template: str | None = CHATML,
    *,
    bos: str | None = None,
    eos: str = "<|im_end|>",
    pad: str | None = "<|endoftext|>",
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: 11 special tokens, then one per byte (267 in all).

    `template=None` leaves it without a chat template; `pad=None` without a padding token. With
    `bos`, encoding with special tokens prepends it, as Llama's tokenizers do.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    if bos is not None:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(
    vocab: int = 288,
    *,
    layers: int = 2,
    hidden: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    eos: Sequence[int] = (EOS,),
    spread: float = 0.25,
) -> LlamaForCausalLM:
    """A random Llama. `spread` is the deviation of its weights: enough to prefer some tokens.

    The default vocabulary is larger than the tokenizer's, as padded vocabularies are.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=spread,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=list(eos),
        pad_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype).eval()
    torch.random.set_rng_state(state)
    model.generation_config.eos_token_id = list(eos)
    return model


def tiny_target(
    vocab: int = 288,
    *,
    layers: int = 2,
    hidden: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    eos: Sequence[int] = (EOS,),
    spread: float = 0.25,
    template: str | None = CHATML,
) -> Target:
    """A target made of `tiny_model` and `tiny_tokenizer`."""
    model = tiny_model(
        vocab,
        layers=layers,
        hidden=hidden,
        seed=seed,
        dtype=dtype,
        tied=tied,
        eos=eos,
        spread=spread,
    )
    return Target.from_model(model, tiny_tokenizer(template), name="tiny")
