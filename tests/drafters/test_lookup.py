"""Prompt lookup: what transformers finds, for every row by itself."""

import random

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from draftsmith.drafters.coins import SeededCoins
from draftsmith.drafters.lookup import PromptLookup, continuation
from draftsmith.drafters.proposal import Plan, Verdict
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import NO_GUESS, Batch, Roots
from draftsmith.drafters.tree import chain
from draftsmith.recipes.schema import PromptLookupConfig
from tests.tiny import tiny_target


def lookup(**knobs):
    config = PromptLookupConfig(kind="prompt_lookup", **knobs)
    return PromptLookup(config, tiny_target(40), None)


def begin(drafter, ids):
    ids = torch.tensor(ids, dtype=torch.int64)
    return drafter.start(ids, torch.full((len(ids),), ids.shape[1]), None)


def drafts(drafter, state, root, count):
    plan = Plan(chain(count), Sampling(), SeededCoins([0] * len(root)))
    found = drafter.propose(state, torch.tensor(root), plan)
    assert found.draw == "point" and found.q is None
    return [row[valid].tolist() for row, valid in zip(found.tokens, found.valid, strict=True)]


def theirs(text, count, longest):
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=count, max_matching_ngram_size=longest, max_length=10**6
    )
    return generator.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
@pytest.mark.parametrize("words", [2, 3, 6, 30])
def test_drafts_are_those_of_transformers(longest, words):
    draw, drafter, some = random.Random(f"{longest} {words}"), lookup(max_ngram=longest), 0
    for _ in range(60):
        text = [draw.randrange(words) for _ in range(draw.randrange(2, 40))]
        count = draw.randrange(1, 12)
        state = begin(drafter, [text[:-1]])
        (mine,) = drafts(drafter, state, text[-1:], count)
        assert mine == theirs(text, count, longest)
        some += bool(mine)
    assert some > 10


def test_a_text_without_a_match_has_no_drafts():
    drafter = lookup()
    assert drafts(drafter, begin(drafter, [[1, 2, 3]]), [4], 5) == [[]]
    assert drafts(drafter, begin(drafter, [[]]), [4], 5) == [[]]


def test_short_suffixes_are_left_alone():
    text = torch.tensor([5, 6, 7, 1, 9, 7])
    assert continuation(text, longest=3, shortest=1).tolist() == [1, 9, 7]
    assert continuation(text, longest=3, shortest=2).tolist() == []


def test_rows_are_looked_up_by_themselves_and_grow_by_what_is_committed():
    drafter = lookup()
    state = begin(drafter, [[1, 2, 3, 4], [8, 9, 8, 7]])
    assert drafts(drafter, state, [1, 8], 3) == [[2, 3, 4], [9, 8, 7]]
    plan = Plan(chain(3), Sampling(), SeededCoins([0, 0]))
    proposal = drafter.propose(state, torch.tensor([1, 8]), plan)
    verdict = Verdict(
        torch.tensor([[1, 2], [0, 0]]), torch.tensor([2, 0]), next=torch.tensor([9, 9])
    )
    state = drafter.commit(state, proposal, verdict, None)
    assert [row.tolist() for row in state.rows] == [[1, 2, 3, 4, 1, 2, 3], [8, 9, 8, 7, 8]]
    assert drafts(drafter, state, [4, 9], 4) == [[1, 2, 3, 4], [8, 7, 8, 9]]


def test_guesses_are_the_drafts_at_every_root_of_its_own_document():
    drafter, ids = lookup(), [3, 4, 3, 4, 5, 3, 4, 3, 7]
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    batch = Batch(torch.tensor([ids]), positions, documents, documents >= 0)
    roots = Roots(torch.tensor([0, 0, 0, 0]), torch.tensor([2, 3, 4, 7]))
    found = drafter.guesses(batch, None, roots, slots=2, count=1, chunk=1)[..., 0]
    none = [NO_GUESS, NO_GUESS]
    assert found.tolist() == [[4, 3], [3, 4], none, [4, 3]]
