import torch

from draftsmith.drafters.slots import (
    Batch,
    Head,
    all_roots,
    before_output,
    before_roots,
    label_slots,
)


def one_row(ids, supervised, documents=None):
    ids = torch.tensor([ids])
    documents = torch.tensor([documents]) if documents else torch.zeros_like(ids)
    return Batch(
        ids, torch.arange(ids.shape[1])[None], documents, torch.tensor([supervised]).bool()
    )


def test_counting_sequence_gives_ten_nine_and_eight_pairs():
    batch = one_row(list(range(12)), [1] * 12)
    labels = label_slots(batch, all_roots(batch), 3)
    assert labels.valid.sum(0).tolist() == [10, 9, 8]
    roots = all_roots(batch)
    expected = roots.position[:, None] + torch.arange(1, 4)
    assert torch.equal(labels.label[labels.valid], expected[labels.valid])


def test_state_before_the_root_and_teacher_before_the_label():
    batch = one_row(list(range(8)), [0, 0, 0, 1, 1, 1, 1, 1])
    roots = all_roots(batch)
    assert roots.position.tolist() == [3, 4, 5, 6, 7]  # the first root reads the last prompt state
    states = torch.arange(8.0)[None, :, None]
    assert before_roots(states, roots)[:, 0].tolist() == [2, 3, 4, 5, 6]
    labels = label_slots(batch, roots, 2)
    assert torch.equal(labels.teacher_position[labels.valid] + 1, labels.label[labels.valid])


def test_nothing_crosses_a_document_or_an_unsupervised_token():
    documents = [0, 0, 0, 0, 1, 1, 1, -1]
    batch = one_row(list(range(8)), [0, 1, 1, 1, 1, 0, 1, 0], documents)
    roots = all_roots(batch)
    assert roots.position.tolist() == [1, 2, 3, 6]  # 4 opens its document: no state before it
    labels = label_slots(batch, roots, 2)
    assert labels.valid.tolist() == [[True, True], [True, False], [False, False], [False, False]]


def test_slots_deeper_than_the_row_are_invalid_not_errors():
    batch = one_row([5, 6], [0, 1])
    labels = label_slots(batch, all_roots(batch), 5)
    assert labels.valid.shape == (1, 5) and not labels.valid.any()


def test_a_row_without_supervision_has_no_groups():
    batch = one_row([5, 6, 7], [0, 0, 0])
    labels = label_slots(batch, all_roots(batch), 2)
    assert labels.label.shape == (0, 2)


def test_the_states_before_an_output_end_before_its_last_token():
    states = torch.arange(24).view(2, 6, 2)
    assert before_output(states, 1, prompt=2, output=3)[:, 0].tolist() == [14, 16, 18]


def test_a_head_counts_the_tokens_that_drafts_may_use():
    shared, own = torch.zeros(7, 4), torch.zeros(3, 7, 2)
    for head in (Head(shared), Head(None, own), Head(shared, own)):
        assert head.rows == 7
