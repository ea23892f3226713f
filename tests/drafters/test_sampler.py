import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.drafters.sampler import Sampling, standardise
from tests.tiny import tiny_model

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


PROCESSORS = {
    "temperature": Sampling(0.7),
    "top_k": Sampling(1.0, top_k=5),
    "top_p": Sampling(1.0, top_p=0.8),
    "min_p": Sampling(1.0, min_p=0.2),
    "penalty": Sampling(1.0, repetition_penalty=1.7),
    "reward": Sampling(1.0, repetition_penalty=0.6),
    "bias": Sampling(1.0, logit_bias=((3, 2.5), (11, -1.0), (0, -2.0))),
    "all": Sampling(0.8, 12, 0.9, 0.05, 1.3, ((3, 2.5), (11, -1.0))),
    "greedy": Sampling(0.0, repetition_penalty=1.3, logit_bias=((3, 0.5),)),
}


def theirs(logits, sampling, before):
    """What transformers' own processors make of it, in the order of its `generate`."""
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(
            SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias])
        )
    processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if not sampling.greedy:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(before, logits)


@pytest.mark.parametrize("sampling", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_law_is_that_of_transformers_processors(sampling, dtype):
    noise = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 40, generator=noise).to(dtype)
    before = torch.randint(40, (200, 25), generator=noise)
    seen = torch.zeros(200, 40, dtype=torch.bool).scatter_(1, before, True)
    want, law = theirs(logits, sampling, before), standardise(logits, sampling, seen)
    if sampling.greedy:
        assert torch.equal(law.argmax(-1), want.argmax(-1)) and law.max(-1).values.eq(1).all()
    else:
        torch.testing.assert_close(law, want.softmax(-1))
        assert torch.equal(law > 0, want > float("-inf"))


def test_the_order_is_transformers_generates_own():
    """Its list of processors, for a model's generation config with everything on."""
    config = GenerationConfig(
        do_sample=True,
        **dict(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
        sequence_bias=[[[3], 1.0]],
    )
    found = tiny_model()._get_logits_processor(config, input_ids_seq_length=4)
    names = [type(processor).__name__ for processor in found]
    assert names == [
        "SequenceBiasLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


def test_a_penalty_without_the_tokens_before_is_refused():
    with pytest.raises(AssertionError, match="tokens before"):
        standardise(LOGITS, Sampling(1.0, repetition_penalty=1.2))
    drafts = Sampling(0.7, 5, repetition_penalty=1.2, logit_bias=((1, 1.0),)).for_drafts()
    assert drafts == Sampling(0.7, 5) and not drafts.adjusted


def test_a_banned_token_has_probability_zero():
    p = standardise(LOGITS, Sampling(1.0, logit_bias=((0, float("-inf")),)))
    assert p[0] == 0 and p.sum() == pytest.approx(1.0)
