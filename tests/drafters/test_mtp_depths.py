"""MTP layers with weights of their own: a plain pass, depth after depth, says what every slot is,
in training and in decoding.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from draftsmith.drafters import methods
from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.mtp_stitch import stitch
from draftsmith.drafters.proposal import Plan
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import TargetStates, all_roots
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MtpConfig
from tests.drafters.test_draft_model import compare_caches
from tests.drafters.test_mtp import (
    FAMILIES,
    accept,
    begin,
    document,
    family,
    final_of,
    mtp,
    packed,
)
from tests.tiny import tiny_target

KNOBS = {
    "plain": {},
    "hidden first": {"order": "hidden_first"},
    "pre-norm": {"recycles": "pre_norm"},
    "reads pre-norm": {"reads": "pre_norm"},
    "shifted": {"position_shift": -1},
}


def untied(target, slots=3, **knobs):
    return mtp(target, slots=slots, depths=slots, **knobs)


def plain_slots(drafter, ids, final, root, count):
    """Slots of one root of a document alone: every depth over all roots up to it."""
    hidden, found = drafter.read(final[:root]), []
    for ahead, block in enumerate(copy.deepcopy(drafter.blocks)[:count]):
        block.layer_config._attn_implementation = "eager"
        block.layer.self_attn.config._attn_implementation = "eager"
        at = torch.arange(1, root + 1)
        sees = (at <= at[:, None]) & block.reach.sees(at[:, None], at)
        low = torch.zeros(root, root).masked_fill(~sees, torch.finfo(hidden.dtype).min)
        embedded = drafter.embed(ids[1 + ahead : 1 + ahead + root])
        out = block(embedded[None], hidden[None], at[None] + ahead, mask=low[None, None])[0]
        found.append(block.norm(out[-1]))
        hidden = drafter.recycled(block, out)
    return torch.stack(found)


def check_against_plain(target, drafter):
    batch = packed(target.vocab_size)
    states, roots = target.states(batch), all_roots(batch)
    slots, compared = drafter.slots(batch, states, roots), 0
    for group, (row, at) in enumerate(zip(roots.row, roots.position, strict=True)):
        ids, start, root = document(batch, row, at)
        count = int(slots.labels.valid[group].sum())
        if count:
            final = states.final[row, start : start + len(ids)]
            want = plain_slots(drafter, ids, final, root, count)
            torch.testing.assert_close(slots.hidden[group, :count], want, rtol=1e-4, atol=1e-4)
            compared += count
    assert compared > 20


@pytest.mark.parametrize("knobs", KNOBS)
def test_every_slot_is_a_plain_pass_of_its_depth(knobs):
    target = tiny_target(40, spread=0.15)
    check_against_plain(target, untied(target, **KNOBS[knobs]))


@pytest.mark.parametrize("name", FAMILIES)
def test_so_it_is_for_every_family(name):
    target = family(name)
    check_against_plain(target, untied(target))


def best_after(target, drafter, text, root, drafts):
    ids = torch.tensor([*text, root, *drafts])
    slots = plain_slots(drafter, ids, final_of(target, text), len(text), len(drafts) + 1)
    return int((slots[-1] @ drafter.rows.T).argmax())


@pytest.mark.parametrize("knobs", KNOBS)
def test_drafts_are_what_the_training_slots_say(knobs):
    target = tiny_target(40, spread=0.15)
    drafter = untied(target, **KNOBS[knobs])
    texts, roots = [list(range(3, 12)), [7], [1, 2, 3]], [6, 9, 2]
    plan = Plan(chain(3), Sampling(), SeededCoins([0] * 3))
    drafted = drafter.propose(begin(target, drafter, *texts), torch.tensor(roots), plan).tokens
    for row, (text, root) in enumerate(zip(texts, roots, strict=True)):
        tokens = drafted[row].tolist()
        for slot, token in enumerate(tokens):
            assert token == best_after(target, drafter, text, root, tokens[:slot])


@pytest.mark.parametrize(
    "rounds", [[[0, 0]], [[3, 3]], [[0, 3], [2, 0]], [[1, 2], [0, 0], [3, 1]]], ids=str
)
def test_after_any_rounds_drafts_are_those_of_a_fresh_cache(rounds):
    target = tiny_target(40, spread=0.15)
    drafter = untied(target)
    texts, roots = [[3, 4, 5, 8, 9], [7]], [6, 2]
    plan = Plan(chain(3), Sampling(), SeededCoins([0, 0]))
    state = begin(target, drafter, *texts)
    for counts in rounds:
        proposal = drafter.propose(state, torch.tensor(roots), plan)
        verdict = accept([list(range(1, count + 1)) for count in counts])
        final = torch.zeros(2, max(counts) + 1, target.hidden_size)
        for row, count in enumerate(counts):
            texts[row] = [*texts[row], roots[row], *proposal.tokens[row, :count].tolist()]
            final[row, : count + 1] = final_of(target, texts[row])[-count - 1 :]
        state = drafter.commit(state, proposal, verdict, TargetStates(final))
        roots = verdict.next.tolist()
    drafted = drafter.propose(state, torch.tensor(roots), plan)
    for row, text in enumerate(texts):
        fresh, one = begin(target, drafter, text), Plan(chain(3), Sampling(), SeededCoins([0]))
        want = drafter.propose(fresh, torch.tensor(roots[row : row + 1]), one)
        assert drafted.tokens[row].tolist() == want.tokens[0].tolist()
        for mine, theirs in zip(state.caches, fresh.caches, strict=True):
            compare_caches(mine, row, theirs, len(text))


def test_rows_can_leave_the_batch():
    target = tiny_target(40, spread=0.15)
    drafter = untied(target)
    texts, roots = [[3, 4, 5, 6], [7, 8], [1]], torch.tensor([6, 9, 2])
    plan = Plan(chain(3), Sampling(), SeededCoins([0, 0, 0]))
    state = drafter.select(begin(target, drafter, *texts), torch.tensor([2, 0]))
    left = drafter.propose(state, roots[[2, 0]], plan).tokens
    for row, number in enumerate((2, 0)):
        alone = drafter.propose(
            begin(target, drafter, texts[number]), roots[number : number + 1], plan
        )
        assert left[row].tolist() == alone.tokens[0].tolist()


def test_they_draft_no_trees():
    target = tiny_target(40)
    drafter = untied(target, slots=2)
    plan = Plan(Tree(((0,), (1,))), Sampling(), SeededCoins([0]))
    with pytest.raises(UserError, match="chains; give no tree"):
        drafter.propose(begin(target, drafter, [3, 4]), torch.tensor([5]), plan)


def test_files_hold_every_depth_and_transformers_drafts_the_same(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3"]()).eval()
    model.save_pretrained(tmp_path / "x")
    drafter = untied(Target.from_model(model, None, name="x"), slots=2, noise=0.1)
    blocks = [block.state_dict() for block in drafter.blocks]
    stitch(tmp_path / "x", blocks, tmp_path / "y", layers=4, hidden_first=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "y").eval()
    assert loaded.config.num_mtp_layers == 2
    target = Target.from_model(loaded, None, name="y")
    ready = methods.build(
        MtpConfig(kind="mtp", draft_tokens=2, depths=2, start="checkpoint"), target, None
    )
    for mine, theirs in zip(drafter.blocks, ready.blocks, strict=True):
        assert all(torch.equal(v, theirs.state_dict()[n]) for n, v in mine.state_dict().items())
    with pytest.raises(UserError, match="has 2 MTP layers; give as many or fewer"):
        methods.build(
            MtpConfig(kind="mtp", draft_tokens=3, depths=3, start="checkpoint"), target, None
        )
    loaded._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[45]\..*"]
    reference = MtpModel.from_pretrained(loaded).eval()
    text, root = [3, 9, 4, 7, 1, 5], 6
    plan = Plan(chain(2), Sampling(), SeededCoins([0]))
    drafted = ready.propose(begin(target, ready, text), torch.tensor([root]), plan).tokens
    with torch.no_grad():
        want, _, _ = reference(
            torch.tensor([[*text[1:], root]]),
            final_of(target, text)[None],
            None,
            torch.arange(1, 7)[None],
            None,
        )
    assert drafted.tolist() == want.tolist()
