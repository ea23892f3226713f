"""Boost-tuning: what the first model guesses is no label of the next one."""

from dataclasses import replace

import torch

from draftsmith.data.dataset import Document, PackedRows, fingerprint
from draftsmith.drafters.draft_model import ready_writer
from draftsmith.drafters.slots import all_roots, label_slots
from draftsmith.train.boost import mark_known
from tests.tiny import tiny_target


def documents():
    draw = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate((9, 5, 12)):
        ids = tuple(torch.randint(40, (length,), generator=draw).tolist())
        supervised = (False,) * 2 + (True,) * (length - 2)
        found.append(Document(str(number), "c", ids, supervised, True, "stop"))
    return found


def test_known_tokens_are_the_model_s_likeliest_after_the_text_before_them():
    first = tiny_target(40, layers=1, seed=3)
    for document in documents():
        (marked,) = mark_known([document], ready_writer(first, 40), 32, 2, 5)
        logits = first.model(torch.tensor([document.ids])).logits[0]
        want = [False, *(logits[:-1].argmax(-1) == torch.tensor(document.ids[1:])).tolist()]
        assert list(marked.known) == want


def test_packing_changes_nothing():
    first = ready_writer(tiny_target(40, layers=1, seed=3), 40)
    together = mark_known(documents(), first, 16, 2, 5)
    apart = [mark_known([document], first, 16, 1, 5)[0] for document in documents()]
    assert together == apart


def test_known_tokens_are_context_and_roots_but_no_labels():
    (document,) = documents()[:1]
    known = tuple(index in (4, 6) for index in range(len(document.ids)))
    plain, marked = (
        PackedRows([one], 16).batch([0]) for one in (document, replace(document, known=known))
    )
    roots = all_roots(plain)
    assert torch.equal(roots.position, all_roots(marked).position)
    before, after = (label_slots(batch, roots, 1).valid[:, 0] for batch in (plain, marked))
    labels = roots.position + 1
    assert torch.equal(after, before & (labels != 4) & (labels != 6))
    assert fingerprint([document]) != fingerprint([replace(document, known=known)])
