"""Batched generation: who is in the batch, when it ends, and by which law it draws."""

from typing import Any

import pytest
import torch

from draftsmith.data.distill import make_requests
from draftsmith.data.generate import Answer, Request, answer, inverse, until_end
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import TargetStates
from draftsmith.drafters.target import Target
from tests.data.asking import make_config, make_prompts
from tests.tiny import tiny_target


def test_progress_moves_and_stays_inside_the_batch(target: Target) -> None:
    requests, _ = make_requests(target, make_prompts(8), make_config(), 0)
    seen: list[float] = []
    answer(target, requests, 20, seen.append)
    assert seen and seen == sorted(seen) and seen[0] > 0 and seen[-1] <= len(requests)


def watch(monkeypatch: pytest.MonkeyPatch, target: Target) -> list[int]:
    """The batch size of every step from now on."""
    sizes: list[int] = []
    step = target.step

    def watched(ids: torch.Tensor, *rest: Any, **options: Any) -> TargetStates:
        sizes.append(len(ids))
        return step(ids, *rest, **options)

    monkeypatch.setattr(target, "step", watched)
    return sizes


def test_a_batch_ends_when_all_rows_have(monkeypatch: pytest.MonkeyPatch) -> None:
    everything_ends = tiny_target(eos=tuple(range(288)))
    steps = watch(monkeypatch, everything_ends)
    requests, _ = make_requests(everything_ends, make_prompts(3), make_config(), 0)
    answers = answer(everything_ends, requests, 200, lambda done: None)
    assert all(len(reply.ids) == 1 and reply.finish_reason == "stop" for reply in answers)
    assert len(steps) <= 4


def test_rows_that_ended_leave_the_batch(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = watch(monkeypatch, target)
    requests, _ = make_requests(target, make_prompts(20), make_config(), 0)
    answer(target, requests, 20, lambda done: None)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 20 and sizes[-1] < 15


def test_until_end() -> None:
    assert until_end([3, 4, 2, 9, 2], (2, 7)) == Answer([3, 4, 2], "stop")
    assert until_end([3, 4], (2, 7)) == Answer([3, 4], "length")


def test_the_inverse_draws_the_law() -> None:
    law = torch.tensor([0.0, 0.125, 0.0, 0.5, 0.375, 0.0])
    count = 8000
    uniform = torch.arange(count, dtype=torch.float64) / count
    drawn = inverse(law.expand(count, -1), uniform).bincount(minlength=6)
    assert drawn.tolist() == [0, 1000, 0, 4000, 3000, 0]
    almost_one = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert inverse(law[None], almost_one).item() == 4  # never a token without mass
    unnormalised = torch.full((1, 150_000), 1e-6)
    assert inverse(unnormalised, almost_one).item() == 149_999


def test_sampling_follows_the_target_law(target: Target) -> None:
    """First tokens of many rows against softmax: only the key differs between the rows."""
    ids = [5, 6, 7]
    logits = target.model(input_ids=torch.tensor([ids])).logits[0, -1].detach()
    law = (logits / 0.7).softmax(dim=-1)
    sampling = Sampling(temperature=0.7)
    config, seeds = make_config(temperature=0.7), range(3000)
    requests, _ = make_requests(target, [make_prompts(1)[0]], config, 0)
    assert requests[0].sampling == sampling
    batch = [Request(str(i), ids, sampling, i) for i in seeds]
    first = [reply.ids[0] for reply in answer(target, batch, 1, lambda done: None)]
    share = torch.tensor(first).bincount(minlength=288) / len(first)
    expected = 0.5 * (law * (1 - law) / len(first)).sqrt().sum() * 0.8  # of the total variation
    assert 0.5 * (share - law).abs().sum() < 1.25 * expected
