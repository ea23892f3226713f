"""The reduced draft vocabulary: counted on what is learned, full, and repeatable."""

import pytest

from draftsmith.data.dataset import Document
from draftsmith.data.vocab import most_frequent
from draftsmith.recipes.errors import UserError


def document(ids, supervised=None):
    marks = (True,) * len(ids) if supervised is None else tuple(map(bool, supervised))
    return Document("k", "c", tuple(ids), marks, True, "stop")


DOCUMENTS = [document([5, 5, 5, 7, 7, 9]), document([3, 9])]


def test_the_most_frequent_are_taken_and_come_ascending():
    assert most_frequent(DOCUMENTS, 1, 12) == [5]
    assert most_frequent(DOCUMENTS, 3, 12) == [5, 7, 9]


def test_ties_go_to_the_lower_id_whatever_the_order_of_the_documents():
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        assert most_frequent(documents, 2, 12) == [5, 7]


def test_only_supervised_tokens_count():
    prompt_heavy = document([1, 1, 1, 1, 2], [0, 0, 0, 0, 1])
    assert most_frequent([prompt_heavy], 1, 12) == [2]


def test_the_end_of_an_answer_is_always_there():
    assert most_frequent(DOCUMENTS, 2, 12, always=[11, 11]) == [5, 11]
    assert most_frequent(DOCUMENTS, 1, 12, always=[0]) == [0]


def test_ids_that_never_occur_fill_it_up_in_order():
    assert most_frequent(DOCUMENTS, 7, 12) == [0, 1, 2, 3, 5, 7, 9]
    assert most_frequent(DOCUMENTS, 12, 12, always=[4]) == list(range(12))
    assert most_frequent([], 3, 12) == [0, 1, 2]


def test_an_end_token_beyond_the_head_is_left_out():
    assert most_frequent(DOCUMENTS, 1, 12, always=[12]) == [5]


@pytest.mark.parametrize(("size", "always"), [(13, []), (1, [0, 1])])
def test_a_size_that_cannot_be_is_refused(size, always):
    with pytest.raises(UserError, match=r"drafter\.draft_vocab: .* allowed are"):
        most_frequent(DOCUMENTS, size, 12, always=always)
