"""The walk against real decoding: the same rounds, in fp32, exactly."""

import pytest
import torch

from draftsmith.data.dataset import Document
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.decode import decode
from draftsmith.eval.summary import Trial, acceptance
from draftsmith.eval.walk import matched, rank_table, walk, walk_one
from tests.drafters.test_mtp import mtp
from tests.eval.test_decode import noisy_drafter
from tests.tiny import tiny_target


def answers(target, count=6, length=24):
    documents = []
    for i in range(count):
        prompt = [11 + i, 12, 13 + 2 * i]
        out = decode(target, None, prompt, sampling=Sampling(), max_new_tokens=length - 2 * i)
        ids = (*prompt, *out.tokens)
        supervised = (False,) * 3 + (True,) * len(out.tokens)
        documents.append(Document(f"k{i}", "ab"[i % 2], ids, supervised, True, out.finish))
    return documents


@pytest.mark.parametrize(
    "tree",
    [chain(3), chain(1), Tree(((0,), (1,), (0, 0), (1, 2), (0, 0, 1)))],
    ids=["chain", "one", "tree"],
)
@pytest.mark.parametrize("kind", ["heads", "heads that read the root", "mtp"])
def test_walked_tau_is_decoded_tau(tree, kind):
    target = tiny_target(40, seed=1, spread=0.15, eos=(7,))
    if kind == "mtp":
        drafter = mtp(target, seed=1, noise=0.02)
    else:
        drafter = noisy_drafter(target, seed=1, reads_root=kind != "heads")
    documents = answers(target)
    result = walk(rank_table(target, drafter, documents, rows=2, chunk=128, max_length=40), tree)
    rounds = emitted = 0
    taus, trials = [], []
    for document in documents:
        prompt, answer = list(document.ids[:3]), list(document.ids[3:])
        out = decode(
            target, drafter, prompt, sampling=Sampling(), max_new_tokens=len(answer), tree=tree
        )
        assert out.tokens == answer
        trials.append(Trial(0, document.category, out))
        rounds += len(out.rounds)
        emitted += sum(r.emitted for r in out.rounds)
        if out.rounds:
            taus.append(sum(r.emitted for r in out.rounds) / len(out.rounds))
    assert (result.total.rounds, result.total.emitted) == (rounds, emitted)
    assert emitted > rounds  # something was accepted
    depth = int(tree.depth.max())
    walked, decoded = result.total.acceptance(), acceptance(trials, depth)
    assert walked.reached == decoded.reached + [0] * (3 - depth)
    assert walked.conditional == decoded.conditional + [None] * (3 - depth)
    assert walked.joint == decoded.joint + [None] * (3 - depth)
    assert result.total.taus == taus
    by_category = result.by_category.values()
    assert sum(c.rounds for c in by_category) == rounds


def test_a_perfect_drafter_accepts_everything():
    counts = walk_one([[0, 0]] * 7, set(chain(2).paths), 2)
    assert (counts.rounds, counts.emitted) == (2, 6)
    assert counts.acceptance().conditional == counts.acceptance().joint == [1.0, 1.0]


def test_the_last_round_counts_only_tokens_that_are_there():
    counts = walk_one([[0, 0], [0, -2], [-2, -2]], set(chain(2).paths), 2)
    assert (counts.rounds, counts.emitted, counts.tau_micro) == (1, 2, 2.0)


def test_an_answer_of_one_token_has_no_round():
    counts = walk_one([[-2, -2]], set(chain(2).paths), 2)
    assert counts.rounds == 0 and counts.tau_macro == 0.0


def test_a_prefix_counts_not_a_later_match():
    assert matched([0, -1, 0, 0], set(chain(4).paths)) == 1
    assert matched([1, 0], {(0,), (1,), (1, 0)}) == 2
    assert matched([2, 0], {(0,), (1,), (1, 0)}) == 0


def test_rank_accuracy_counts_valid_slots_only():
    target = tiny_target(40, seed=1, spread=0.15, eos=(7,))
    documents = answers(target, count=3)
    table = rank_table(
        target, noisy_drafter(target, seed=1), documents, rows=4, chunk=7, max_length=64
    )
    accuracy = table.accuracy()
    assert len(accuracy) == 3
    ranks = torch.cat(table.ranks)
    for slot in range(3):
        valid = ranks[:, slot] > -2
        assert sum(accuracy[slot]) <= 1.0 + 1e-6
        assert accuracy[slot][0] == pytest.approx(float((ranks[valid, slot] == 0).float().mean()))


def test_slots_past_the_end_of_the_text_are_not_failures():
    counts = walk_one([[0, -1, 0], [0, 0, -2], [0, -2, -2], [-2, -2, -2]], set(chain(3).paths), 3)
    assert counts.reached == [2, 1, 0]  # rounds at 0 (one accepted) and at 2
    assert counts.acceptance().conditional == counts.acceptance().joint == [1.0, 0.0, None]
