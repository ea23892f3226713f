"""Targets that no MTP block can be made of are told from those it can, before weights are there."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    GPT2Config,
    GptOssConfig,
    NemotronConfig,
    StableLmConfig,
)

from draftsmith.data.plan import check_layer_of
from draftsmith.drafters import methods
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig, TargetConfig
from tests.drafters.test_families import ATTENTION, MAMBA, RECURRENT, SMALL
from tests.drafters.test_mtp import FAMILIES
from tests.drafters.test_mtp_files import CONFIGS, checkpoint
from tests.tiny import tiny_tokenizer

INTERFACE = "do not use transformers' attention interface"
REFUSED = {
    "sinks": (lambda: GptOssConfig(**SMALL, head_dim=8, num_local_experts=4), "attention sinks"),
    "learned positions": (
        lambda: GPT2Config(vocab_size=40, n_embd=32, n_layer=4, n_head=4, n_positions=64),
        "has no last norm",
    ),
    "own attention": (lambda: StableLmConfig(**SMALL), INTERFACE),
    "own attention too": (lambda: NemotronConfig(**SMALL), INTERFACE),
    "layers by index": (ATTENTION["llama4"], "other weights than a last one"),
    "another norm": (
        lambda: BambaConfig(**SMALL, **MAMBA, mamba_d_conv=4, attn_layer_indices=[1, 3]),
        "has no last norm",
    ),
}


def saved(folder, config):
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return TargetConfig(model=str(folder), device="cpu")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_from_its_config_too(tmp_path, name):
    make, reason = REFUSED[name]
    with pytest.raises(UserError, match=f"drafter.kind: no mtp block .*{reason}.*another kind"):
        check_layer_of(saved(tmp_path, make()), MtpConfig(kind="mtp"))
    target = Target.from_model(AutoModelForCausalLM.from_config(make()), None, name=name)
    with pytest.raises(UserError, match=f"drafter.kind: no mtp block .*{reason}.*another kind"):
        methods.build(MtpConfig(kind="mtp"), target, None)


@pytest.mark.parametrize("name", FAMILIES | CONFIGS)
def test_supported_families_are_not(tmp_path, name):
    torch.manual_seed(0)
    check_layer_of(saved(tmp_path, (FAMILIES | CONFIGS)[name]()), MtpConfig(kind="mtp"))


def test_what_a_start_from_the_checkpoint_needs_is_seen_before_it_loads(tmp_path):
    def check(config, **knobs):
        target = saved(tmp_path / "x", config)
        check_layer_of(target, MtpConfig(kind="mtp", start="checkpoint", **knobs))

    with pytest.raises(UserError, match="does not work for nemotron_h: its MTP module is an"):
        check(RECURRENT["nemotronh"]())
    with pytest.raises(UserError, match="cannot read the weights in"):
        check(FAMILIES["qwen3"]())
    checkpoint(tmp_path / "y", "qwen3next", "mtp")
    tiny_tokenizer().save_pretrained(tmp_path / "y")
    target = TargetConfig(model=str(tmp_path / "y"), device="cpu")
    check_layer_of(target, MtpConfig(kind="mtp", start="checkpoint"))
    for knobs, line in (
        ({"recycles": "pre_norm"}, "qwen3_next were trained with post_norm; write recycles"),
        ({"position_shift": -1}, "trained with 0; write position_shift: 0"),
        ({"depths": 2, "draft_tokens": 2}, "has 1 MTP layers; give as many or fewer"),
    ):
        with pytest.raises(UserError, match=line):
            check_layer_of(target, MtpConfig(kind="mtp", start="checkpoint", **knobs))
