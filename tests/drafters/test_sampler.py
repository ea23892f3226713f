import pytest
import torch

from draftsmith.drafters.sampler import Sampling, standardise

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0], dtype=torch.float64)


def test_greedy_takes_the_lowest_id_of_a_tie():
    p = standardise(torch.tensor([0.0, 3.0, 3.0]), Sampling())
    assert p.tolist() == [0.0, 1.0, 0.0]


def test_temperature_alone_is_a_softmax():
    p = standardise(LOGITS, Sampling(temperature=0.7))
    torch.testing.assert_close(p, (LOGITS / 0.7).softmax(-1))


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 9])
def test_top_k_keeps_k_tokens_even_among_ties(k):
    p = standardise(LOGITS, Sampling(temperature=1.0, top_k=k))
    assert int((p > 0).sum()) == min(k, 5)
    assert p[0] == p.max()
    torch.testing.assert_close(p.sum(), torch.tensor(1.0, dtype=torch.float64))


def test_top_k_never_drops_a_likelier_token_for_a_tied_one():
    p = standardise(torch.tensor([1.0, 1.0, 1.0, 5.0]), Sampling(temperature=1.0, top_k=2))
    assert p[3] > 0.9


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.6, 0.9, 0.999])
def test_nucleus_is_the_smallest_prefix_that_reaches_its_mass(top_p):
    p = LOGITS.softmax(-1)
    kept = standardise(LOGITS, Sampling(temperature=1.0, top_p=top_p)) > 0
    mass = p[kept].sum()
    assert kept.any() and mass >= top_p
    assert mass - p[kept].min() < top_p or int(kept.sum()) == 1


def test_top_p_counts_mass_after_top_k():
    both = standardise(LOGITS, Sampling(temperature=1.0, top_k=2, top_p=0.7))
    assert int((both > 0).sum()) == 1  # e/(1+e) = 0.73 of the two that top-k kept


def test_a_flat_law_needs_more_than_the_first_tokens():
    p = standardise(torch.zeros(1, 5000), Sampling(temperature=1.0, top_p=0.9))
    assert int((p > 0).sum()) == 4500
