"""Training from the feature cache is the online training, up to rounding."""

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data import features
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.train import trainer
from draftsmith.train.trainer import train
from tests.train.counting import counting_row, read_log, recipe_for, save_rows, save_target

TIMED = ("seconds", "tokens_per_second")


@pytest.fixture(autouse=True)
def two_rows_per_shard(monkeypatch):
    monkeypatch.setattr(features, "ROWS_PER_SHARD", 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def make_run(target, tmp_path):
    rows = [counting_row(number) for number in range(32)]
    return lambda name: save_rows(tmp_path / name, rows, target)


def cached_recipe(target, *, cache=True, train=None, **blocks):
    return recipe_for(
        target, train={"epochs": 2, "feature_cache": cache, **(train or {})}, **blocks
    )


def weights(run):
    return load_file(run / "drafter" / "medusa_lm_head.safetensors")


def assert_same_training(one, other):
    """The log and the weights, up to rounding."""
    logs = [read_log(run) for run in (one, other)]
    for have, want in zip(*logs, strict=True):
        assert have.keys() == want.keys()
        for name in have.keys() - {"kind", *TIMED}:
            assert have[name] == pytest.approx(want[name], rel=1e-5, abs=1e-5), name
    for name, value in weights(one).items():
        torch.testing.assert_close(value, weights(other)[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "objective", [{}, {"loss": "kl"}, {"loss": "e2e_tv"}], ids=["ce", "kl", "e2e_tv"]
)
def test_cached_training_equals_online_training(target, make_run, objective):
    online, cached = make_run("online"), make_run("cached")
    for run, cache in ((online, False), (cached, True)):
        train(cached_recipe(target, cache=cache, objective=objective, optim={"lr": 2e-3}), run)
    assert not (online / "features").exists()
    assert_same_training(cached, online)


def test_the_target_is_asked_once_for_every_row(target, make_run, monkeypatch):
    asked = []
    real = Target.states

    def states(self, batch, taps=()):
        asked.append(len(batch.ids))
        return real(self, batch, taps)

    monkeypatch.setattr(Target, "states", states)
    monkeypatch.setattr(trainer, "evaluate", lambda t: None)
    run = make_run("run")
    train(cached_recipe(target, train={"epochs": 3}), run)
    rows = trainer.prepare(cached_recipe(target), run).rows
    assert asked == [1] * len(rows)


class Stop(Exception):
    pass


def stop_at(monkeypatch, owner, name, number):
    """Let the `number`-th call raise."""
    real, count = getattr(owner, name), 0

    def call(*arguments, **options):
        nonlocal count
        count += 1
        if count == number:
            raise Stop
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


def test_stopped_in_the_cache_and_in_training_it_ends_as_undisturbed(target, make_run, monkeypatch):
    recipe = cached_recipe(target, train={"save_every": 2})
    whole, broken = make_run("whole"), make_run("broken")
    train(recipe, whole)
    deaths = ((features, "save_file", 1), (features, "sync", 3), (trainer, "take_step", 4))
    for owner, name, number in deaths:
        with monkeypatch.context() as patch:
            stop_at(patch, owner, name, number)
            with pytest.raises(Stop):
                train(recipe, broken)
    train(recipe, broken)
    for path in sorted((whole / "features").iterdir()):
        assert path.read_bytes() == (broken / "features" / path.name).read_bytes()
    assert all(torch.equal(value, weights(broken)[name]) for name, value in weights(whole).items())


def test_a_run_may_go_on_with_a_cache_and_is_the_same_up_to_rounding(
    target, make_run, monkeypatch, capsys
):
    online, mixed = make_run("online"), make_run("mixed")
    knobs = {"train": {"epochs": 2, "save_every": 2}, "optim": {"lr": 2e-3}}
    train(recipe_for(target, **knobs), online)
    with monkeypatch.context() as patch:
        stop_at(patch, trainer, "take_step", 4)
        with pytest.raises(Stop):
            train(recipe_for(target, **knobs), mixed)
    train(cached_recipe(target, **knobs), mixed)
    assert "warning: train.feature_cache False -> True" in capsys.readouterr().out
    assert_same_training(mixed, online)


def test_a_finished_run_computes_no_cache(target, make_run):
    run = make_run("run")
    train(cached_recipe(target, cache=False), run)
    train(cached_recipe(target), run)
    assert not (run / "features").exists()


def test_a_cache_of_other_rows_is_refused(target, make_run):
    run = make_run("run")
    train(cached_recipe(target), run)
    (run / "features").rename(run / "kept")
    other = save_rows(run.parent / "other", [counting_row(n) for n in range(1, 33)], target)
    (run / "kept").rename(other / "features")
    with pytest.raises(UserError, match=r"documents .*remove the folder"):
        train(cached_recipe(target), other)
