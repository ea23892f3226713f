"""The block drafter: a block sees its document before its anchor and itself, in training as in
decoding; what it drafts changes no law.
"""

from dataclasses import replace

import pytest
import torch

from draftsmith.data.dataset import Document
from draftsmith.drafters import dflash_start
from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.dflash import DFlash, spread_taps
from draftsmith.drafters.dflash_mask import propose_mask_token
from draftsmith.drafters.proposal import Plan, Verdict
from draftsmith.drafters.sampler import Sampling, standardise
from draftsmith.drafters.shallow import spread
from draftsmith.drafters.slots import Batch, Roots, TargetStates, all_roots
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval import decode as loop
from draftsmith.eval.decode import decode, decode_batch
from draftsmith.eval.rules import RULES
from draftsmith.eval.walk import rank_table, walk
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DFlashConfig
from tests.coins import distance, law_of
from tests.tiny import tiny_target, tiny_tokenizer

GREEDY = Sampling()
WORDS = 8
BUSHY = Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def small_target(words=WORDS, **options):
    return tiny_target(words, **{"layers": 4, "eos": (), "spread": 0.2, **options})


def make(target, *, block=4, noise=0.05, seed=0, draft_ids=None, **knobs):
    """A drafter that has not quite learned nothing."""
    given = {"layers": 2, "taps": (0, 2), "mask_token_id": target.vocab_size - 1, "start": "target"}
    config = DFlashConfig(kind="dflash", block_size=block, **{**given, **knobs})
    drafter = DFlash(config, target, draft_ids)
    drafter.begin(target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in drafter.parameters():
            value.add_(noise * torch.randn(value.shape, generator=generator))
    return drafter.eval()


def packed(*documents, prompt=2):
    """A row of documents, supervised behind their prompts."""
    ids = torch.tensor([[token for part in documents for token in part]])
    positions = torch.cat([torch.arange(len(part)) for part in documents])[None]
    number = torch.cat([torch.full((len(part),), i) for i, part in enumerate(documents)])[None]
    return Batch(ids, positions, number, positions >= prompt)


def texts(count, length, words=WORDS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(words, (count, length), generator=generator).tolist()


def slot_states(drafter, batch, states, roots):
    return drafter.slots(batch, states, roots).hidden


# --- what a block sees ---


def test_nothing_at_or_behind_an_anchor_reaches_its_block_but_the_anchors_embedding():
    target = small_target(20)
    drafter, batch = make(target), packed(*texts(2, 12, 20))
    states, roots = target.states(batch, drafter.taps), all_roots(batch)
    before = slot_states(drafter, batch, states, roots)
    for at in (5, 8, 17):
        other = states.layers.clone()
        other[0, at:] += torch.randn_like(other[0, at:])
        ids = batch.ids.clone()
        ids[0, at + 1 :] = (ids[0, at + 1 :] + 1) % 20  # the anchor's own token stays
        changed = replace(batch, ids=ids)
        after = slot_states(drafter, changed, TargetStates(states.final, other), roots)
        blind = roots.position <= at
        assert torch.equal(after[blind], before[blind])
        same_document = batch.documents[0, roots.position] == batch.documents[0, at]
        sees = (roots.position > at + 1) & same_document
        assert (after[sees] - before[sees]).abs().amax(dim=(1, 2)).min() > 1e-6


def test_the_anchors_token_is_read():
    target = small_target(20)
    drafter, batch = make(target), packed(*texts(1, 12, 20))
    states, roots = target.states(batch, drafter.taps), Roots(torch.tensor([0]), torch.tensor([6]))
    before = slot_states(drafter, batch, states, roots)
    ids = batch.ids.clone()
    ids[0, 6] = (ids[0, 6] + 1) % 20
    assert not torch.allclose(
        slot_states(drafter, replace(batch, ids=ids), states, roots), before, atol=1e-3
    )


def test_documents_of_a_pack_are_as_if_each_were_alone():
    target = small_target(20)
    drafter, parts = make(target), texts(3, 11, 20)
    batch = packed(*parts)
    states, roots = target.states(batch, drafter.taps), all_roots(batch)
    together = slot_states(drafter, batch, states, roots)
    for number, part in enumerate(parts):
        alone = packed(part)
        want = slot_states(drafter, alone, target.states(alone, drafter.taps), all_roots(alone))
        mine = batch.documents[0, roots.position] == number
        torch.testing.assert_close(together[mine], want)


def test_labels_behind_a_document_are_masked_and_blocks_are_kept():
    target = small_target()
    drafter, batch = make(target, block=6), packed([1, 2, 3, 4, 5], [1, 2, 3, 4])
    slots = drafter.slots(batch, target.states(batch, drafter.taps), drafter.roots(batch))
    assert slots.labels.valid.sum(dim=1).tolist() == [2, 1, 1]
    assert slots.hidden.shape == (3, 5, 32)


def test_a_row_without_anchors_gives_a_loss_on_the_graph():
    target = small_target()
    drafter, batch = make(target), packed([1, 2, 3, 4], prompt=9)
    slots = drafter.slots(batch, target.states(batch, drafter.taps), drafter.roots(batch))
    slots.hidden.sum().backward()
    assert slots.hidden.shape[0] == 0
    assert all(value.grad is not None for value in drafter.parameters())


# --- decoding ---


def context_states(target, drafter, prompts):
    """A drafter's state behind prompts."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[3] * (longest - len(prompt))] for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    states = target.prefill(ids, lengths, target.new_cache(), taps=drafter.taps)
    return drafter.start(ids, lengths, states)


def test_slots_in_training_are_what_decoding_drafts():
    target = small_target(20)
    drafter, text = make(target), texts(1, 14, 20)[0]
    batch = packed(text)
    roots = all_roots(batch)
    best = drafter.guesses(
        batch, target.states(batch, drafter.taps), roots, slots=3, count=1, chunk=5
    )
    for group, at in enumerate(roots.position.tolist()):
        state = context_states(target, drafter, [text[:at]])
        plan = Plan(chain(3), GREEDY, SeededCoins([0]))
        proposal = drafter.propose(state, torch.tensor([text[at]]), plan)
        assert proposal.tokens[0].tolist() == best[group, :, 0].tolist()


@pytest.mark.parametrize("accepted", [[0], [2], [3], [1, 3], [3, 0]])
def test_after_a_round_the_cache_is_what_a_fresh_one_is(accepted):
    target = small_target(20)
    drafter, parts = make(target), texts(2, 9, 20)
    prompts = [parts[0][:5], parts[1][:8]][: len(accepted)]
    state = context_states(target, drafter, prompts)
    plan = Plan(chain(3), GREEDY, SeededCoins([0] * len(accepted)))
    roots = torch.tensor([part[-1] for part in parts])[: len(accepted)]
    proposal = drafter.propose(state, roots, plan)
    grown = [
        [*prompt, int(root), *proposal.tokens[row, :count].tolist()]
        for row, (prompt, root, count) in enumerate(zip(prompts, roots, accepted, strict=True))
    ]
    longest = max(accepted)
    ids = torch.tensor([[*text, *[0] * (20 - len(text))] for text in grown])
    whole = target.states(packed_alone(ids), drafter.taps)
    at = torch.tensor([[len(p) + i for i in range(longest + 1)] for p in prompts])
    path = torch.arange(1, longest + 1).expand(len(accepted), -1)
    verdict = Verdict(path, torch.tensor(accepted), torch.tensor([4, 6])[: len(accepted)])
    rows = torch.arange(len(accepted))[:, None]
    state = drafter.commit(state, proposal, verdict, whole.at(rows, at))
    assert state.cache.lengths == [len(text) for text in grown]
    second = drafter.propose(state, verdict.next, plan)
    fresh = context_states(target, drafter, grown)
    assert torch.equal(second.tokens, drafter.propose(fresh, verdict.next, plan).tokens)


def packed_alone(ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return Batch(ids, positions, torch.zeros_like(ids), torch.ones_like(ids).bool())


@pytest.mark.parametrize("tree", [chain(3), BUSHY], ids=["chain", "bushy"])
def test_greedy_output_is_the_targets_and_rows_are_as_if_alone(tree):
    target, prompts = small_target(), [[1, 2], [3, 4, 5, 6, 1], [2]]
    drafter = make(target)
    options = dict(sampling=GREEDY, max_new_tokens=20)
    plain = decode_batch(target, None, prompts, seeds=[0] * 3, **options)
    together = decode_batch(target, drafter, prompts, seeds=[0] * 3, tree=tree, **options)
    for prompt, want, have in zip(prompts, plain, together, strict=True):
        alone = decode(target, drafter, prompt, tree=tree, **options)
        assert have.tokens == want.tokens == alone.tokens
        assert [r.accepted for r in have.rounds] == [r.accepted for r in alone.rounds]
    assert sum(r.accepted for row in together for r in row.rounds) > 0


@pytest.mark.parametrize("draft_ids", [None, torch.tensor([0, 2, 3, 5])], ids=["all", "some"])
@pytest.mark.parametrize("tree", [chain(3), chain(2), BUSHY], ids=["chain", "shorter", "bushy"])
def test_the_walk_is_what_decoding_does(tree, draft_ids):
    target = small_target()
    drafter = make(target, draft_ids=draft_ids)
    prompts = texts(5, 4)
    rounds = emitted = 0
    documents = []
    for number, prompt in enumerate(prompts):
        out = decode(target, drafter, prompt, sampling=GREEDY, max_new_tokens=18, tree=tree)
        rounds += len(out.rounds)
        emitted += sum(r.emitted for r in out.rounds)
        whole = tuple(prompt + out.tokens)
        marks = tuple(i >= len(prompt) for i in range(len(whole)))
        documents.append(Document(str(number), "a", whole, marks, True, "length"))
    table = rank_table(target, drafter, documents, rows=2, chunk=7, max_length=50)
    total = walk(table, tree).total
    assert (total.rounds, total.emitted) == (rounds, emitted)
    assert emitted > rounds  # something was accepted


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, 2)], ids=["T1", "top2"])
@pytest.mark.parametrize(
    ("name", "draw", "tree"),
    [
        ("token", "chain", chain(2)),
        ("block", "chain", chain(2)),
        ("multi_step", "iid", Tree(((0,), (1,)))),
        ("without_replacement", "without_replacement", Tree(((0,), (1,)))),
        ("point_mass", "point", chain(2)),
    ],
)
def test_drawn_drafts_leave_the_law_as_it_is(monkeypatch, name, draw, tree, sampling):
    target = small_target(3, hidden=16, layers=3)
    target.tokenizer, target.eos_ids = None, ()
    drafter = make(target, block=3, taps=(0, 1), layers=1, noise=0.3)

    def run(coins):
        monkeypatch.setattr(loop, "SeededCoins", lambda seeds: coins)
        options = dict(sampling=sampling, max_new_tokens=3, tree=tree, rule=RULES[name])
        return tuple(decode(target, drafter, [0, 1], draw=draw, **options).tokens)

    out, want = law_of(run), target_law(target, [0, 1], 3, sampling)
    assert sum(out.values()) == pytest.approx(1.0)
    assert distance(out, want) < 1e-5  # fp32 logits


def target_law(target, context, left, sampling):
    if left == 0:
        return {(): 1.0}
    final = target.base(input_ids=torch.tensor([context])).last_hidden_state[0, -1]
    law = standardise(target.logits(final).double(), sampling)
    return {
        (token, *rest): float(law[token]) * share
        for token in law.nonzero()[:, 0].tolist()
        for rest, share in target_law(target, [*context, token], left - 1, sampling).items()
    }


def test_q_is_the_law_of_the_slots_and_of_alpha():
    target = small_target(20)
    ids = torch.tensor([1, 4, 7, 9, 13])
    drafter, text = make(target, draft_ids=ids), texts(1, 9, 20)[0]
    sampling = Sampling(0.8)
    state = context_states(target, drafter, [text[:-1]])
    plan = Plan(chain(3), sampling, SeededCoins([0]), "chain")
    proposal = drafter.propose(state, torch.tensor(text[-1:]), plan)
    assert proposal.draw == "chain" and torch.equal(proposal.ids, ids)
    assert set(proposal.tokens[0].tolist()) <= set(ids.tolist())
    batch, root = packed(text), Roots(torch.tensor([0]), torch.tensor([len(text) - 1]))
    logits = drafter.first_logits(batch, target.states(batch, drafter.taps), root)
    law = standardise(logits(torch.tensor([0])), sampling)
    torch.testing.assert_close(proposal.q[:, 0], law)


def test_a_block_may_be_shorter_than_the_one_that_was_trained():
    target = small_target()
    drafter, prompt = make(target, block=6), [1, 2, 3]
    drafter.depth = 2
    out = decode(target, drafter, prompt, sampling=GREEDY, max_new_tokens=12, tree=chain(2))
    plain = decode(target, None, prompt, sampling=GREEDY, max_new_tokens=12)
    assert out.tokens == plain.tokens
    same = make(target, block=3)
    want = decode(target, same, prompt, sampling=GREEDY, max_new_tokens=12, tree=chain(2))
    assert [r.accepted for r in out.rounds] == [r.accepted for r in want.rounds]


# --- how it is made ---


@pytest.mark.parametrize(
    ("layers", "count", "want"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (30, 5, (1, 8, 14, 20, 27)),
        (30, 1, (15,)),
        (32, 5, (1, 8, 15, 22, 29)),
    ],
)
def test_taps_are_spread_as_published(layers, count, want):
    assert spread_taps(layers, count) == want


@pytest.mark.parametrize(("layers", "count"), [(4, 3), (1, 1), (5, 4)])
def test_taps_that_do_not_fit_are_refused(layers, count):
    with pytest.raises(UserError, match=r"drafter\.taps"):
        spread_taps(layers, count)


WIDE = 256  # heads of 64, whose positions can tell neighbours apart


def outlying(count, *, seed=0):
    """States as language models have them: in a channel much the same everywhere."""
    states = torch.randn(count, WIDE, generator=torch.Generator().manual_seed(seed))
    states[:, 0] += 16.0
    return states


@pytest.mark.parametrize(("layers", "kv_heads"), [(1, 4), (3, 4), (2, None)])
def test_a_start_from_the_target_says_what_it_says_before_the_root(monkeypatch, layers, kv_heads):
    """But for the attention of its last layer; less so where heads share what they pass on."""
    monkeypatch.setattr(dflash_start, "sample_states", lambda *_: outlying(800))
    target = small_target(20, hidden=WIDE)
    knobs = {"layers": layers, "kv_heads": kv_heads, "taps": (0, 2), "block": 3}
    drafter, batch = make(target, noise=0.0, **knobs), packed(*texts(8, 10, 20), prompt=1)
    tapped = outlying(2 * batch.ids.numel(), seed=1).view(1, -1, 2 * WIDE)
    states, roots = TargetStates(tapped[..., :WIDE], tapped), all_roots(batch)
    slots = slot_states(drafter, batch, states, roots)[:, 0]
    tap = tapped[roots.row, roots.position - 1, WIDE:]
    last = target.base.layers[-1]
    want = target.base.norm(tap + last.mlp(last.post_attention_layernorm(tap)))
    # Without the channel that all have in common.
    alike = torch.cosine_similarity(slots[:, 1:], want[:, 1:], dim=-1).mean()
    assert alike > (0.8 if kv_heads else 0.4)
    shuffled = torch.cosine_similarity(slots[:, 1:], want.roll(3, 0)[:, 1:], dim=-1).mean()
    assert shuffled < alike - 0.3
    for layer, at in zip(drafter.layers, spread(4, layers), strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, target.base.layers[at].mlp.up_proj.weight)


def test_a_start_that_the_targets_layers_do_not_fit_is_refused():
    target = small_target(20)
    with pytest.raises(UserError, match=r"drafter\.start.*mlp\.gate_proj"):
        make(target, intermediate=32)


@pytest.mark.parametrize("knobs", [{"kv_heads": 3}, {"heads": 2, "kv_heads": 4}, {"head_dim": 7}])
def test_measures_that_do_not_fit_each_other_are_refused(knobs):
    with pytest.raises(UserError, match=r"drafter\.(kv_heads|head_dim)"):
        make(small_target(20), start="random", **knobs)


def test_frozen_parts_are_the_targets_own_and_not_trained():
    target = small_target()
    drafter = make(target, start="random")
    assert drafter.embedding.data_ptr() == target.embedding.data_ptr()
    assert drafter.rows.data_ptr() == target.head_weight.data_ptr()
    names = {name.split(".")[0] for name, _ in drafter.named_parameters()}
    assert names == {"fc", "hidden_norm", "layers", "norm"}


@pytest.mark.parametrize(
    ("token", "why"),
    [(99, "rows 0 to 39"), (0, "pads texts"), (2, "ends, begins or pads")],
)
def test_a_mask_that_is_no_spare_row_is_refused(token, why):
    target = tiny_target(40, layers=4)
    with pytest.raises(UserError, match=why) as error:
        make(target, mask_token_id=token)
    assert "drafter.mask_token_id" in str(error.value)


def test_the_proposed_mask_is_a_row_behind_the_tokenizer_or_an_unused_token():
    padded = tiny_target(288)
    assert propose_mask_token(padded) == len(tiny_tokenizer())
    whole = tiny_target(len(tiny_tokenizer()))
    token = propose_mask_token(whole)
    assert whole.tokenizer.convert_ids_to_tokens(token) == "</think>"
    assert propose_mask_token(whole, {token}) != token
