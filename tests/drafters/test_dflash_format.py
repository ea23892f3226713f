"""Files of a block drafter: every reader's constraints, and transformers drafts the same tokens."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantModel

from draftsmith.drafters.checkpoint import load_drafter, save_drafter, target_metadata
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dflash_format import check_folder
from draftsmith.drafters.dflash_import import import_dflash
from draftsmith.drafters.dflash_speculators import check_speculators, export_speculators
from draftsmith.drafters.export import export_assistant
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import chain
from draftsmith.eval.decode import decode
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DFlashConfig
from tests.drafters.test_families import ATTENTION, make_target
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target(20, layers=4, eos=(), spread=0.2)


def drafter_of(target, draft_ids=None):
    torch.manual_seed(0)
    given = {"block_size": 4, "layers": 2, "taps": (0, 2), "mask_token_id": 19, "start": "target"}
    drafter = DFlash(DFlashConfig(kind="dflash", **given), target, draft_ids)
    drafter.begin(target)
    return drafter.eval()


@pytest.fixture
def folder(target, tmp_path):
    save_drafter(drafter_of(target), tmp_path / "drafter", {"target": target_metadata(target)})
    return tmp_path / "drafter"


def test_what_is_written_is_the_published_layout(folder):
    check_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    tensors = load_file(folder / "model.safetensors")
    assert tensors["fc.weight"].shape == (32, 64)
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert len(tensors) == 3 + 2 * 11


def test_a_reduced_vocabulary_lies_in_our_file_alone(target, tmp_path):
    save_drafter(
        drafter_of(target, torch.tensor([1, 4, 9])),
        tmp_path / "drafter",
        {"target": target_metadata(target)},
    )
    check_folder(tmp_path / "drafter")
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["vocab_size"] == 20
    assert load_drafter(tmp_path / "drafter", target).draft_ids.tolist() == [1, 4, 9]


def rewrite(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layer_types", lambda c: c.update(layer_types=["sliding_attention"] * 2)),
        ("is_causal", lambda c: c.update(is_causal=False)),
        ("causal", lambda c: c["dflash_config"].update(causal=True)),
        ("target_layer_ids", lambda c: c["dflash_config"].update(target_layer_ids=[2, 0])),
        ("target_layer_ids", lambda c: c["dflash_config"].update(target_layer_ids=[0, 3])),
        ("target_layer_ids", lambda c: c["dflash_config"].update(target_layer_ids=[0, 0])),
        ("mask_token_id", lambda c: c["dflash_config"].update(mask_token_id=20)),
        ("block_size", lambda c: c.update(block_size=5)),
        ("rope_theta", lambda c: c.update(rope_theta=1.0)),
        ("attention_bias", lambda c: c.update(attention_bias=True)),
        ("num_target_layers", lambda c: c.pop("num_target_layers")),
        ("fc.weight", lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2])),
        ("layers.2.mlp", lambda c: c.update(num_hidden_layers=3, layer_types=FULL * 3)),
        ("dtype", lambda c: c.update(dtype="int8")),
        ("not all bfloat16", lambda c: c.update(dtype="bfloat16")),
    ],
)
def test_what_a_reader_would_misread_is_named(folder, name, change):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=name):
        check_folder(folder)


FULL = ["full_attention"]


def test_a_tensor_that_is_missing_or_left_over_is_named(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("layers.1.self_attn.k_norm.weight")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.k_norm\.weight, lm_head\.weight"):
        check_folder(folder)


def test_transformers_drafts_token_for_token_what_we_draft(target, folder, tmp_path):
    export_assistant(folder, tmp_path / "assistant")
    model, found = MuseGlimmerAssistantModel.from_pretrained(
        tmp_path / "assistant", output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    drafter = load_drafter(folder, target)
    drafts = watch_drafts(drafter)
    options = dict(sampling=Sampling(), max_new_tokens=24, tree=chain(3))
    ours = decode(target, drafter, [1, 2, 3, 4], **options)
    theirs = watch_blocks(model, target)
    out = target.model.generate(
        torch.tensor([[1, 2, 3, 4]]),
        assistant_model=model,
        speculation_type="dflash",
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=0,
    )
    assert out[0, 4:].tolist() == ours.tokens
    count = min(len(theirs), len(drafts)) - 2  # near the end each cuts drafts in its own way
    assert count > 3 and theirs[:count] == drafts[:count]


def watch_drafts(drafter):
    """What our drafter proposes, round by round, from now on."""
    found, propose = [], drafter.propose

    def watched(state, root, plan):
        proposal = propose(state, root, plan)
        found.append(proposal.tokens[0].tolist())
        return proposal

    drafter.propose = watched
    return found


def watch_blocks(model, target):
    """What transformers' drafter says in its slots, round by round, from now on."""
    found, forward = [], model.forward

    def watched(*args, **options):
        output = forward(*args, **options)
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        found.append(target.logits(hidden[:, 1:]).argmax(-1)[0].tolist())
        return output

    model.forward = watched
    return found


def test_transformers_scales_the_embedding_as_we_do(tmp_path):
    target = make_target(ATTENTION["gemma3"]())
    assert target.embedding_scale == pytest.approx(target.hidden_size**0.5)
    torch.manual_seed(0)
    given = {"block_size": 4, "layers": 2, "taps": (0, 2), "mask_token_id": 39}
    drafter = DFlash(DFlashConfig(kind="dflash", **given), target, None).eval()
    save_drafter(drafter, tmp_path / "drafter", {"target": target_metadata(target)})
    written = json.loads((tmp_path / "drafter" / "config.json").read_text())["dflash_config"]
    assert written["input_embedding_scale"] == target.embedding_scale
    export_assistant(tmp_path / "drafter", tmp_path / "assistant")
    drafts = watch_drafts(drafter)
    decode(target, drafter, [5, 6, 7], sampling=Sampling(), max_new_tokens=12, tree=chain(3))
    model = MuseGlimmerAssistantModel.from_pretrained(tmp_path / "assistant")
    theirs = watch_blocks(model, target)
    target.model.generate(
        torch.tensor([[5, 6, 7]]),
        assistant_model=model,
        speculation_type="dflash",
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
    )
    count = min(len(theirs), len(drafts)) - 2
    assert count > 3 and theirs[:count] == drafts[:count]
    import_dflash(tmp_path / "drafter", target)
    rewrite(tmp_path / "drafter", lambda c: c["dflash_config"].pop("input_embedding_scale"))
    with pytest.raises(UserError, match="its input_embedding_scale is None"):
        import_dflash(tmp_path / "drafter", target)


def test_a_smaller_block_is_what_a_drafter_of_that_size_drafts(target, folder):
    short = load_drafter(folder, target)
    short.depth = 2
    other = DFlash(short.config.model_copy(update={"block_size": 3}), target, None)
    other.load_native(short.native_tensors())
    options = dict(sampling=Sampling(), max_new_tokens=12, tree=chain(2))
    one, two = (decode(target, drafter, [1, 2, 3], **options) for drafter in (short, other.eval()))
    assert one.tokens == two.tokens
    assert [r.accepted for r in one.rounds] == [r.accepted for r in two.rounds]
    assert short.native_config({})["block_size"] == 3


# --- speculators' layout ---


@pytest.fixture
def speculators(folder, tmp_path):
    export_speculators(
        folder, tmp_path / "speculators", verifier="org/name", architectures=["LlamaForCausalLM"]
    )
    return tmp_path / "speculators"


def test_speculators_layout_is_read_back_as_the_same_drafter(target, folder, speculators):
    config = json.loads((speculators / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3]  # the embedding counts as 0
    assert config["sliding_window_non_causal"] is True  # vLLM's causality of all layers
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    want, have = load_drafter(folder, target), import_dflash(speculators, target)
    assert (have.taps, have.block_size, have.mask_token_id) == ((0, 2), 4, 19)
    for name, value in want.state_dict().items():
        assert torch.equal(have.state_dict()[name], value), name


def test_defaults_that_speculators_leaves_out_are_qwens(target, speculators):
    def lean(config):
        layers = config["transformer_layer_config"]
        for name in ("attention_bias", "hidden_act", "layer_types", "rope_theta", "rope_scaling"):
            layers.pop(name)

    rewrite(speculators, lean)
    check_speculators(speculators)
    import_dflash(speculators, target)


def reduce(folder, target, ids, *, head=None):
    """As speculators writes a drafter with a vocabulary of its own."""
    tensors = load_file(folder / "model.safetensors")
    ids = torch.tensor(ids)
    chosen = torch.zeros(20, dtype=torch.bool)
    chosen[ids] = True
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(len(ids)), chosen
    tensors["lm_head.weight"] = target.head_weight[ids] if head is None else head
    save_file(tensors, folder / "model.safetensors")
    rewrite(folder, lambda c: c.update(draft_vocab_size=len(ids)))


def test_a_reduced_vocabulary_of_speculators_is_read(target, speculators):
    reduce(speculators, target, [1, 4, 9])
    check_speculators(speculators)
    assert import_dflash(speculators, target).draft_ids.tolist() == [1, 4, 9]


def test_a_head_that_is_not_the_targets_is_refused(target, speculators):
    reduce(speculators, target, [1, 4, 9], head=torch.randn(3, 32))
    with pytest.raises(UserError, match=r"its lm_head\.weight is not the target's"):
        import_dflash(speculators, target)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sliding_window_non_causal", lambda c: c.update(sliding_window_non_causal=False)),
        ("sample_from_anchor", lambda c: c.update(sample_from_anchor=True)),
        ("aux_hidden_state_layer_ids", lambda c: c.update(aux_hidden_state_layer_ids=[0, 2])),
        ("mask_token_id", lambda c: c.update(mask_token_id=20)),
        ("proposal_methods", lambda c: c.update(block_size=5)),
        ("verifier", lambda c: c["speculators_config"]["verifier"].update(name_or_path=None)),
        ("layer_types", lambda c: c["transformer_layer_config"].update(layer_types=["sliding"])),
        ("d2t, t2d, lm_head.weight", lambda c: c.update(draft_vocab_size=3)),
        ("fc.weight", lambda c: c.update(aux_hidden_state_layer_ids=[1])),
        ("is missing", lambda c: c.pop("mask_token_id")),
    ],
)
def test_what_speculators_or_vllm_would_misread_is_named(speculators, name, change):
    rewrite(speculators, change)
    with pytest.raises(ValueError, match=name):
        check_speculators(speculators)


def test_another_folder_is_not_exported(tmp_path):
    with pytest.raises(UserError, match="no block drafter"):
        export_assistant(tmp_path, tmp_path / "to")


def newer(config):
    """As z-lab's newer checkpoints say it."""
    config.pop("block_size")
    config.pop("rope_theta")
    config.pop("rope_scaling")


def older(config):
    """As z-lab's first checkpoints say it."""
    config["dflash_config"].pop("block_size")
    config.pop("rope_parameters")


@pytest.mark.parametrize("change", [newer, older])
def test_a_drafter_made_elsewhere_is_read(target, folder, change):
    want = load_drafter(folder, target)
    (folder / "draftsmith.json").unlink()
    rewrite(folder, change)
    have = import_dflash(folder, target)
    assert (have.taps, have.block_size, have.mask_token_id) == ((0, 2), 4, 19)
    options = dict(sampling=Sampling(), max_new_tokens=12, tree=chain(3))
    one, other = (decode(target, drafter, [1, 2, 3], **options) for drafter in (want, have))
    assert one.tokens == other.tokens
    assert [r.accepted for r in one.rounds] == [r.accepted for r in other.rounds]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda c: c.update(hidden_size=64), "hidden_size is not that"),
        (lambda c: c.update(num_key_value_heads=4), "other tensors"),
        (lambda c: c["rope_parameters"].update(rope_theta=5.0), "rope_parameters is not that"),
        (lambda c: c.update(layer_types=["sliding_attention"] * 2), "sliding layers"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "has no 'mask_token_id'"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[2, 0]), "must ascend"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 2]), "other tensors"),
    ],
)
def test_what_is_not_our_network_is_refused(target, folder, change, line):
    rewrite(folder, change)
    with pytest.raises(UserError, match=line):
        import_dflash(folder, target)
