"""The schedule: bounds, shape, and its ends."""

import pytest

from draftsmith.recipes.schema import OptimConfig
from draftsmith.train.schedule import lr_share


def shares(total, **knobs):
    config = OptimConfig(**knobs)
    return [lr_share(step, total, config) for step in range(total + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("total", [1, 7, 40, 1000])
@pytest.mark.parametrize("warmup", [0, 1, 40])
def test_every_step_that_is_taken_learns_and_none_exceeds_lr(schedule, total, warmup):
    taken = shares(total, schedule=schedule, warmup_steps=warmup)[:-1]
    assert all(0.0 < share <= 1.0 for share in taken)
    warm = taken[: min(warmup, total)]
    assert warm == sorted(warm) and all(share == 1.0 for share in warm[-1:])
    after = taken[min(warmup, total) :]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_schedule_ends_at_the_minimum(schedule):
    values = shares(100, schedule=schedule, warmup_steps=10, min_lr_share=0.1)
    assert values[-1] == pytest.approx(0.1)


def test_warm_up_is_linear():
    assert shares(10, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_is_half_way_at_half_time():
    assert shares(110, schedule="cosine", warmup_steps=10)[60] == pytest.approx(0.5)


def test_wsd_is_stable_and_then_falls_linearly():
    values = shares(100, schedule="wsd", warmup_steps=10, wsd_decay=0.2)
    assert values[10:81] == [1.0] * 71
    assert values[90] == pytest.approx(0.5)


def test_wsd_without_decay_stays():
    assert shares(100, schedule="wsd", warmup_steps=0, wsd_decay=0.0)[:-1] == [1.0] * 100


def test_constant_ignores_the_minimum():
    assert shares(50, schedule="constant", warmup_steps=5, min_lr_share=0.5)[5:] == [1.0] * 46
