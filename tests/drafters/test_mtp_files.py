"""MTP layers of checkpoints: read as transformers reads them, put back with nothing else moved."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    ExaoneMoeConfig,
    Glm4MoeConfig,
    MellumConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from transformers.modeling_layers import MtpModel

from draftsmith.drafters import methods
from draftsmith.drafters.mtp_files import LAYOUTS, split
from draftsmith.drafters.mtp_stitch import stitch
from draftsmith.drafters.slots import all_roots
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig
from tests.drafters.test_families import LINEAR, SMALL, every_other
from tests.drafters.test_mtp import FAMILIES, mtp, packed

CONFIGS = {
    **{name: FAMILIES[name] for name in ("qwen2", "qwen3", "qwen3next")},
    "qwen3.5": lambda: Qwen3_5TextConfig(
        **SMALL, **LINEAR, head_dim=8, layer_types=every_other("linear_attention")
    ),
}
MOE = dict(
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
CONFIGS |= {
    "glm4_moe": lambda: Glm4MoeConfig(**SMALL, **MOE, head_dim=8),
    "deepseek": lambda: DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}),
        **MOE,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
}
CONFIGS |= {
    "qwen3.5_moe": lambda: Qwen3_5MoeTextConfig(
        **SMALL,
        **LINEAR,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=every_other("linear_attention"),
    ),
    "exaone_moe": lambda: ExaoneMoeConfig(
        **SMALL,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        layer_types=every_other("sliding_attention"),
    ),
    "mellum": lambda: MellumConfig(
        **SMALL,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        layer_types=every_other("sliding_attention"),
    ),
}
CASES = [
    ("qwen3.5_moe", "mtp"),
    ("exaone_moe", "mtp"),
    ("mellum", "mtp"),
    ("qwen3.5", "mtp"),
    ("qwen3", "mtp"),
    ("qwen3", "next layer"),
    ("qwen2", "mtp_layers"),
    ("qwen3next", "mtp"),
    ("glm4_moe", "next layer"),
    ("deepseek", "next layer"),
]
KINDS = {"mellum": "sliding_attention"}  # of MTP layers; elsewhere full attention
PATTERNS = {"mtp": r"^mtp\.", "next layer": r"model\.layers\.4\..*"}


def in_family(block, layout, hidden_first=False):
    """A block's tensors as a checkpoint of this layout names them; experts one by one."""
    found = {}
    for name, value in block.state_dict().items():
        value = value.clone()
        if name == "fc.weight" and layout.hidden_first != hidden_first:
            value = torch.cat(value.chunk(2, dim=1)[::-1], dim=1)
        theirs = layout.theirs(name)
        alone = [theirs]
        if theirs.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            stem = theirs.rpartition(".")[0]
            alone = [f"{stem}.{i}.down_proj.weight" for i in range(len(value))]
        parts = {theirs: value} if alone == [theirs] else split(alone, theirs, value)
        prefix = layout.at(4)
        found |= {prefix + part: one.contiguous() for part, one in parts.items()}
    return found


def checkpoint(folder, family, layout, *, sharded=False, drop=(), more=None):
    """A tiny checkpoint with a random MTP layer, and that layer's block."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    if family in KINDS:
        config.mtp_layer_types = [KINDS[family]]
    model = AutoModelForCausalLM.from_config(config)
    block = mtp(Target.from_model(model, None, name="x"), seed=3, noise=0.1, start="random").block
    model.requires_grad_(True)
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
    added = {k: v for k, v in in_family(block, LAYOUTS[layout]).items() if k not in drop}
    added |= more or {}
    index = folder / "model.safetensors.index.json"
    if sharded:
        names = json.loads(index.read_text())
        last = sorted(set(names["weight_map"].values()))[-1]
        names["weight_map"] |= dict.fromkeys(added, last)
        index.write_text(json.dumps(names))
    file = folder / (last if sharded else "model.safetensors")
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    return block


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return Target.from_model(model, None, name=str(folder))


def healed(target, **knobs):
    config = MtpConfig(kind="mtp", draft_tokens=2, start="checkpoint", **knobs)
    return methods.build(config, target, None)


def same(block, other):
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in block.state_dict().items())


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_layer_is_read_from_the_files(tmp_path, family, layout, sharded):
    block = checkpoint(tmp_path / "x", family, layout, sharded=sharded)
    target = load(tmp_path / "x")
    assert not any("mtp" in name for name in target.model.state_dict())  # transformers drops it
    assert same(block, healed(target).block)
    turned = healed(target, order="hidden_first").block.fc.weight
    assert torch.equal(turned, torch.cat(block.fc.weight.chunk(2, dim=1)[::-1], dim=1))


@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case[1] in PATTERNS])
def test_its_states_are_those_of_transformers(tmp_path, family, layout):
    checkpoint(tmp_path / "x", family, layout)
    target = load(tmp_path / "x")
    drafter, model = healed(target), target.model
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types = [KINDS.get(family, "full_attention")]
    if hasattr(model.config, "mlp_layer_types"):
        model.config.mtp_mlp_layer_types = ["sparse"]
    model._keys_to_ignore_on_load_unexpected = [PATTERNS[layout]]
    reference = MtpModel.from_pretrained(model).eval()
    batch = packed()
    states, roots = target.states(batch), all_roots(batch)
    slots = drafter.slots(batch, states, roots).hidden
    ids, final = batch.ids[:1, :7], states.final[:1, :7]  # the first document
    with torch.no_grad():
        want = reference.forward_layer(
            0, final[:, :-1], torch.arange(1, 7)[None], None, input_ids=ids[:, 1:]
        )
    compared = 0
    for group, (row, at) in enumerate(
        zip(roots.row.tolist(), roots.position.tolist(), strict=True)
    ):
        if row == 0 and at < 7:
            torch.testing.assert_close(slots[group, 0], want[0, at - 1], rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared == 4


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_putting_it_back_changes_its_tensors_and_not_a_byte_else(tmp_path, family, layout, sharded):
    source, folder = tmp_path / "x", tmp_path / "healed"
    block = checkpoint(source, family, layout, sharded=sharded)
    for value in block.state_dict().values():
        value.add_(0.5)
    stitch(source, [block.state_dict()], folder, layers=4, hidden_first=False)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in source.iterdir())
    moved = set(in_family(block, LAYOUTS[layout]))
    for path in source.iterdir():
        old, new = path.read_bytes(), (folder / path.name).read_bytes()
        if path.suffix != ".safetensors":
            assert old == new
            continue
        before, after = load_file(path), load_file(folder / path.name)
        for name, value in before.items():
            assert torch.equal(value, after[name]) == (name not in moved)
        size = sum(v.numel() * v.element_size() for k, v in before.items() if k in moved)
        assert len(old) == len(new)
        assert sum(a != b for a, b in zip(old, new, strict=True)) <= size
    assert same(block, healed(load(folder)).block)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["healed", "x"]  # no temporaries


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_a_checkpoint_without_one_gets_a_file_more(tmp_path, sharded):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]())
    model.save_pretrained(tmp_path / "x", max_shard_size="20KB" if sharded else "5GB")
    block = mtp(Target.from_model(model, None, name="x"), order="hidden_first").block
    weights = block.state_dict()
    stitch(tmp_path / "x", [weights], tmp_path / "y", layers=4, hidden_first=True)
    target = load(tmp_path / "y")
    for name, value in model.state_dict().items():
        assert torch.equal(target.model.state_dict()[name], value)
    assert same(block, healed(target, order="hidden_first").block)
    assert json.loads((tmp_path / "y" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.raises(UserError, match="exists"):
        stitch(tmp_path / "x", [weights], tmp_path / "y", layers=4, hidden_first=True)


def test_what_does_not_fit_is_named(tmp_path):
    more = {"mtp.extra.weight": torch.zeros(2)}
    checkpoint(tmp_path / "x", "qwen3", "mtp", drop=("mtp.norm.weight",), more=more)
    with pytest.raises(UserError, match=r"missing norm.weight; unexpected extra.weight"):
        healed(load(tmp_path / "x"))
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"]()).save_pretrained(tmp_path / "none")
    with pytest.raises(
        UserError, match=r"has no MTP layer \(no tensor mtp.fc.weight, model.layers.4"
    ):
        healed(load(tmp_path / "none"))


def test_copies_of_embedding_and_head_are_left_alone(tmp_path):
    more = {f"model.layers.4.{n}": torch.ones(40, 32) for n in LAYOUTS["next layer"].copies}
    block = checkpoint(tmp_path / "x", "qwen3", "next layer", more=more)
    assert same(block, healed(load(tmp_path / "x")).block)
