"""The fitted projection: the least squares that it claims to be, and a copied layer that works."""

import pytest
import torch

from draftsmith.drafters import methods, mtp_fit
from draftsmith.drafters.mtp_fit import RIDGE, Normal, fit, pairs
from draftsmith.drafters.slots import Batch
from draftsmith.recipes.schema import MtpConfig
from tests.tiny import tiny_target


def documents(count, vocab, seed=0):
    """One row of so many documents of 24 tokens."""
    ids = torch.randint(0, vocab, (1, 24 * count), generator=torch.Generator().manual_seed(seed))
    at = torch.arange(24 * count)[None]
    return Batch(ids, at % 24, at // 24, torch.ones_like(ids, dtype=torch.bool))


def test_it_is_weighted_least_squares_with_a_ridge():
    generator = torch.Generator().manual_seed(0)
    inputs, states = (torch.randn(50, n, generator=generator).double() for n in (6, 3))
    states *= torch.linspace(0.1, 9, 50)[:, None]
    normal = Normal(torch.zeros(6, 6).double(), torch.zeros(6, 3).double())
    for part in zip(inputs.split(20), states.split(20), strict=True):
        normal.add(*part)
    weight = 1 / states.pow(2).mean(-1, keepdim=True).sqrt()
    left, right = inputs * weight, states * weight
    ridge = (RIDGE * left.pow(2).sum() / 6).sqrt() * torch.eye(6).double()
    padded = torch.cat([right, torch.zeros(6, 3).double()])
    want = torch.linalg.lstsq(torch.cat([left, ridge]), padded).solution.T
    torch.testing.assert_close(normal.solve(), want)


@pytest.mark.parametrize("order", ["embedding_first", "hidden_first"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_copied_layer_then_reads_what_the_target_s_does(layers, order):
    target = tiny_target(40, layers=layers)
    drafter = methods.build(MtpConfig(kind="mtp", order=order), target, None)
    block, held_out = drafter.block, documents(4, 40, seed=9)
    fit(drafter, [documents(16, 40, seed=seed) for seed in range(3)])
    inputs, states = pairs(drafter, held_out)
    assert len(inputs) == 4 * 23  # no document's first token
    alike = torch.nn.functional.cosine_similarity(block.fc(inputs), states, dim=-1)
    assert float(alike.detach().median()) > {1: 0.9, 2: 0.25}[layers]
    if layers == 1:  # it reads the token's embedding, which the block has
        read = target.embedding[held_out.ids][0].view(4, 24, -1)[:, 1:].flatten(0, 1)
        assert torch.equal(states, read)


def test_it_stops_when_it_has_seen_enough(monkeypatch):
    target = tiny_target(40)
    drafter = methods.build(MtpConfig(kind="mtp"), target, None)
    monkeypatch.setattr(mtp_fit, "SPREAD", 1)  # 64 tokens
    seen = []
    batches = (seen.append(seed) or documents(2, 40, seed=seed) for seed in range(9))
    fit(drafter, batches)
    assert seen == [0, 1]
