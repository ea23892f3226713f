"""A block drafter learns the toy language, and its anchors are the same however it is trained."""

import pytest
import torch

from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.dflash_format import check_folder
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.train import trainer
from draftsmith.train.checkpoint import latest
from draftsmith.train.setup import prepare
from draftsmith.train.trainer import micro_batches, take_step, train
from tests.train.counting import counting_row, read_log, recipe_for, save_rows, save_target, weights

DRAFTER = {"kind": "dflash", "block_size": 4, "layers": 1, "taps": [0, 2], "start": "target"}
WEIGHTS = {"weights": "exponential", "gamma": 4.0}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("deep"), layers=4, hidden=64)


@pytest.fixture
def rows(deep, tmp_path):
    return save_rows(tmp_path / "run", [counting_row(number) for number in range(48)], deep)


def block_recipe(target, *, drafter=None, **blocks):
    given = {"objective": WEIGHTS, **blocks}
    recipe = recipe_for(target, **given)
    fields = recipe.model_dump(mode="json")
    fields["drafter"] = {**DRAFTER, **(drafter or {})}
    return type(recipe).model_validate(fields)


def test_it_learns_to_count(deep, rows):
    train_block = {"epochs": 20, "rows_per_step": 2, "eval_every": 30, "feature_cache": True}
    recipe = block_recipe(deep, train=train_block, drafter={"anchors_per_row": 12})
    folder = train(recipe, rows)
    log = read_log(rows)
    assert log[0]["loss"] > 1.0 and log[-1]["loss"] < 0.05
    assert log[-1]["conditional_hit_rate"] == [1.0, 1.0, 1.0]
    walks = read_log(rows, "held_out")
    assert walks[0]["tau"] < walks[-1]["tau"] and walks[-1]["tau"] > 3.0
    check_folder(folder)
    loaded = load_drafter(folder, Target.load(recipe.target))
    assert torch.equal(loaded.fc.weight, weights(rows)["fc.weight"])
    assert loaded.mask_token_id == 10


def anchors(recipe, run, step):
    """The anchors of every row of a step."""
    t = prepare(recipe, run)
    t.step = step
    found = {}
    for index, batch in micro_batches(t):
        roots = t.drafter.roots(batch)
        for place, row in enumerate(index):
            found[row] = roots.position[roots.row == place].tolist()
    t.journal.close()
    return found


def test_anchors_depend_on_seed_epoch_and_row_alone(deep, rows):
    few = {"anchors_per_row": 6}
    knobs = [{"rows_per_micro_batch": size, "rows_per_step": 4} for size in (1, 4)]
    one, other = (anchors(block_recipe(deep, train=k, drafter=few), rows, 0) for k in knobs)
    assert one == other and all(len(set(row)) == 6 for row in one.values())
    recipe = block_recipe(deep, train={"rows_per_step": 100}, drafter=few)
    first, second = anchors(recipe, rows, 0), anchors(recipe, rows, 1)
    assert first.keys() == second.keys() and first != second
    assert anchors(recipe.model_copy(update={"seed": 1}), rows, 0) != first


@pytest.mark.parametrize("objective", [WEIGHTS, {"weights": "dpace"}, {"loss": "e2e_tv"}])
def test_1x8_accumulation_equals_8x1(deep, rows, monkeypatch, objective):
    def gradients(size):
        found = {}

        def keep(t):
            found.update(
                {name: value.grad.clone() for name, value in t.parallel.parameters.items()}
            )

        monkeypatch.setattr(trainer, "apply_gradients", keep)
        train_block = {"rows_per_step": 8, "rows_per_micro_batch": size}
        recipe = block_recipe(
            deep, objective=objective, train=train_block, drafter={"anchors_per_row": 9}
        )
        take_step(prepare(recipe, rows))
        return found

    whole = gradients(8)
    for size in (1, 3):
        for name, value in gradients(size).items():
            torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-6)


def test_a_resumed_run_is_the_undisturbed_one(deep, tmp_path):
    knobs = {"epochs": 2, "rows_per_step": 2, "save_every": 3}
    ends = []
    for stop in (None, 7):
        run = save_rows(tmp_path / str(stop), [counting_row(n) for n in range(48)], deep)
        recipe = block_recipe(deep, train=knobs, drafter={"anchors_per_row": 6})
        if stop is not None:
            with pytest.MonkeyPatch.context() as patch:
                step = trainer.take_step

                def dying(t, step=step, stop=stop):
                    if t.step == stop:
                        raise KeyboardInterrupt
                    step(t)

                patch.setattr(trainer, "take_step", dying)
                with pytest.raises(KeyboardInterrupt):
                    train(recipe, run)
        train(recipe, run)
        ends.append(latest(run / "checkpoints").trainables)
    assert all(torch.equal(ends[1][name], value) for name, value in ends[0].items())


def test_a_mask_that_the_data_hold_is_refused(deep, rows):
    with pytest.raises(UserError, match="the training data hold it"):
        prepare(block_recipe(deep, drafter={"mask_token_id": 20}), rows)
