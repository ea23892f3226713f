from dataclasses import replace

import torch

from draftsmith.drafters.slots import (
    Batch,
    Head,
    all_roots,
    before_output,
    before_roots,
    label_slots,
    sampled_roots,
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


def long_row(*sizes, seeds):
    """Rows of one pack of documents of these sizes; the first two tokens of each are the prompt."""
    positions = torch.cat([torch.arange(size) for size in sizes])
    documents = torch.cat([torch.full((size,), i) for i, size in enumerate(sizes)])
    stack = [one.repeat(len(seeds), 1) for one in (positions, documents)]
    return Batch(torch.zeros_like(stack[0]), stack[0], stack[1], stack[0] > 1, seeds=seeds)


def test_sampled_roots_are_a_documents_share_and_have_a_first_slot():
    batch = long_row(103, 33, 3, 63, seeds=tuple(range(200)))  # 100, 30, 0 and 60 may be drawn
    roots = sampled_roots(batch, 19)
    assert roots.row.bincount().tolist() == [19] * 200
    assert label_slots(batch, roots, 1).valid.all()
    assert len(set(zip(roots.row.tolist(), roots.position.tolist(), strict=True))) == 19 * 200
    number = batch.documents[roots.row, roots.position]
    counts = [number[roots.row == row].bincount(minlength=4).tolist() for row in range(200)]
    assert {tuple(one) for one in counts} == {(10, 3, 0, 6)}
    drawn = roots.position[number == 1].bincount(minlength=136)[105:135]
    assert drawn.sum() == 600 and drawn.min() > 5 and drawn.max() < 40  # 20 each, on average


def test_uneven_shares_are_rounded_by_chance():
    batch = long_row(13, 23, seeds=tuple(range(400)))  # 10 and 20 for 4: 4/3 and 8/3
    roots = sampled_roots(batch, 4)
    first = (batch.documents[roots.row, roots.position] == 0).sum() / 400
    assert abs(first - 4 / 3) < 0.1


def test_sampled_roots_depend_on_the_rows_seed_alone():
    batch = long_row(40, 30, seeds=(5, 9))
    both, alone = sampled_roots(batch, 8), sampled_roots(long_row(40, 30, seeds=(9,)), 8)
    assert torch.equal(both.position[both.row == 1], alone.position)
    again = sampled_roots(long_row(40, 30, seeds=(9, 5)), 8)
    assert torch.equal(again.position[again.row == 0], alone.position)
    padded = long_row(40, 30, 20, seeds=(9,))
    supervised = padded.supervised & (padded.documents < 2)
    assert torch.equal(
        sampled_roots(replace(padded, supervised=supervised), 8).position, alone.position
    )


def test_few_or_unseeded_roots_are_all_taken():
    batch = long_row(8, 5, seeds=(0,))
    assert sampled_roots(batch, 50).position.tolist() == [2, 3, 4, 5, 6, 10, 11]
    assert sampled_roots(replace(batch, seeds=None), 1).position.tolist() == [2, 3, 4, 5, 6, 10, 11]
