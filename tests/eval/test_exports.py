"""Exports: read as their engines read them, they are the drafter that was written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.drafters.checkpoint import read_metadata
from draftsmith.drafters.engine_files import Source
from draftsmith.drafters.methods import METHODS
from draftsmith.drafters.target import Target
from draftsmith.eval.export_check import check_export
from draftsmith.eval.exports import (
    ENGINES,
    EXPORTS,
    LACKING,
    check_read,
    find_export,
    serving,
    write_export,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from tests.drafted import KINDS, write_drafter
from tests.drafters.test_mtp_files import CONFIGS
from tests.tiny import tiny_model, tiny_target, tiny_tokenizer

PROMPTS = [[1, 20, 30, 40, 21], [1, 99, 20, 30]]
# TensorRT-LLM takes MTP in the target's own checkpoint alone, speculators of Qwen's targets
ELSEWHERE = {("mtp", "tensorrt-llm"), ("mtp", "speculators")}
PAIRS = [
    (name, engine)
    for name, knobs in KINDS.items()
    for kind, engine in EXPORTS
    if kind == knobs["kind"] and (kind, engine) not in ELSEWHERE
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """On disk, where transformers' own assistants look for the tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model(layers=3).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    made = tiny_target(layers=3)
    made.model.config.name_or_path = str(folder)
    return made


def source_at(folder, target):
    meta = read_metadata(folder)
    return Source(folder, meta, Recipe.model_validate(meta["recipe"]), lambda: target)


def source_of(target, folder, name, **more):
    return source_at(write_drafter(target, folder, KINDS[name], **more), target)


@pytest.mark.parametrize(("name", "engine"), PAIRS, ids=lambda value: value.replace(" ", "_"))
def test_an_export_drafts_what_the_drafter_drafts(target, tmp_path, name, engine):
    source = source_of(target, tmp_path / "drafter", name)
    export = find_export(source.kind, engine)
    write_export(export, source, tmp_path / "out")
    found = check_export(export, source, tmp_path / "out", PROMPTS, 12)
    assert found.unlike == 0 and found.guesses > 15
    assert found.rounds > 0 and "argmax" in found.verdict
    assert (found.engine_tokens is not None) == (engine == "transformers")
    said = serving(export, target="org/t", drafter="org/d", drafts=source.drafter.depth)
    assert ("{" not in said.replace('{"', "").replace("{'", "") and "org/" in said) or "mtp" in name


@pytest.mark.parametrize("name", ["medusa", "medusa low rank", "medusa own"])
def test_a_reduced_vocabulary_is_vllms_token_map(target, tmp_path, name):
    ids = torch.arange(3, 200, 2)
    source = source_of(target, tmp_path / "drafter", name, draft_ids=ids)
    export = find_export("medusa", "vllm")
    write_export(export, source, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors")["token_map"].tolist() == ids.tolist()
    assert check_export(export, source, tmp_path / "out", PROMPTS, 8).unlike == 0


def test_a_reduced_vocabulary_keeps_its_meaning_among_all_tokens(target, tmp_path):
    ids = torch.arange(3, 200, 2)
    for number, name in enumerate(("medusa low rank", "mtp", "dflash", "draft_model")):
        source = source_of(target, tmp_path / f"d{number}", name, draft_ids=ids)
        engine = "fasterdecoding" if "medusa" in name else "sglang"
        export = find_export(source.kind, engine)
        write_export(export, source, tmp_path / f"o{number}")
        assert check_export(export, source, tmp_path / f"o{number}", PROMPTS, 8).unlike == 0
    own = source_of(target, tmp_path / "own", "medusa own", draft_ids=ids)
    with pytest.raises(UserError, match="draft_vocab=null"):
        write_export(find_export("medusa", "fasterdecoding"), own, tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_every_pair_is_an_export_or_a_reason():
    late = {("dflash", "speculators")}
    pairs = {(kind, engine) for kind in METHODS for engine in ENGINES}
    assert EXPORTS.keys() | LACKING.keys() | late == pairs
    assert not EXPORTS.keys() & LACKING.keys()
    for kind, engine in pairs - EXPORTS.keys():
        with pytest.raises(UserError, match=f"cannot load a {kind} drafter: .*"):
            find_export(kind, engine)
    with pytest.raises(UserError, match="no such engine; allowed: vllm"):
        find_export("mtp", "tgi")
    assert "vllm<0.33" in find_export("medusa", "vllm").note


@pytest.mark.parametrize(
    ("name", "engine", "knobs", "line"),
    [
        ("medusa", "vllm", {"reads_root": True}, "reads_root=false"),
        ("medusa", "fasterdecoding", {"heads": 3}, "its loader makes 5 heads"),
        ("mtp", "vllm", {"recycles": "pre_norm"}, "recycles=post_norm"),
        ("mtp", "tensorrt-llm", {}, "it has MTP for qwen3_next"),
    ],
)
def test_what_an_engine_cannot_say_is_refused(target, tmp_path, name, engine, knobs, line):
    folder = write_drafter(target, tmp_path / "drafter", KINDS[name] | knobs)
    source = source_at(folder, target)
    with pytest.raises(UserError, match=line):
        write_export(find_export(name, engine), source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_ready_models_are_named_instead(target, tmp_path):
    small = tmp_path / "small"
    tiny_model(layers=1).save_pretrained(small)
    tiny_tokenizer().save_pretrained(small)
    knobs = {"kind": "draft_model", "models": [str(small)], "draft_tokens": 2}
    folder = write_drafter(target, tmp_path / "drafter", knobs)
    source = source_at(folder, target)
    with pytest.raises(UserError, match=r"name .*small"):
        write_export(find_export("draft_model", "vllm"), source, tmp_path / "out")


def qwen3(head_dim):
    config = Qwen3Config(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        initializer_range=0.25,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    return Target.from_model(model, tiny_tokenizer(), name="qwen")


def test_norms_of_heads_and_wide_heads_have_no_class_in_servers(tmp_path):
    for head_dim, engine, line in ((8, "sglang", "q_norm"), (16, "vllm", "heads of 32 / 4")):
        target = qwen3(head_dim)
        folder = write_drafter(target, tmp_path / f"d{head_dim}", KINDS["mtp"])
        source = source_at(folder, target)
        with pytest.raises(UserError, match=line):
            write_export(find_export("mtp", engine), source, tmp_path / "out")
        export = find_export("mtp", "transformers")
        write_export(export, source, tmp_path / f"o{head_dim}")
        assert check_export(export, source, tmp_path / f"o{head_dim}", PROMPTS, 8).unlike == 0


@pytest.mark.parametrize("order", ["embedding_first", "hidden_first"])
def test_speculators_has_layers_of_qwens(tmp_path, order):
    target = qwen3(16)
    source = source_at(
        write_drafter(target, tmp_path / "d", {**KINDS["mtp"], "order": order}), target
    )
    export = find_export("mtp", "speculators")
    write_export(export, source, tmp_path / "out")
    assert check_export(export, source, tmp_path / "out", PROMPTS, 8).unlike == 0
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert "mtp_layers.0.input_proj.weight" in names and all("mtp_layers.0." in n for n in names)
    llama = source_of(tiny_target(), tmp_path / "llama", "mtp")
    with pytest.raises(UserError, match=r"has MTP layers for qwen3, .* and the target is of llama"):
        write_export(export, llama, tmp_path / "never")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_family_with_such_layers_gets_a_copy_of_the_target(tmp_path, engine):
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(CONFIGS["qwen3.5"]()).eval()
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    target = Target.from_model(model, tiny_tokenizer(), name="qwen")
    folder = write_drafter(target, tmp_path / "drafter", KINDS["mtp"])
    source = source_at(folder, target)
    export = find_export("mtp", engine)
    write_export(export, source, tmp_path / "out")
    assert check_export(export, source, tmp_path / "out", [[1, 20, 30]], 6).unlike == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


DAMAGE = {  # of a file that an engine would load without a word
    "vllm": ("model.safetensors", "blocks.0.layers.0.bias"),
    "tensorrt-llm": ("medusa_lm_head.safetensors", "0.0.linear.bias"),
}


@pytest.mark.parametrize("engine", DAMAGE)
@pytest.mark.parametrize("how", ["missing", "extra", "nan", "dtype"])
def test_a_damaged_file_is_told(target, tmp_path, engine, how):
    source = source_of(target, tmp_path / "drafter", "medusa own")
    export, out = find_export("medusa", engine), tmp_path / "out"
    write_export(export, source, out)
    file, name = DAMAGE[engine]
    tensors = load_file(out / file)
    match how:
        case "missing":
            tensors.pop(name)
        case "extra":
            tensors["mask_hidden"] = tensors[name].clone()
        case "nan":
            tensors[name][0] = float("nan")
        case "dtype":
            tensors[name] = tensors[name].half()
    save_file(tensors, out / file)
    with pytest.raises(UserError, match="would not read this drafter"):
        check_read(export, source, out)


def test_keys_that_vllm_would_rename_are_told(target, tmp_path):
    source = source_of(target, tmp_path / "drafter", "medusa")
    export, out = find_export("medusa", "vllm"), tmp_path / "out"
    write_export(export, source, out)
    config = json.loads((out / "config.json").read_text())
    for change in ({"num_attention_heads": 4}, {"medusa_fc_bias": False}, {"hidden_size": 4096}):
        (out / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=next(iter(change))):
            check_read(export, source, out)


def test_other_weights_beside_an_export_are_told(target, tmp_path):
    source = source_of(target, tmp_path / "drafter", "medusa")
    export, out = find_export("medusa", "vllm"), tmp_path / "out"
    write_export(export, source, out)
    save_file({"x": torch.zeros(1)}, out / "consolidated.safetensors")
    with pytest.raises(UserError, match=r"consolidated\.safetensors lies beside"):
        check_read(export, source, out)


def test_other_numbers_are_no_export_of_this_drafter(target, tmp_path):
    mine = source_of(target, tmp_path / "mine", "dflash")
    export = find_export("dflash", "vllm")
    write_export(export, mine, tmp_path / "out")
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"] = torch.randn_like(tensors["fc.weight"])
    save_file(tensors, file)
    with pytest.raises(UserError, match="guesses are not those of"):
        check_export(export, mine, tmp_path / "out", PROMPTS, 8)


def test_a_path_that_vllm_takes_for_another_kind_is_refused(target, tmp_path):
    source = source_of(target, tmp_path / "drafter", "medusa")
    for name in ("my-eagle3-heads", "dflash_not"):
        with pytest.raises(UserError, match="another kind of drafter"):
            write_export(find_export("medusa", "vllm"), source, tmp_path / name)
