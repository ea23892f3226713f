"""MTP: a plain forward pass over one root's entries says what every slot is, in training, in
decoding and for the walk.
"""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    Starcoder2Config,
)

from draftsmith.drafters import methods, mtp_attention
from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.projection import slot_logits
from draftsmith.drafters.proposal import Plan, Verdict
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import Batch, Roots, TargetStates, all_roots, label_slots
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig
from tests.drafters.test_draft_model import compare_caches
from tests.drafters.test_families import LINEAR, SMALL, every_other
from tests.tiny import tiny_target

BUSHY = Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1)))
KNOBS = {
    "plain": {},
    "hidden first": {"order": "hidden_first"},
    "pre-norm": {"recycles": "pre_norm"},
    "reads pre-norm": {"reads": "pre_norm"},
    "shifted": {"position_shift": -1},
    "random": {"start": "random"},
    "reduced": {},
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=5),
    "gemma2": lambda: Gemma2Config(
        **SMALL, head_dim=8, sliding_window=5, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, head_dim=8, sliding_window=6, layer_types=every_other("sliding_attention")
    ),
    "starcoder2": lambda: Starcoder2Config(**SMALL),
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
}


def family(name):
    torch.manual_seed(0)
    return Target.from_model(AutoModelForCausalLM.from_config(FAMILIES[name]()), None, name=name)


def mtp(target, slots=3, seed=0, ids=None, noise=0.05, **knobs):
    """A drafter that is right now and then."""
    config = MtpConfig(kind="mtp", draft_tokens=slots, **knobs)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = methods.build(config, target, ids)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in drafter.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return drafter.to(target.dtype).eval()


def built(knobs, target=None):
    target = target or tiny_target(40, spread=0.15)
    ids = torch.arange(0, 40, 2) if knobs == "reduced" else None
    return target, mtp(target, ids=ids, **KNOBS[knobs])


def packed(vocab=40):
    """Two rows: two documents with an unsupervised start each, and one with padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (2, 16), generator=generator)
    documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 12 + [-1] * 4])
    positions = torch.tensor([[*range(7), *range(9)], [*range(12), 0, 0, 0, 0]])
    supervised = (documents >= 0) & (positions > 2)
    return Batch(ids, positions, documents, supervised)


def plain_slots(drafter, ids, final, root, count):
    """Slots of one root of a document alone, by transformers' own attention over its entries."""
    block = copy.deepcopy(drafter.block)
    block.layer_config._attn_implementation = "eager"
    block.layer.self_attn.config._attn_implementation = "eager"
    embedded, hidden, found = drafter.embed(ids[1 : root + 1]), drafter.read(final[:root]), []
    for slot in range(1, count + 1):
        length = len(embedded)
        at = torch.arange(1, length + 1)
        near = block.reach.sees(at[:, None], at[None])
        low = torch.finfo(hidden.dtype).min
        mask = torch.zeros(length, length, dtype=hidden.dtype)
        mask = mask.masked_fill(~(near & (at <= at[:, None])), low)[None, None]
        out = block(embedded[None], hidden[None], at[None], mask=mask)[0, -1]
        found.append(block.norm(out))
        if slot < count:
            embedded = torch.cat([embedded, drafter.embed(ids[root + slot])[None]])
            hidden = torch.cat([hidden, drafter.recycle(out)[None]])
    return torch.stack(found)


def document(batch, row, at):
    """The tokens of a root's document, where it starts, and where the root is in it."""
    own = batch.documents[row] == batch.documents[row, at]
    start = int(own.nonzero()[0])
    return batch.ids[row, own], start, int(at) - start


def check_against_plain(target, drafter):
    batch = packed(target.vocab_size)
    states, roots = target.states(batch), all_roots(batch)
    slots = drafter.slots(batch, states, roots)
    compared = 0
    for group, (row, at) in enumerate(zip(roots.row, roots.position, strict=True)):
        ids, start, root = document(batch, row, at)
        count = int(slots.labels.valid[group].sum())
        final = states.final[row, start : start + len(ids)]
        if count:
            want = plain_slots(drafter, ids, final, root, count)
            torch.testing.assert_close(slots.hidden[group, :count], want, rtol=1e-4, atol=1e-4)
            compared += count
    assert compared > 20


@pytest.mark.parametrize("knobs", KNOBS)
def test_every_slot_is_a_plain_pass_over_what_it_sees_when_served(knobs):
    check_against_plain(*built(knobs))


@pytest.mark.parametrize("name", FAMILIES)
def test_so_it_is_for_every_family(name):
    target = family(name)
    check_against_plain(target, mtp(target))


@pytest.mark.parametrize("held", [2, 1024], ids=["some", "all"])
def test_gradients_are_those_of_the_plain_pass(monkeypatch, held):
    monkeypatch.setattr(mtp_attention, "QUERIES", held)
    target, drafter = built("plain")
    batch = packed()
    states, roots = target.states(batch), all_roots(batch)
    valid = label_slots(batch, roots, drafter.depth).valid
    weight = torch.randn(len(roots.row), drafter.depth, target.hidden_size)
    hidden = drafter.slots(batch, states, roots).hidden
    (hidden * weight * valid[..., None]).sum().backward()
    fast = {name: value.grad.clone() for name, value in drafter.named_parameters()}
    drafter.zero_grad()
    total = torch.zeros(())
    for group, (row, at) in enumerate(zip(roots.row, roots.position, strict=True)):
        ids, start, root = document(batch, row, at)
        count = int(valid[group].sum())
        if count:
            final = states.final[row, start : start + len(ids)]
            copied = plain_with_gradient(drafter, ids, final, root, count)
            total = total + (copied * weight[group, :count]).sum()
    total.backward()
    for name, value in drafter.named_parameters():
        torch.testing.assert_close(fast[name], value.grad, rtol=1e-3, atol=1e-3)
        assert value.grad.abs().max() > 0


def plain_with_gradient(drafter, ids, final, root, count):
    """`plain_slots` on the drafter's own weights: its masks as bool for sdpa."""
    embedded, hidden, found = drafter.embed(ids[1 : root + 1]), final[:root], []
    for slot in range(1, count + 1):
        at = torch.arange(1, len(embedded) + 1)
        mask = (at <= at[:, None])[None, None]
        out = drafter.block(embedded[None], hidden[None], at[None], mask=mask)[0, -1]
        found.append(drafter.block.norm(out))
        if slot < count:
            embedded = torch.cat([embedded, drafter.embed(ids[root + slot])[None]])
            hidden = torch.cat([hidden, drafter.recycle(out)[None]])
    return torch.stack(found)


def test_states_before_the_target_s_last_norm_are_known_up_to_their_length():
    target = tiny_target(40)
    with torch.no_grad():
        target.base.norm.weight.copy_(torch.linspace(-2.0, 2.0, target.hidden_size))
    drafter, kept = mtp(target, reads="pre_norm"), []
    hook = target.base.norm.register_forward_hook(lambda module, args, out: kept.append(args[0]))
    final = target.states(packed()).final
    hook.remove()
    drafter.block.pre_fc_norm_hidden.eps = target.base.norm.variance_epsilon = 0.0
    have, want = (drafter.block.pre_fc_norm_hidden(x) for x in (drafter.read(final), kept[0]))
    torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)
    with pytest.raises(UserError, match=r"reads: .* is no RMS norm; use post_norm"):
        mtp(family("starcoder2"), reads="pre_norm")


def test_a_router_can_be_frozen():
    frozen = methods.trainable(mtp(family("qwen3next"), router="frozen"))
    trained = methods.trainable(mtp(family("qwen3next")))
    left = {name.rpartition("mlp.")[2] for name in trained.keys() - frozen.keys()}
    assert left == {"gate.weight", "shared_expert_gate.weight"}
    with pytest.raises(UserError, match=r"router: .* have no router that could be frozen"):
        mtp(tiny_target(40), router="frozen")


def test_what_comes_after_a_slot_s_inputs_changes_nothing():
    target, drafter = built("plain")
    batch = packed()
    roots = Roots(torch.tensor([0]), torch.tensor([10]))  # of the second document
    final = target.states(batch).final

    def slots(ids, states):
        other = Batch(ids, batch.positions, batch.documents, batch.supervised)
        return drafter.slots(other, TargetStates(states), roots).hidden[0]

    base = slots(batch.ids, final)
    for slot in range(1, 4):
        ids, states = batch.ids.clone(), final.clone()
        ids[0, 10 + slot :] = 3
        states[0, 10:] = 7.0  # the root's own state is not known yet
        ids[0, :7], states[0, :7], ids[1], states[1] = 5, -3.0, 1, 2.0  # other documents
        assert torch.equal(slots(ids, states)[:slot], base[:slot])
        ids[0, 10 + slot - 1] += 1
        assert not torch.allclose(slots(ids, states)[slot - 1], base[slot - 1])
    states = final.clone()
    states[0, 8] += 1.0  # behind the root by two: in the entry of the token before it
    assert not torch.allclose(slots(batch.ids, states)[2], base[2])


def test_one_slot_is_the_first_of_many():
    target, drafter = built("plain")
    batch = packed()
    states, roots = target.states(batch), all_roots(batch)
    one = drafter.groups(batch, states, roots, 1, "teacher")
    assert torch.equal(one, drafter.groups(batch, states, roots, 3, "teacher")[:, :1])
    assert (
        drafter.groups(batch, states, Roots(roots.row[:0], roots.position[:0]), 3, "teacher").shape[
            0
        ]
        == 0
    )


def test_on_policy_is_teacher_forced_on_its_own_drafts():
    target, drafter = built("reduced")
    batch = packed()
    states = target.states(batch)
    roots = Roots(torch.tensor([0]), torch.tensor([9]))
    own = drafter.groups(batch, states, roots, 3, "on_policy")
    best = drafter.draft_ids[(own[0] @ drafter.rows.T).argmax(-1)]
    ids = batch.ids.clone()
    ids[0, 10:12] = best[:2]
    told = Batch(ids, batch.positions, batch.documents, batch.supervised)
    torch.testing.assert_close(drafter.groups(told, states, roots, 3, "teacher"), own)


def test_mixed_states_are_the_target_s_or_earlier_slots_at_the_same_token(monkeypatch):
    target, drafter = built("plain")
    batch = packed()
    states, roots = target.states(batch), all_roots(batch)
    truth = drafter.groups(batch, states, roots, 3, "teacher")
    valid = label_slots(batch, roots, 3).valid.all(dim=1)

    def with_choice(number):
        monkeypatch.setattr(
            torch, "randint", lambda n, shape, **_: torch.full(shape, min(number, n - 1))
        )
        return drafter.groups(batch, states, roots, 3, "mixed")

    torch.testing.assert_close(with_choice(9)[valid], truth[valid])  # the slot before, always
    monkeypatch.setattr(drafter, "recycle", lambda out: torch.full_like(out, torch.nan))
    assert bool(with_choice(0)[valid].isfinite().all())  # the target's, always
    group = int(valid.nonzero()[0])
    row, at = int(roots.row[group]), int(roots.position[group])
    changed = states.final.clone()
    changed[row, at] += 1.0  # what slot 2 reads then, and slot 1 does not
    moved = drafter.groups(batch, TargetStates(changed), roots, 3, "mixed")[group]
    base = with_choice(0)[group]
    assert torch.equal(moved[0], base[0]) and not torch.allclose(moved[1], base[1])


# --- decoding ---


def accept(paths):
    """A verdict that accepts these nodes."""
    longest = max(map(len, paths))
    padded = [[*path, *[0] * (longest - len(path))] for path in paths]
    following = torch.tensor([11 + row for row in range(len(paths))])
    path = torch.tensor(padded).long().view(len(paths), longest)
    return Verdict(path, torch.tensor([len(path) for path in paths]), following)


def begin(target, drafter, *texts):
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[9] * (longest - len(text))] for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    final = target.base(input_ids=ids).last_hidden_state
    return drafter.start(ids, lengths, TargetStates(final))


def final_of(target, text):
    return target.base(input_ids=torch.tensor([text])).last_hidden_state[0]


def best_after(target, drafter, text, root, drafts, rank):
    """By the plain pass: the guess of this rank behind the drafts."""
    ids = torch.tensor([*text, root, *drafts])
    final = final_of(target, text)
    hidden = plain_slots(drafter, ids, final, len(text), len(drafts) + 1)[-1]
    logits = slot_logits(hidden[None, None], drafter.head(), target.adjust)[0, 0]
    best = logits.topk(rank + 1).indices[-1]
    return int(best if drafter.draft_ids is None else drafter.draft_ids[best])


@pytest.mark.parametrize("tree", [chain(1), chain(3), BUSHY], ids=["one", "chain", "tree"])
@pytest.mark.parametrize("knobs", KNOBS)
def test_drafts_are_what_the_training_slots_say(tree, knobs):
    target, drafter = built(knobs)
    texts, roots = [[3, 4, 5, 6], [7], [1, 2, 3]], [6, 9, 2]
    state = begin(target, drafter, *texts)
    plan = Plan(tree, Sampling(), SeededCoins([0] * 3))
    proposal = drafter.propose(state, torch.tensor(roots), plan)
    for row, (text, root) in enumerate(zip(texts, roots, strict=True)):
        tokens = proposal.tokens[row].tolist()
        number = {path: node for node, path in enumerate(tree.paths)}
        for path, node in number.items():
            drafts = [tokens[number[path[: k + 1]]] for k in range(len(path) - 1)]
            assert tokens[node] == best_after(target, drafter, text, root, drafts, path[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_so_they_are_for_every_family(name):
    """Windows too, of texts longer than they reach."""
    target = family(name)
    drafter = mtp(target)
    texts, roots = [list(range(3, 12)), [7, 8]], [6, 9]
    plan = Plan(chain(3), Sampling(), SeededCoins([0] * 2))
    state = begin(target, drafter, *texts)
    proposal = drafter.propose(state, torch.tensor(roots), plan)
    for row, (text, root) in enumerate(zip(texts, roots, strict=True)):
        tokens = proposal.tokens[row].tolist()
        for slot, token in enumerate(tokens):
            assert token == best_after(target, drafter, text, root, tokens[:slot], 0)


@pytest.mark.parametrize(
    ("tree", "paths"),
    [(chain(3), [list(range(1, n + 1))]) for n in range(4)]
    + [(chain(3), [[], [1, 2, 3]]), (chain(3), [[1], [1, 2]])]
    + [(BUSHY, [path]) for path in ([], [2], [1, 4], [1, 3, 6], [2, 5, 7])]
    + [(BUSHY, [[1, 3, 6], [2]]), (BUSHY, [[2, 5, 7], [1, 3]])],
)
def test_after_any_accepted_path_drafts_are_those_of_a_fresh_cache(tree, paths):
    """The cache then holds entries of true states alone."""
    target, drafter = built("plain")
    texts, roots = [[3, 4, 5], [7, 8]][: len(paths)], [6, 2][: len(paths)]
    plan = Plan(tree, Sampling(), SeededCoins([0] * len(paths)))
    state = begin(target, drafter, *texts)
    proposal, verdict = drafter.propose(state, torch.tensor(roots), plan), accept(paths)
    grown = [
        [*text, root, *(int(proposal.tokens[row, node - 1]) for node in path)]
        for row, (text, root, path) in enumerate(zip(texts, roots, paths, strict=True))
    ]
    deepest = max(map(len, paths))
    final = torch.zeros(len(paths), deepest + 1, target.hidden_size)
    for row, (text, path) in enumerate(zip(grown, paths, strict=True)):
        final[row, : len(path) + 1] = final_of(target, text)[-len(path) - 1 :]
    state = drafter.commit(state, proposal, verdict, TargetStates(final))
    second = drafter.propose(state, verdict.next, plan)
    assert torch.equal(drafter.propose(state, verdict.next, plan).tokens, second.tokens)
    for row, text in enumerate(grown):
        fresh = begin(target, drafter, text)
        one = Plan(tree, Sampling(), SeededCoins([0]))
        want = drafter.propose(fresh, verdict.next[row : row + 1], one)
        assert second.tokens[row].tolist() == want.tokens[0].tolist()
        compare_caches(state.cache, row, fresh.cache, len(text))


def test_rows_can_leave_the_batch():
    target, drafter = built("plain")
    plan = Plan(chain(2), Sampling(), SeededCoins([0, 0, 0]))
    texts, roots = [[3, 4, 5], [7, 8], [1]], [6, 9, 2]
    state = begin(target, drafter, *texts)
    proposal = drafter.propose(state, torch.tensor(roots), plan)
    grown = [
        [*t, r, *proposal.tokens[i, :1].tolist()]
        for i, (t, r) in enumerate(zip(texts, roots, strict=True))
    ]
    final = torch.stack([final_of(target, text)[-2:] for text in grown])
    state = drafter.commit(state, proposal, accept([[1]] * 3), TargetStates(final))
    state = drafter.select(state, torch.tensor([2, 1]))
    left = drafter.propose(state, torch.tensor([13, 12]), plan)
    for row, text in enumerate((grown[2], grown[1])):
        alone = drafter.propose(begin(target, drafter, text), torch.tensor([13 - row]), plan)
        assert left.tokens[row].tolist() == alone.tokens[0].tolist()


def test_names_and_shapes_in_files_are_those_of_the_mtp_layout():
    target, drafter = built("plain", family("qwen3"))
    size, tensors = target.hidden_size, drafter.native_tensors()
    layer = target.decoder_layers()[-1].state_dict()
    assert tensors["mtp.fc.weight"].shape == (size, 2 * size)
    top = {"fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"}
    want = {f"mtp.{name}.weight" for name in top} | {f"mtp.layers.0.{name}" for name in layer}
    assert tensors.keys() == want
    other = mtp(target, seed=5)
    other.load_native(tensors)
    assert all(torch.equal(a, tensors[n]) for n, a in other.native_tensors().items())
    with pytest.raises(ValueError, match="other tensors"):
        other.load_native({**tensors, "mtp.extra": torch.zeros(size)})


def test_only_the_block_is_trained_and_starts_as_the_last_layer():
    target = tiny_target(40, tied=True)
    drafter = methods.build(MtpConfig(kind="mtp"), target, None)
    trained = methods.trainable(drafter)
    assert trained.keys() == dict(drafter.block.named_parameters(prefix="blocks.0")).keys()
    assert all(value.dtype == torch.float32 for value in trained.values())
    for name, value in target.decoder_layers()[-1].state_dict().items():
        assert torch.equal(trained[f"blocks.0.layer.{name}"], value)
        assert trained[f"blocks.0.layer.{name}"].data_ptr() != value.data_ptr()
    assert target.model.config._attn_implementation == "sdpa"  # the target's own is left alone
