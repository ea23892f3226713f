"""Blocks attend as one dense softmax over everything with a mask would: values and gradients."""

import pytest
import torch

from draftsmith.drafters import dflash_attention
from draftsmith.drafters.dflash_attention import over_all, over_runs, runs_of
from draftsmith.drafters.slots import Batch, Roots, all_roots

BLOCK, HEADS, KV, WIDTH = 3, 4, 2, 8
ASKING = pytest.mark.parametrize("asking", [BLOCK, BLOCK - 1])  # queries of a block


def rows():
    """Two rows: documents of 5 and 7 tokens, and one of 9; the rest is padding."""
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3])
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    ids = torch.zeros_like(documents)
    return Batch(ids, positions, documents, (documents >= 0) & (positions > 1))


def operands(batch, roots, device="cpu", asking=BLOCK):
    generator = torch.Generator().manual_seed(0)
    count = len(roots.row)
    shapes = [(count, asking, HEADS), (count, BLOCK, KV), (count, BLOCK, KV)]
    shapes += [(*batch.ids.shape, KV)] * 2
    made = [torch.randn(*shape, WIDTH, generator=generator) for shape in shapes]
    return [one.to(device).requires_grad_() for one in made]


def dense(batch, roots, q, k, v, keys, values):
    """One softmax per block over its document before the anchor, and the block."""
    out = []
    for group, (row, at) in enumerate(
        zip(roots.row.tolist(), roots.position.tolist(), strict=True)
    ):
        seen = (batch.documents[row] == batch.documents[row, at]).nonzero()[:, 0]
        seen = seen[seen < at]
        k_all = torch.cat([keys[row, seen], k[group]]).repeat_interleave(HEADS // KV, dim=1)
        v_all = torch.cat([values[row, seen], v[group]]).repeat_interleave(HEADS // KV, dim=1)
        scores = torch.einsum("bhd,shd->hbs", q[group], k_all) / WIDTH**0.5
        out.append(torch.einsum("hbs,shd->bhd", scores.softmax(-1), v_all))
    return torch.stack(out)


def some_roots(batch):
    """Not all, in no order."""
    every = all_roots(batch)
    index = torch.tensor([3, 0, 1, 9, 8, 7, 2, 12])
    return Roots(every.row[index], every.position[index])


@ASKING
@pytest.mark.parametrize("scores", [1, 40, 10000])  # blocks alone, some, all together
@pytest.mark.parametrize("choose", [all_roots, some_roots])
def test_runs_are_one_softmax_in_values_and_gradients(monkeypatch, scores, choose, asking):
    monkeypatch.setattr(dflash_attention, "SCORES", scores)
    batch = rows()
    roots = choose(batch)
    inputs = operands(batch, roots, asking=asking)
    weights = torch.randn(len(roots.row), asking, HEADS, WIDTH)
    want = dense(batch, roots, *inputs)
    wanted = torch.autograd.grad((want * weights).sum(), inputs)
    have = over_runs(runs_of(batch, roots, BLOCK))(*inputs)
    torch.testing.assert_close(have, want)
    for mine, theirs in zip(
        torch.autograd.grad((have * weights).sum(), inputs), wanted, strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # compiled where it counts
@ASKING
def test_flex_attention_is_the_same(asking):
    batch = rows()
    roots = some_roots(batch)
    given = operands(batch, roots, asking=asking)
    inputs = [one.detach() for one in given]  # it has no gradient on CPUs
    have = over_all(batch, roots, BLOCK)(*inputs)
    torch.testing.assert_close(have, dense(batch, roots, *inputs))


@pytest.mark.gpu
@ASKING
def test_flex_attention_has_the_same_gradients(asking):
    batch = rows().to("cuda")
    roots = some_roots(batch)
    inputs = operands(batch, roots, "cuda", asking)
    weights = torch.randn(len(roots.row), asking, HEADS, WIDTH, device="cuda")
    want = dense(batch, roots, *inputs)
    wanted = torch.autograd.grad((want * weights).sum(), inputs)
    have = over_all(batch, roots, BLOCK)(*inputs)
    torch.testing.assert_close(have, want, rtol=1e-2, atol=1e-2)
    for mine, theirs in zip(
        torch.autograd.grad((have * weights).sum(), inputs), wanted, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
