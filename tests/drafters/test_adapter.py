"""An adapter on a target: nothing while it is off, the same on disk, merged or beside it."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from draftsmith.data.needs import adapted_parameters
from draftsmith.drafters import adapter as adapters
from draftsmith.drafters.adapted import adapt, take_on
from draftsmith.drafters.slots import Batch
from draftsmith.drafters.target import Target, describe
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import AdapterConfig, Recipe, TargetConfig
from tests.tiny import tiny_model, tiny_tokenizer

TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
NF4 = pytest.param(
    "nf4",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
    ),
)


def loaded(path: Path, *, tied: bool = False, **knobs: str | None) -> Target:
    """A tiny target from a folder of its own."""
    if not path.exists():
        tiny_model(hidden=64, layers=3, spread=0.1, tied=tied).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    given = {"model": str(path), "device": "cpu", "dtype": "float32", **knobs}
    return Target.load(TargetConfig.model_validate(given))


def rows() -> Batch:
    """Two documents in a row."""
    ids = torch.arange(12)[None] * 7 % 250 + 11
    documents = torch.tensor([[0] * 7 + [1] * 5])
    positions = torch.tensor([[*range(7), *range(5)]])
    return Batch(ids, positions, documents, torch.ones_like(ids, dtype=torch.bool))


def shaken(target: Target, **knobs: object) -> adapters.Adapter:
    """An adapter whose factors are all far from zero."""
    config = AdapterConfig.model_validate({"rank": 4, "checkpointing": False, **knobs})
    adapter = adapt(target, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in adapter.parameters.values():
            value.copy_(0.05 * torch.randn(value.shape, generator=generator))
    return adapter


def logits(target: Target) -> torch.Tensor:
    """Of the rows."""
    return target.logits(target.states(rows()).final)


@TIED
@pytest.mark.parametrize("load_in", [None, NF4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_that_are_off_or_new_leave_the_original_bit_for_bit(
    tmp_path: Path, tied: bool, load_in: str | None, dtype: str
) -> None:
    target = loaded(tmp_path / "t", tied=tied, load_in=load_in, dtype=dtype)
    before = logits(target)
    adapt(target, AdapterConfig(rank=4))
    assert torch.equal(logits(target), before)
    target = loaded(tmp_path / "t", load_in=load_in, dtype=dtype)
    adapter = shaken(target)
    changed = logits(target)
    assert not torch.equal(changed, before) and changed.dtype == before.dtype
    adapter.train(True)  # dropout says nothing where the adapters are off
    with target.original() as original:
        assert torch.equal(logits(original), before)
    adapter.train(False)
    assert torch.equal(logits(target), changed)
    assert {value.dtype for value in adapter.parameters.values()} == {torch.float32}


def test_all_linear_layers_and_the_head_are_adapted_and_nothing_else_is_trained(
    tmp_path: Path,
) -> None:
    target = loaded(tmp_path / "t")
    linear = [one for one in target.model.modules() if isinstance(one, nn.Linear)]
    adapter = shaken(target)
    assert len(adapter.parameters) == 2 * len(linear) == 2 * (3 * 7 + 1)
    given = {"name": "x", "target": {"model": target.name}, "adapter": {"rank": 4}}
    counted = adapted_parameters(
        Recipe.model_validate(given), describe(TargetConfig(model=target.name))
    )
    assert counted == sum(value.numel() for value in adapter.parameters.values())
    trained = {id(v) for v in target.model.parameters() if v.requires_grad}
    assert trained == {id(value) for value in adapter.parameters.values()}
    target = loaded(tmp_path / "t")
    adapter = shaken(target, head=False)
    assert len(adapter.parameters) == 2 * 3 * 7 and not adapter.adapts_head
    assert torch.allclose(logits(target), target.model(rows().ids, use_cache=False).logits) is False
    hidden = torch.randn(3, 64)
    assert torch.equal(target.logits(hidden), hidden @ target.head_weight.T)


@TIED
@pytest.mark.parametrize("load_in", [None, NF4])
def test_stored_adapters_give_the_same_target_merged_or_not(
    tmp_path: Path, tied: bool, load_in: str | None
) -> None:
    target = loaded(tmp_path / "t", tied=tied, load_in=load_in)
    adapter = shaken(target)
    want, digest = logits(target), adapter.digest()
    adapter.save(tmp_path / "adapter", "mine")
    again = loaded(tmp_path / "t", load_in=load_in)
    embedding = again.embedding.clone()
    take_on(again, tmp_path / "adapter", digest)
    assert again.fingerprint["adapter"] == digest != target.fingerprint["adapter"] == "none"
    assert torch.allclose(logits(again), want, atol=1e-4)
    assert (again.adapter is None) == (load_in is None)  # plain weights take it up
    assert not any(value.requires_grad for value in again.model.parameters())
    assert torch.equal(again.embedding, embedding)
    assert torch.equal(again.head_weight, loaded(tmp_path / "t", load_in=load_in).head_weight)


def test_a_merged_target_is_a_plain_model_on_disk(tmp_path: Path) -> None:
    target = loaded(tmp_path / "t", tied=True)
    adapter = shaken(target)
    want = logits(target)
    adapter.merge()
    target.model.save_pretrained(tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not model.config.tie_word_embeddings
    batch = rows()
    inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
    assert torch.allclose(model(**inputs).logits, want, atol=1e-4)


def test_peft_reads_what_is_written(tmp_path: Path) -> None:
    from peft import PeftModel

    target = loaded(tmp_path / "t")
    adapter = shaken(target)
    adapter.save(tmp_path / "adapter", "org/name")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "org/name" and str(tmp_path) not in json.dumps(said)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "t")
    model = PeftModel.from_pretrained(model, tmp_path / "adapter")
    batch = rows()
    inputs = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
    assert torch.allclose(model(**inputs).logits, logits(target), atol=1e-5)


@pytest.mark.parametrize("load_in", [None, NF4])
def test_recomputed_layers_have_the_same_gradient(tmp_path: Path, load_in: str | None) -> None:
    found = []
    for again in (False, True):
        target = loaded(tmp_path / "t", load_in=load_in)
        adapter = shaken(target, checkpointing=again, dropout=0.5)
        adapter.train(True)
        assert [layer.training for layer in target.decoder_layers()] == [again] * 3
        assert not any(layer.self_attn.training for layer in target.decoder_layers())
        torch.manual_seed(3)
        target.differentiable_states(rows()).final.square().sum().backward()
        head = {"lm_head"} if adapter.adapts_head else set()
        grads = {k: v.grad for k, v in adapter.parameters.items() if k.split(".")[0] not in head}
        assert all(grad is not None and bool(grad.any()) for grad in grads.values())
        found.append(grads)
    assert all(torch.allclose(found[0][k], found[1][k], atol=1e-5) for k in found[0])


def test_a_broken_or_foreign_adapter_is_one_line(tmp_path: Path) -> None:
    target = loaded(tmp_path / "t")
    shaken(target).save(tmp_path / "adapter", "mine")
    with pytest.raises(UserError, match="not the adapter that its drafter was trained with"):
        take_on(loaded(tmp_path / "t"), tmp_path / "adapter", "0" * 16)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match="broken adapter"):
        take_on(loaded(tmp_path / "t"), tmp_path / "adapter", "0" * 16)
    with pytest.raises(UserError, match="broken adapter"):
        take_on(loaded(tmp_path / "t"), tmp_path / "nowhere", "0" * 16)
