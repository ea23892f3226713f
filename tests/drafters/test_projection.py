"""From slot states to logits, tokens and hits, against brute force."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from draftsmith.drafters.projection import draft_index, hits, slot_logits, top_tokens
from draftsmith.drafters.slots import Head

V, D, R, N, K = 23, 6, 2, 7, 3
IDS = torch.tensor([1, 4, 5, 9, 16, 20, 22])
KINDS = ["shared", "own", "low_rank"]


def make(kind: str) -> tuple[Tensor, Head]:
    """Random states and a head over a reduced vocabulary."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(len(IDS), D, generator=generator)
    own = torch.randn(K, len(IDS), D if kind == "own" else R, generator=generator)
    hidden = torch.randn(N, K, D + (R if kind == "low_rank" else 0), generator=generator)
    head = Head(None if kind == "own" else shared, None if kind == "shared" else own, IDS)
    return hidden, head


def test_draft_index_maps_and_marks() -> None:
    index, inside = draft_index(torch.tensor([[1, 2], [22, 0]]), IDS)
    assert index.tolist() == [[0, 0], [6, 0]]
    assert inside.tolist() == [[True, False], [True, False]]
    label = torch.tensor([3, 0])
    assert draft_index(label, None)[0] is label and draft_index(label, None)[1].all()


@pytest.mark.parametrize("kind", KINDS)
def test_slot_logits_by_hand(kind: str) -> None:
    hidden, head = make(kind)
    logits = slot_logits(hidden, head)
    for slot in range(K):
        state, want = hidden[0, slot], torch.zeros(len(IDS))
        if head.shared is not None:
            want = want + head.shared @ state[:D]
        if head.own is not None:
            want = want + head.own[slot] @ state[-head.own.shape[-1] :]
        assert_close(logits[0, slot], want)


@pytest.mark.parametrize("kind", KINDS)
def test_top_tokens_are_target_ids_and_chunks_do_not_matter(kind: str) -> None:
    hidden, head = make(kind)
    logits = slot_logits(hidden, head)
    want = IDS[logits.sort(dim=-1, descending=True, stable=True).indices[..., :4]]
    for chunk in (1, 3, 100):
        assert torch.equal(top_tokens(hidden, head, 4, chunk=chunk), want)
        assert torch.equal(top_tokens(hidden, head, 1, chunk=chunk), want[..., :1])
    assert top_tokens(hidden[:0], head, 2).shape == (0, K, 2)


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, 2.0, 2.0], [3.0, 2.0, 2.0], [3.0, 0.0, 0.0]])
    label, inside = torch.tensor([1, 2, 2, 0]), torch.tensor([True, True, True, False])
    assert hits(logits, label, inside).tolist() == [True, False, False, False]
