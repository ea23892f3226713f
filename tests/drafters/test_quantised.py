"""Quantised targets: every other part sees plain dtypes, and copies of layers are plain again."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from draftsmith.data.memory import FROZEN, answering_memory
from draftsmith.drafters import quantised
from draftsmith.drafters.methods import build, trainable
from draftsmith.drafters.quantised import count_parameters, is_quantised, plain_state, plain_weight
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import Batch
from draftsmith.drafters.target import Target, describe
from draftsmith.drafters.tree import chain
from draftsmith.eval.decode import decode
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import (
    DFlashConfig,
    DraftModelConfig,
    MedusaConfig,
    MtpConfig,
    Recipe,
    TargetConfig,
)
from draftsmith.train.phases import Phases
from draftsmith.train.setup import SlotLoss
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
)
KINDS = {
    "medusa": MedusaConfig(heads=2, projection="low_rank", rank=4),
    "mtp": MtpConfig(kind="mtp", draft_tokens=2),
    "dflash": DFlashConfig(kind="dflash", block_size=4, layers=1, taps=(0,), start="target"),
    "draft model": DraftModelConfig(kind="draft_model", layers=1, draft_tokens=2),
    "own": DraftModelConfig(kind="draft_model", layers=1, draft_tokens=2, embedding="own"),
}
BOTH = pytest.mark.parametrize("load_in", ["nf4", "int8"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk; wide enough that bitsandbytes has whole blocks."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(hidden=64, layers=3, spread=0.1).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def loaded(folder: Path, load_in: str | None, dtype: str = "float32") -> Target:
    """The tiny target on the CPU."""
    given = {"model": str(folder), "load_in": load_in, "dtype": dtype, "device": "cpu"}
    return Target.load(TargetConfig.model_validate(given))


def rows() -> Batch:
    """Two documents in a row."""
    ids = torch.arange(12)[None] * 7 % 250 + 11
    documents = torch.tensor([[0] * 7 + [1] * 5])
    positions = torch.tensor([[*range(7), *range(5)]])
    return Batch(ids, positions, documents, torch.ones_like(ids, dtype=torch.bool), seeds=(1,))


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_and_logits_have_the_targets_dtype_and_nothing_else_is_quantised(
    folder: Path, load_in: str, dtype: str
) -> None:
    target = loaded(folder, load_in, dtype)
    states = target.states(rows(), (0, 1))
    assert target.dtype == getattr(torch, dtype) == states.final.dtype
    assert states.layers is not None and states.layers.dtype == target.dtype
    assert target.logits(states.final).dtype == target.head_weight.dtype == target.dtype
    assert target.embedding.dtype == target.dtype
    inner = [one for one in target.base.modules() if isinstance(one, nn.Linear)]
    assert len(inner) == 3 * 7 and all(map(is_quantised, inner))
    assert target.fingerprint["quantisation"] == load_in
    assert count_parameters(target.model) == count_parameters(loaded(folder, None).model)


@BOTH
def test_plain_weights_are_those_that_the_layer_multiplies_by(folder: Path, load_in: str) -> None:
    target, plain = loaded(folder, load_in), loaded(folder, None)
    layer = target.decoder_layers()[1]
    target.states(rows())  # int8 weights are held elsewhere after the first pass
    state = plain_state(layer, "tiny")
    assert state.keys() == plain.decoder_layers()[1].state_dict().keys()
    assert {value.dtype for value in state.values()} == {torch.float32}
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    product = layer.mlp.up_proj(hidden)
    wanted = hidden @ state["mlp.up_proj.weight"].T
    error = 1e-5 if load_in == "nf4" else 0.03  # int8 rounds what it is given as well
    assert (product - wanted).norm() < error * wanted.norm()
    there = plain.decoder_layers()[1].mlp.up_proj.weight
    distance = (state["mlp.up_proj.weight"] - there).norm() / there.norm()
    assert 0 < distance < (0.15 if load_in == "nf4" else 0.01)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_trains_in_fp32_on_it_and_decodes_it_exactly(
    folder: Path, load_in: str, kind: str
) -> None:
    target = loaded(folder, load_in)
    torch.manual_seed(0)
    config = KINDS[kind]
    drafter = build(config, target, None)
    assert {value.dtype for value in trainable(drafter).values()} == {torch.float32}
    assert not any(map(is_quantised, drafter.modules()))
    frozen = {key: value.clone() for key, value in target.model.state_dict().items()}
    given = {"name": "x", "target": {"model": str(folder)}, "drafter": config.model_dump()}
    loss = SlotLoss(drafter, target, Recipe.model_validate(given), Phases(target.device))
    batch = rows()
    value, _ = loss(batch, target.states(batch, drafter.taps), metrics=True)
    value.backward()
    learned = [one.grad is not None and bool(one.grad.any()) for one in drafter.parameters()]
    assert any(learned) and bool(torch.isfinite(value))
    assert all(torch.equal(v, frozen[k]) for k, v in target.model.state_dict().items())
    drafter = drafter.to(target.dtype).eval()
    prompt = [11, 40, 80, 120, 60]
    with torch.no_grad():
        plain = decode(target, None, prompt, sampling=Sampling(), max_new_tokens=12)
        tree = chain(drafter.depth)
        drafted = decode(target, drafter, prompt, sampling=Sampling(), max_new_tokens=12, tree=tree)
    if load_in == "nf4":  # int8 products depend on what else is in the batch
        assert drafted.tokens == plain.tokens


def test_nf4_weights_stay_as_they_are_stored(folder: Path) -> None:
    target = loaded(folder, "nf4", "bfloat16")
    before = target.decoder_layers()[0].mlp.up_proj.weight.data.clone()
    with torch.no_grad():
        target.states(rows())
    layer = target.decoder_layers()[0].mlp.up_proj
    assert torch.equal(layer.weight.data, before)
    hidden = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    layer(hidden).sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.any())


@BOTH
def test_a_quantised_checkpoint_is_loaded_as_it_is(
    folder: Path, load_in: str, tmp_path: Path
) -> None:
    target = loaded(folder, load_in)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    again = loaded(tmp_path, None)
    assert again.fingerprint["quantisation"] == load_in
    assert torch.equal(again.states(rows()).final, target.states(rows()).final)
    with pytest.raises(UserError, match=f"are {load_in} already"):
        loaded(tmp_path, "nf4")
    with pytest.raises(UserError, match=f"are {load_in} already"):
        describe(TargetConfig(model=str(tmp_path), load_in="int8"))
    shape = describe(TargetConfig(model=str(tmp_path)))
    assert shape.parameters == count_parameters(target.model) and shape.quantisation == load_in


def test_layers_of_an_unknown_quantisation_are_no_start() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(layer.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UserError, match=r"float8_e4m3fn.*start it at random"):
        plain_state(layer, "x")
    assert plain_weight(nn.Linear(3, 3)).shape == (3, 3)


def test_without_bitsandbytes_one_line_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: None)
    config = TargetConfig(model=str(folder), load_in="nf4")
    for load in (Target.load, describe):
        with pytest.raises(UserError, match=r"pip install 'draftsmith\[bitsandbytes\]'"):
            load(config)


@BOTH
def test_the_estimate_counts_the_bytes_of_the_weights(folder: Path, load_in: str) -> None:
    given = {"name": "x", "target": {"model": str(folder), "load_in": load_in, "dtype": "float32"}}
    recipe = Recipe.model_validate(given)
    model = loaded(folder, load_in).model
    held = sum(value.numel() * value.element_size() for value in model.parameters())
    for value in model.parameters():
        state = getattr(value, "quant_state", None)
        if state is not None:
            held += state.absmax.numel() + 4 * state.state2.absmax.numel()
    estimate = answering_memory(recipe, describe(recipe.target), 10)[FROZEN]
    assert estimate == pytest.approx(held, rel=0.005)
