"""The distilled draft model: a copy that shares what it should, and a plain folder on disk."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

from draftsmith.data.needs import trained_parameters
from draftsmith.drafters import checkpoint
from draftsmith.drafters.methods import build, trainable
from draftsmith.drafters.projection import slot_logits
from draftsmith.drafters.proposal import Plan
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.shallow import shallow_copy, spread
from draftsmith.drafters.slots import Batch, all_roots
from draftsmith.drafters.target import Target, shape_of
from draftsmith.drafters.tree import chain
from draftsmith.eval.decode import decode
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DraftModelConfig
from tests.tiny import tiny_target, tiny_tokenizer

CASES = [
    (embedding, tied, ids)
    for embedding in ("shared", "own")
    for tied in (False, True)
    for ids in (None, [3, 7, 20, 21, 30])
]


def drafter_of(target, ids=None, **knobs):
    config = DraftModelConfig(kind="draft_model", **{"layers": 2, "draft_tokens": 3, **knobs})
    return build(config, target, None if ids is None else torch.tensor(ids))


def packed():
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]])
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    return Batch(ids, positions, documents, documents >= 0)


def test_layers_are_spread_from_first_to_last():
    assert spread(30, 4) == [0, 10, 19, 29]
    assert spread(3, 3) == [0, 1, 2] and spread(5, 2) == [0, 4] and spread(5, 1) == [4]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_copy_of_all_layers_is_the_target(tied):
    target = tiny_target(40, layers=3, tied=tied)
    for own in (False, True):
        net = shallow_copy(target, 3, own=own)
        ids = torch.tensor([[1, 2, 3, 4]])
        assert torch.equal(net(ids).logits, target.model(ids).logits)


def test_a_shallow_copy_starts_from_the_chosen_layers_and_leaves_the_target_alone():
    target = tiny_target(40, layers=4, dtype=torch.bfloat16)
    before = [value.clone() for value in target.model.parameters()]
    net = shallow_copy(target, 2, own=False)
    for place, layer in enumerate((0, 3)):
        mine = net.model.layers[place].state_dict()
        for name, value in target.base.layers[layer].state_dict().items():
            assert mine[name].dtype == torch.float32
            assert torch.equal(mine[name], value.float())
    assert net.model.embed_tokens.weight is target.base.embed_tokens.weight
    assert net.lm_head.weight is target.head_weight
    assert net.config.num_hidden_layers == 2 and target.config.num_hidden_layers == 4
    with torch.no_grad():
        for value in net.parameters():
            if value.requires_grad:
                value.add_(1.0)
    pairs = zip(before, target.model.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)


def test_lists_with_an_entry_per_layer_are_cut_likewise():
    config = MistralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    config.layer_types = ["full_attention", "sliding_attention", "sliding_attention"]
    model = MistralForCausalLM(config).eval()
    net = shallow_copy(Target.from_model(model, tiny_tokenizer(), name="m"), 2, own=False)
    assert net.config.layer_types == ["full_attention", "sliding_attention"]
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]


def test_more_layers_than_there_are_is_one_clear_line():
    with pytest.raises(UserError, match=r"drafter\.layers: 3 is more than the 2 of tiny"):
        shallow_copy(tiny_target(40), 3, own=False)


@pytest.mark.parametrize(("embedding", "tied", "ids"), CASES)
def test_its_one_slot_is_its_own_state_at_the_root(embedding, tied, ids):
    target = tiny_target(40, layers=3, tied=tied)
    drafter = drafter_of(target, ids, embedding=embedding)
    batch = packed()
    roots = all_roots(batch)
    slots = drafter.slots(batch, target.states(batch), roots)
    assert slots.hidden.shape == (len(roots.row), 1, target.hidden_size)
    logits = slot_logits(slots.hidden, slots.head, target.adjust)[:, 0]
    for group, (row, at) in enumerate(zip(roots.row, roots.position, strict=True)):
        if slots.labels.valid[group, 0]:
            start = int(at - batch.positions[row, at])
            text = batch.ids[row, start : at + 1][None]
            want = drafter.net(text).logits[0, -1]
            want = want if ids is None else want[ids]
            torch.testing.assert_close(logits[group], want, rtol=1e-4, atol=1e-5)
            assert slots.labels.label[group, 0] == batch.ids[row, at + 1]


@pytest.mark.parametrize(("embedding", "tied", "ids"), CASES)
def test_gradients_reach_what_is_trained_and_nothing_of_the_target(embedding, tied, ids):
    target = tiny_target(40, layers=3, tied=tied)
    drafter = drafter_of(target, ids, embedding=embedding)
    batch = packed()
    slots = drafter.slots(batch, target.states(batch), all_roots(batch))
    slot_logits(slots.hidden, slots.head).square().sum().backward()
    trained = trainable(drafter)
    assert all(value.grad is not None and value.grad.any() for value in trained.values())
    assert all(value.grad is None for value in target.model.parameters())
    assert all(value.dtype == torch.float32 for value in trained.values())
    shape = shape_of(target.model.config, None)
    assert trained_parameters(drafter.config, shape) == sum(v.numel() for v in trained.values())


def shaken(drafter):
    with torch.no_grad():
        for value in trainable(drafter).values():
            value.add_(0.05 * torch.randn_like(value))
    return drafter


def save(drafter, target, folder):
    checkpoint.save_drafter(drafter, folder, {"target": checkpoint.target_metadata(target)})


@pytest.mark.parametrize(("embedding", "tied", "ids"), CASES)
def test_what_is_kept_is_a_plain_folder_and_loads_again(tmp_path, embedding, tied, ids):
    target = tiny_target(40, layers=3, tied=tied)
    drafter = shaken(drafter_of(target, ids, embedding=embedding))
    save(drafter, target, tmp_path / "d")
    text = torch.tensor([[1, 2, 3, 4]])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "d")
    torch.testing.assert_close(plain(text).logits, drafter.net(text).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "d").get_vocab() == tiny_tokenizer().get_vocab()
    again = checkpoint.load_drafter(tmp_path / "d", target)
    torch.testing.assert_close(again.net(text).logits, drafter.net(text).logits)
    assert again.draft_ids is None if ids is None else again.draft_ids.tolist() == ids
    if embedding == "shared":
        assert again.net.lm_head.weight is target.head_weight


def test_a_bf16_target_keeps_its_rows_and_the_drafter_decodes_in_bf16(tmp_path):
    target = tiny_target(40, layers=3, dtype=torch.bfloat16, eos=())
    save(shaken(drafter_of(target)), target, tmp_path / "d")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 2
    drafter = checkpoint.load_drafter(tmp_path / "d", target)
    assert {value.dtype for value in drafter.parameters()} == {torch.bfloat16}
    options = dict(sampling=Sampling(), max_new_tokens=12)
    decode(target, drafter, [3, 4, 5], tree=chain(3), **options)


def test_drafts_come_from_the_reduced_vocabulary_alone():
    target, ids = tiny_target(40, layers=3, eos=()), [3, 7, 20, 21, 30]
    drafter = drafter_of(target, ids)
    state = drafter.start(torch.tensor([[1, 2]]), torch.tensor([2]), None)
    proposal = drafter.propose(state, torch.tensor([5]), Plan(chain(3), Sampling(), None))
    assert set(proposal.tokens[0].tolist()) <= set(ids)
    options = dict(sampling=Sampling(), max_new_tokens=12)
    out = decode(target, drafter, [3, 4, 5], tree=chain(3), **options)
    assert out.tokens == decode(target, None, [3, 4, 5], **options).tokens


def test_damaged_weights_are_one_clear_line(tmp_path):
    target = tiny_target(40, layers=3)
    save(drafter_of(target), target, tmp_path / "d")
    other = tiny_target(40, layers=1)
    save(drafter_of(other, layers=1), other, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "d" / "model.safetensors")
    with pytest.raises(UserError, match="broken drafter checkpoint"):
        checkpoint.load_drafter(tmp_path / "d", target)
