"""One loop over every kind of cache: full, sliding and chunked attention, and recurrent states."""

from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    FalconH1Config,
    Gemma3TextConfig,
    GPTNeoConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    NemotronHConfig,
    Qwen3NextConfig,
)

from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import Batch
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.decode import decode, decode_batch
from draftsmith.recipes.errors import UserError
from tests.eval.test_decode import noisy_drafter

SMALL = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
MAMBA = dict(
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_n_groups=1,
    mamba_d_state=8,
    mamba_chunk_size=8,
)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)


def every_other(kind):
    return [kind, "full_attention"] * 2


ATTENTION = {
    "llama": lambda: LlamaConfig(**SMALL),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=7),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=6, layer_types=every_other("sliding_attention")
    ),
    "llama4": lambda: Llama4TextConfig(
        **SMALL,
        head_dim=8,
        intermediate_size_mlp=64,
        attention_chunk_size=8,
        num_local_experts=2,
        layer_types=every_other("chunked_attention"),
        no_rope_layers=[1, 0, 1, 0],
    ),
}
RECURRENT = {
    "qwen3next": lambda: Qwen3NextConfig(
        **SMALL,
        **LINEAR,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        layer_types=every_other("linear_attention"),
    ),
    "bamba": lambda: BambaConfig(**SMALL, **MAMBA, mamba_d_conv=4, attn_layer_indices=[1, 3]),
    "nemotronh": lambda: NemotronHConfig(
        **SMALL,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=8,
        conv_kernel=4,
        chunk_size=8,
    ),
    "falconh1": lambda: FalconH1Config(**SMALL, **MAMBA, mamba_d_ssm=64, mamba_d_conv=4),
    "lfm2": lambda: Lfm2Config(
        **SMALL, layer_types=every_other("conv"), conv_L_cache=3, block_auto_adjust_ff_dim=False
    ),
}
TREE = Tree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2)))
PROMPTS = [list(range(20, 25)), list(range(2, 20)), [30, 31], list(range(3, 33))]
OPTIONS = dict(sampling=Sampling(), max_new_tokens=20, eos_ids=())


def make_target(config, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    return Target.from_model(model, None, name=config.model_type)


@cache
def subject(name):
    """A target, and what transformers itself decodes with it."""
    target = make_target((ATTENTION | RECURRENT)[name]())
    return target, [greedy(target, prompt) for prompt in PROMPTS]


def greedy(target, prompt):
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def tokens(answers):
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("name", [*ATTENTION, *RECURRENT])
def test_speculative_output_is_what_generate_gives(name):
    target, want = subject(name)
    drafter = noisy_drafter(target, noise=0.03)
    alone = [decode(target, drafter, prompt, tree=chain(3), **OPTIONS) for prompt in PROMPTS]
    together = decode_batch(target, drafter, PROMPTS, tree=chain(3), seeds=[0] * 4, **OPTIONS)
    assert tokens(alone) == tokens(together) == want
    counts = {r.accepted for answer in alone for r in answer.rounds}
    assert len(counts) > 1  # right now and then


@pytest.mark.parametrize("name", ATTENTION)
def test_trees_cross_windows_and_chunks(name):
    target, want = subject(name)
    drafter = noisy_drafter(target)
    alone = [decode(target, drafter, prompt, tree=TREE, **OPTIONS) for prompt in PROMPTS]
    together = decode_batch(target, drafter, PROMPTS, tree=TREE, seeds=[0] * 4, **OPTIONS)
    assert tokens(alone) == tokens(together) == want
    assert any(r.accepted for answer in alone for r in answer.rounds)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_replay_is_a_pass_of_the_target(monkeypatch, name):
    target, _ = subject(name)
    fed = []
    feed = target.feed
    monkeypatch.setattr(target, "feed", lambda ids, *rest: fed.append(ids) or feed(ids, *rest))
    assert target.continues
    fed.clear()
    drafter = noisy_drafter(target, noise=0.03)
    out = decode(target, drafter, PROMPTS[0], tree=chain(3), **OPTIONS)
    assert sum(r.passes for r in out.rounds) == len(fed) - 1
    assert all(r.passes == 1 + (r.accepted < 3) for r in out.rounds)


@pytest.mark.parametrize("name", RECURRENT)
def test_trees_on_recurrent_states_are_refused(name):
    target, _ = subject(name)
    with pytest.raises(UserError, match="chains, not trees"):
        decode(target, noisy_drafter(target), PROMPTS[0], tree=TREE, **OPTIONS)


@pytest.mark.parametrize("name", [*ATTENTION, *RECURRENT])
def test_packed_documents_of_every_kind_do_not_see_each_other(name):
    target, _ = subject(name)
    parts = PROMPTS[1:]
    ids = torch.tensor([[token for part in parts for token in part]])
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    number = torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)])[None]
    final = target.states(Batch(ids, positions, number, ids >= 0)).final[0]
    for part, states in zip(parts, final.split([len(part) for part in parts]), strict=True):
        alone = target.base(input_ids=torch.tensor([part])).last_hidden_state[0]
        torch.testing.assert_close(states, alone, rtol=1e-4, atol=1e-4)


def test_a_state_that_is_forgotten_behind_a_cached_context_is_found_out():
    target = make_target(
        JambaConfig(
            **SMALL,
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
        )
    )
    plain = decode_batch(target, None, PROMPTS, seeds=[0] * 4, **OPTIONS)
    assert tokens(plain) == [greedy(target, prompt) for prompt in PROMPTS]
    with pytest.raises(UserError, match="cannot verify drafts"):
        decode(target, noisy_drafter(target), PROMPTS[0], tree=chain(3), **OPTIONS)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4),
        GPTNeoConfig(
            vocab_size=40,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["local"], 2]],
        ),
    ],
    ids=["alibi", "local"],
)
def test_attention_that_takes_no_masks_decodes_chains_alone(config):
    target = make_target(config)
    drafter = noisy_drafter(target)
    out = decode(target, drafter, PROMPTS[0], tree=chain(3), **OPTIONS)
    assert out.tokens == greedy(target, PROMPTS[0])
    with pytest.raises(UserError, match="masks of single positions"):
        decode(target, drafter, PROMPTS[0], tree=TREE, **OPTIONS)
