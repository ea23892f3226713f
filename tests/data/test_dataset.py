import random
from collections import Counter
from typing import Any, Literal

import pytest
import torch

from draftsmith.data.dataset import (
    Document,
    PackedRows,
    documents_from_rows,
    pack,
    split_held_out,
)
from draftsmith.drafters.slots import Batch, all_roots, label_slots
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig
from tests.tiny import EOS, tiny_target


def row(
    prompt: int, answer: int, finish: Literal["stop", "length"] = "stop", **more: Any
) -> dict[str, Any]:
    ids = list(range(100, 100 + prompt + answer))
    base = {"key": "k", "category": "c", "finish_reason": finish, "temperature": 0.0}
    return base | {"prompt_ids": ids[:prompt], "response_ids": ids[prompt:]} | more


def document(length: int, key: str = "k", *, prompt: int = 1) -> Document:
    supervised = (False,) * min(prompt, length) + (True,) * max(0, length - prompt)
    return Document(key, "c", tuple(range(5, 5 + length)), supervised, True, "stop")


def documents(seed: int, count: int, longest: int) -> list[Document]:
    numbers = random.Random(seed)
    return [document(numbers.randint(1, longest), str(i)) for i in range(count)]


def test_ids_are_kept_as_generated_and_the_answer_is_supervised() -> None:
    (found,), dropped = documents_from_rows([row(3, 2, temperature=0.7)], DataConfig())
    assert found.ids == (100, 101, 102, 103, 104) and not dropped
    assert found.supervised == (False, False, False, True, True)
    assert not found.greedy and found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("rule", "supervised"),
    [("keep", (False, True, True)), ("mask_last", (False, True, False)), ("drop", None)],
)
def test_cut_answers_follow_the_recipe(rule: Any, supervised: tuple[bool, ...] | None) -> None:
    config = DataConfig(cut_answers=rule)
    found, dropped = documents_from_rows([row(1, 2, "length"), row(1, 2)], config)
    assert [d.supervised for d in found][-1] == (False, True, True)  # a whole answer stays whole
    if supervised is None:
        assert len(found) == 1 and dropped == {"answer cut by max_new_tokens": 1}
    else:
        assert found[0].supervised == supervised and found[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [4, 5, 9])
def test_a_prompt_that_fills_the_row_is_dropped_and_counted(prompt: int) -> None:
    found, dropped = documents_from_rows([row(prompt, 3)], DataConfig(max_length=4))
    assert not found and dropped == {"answer truncated away": 1}


def test_a_partial_answer_stays_supervised() -> None:
    (found,), dropped = documents_from_rows([row(2, 9)], DataConfig(max_length=5))
    assert found.ids == (100, 101, 102, 103, 104) and not dropped
    assert found.supervised == (False, False, True, True, True)
    assert found.finish_reason == "length"


def test_too_little_to_learn_from_is_dropped_and_counted() -> None:
    rows = [row(2, 0), row(2, 2), row(2, 3), row(2, 3, "length")]
    config = DataConfig(min_supervised_tokens=3, cut_answers="mask_last")
    found, dropped = documents_from_rows(rows, config)
    assert len(found) == 1
    assert dropped == Counter({"fewer than 3 supervised tokens": 2, "no assistant turn": 1})


def test_held_out_documents_do_not_depend_on_order_or_number() -> None:
    all_of_them = documents(0, 60, 9)
    train, held = split_held_out(all_of_them, 10, seed=3)
    assert len(held) == 10 and len(train) == 50
    assert {d.key for d in train}.isdisjoint(d.key for d in held)
    assert [d.key for d in train] == sorted((d.key for d in train), key=int)  # order is kept
    shuffled = all_of_them.copy()
    random.Random(1).shuffle(shuffled)
    assert {d.key for d in split_held_out(shuffled, 10, seed=3)[1]} == {d.key for d in held}
    fewer = [d for d in all_of_them if d.key != train[0].key]
    assert {d.key for d in split_held_out(fewer, 10, seed=3)[1]} == {d.key for d in held}
    assert {d.key for d in split_held_out(all_of_them, 10, seed=4)[1]} != {d.key for d in held}


def test_answers_to_one_prompt_are_held_out_together() -> None:
    endings = ["", " (answer 2)", " (answer 13)"]
    several = [document(4, f"{i}{ending}") for i in range(20) for ending in endings]
    train, held = split_held_out(several, 10, seed=3)
    assert len(held) == 12  # the tenth document's prompt has two more answers
    first = [{d.key.split()[0] for d in part} for part in (train, held)]
    assert len(first[1]) == 4 and first[0].isdisjoint(first[1])


def test_holding_everything_out_is_an_error() -> None:
    endings = ["", " (answer 2)", " (answer 13)"]
    with pytest.raises(UserError, match=r"data.held_out: 3 documents .* only 3"):
        split_held_out(documents(0, 3, 4), 3, seed=0)
    with pytest.raises(UserError, match=r"data.held_out: 2 documents .* other answers"):
        split_held_out([document(4, f"a{ending}") for ending in endings], 2, seed=0)


@pytest.mark.parametrize("seed", range(5))
def test_packing_holds_every_document_once_and_wastes_little(seed: int) -> None:
    some = documents(seed, 300, 64)
    rows = pack(some, 128)
    assert sorted(i for one in rows for i in one) == list(range(300))
    filled = [sum(len(some[i].ids) for i in one) for one in rows]
    assert max(filled) <= 128
    assert sum(filled) / (128 * len(rows)) > 0.95
    assert rows == pack(some, 128)


def test_packing_is_no_worse_than_first_fit() -> None:
    """The readable rule beside the fast one: first fit, longest first."""
    for seed in range(20):
        some = documents(seed, 40, 100)
        free: list[int] = []
        for length in sorted((len(d.ids) for d in some), reverse=True):
            at = next((i for i, room in enumerate(free) if room >= length), None)
            if at is None:
                free.append(100 - length)
            else:
                free[at] -= length
        assert len(pack(some, 100)) <= len(free) + 1


def test_a_document_longer_than_a_row_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="a document of 9 tokens"):
        pack([document(9)], 8)


@pytest.mark.parametrize("per_step", [1, 3, 8, 500])
def test_an_epoch_sees_every_row_once_in_a_seeded_order(per_step: int) -> None:
    rows = PackedRows(documents(0, 100, 30), 64)
    steps = rows.steps(0, per_step, seed=1)
    assert sorted(i for step in steps for i in step) == list(range(len(rows)))
    assert len(steps) == -(-len(rows) // per_step)
    sizes = {len(step) for step in steps}
    assert max(sizes) <= per_step and max(sizes) - min(sizes) <= 1
    assert steps == rows.steps(0, per_step, seed=1)
    assert steps != rows.steps(1, per_step, seed=1) and steps != rows.steps(0, per_step, seed=2)


def test_no_rows_no_steps() -> None:
    assert PackedRows([], 8).steps(0, 4, seed=0) == []


def packed(*lengths: int, width: int = 16) -> tuple[PackedRows, Batch]:
    rows = PackedRows([document(n, str(n), prompt=2) for n in lengths], width)
    return rows, rows.batch(range(len(rows)))


def test_a_batch_is_as_wide_as_its_longest_row_and_masks_come_from_lengths() -> None:
    rows, batch = packed(9, 5, 4)
    assert batch.ids.shape == (2, 14)  # 9 + 5, and 4
    second = rows.batch([1])
    assert second.ids.shape == (1, 4) and rows.tokens == 18 and rows.supervised == 12
    assert batch.documents[0].tolist() == [0] * 9 + [1] * 5
    assert batch.documents[1].tolist() == [0] * 4 + [-1] * 10
    assert batch.positions[0].tolist() == [*range(9), *range(5)]
    assert batch.positions[1].tolist() == [*range(4), *range(10)]
    assert not batch.supervised[batch.documents < 0].any()


def test_end_tokens_stay_supervised_whatever_is_used_as_padding() -> None:
    """Padding may share its id with real tokens: nothing is told apart by value."""
    for token in (EOS, 0):
        docs = [Document("a", "c", (9, token, token), (False, True, True), True, "stop")]
        docs.append(Document("b", "c", (9,) * 6, (False,) + (True,) * 5, True, "stop"))
        batch = PackedRows(docs, 6).batch([0, 1])
        assert batch.supervised.sum() == 7
        assert batch.supervised[batch.documents >= 0].sum() == 7


def test_documents_of_a_row_do_not_see_one_another() -> None:
    """Change document 0: states of document 1, and of other rows, stay; padding changes nothing."""
    target = tiny_target()
    rows, batch = packed(9, 5, 4)
    states = target.states(batch).final
    for number in (0, 1):
        changed = torch.where((batch.documents == number), batch.ids + 7, batch.ids)
        changed[1] = batch.ids[1]
        other = Batch(changed, batch.positions, batch.documents, batch.supervised)
        same = batch.documents[0] != number
        have = target.states(other).final
        torch.testing.assert_close(have[0, same], states[0, same])
        assert not torch.allclose(have[0, ~same], states[0, ~same])
    alone = target.states(rows.batch([1])).final
    torch.testing.assert_close(states[1, :4], alone[0])


def test_a_packed_document_has_the_states_it_has_alone() -> None:
    target = tiny_target()
    rows, batch = packed(7, 6, 3, 2)
    states = target.states(batch).final
    for b, members in enumerate(rows.rows):
        for number, i in enumerate(members):
            alone = PackedRows([rows.documents[i]], 16).batch([0])
            there = states[b, batch.documents[b] == number]
            torch.testing.assert_close(there, target.states(alone).final[0])


def test_no_label_crosses_a_border() -> None:
    _, batch = packed(6, 5, 4)
    roots = all_roots(batch)
    labels = label_slots(batch, roots, 4)
    at = roots.position[:, None] + torch.arange(1, 5)
    row_of = roots.row[:, None].expand_as(at)[labels.valid]
    home = batch.documents[roots.row, roots.position][:, None].expand_as(at)[labels.valid]
    assert torch.equal(batch.documents[row_of, at[labels.valid]], home)
    # Documents of 6, 5 and 4 tokens with a prompt of 2 have 4, 3 and 2 roots.
    assert len(roots.row) == 9
    assert labels.valid.sum() == (3 + 2 + 1) + (2 + 1) + 1
