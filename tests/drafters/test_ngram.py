"""The n-gram table: its law is the formula's, and what is drafted is drawn from it."""

from collections import Counter

import pytest
import torch

from draftsmith.drafters.grow import levels, lines
from draftsmith.drafters.ngram import NgramTable
from draftsmith.drafters.proposal import Plan
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import Batch, all_roots, label_slots
from draftsmith.drafters.tree import Tree, chain
from draftsmith.recipes.schema import NgramConfig
from tests.coins import distance, law_of
from tests.tiny import tiny_target

WORDS = 12
BUSHY = Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


def texts(count=6, seed=0):
    """Random texts of which the last part is supervised."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(WORDS - 2, (15,), generator=draw).tolist()
        found.append((ids, [False] * 4 + [True] * 11))
    return found


def table(order=3, backoff=0.7, draft_tokens=3, counted=True):
    config = NgramConfig(kind="ngram", order=order, backoff=backoff, draft_tokens=draft_tokens)
    drafter = NgramTable(config, tiny_target(WORDS, hidden=16), None)
    if counted:
        drafter.count(texts())
    return drafter


def formula(context, token, backoff):
    """The docstring's recursion over plain counts; `context` with its first token first."""
    grams, contexts = Counter(), Counter()
    for ids, supervised in texts():
        for at, seen in enumerate(supervised):
            if seen and at >= len(context):
                grams[tuple(ids[at - len(context) : at + 1])] += 1
                contexts[tuple(ids[at - len(context) : at])] += 1
    shorter = 1 / WORDS
    if context:
        shorter = formula(context[1:], token, backoff)
        if not contexts[tuple(context)]:
            return shorter
    whole = contexts[tuple(context)] + backoff
    return (grams[(*context, token)] + backoff * shorter) / whole


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("backoff", [0.1, 2.0])
def test_the_law_is_the_formula_s(order, backoff):
    drafter = table(order, backoff)
    for text in ([3, 1, 2], texts()[0][0][:9], texts()[1][0], [11, 11, 11]):
        context = text[len(text) - order + 1 :]
        (law,) = drafter.laws(torch.tensor([text[-drafter.reach :]]))
        want = [formula(context, token, backoff) for token in range(WORDS)]
        torch.testing.assert_close(law, torch.tensor(want), rtol=1e-5, atol=1e-7)
        assert float(law.sum()) == pytest.approx(1.0)


def test_the_start_of_a_text_backs_off_to_what_there_is():
    drafter = table(3)
    (short,) = drafter.laws(torch.tensor([[-1, 5]]))
    want = [formula([5], token, 0.7) for token in range(WORDS)]
    torch.testing.assert_close(short, torch.tensor(want), rtol=1e-5, atol=1e-7)


def test_an_empty_table_is_uniform():
    law = table(counted=False).laws(torch.tensor([[1, 2]]))
    torch.testing.assert_close(law, torch.full((1, WORDS), 1 / WORDS))


@pytest.mark.parametrize("tree", [chain(1), chain(3), BUSHY], ids=["one", "chain", "bushy"])
def test_point_drafts_are_the_likeliest_after_their_own_path(tree):
    drafter, text = table(), texts()[2][0][:6]
    state = drafter.start(torch.tensor([text]), torch.tensor([len(text)]), None)
    proposal = drafter.propose(state, torch.tensor([4]), Plan(tree, Sampling(), None))
    assert proposal.draw == "point" and proposal.valid.all()
    assert torch.equal(proposal.parent[0], tree.parent)
    for node, path in enumerate(tree.paths):
        above = [int(proposal.tokens[0, n - 1]) for n in lines(tree)[node + 1][:-1]]
        (law,) = drafter.laws(torch.tensor([[*text, 4, *above][-2:]]))
        place = int((law > law[proposal.tokens[0, node]]).sum())
        assert place <= path[-1] < place + int((law == law[proposal.tokens[0, node]]).sum())


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.5, top_k=3)], ids=["1", "0.5"])
@pytest.mark.parametrize(
    ("tree", "draw"),
    [
        (chain(2), "chain"),
        (Tree(((0,), (1,), (0, 0))), "iid"),
        (Tree(((0,), (1,), (1, 0))), "without_replacement"),
    ],
    ids=["chain", "iid", "without_replacement"],
)
def test_q_is_the_law_that_drafts_are_drawn_from(tree, draw, sampling):
    """By enumeration: given the drafts before it, each token has the frequencies of its q."""
    drafter = table(2)
    state = drafter.start(torch.tensor([[1, 2]]), torch.tensor([2]), None)
    laws = {}

    def run(coins):
        proposal = drafter.propose(state, torch.tensor([3]), Plan(tree, sampling, coins, draw))
        assert proposal.draw == draw
        tokens = tuple(proposal.tokens[0].tolist())
        for node in range(len(tokens)):
            laws[tokens[:node]] = proposal.q[0, node]
        return tokens

    out = law_of(run)
    assert sum(out.values()) == pytest.approx(1.0)
    for before, q in laws.items():
        here = Counter()
        for tokens, share in out.items():
            if tokens[: len(before)] == before:
                here[tokens[len(before)]] += share
        whole = sum(here.values())
        want = {token: share for token, share in enumerate(q.tolist()) if share > 0}
        assert distance({t: s / whole for t, s in here.items()}, want) < 1e-5


def test_levels_name_every_node_once_below_its_parent():
    found = levels(BUSHY)
    assert [[f.parent for f in level] for level in found] == [[0], [1, 2], [3]]
    assert [[f.children for f in level] for level in found] == [[[1, 2]], [[3, 4], [5]], [[6]]]
    assert lines(BUSHY) == [[], [1], [2], [1, 3], [1, 4], [2, 5], [1, 3, 6]]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_guesses_are_what_would_be_drafted_after_the_true_text(order):
    drafter, ids = table(order), torch.tensor([texts()[3][0], texts()[4][0]])
    positions = torch.arange(15).expand(2, -1)
    batch = Batch(ids, positions, torch.zeros_like(ids), positions > 3)
    roots = all_roots(batch)
    found = drafter.guesses(batch, None, roots, slots=2, count=4, chunk=3)
    labels = label_slots(batch, roots, 2)
    for group, (row, at) in enumerate(zip(roots.row, roots.position, strict=True)):
        for slot in range(2):
            if labels.valid[group, slot]:
                text = [-1, -1, *ids[row, : at + slot + 1].tolist()]
                (law,) = drafter.laws(torch.tensor([text[-drafter.reach :]]))
                assert torch.equal(law[found[group, slot]], law.topk(4).values)


def test_what_is_loaded_is_what_was_counted():
    drafter, other = table(3), table(3, counted=False)
    other.load_native(drafter.native_tensors())
    context = torch.tensor([[1, 2], [5, 0]])
    assert torch.equal(other.laws(context), drafter.laws(context))


@pytest.mark.parametrize(
    "damage",
    [
        {"1.counts": torch.zeros(3, dtype=torch.int32)},
        {"2.keys": torch.zeros(2, dtype=torch.int64)},
        {"2.tokens": torch.full((1,), 99, dtype=torch.int32)},
        {"3.counts": torch.zeros(2, 2, dtype=torch.int32)},
        {"3.starts": torch.zeros(0, dtype=torch.int64)},
        {"4.keys": torch.zeros(1)},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_a_damaged_table_is_refused(damage):
    with pytest.raises(ValueError, match=r"holds|grams|counts"):
        table(3).load_native({**table(3).native_tensors(), **damage})
