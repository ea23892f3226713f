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
from tests.drafters.test_families import ATTENTION, MAMBA, SMALL
from tests.drafters.test_mtp import FAMILIES
from tests.drafters.test_mtp_files import CONFIGS
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
        check_layer_of(saved(tmp_path, make()))
    target = Target.from_model(AutoModelForCausalLM.from_config(make()), None, name=name)
    with pytest.raises(UserError, match=f"drafter.kind: no mtp block .*{reason}.*another kind"):
        methods.build(MtpConfig(kind="mtp"), target, None)


@pytest.mark.parametrize("name", FAMILIES | CONFIGS)
def test_supported_families_are_not(tmp_path, name):
    torch.manual_seed(0)
    check_layer_of(saved(tmp_path, (FAMILIES | CONFIGS)[name]()))
