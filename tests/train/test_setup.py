"""What training starts from: rows of this very target, all of them."""

import json

import pytest
import torch

from draftsmith.recipes.errors import UserError
from draftsmith.train.parallel import adamw
from draftsmith.train.trainer import train
from tests.train.counting import counting_row, recipe_for, save_rows, save_target


def test_bf16_trainables_are_refused():
    norm = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="must be fp32"):
        adamw({"norm": norm}, recipe_for("x").optim)


def test_no_rows_and_too_few_rows_say_so(target, tmp_path):
    with pytest.raises(UserError, match="no distilled rows"):
        train(recipe_for(target), tmp_path / "none")
    run = save_rows(tmp_path / "run", [counting_row(number) for number in range(8)], target)
    with pytest.raises(UserError, match=r"data\.held_out"):
        train(recipe_for(target), run)
    data = {"min_supervised_tokens": 99, "held_out": 1}
    with pytest.raises(UserError, match="no row is left to train on"):
        train(recipe_for(target, data=data), run)


def test_rows_that_were_lost_say_so(target, run):
    path = run / "rows" / "rows.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[2:]))
    with pytest.raises(UserError, match="2 of 48 rows are missing; run `draftsmith data` again"):
        train(recipe_for(target), run)


@pytest.mark.parametrize("token", [32, 10**30])
def test_a_token_that_the_target_does_not_have_says_so(target, tmp_path, token):
    rows = [counting_row(number) for number in range(24)]
    rows[3]["response_ids"][0] = token
    run = save_rows(tmp_path / "run", rows, target)
    with pytest.raises(UserError, match=f"'003' holds the token {token} and .* has 0 to 31"):
        train(recipe_for(target), run)


def test_rows_of_older_weights_in_the_same_folder_are_refused(tmp_path):
    target = save_target(tmp_path / "target")
    run = save_rows(tmp_path / "run", [counting_row(number) for number in range(48)], target)
    save_target(target, seed=1)
    with pytest.raises(UserError, match=r"the answers are another target's \(content "):
        train(recipe_for(target), run)


def test_rows_that_do_not_name_their_target_s_content_are_taken(target, run):
    path = run / "rows" / "manifest.json"
    made = json.loads(path.read_text())
    del made["target"]["content"]
    path.write_text(json.dumps(made))
    train(recipe_for(target, train={"max_steps": 1}), run)


@pytest.mark.parametrize(
    ("key", "refused"), [("template", True), ("content", True), ("dtype", False)]
)
def test_rows_of_another_target_are_refused_and_another_precision_is_named(
    target, run, capsys, key, refused
):
    recipe = recipe_for(target, train={"max_steps": 1})
    made = json.loads((run / "rows" / "manifest.json").read_text())
    made["target"][key] = "another"
    (run / "rows" / "manifest.json").write_text(json.dumps(made))
    if refused:
        with pytest.raises(UserError, match="the answers are another target's"):
            train(recipe, run)
    else:
        train(recipe, run)
        assert "made in another precision (dtype another / float32" in capsys.readouterr().out


def test_rows_that_nobody_answers_for_are_refused(target, run):
    path = run / "rows" / "manifest.json"
    good = json.loads(path.read_text())
    changes = [{"target": 3}, {"target": []}, {"prompts": {"count": "48"}}, {"prompts": []}]
    bads = [{**good, **change} for change in changes] + [{"target": good["target"]}]
    for bad in ("{", "[" * 100_000, *map(json.dumps, bads)):
        path.write_text(bad)
        with pytest.raises(UserError, match=r"manifest.json: is damaged"):
            train(recipe_for(target), run)
    path.unlink()
    with pytest.raises(UserError, match=r"holds no manifest.json, so nothing says whose answers"):
        train(recipe_for(target), run)
