"""What is finished is skipped; what was made with other settings is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.stages import (
    DATA,
    EVAL,
    STAGES,
    TRAIN,
    Stage,
    is_finished,
    marker,
    run_stage,
)

WRITTEN = {"self_written": {"count": 3}}


def recipe(**changes: Any) -> Recipe:
    """A recipe with changed blocks."""
    return Recipe.model_validate({"name": "mine", "target": {"model": "smollm2-135m"}, **changes})


def work(run: Path, stage: Stage) -> None:
    """Leave what the stage would."""
    (run / stage.result).mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_finished_stage_is_not_done_again(tmp_path: Path, stage: Stage) -> None:
    assert run_stage(recipe(), tmp_path, stage, lambda: work(tmp_path, stage))
    assert is_finished(recipe(), tmp_path, stage)
    assert not run_stage(recipe(), tmp_path, stage, lambda: pytest.fail("done twice"))


def test_an_interrupted_stage_is_begun_and_not_finished(tmp_path: Path) -> None:
    def killed() -> None:
        work(tmp_path, DATA)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(recipe(), tmp_path, DATA, killed)
    assert not is_finished(recipe(), tmp_path, DATA)
    assert run_stage(recipe(), tmp_path, DATA, lambda: None)
    assert is_finished(recipe(), tmp_path, DATA)


def test_other_settings_are_refused_begun_or_finished(tmp_path: Path) -> None:
    other = recipe(data={"distil": {"temperature": 0.7}})
    with pytest.raises(RuntimeError):
        run_stage(recipe(), tmp_path, DATA, lambda: break_off(tmp_path))
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            run_stage(other, tmp_path, DATA, lambda: pytest.fail("mixed"))
        message = str(caught.value)
        assert "data.distil.temperature: 0.0 there, 0.7 here" in message
        assert "name=" in message and f"delete {tmp_path / 'rows'}" in message
        run_stage(recipe(), tmp_path, DATA, lambda: None)
    assert (tmp_path / "rows").exists()


def break_off(run: Path) -> None:
    """Leave something behind and fail."""
    work(run, DATA)
    raise RuntimeError


def test_a_deleted_result_is_made_again_with_any_settings(tmp_path: Path) -> None:
    run_stage(recipe(), tmp_path, DATA, lambda: work(tmp_path, DATA))
    (tmp_path / "rows").rmdir()
    assert run_stage(recipe(seed=1), tmp_path, DATA, lambda: work(tmp_path, DATA))
    assert is_finished(recipe(seed=1), tmp_path, DATA)


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        ({"data": {"distil": {"max_new_tokens": 9}}}, (DATA, TRAIN, EVAL)),
        ({"data": WRITTEN}, (DATA, TRAIN, EVAL)),
        ({"data": {"held_out": 9}}, (TRAIN, EVAL)),
        ({"optim": {"lr": 1.0}}, (TRAIN, EVAL)),
        ({"eval": {"repeats": 3}}, (EVAL,)),
        ({"data": {"eval_prompts": "other.jsonl", "eval_split": "x"}}, (EVAL,)),
        ({"train": {"log_every": 1, "trackers": ["wandb"]}}, ()),
        ({"train": {"chunk": 1, "feature_cache": True}}, ()),
        ({"runs": "elsewhere"}, ()),
    ],
    ids=[
        "distil",
        "self_written",
        "held_out",
        "lr",
        "repeats",
        "eval_prompts",
        "cosmetic",
        "rounding",
        "place",
    ],
)
def test_a_change_touches_the_stages_that_depend_on_it(
    tmp_path: Path, change: dict[str, Any], stages: tuple[Stage, ...]
) -> None:
    for stage in STAGES:
        run_stage(recipe(), tmp_path, stage, lambda stage=stage: work(tmp_path, stage))
    for stage in STAGES:
        if stage in stages:
            with pytest.raises(UserError):
                is_finished(recipe(**change), tmp_path, stage)
        else:
            assert is_finished(recipe(**change), tmp_path, stage)


def test_changed_contents_of_a_prompts_file_count_as_other_settings(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    mine = recipe(data={"prompts": str(prompts)})
    run_stage(mine, tmp_path, DATA, lambda: work(tmp_path, DATA))
    prompts.write_text('{"prompt": "two"}\n')
    with pytest.raises(UserError, match=r"contents of data\.prompts"):
        is_finished(mine, tmp_path, DATA)


def test_changed_evaluation_prompts_touch_the_report_alone(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    mine = recipe(data={"eval_prompts": str(prompts)})
    for stage in STAGES:
        run_stage(mine, tmp_path, stage, lambda stage=stage: work(tmp_path, stage))
    prompts.write_text('{"prompt": "two"}\n')
    assert is_finished(mine, tmp_path, DATA) and is_finished(mine, tmp_path, TRAIN)
    with pytest.raises(UserError, match=r"contents of data\.eval_prompts"):
        is_finished(mine, tmp_path, EVAL)


def test_self_written_prompts_are_kept_apart_from_the_evaluation_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n')
    data = {"eval_prompts": str(prompts), "self_written": {"count": 3}}
    mine = recipe(data=data)
    run_stage(mine, tmp_path, DATA, lambda: work(tmp_path, DATA))
    assert is_finished(mine, tmp_path, DATA)
    with pytest.raises(UserError, match=r"data\.self_written\.top_p: 0\.95 there, 0\.5 here"):
        is_finished(
            recipe(data=data | {"self_written": {"count": 3, "top_p": 0.5}}), tmp_path, DATA
        )
    prompts.write_text('{"prompt": "two"}\n')
    with pytest.raises(UserError, match=r"contents of data\.eval_prompts"):
        is_finished(mine, tmp_path, DATA)


def test_knobs_of_what_is_off_are_no_settings(tmp_path: Path) -> None:
    for stage in STAGES:
        run_stage(recipe(), tmp_path, stage, lambda stage=stage: work(tmp_path, stage))
    off = recipe(data={"self_written": {"top_p": 0.5}})
    assert all(is_finished(off, tmp_path, stage) for stage in STAGES)
    written = json.loads(marker(tmp_path, TRAIN).read_text())["settings"]
    assert not any(key.startswith("data.self_written") for key in written)


def test_turns_without_rows_are_not_taken_for_other_settings(tmp_path: Path) -> None:
    run_stage(recipe(data=WRITTEN), tmp_path, DATA, lambda: (tmp_path / "self_written").mkdir())
    assert not is_finished(recipe(data=WRITTEN), tmp_path, DATA)
    with pytest.raises(UserError, match=r"self_written was made with other settings"):
        is_finished(recipe(), tmp_path, DATA)


def test_a_marker_that_names_more_than_it_must_still_counts(tmp_path: Path) -> None:
    run_stage(recipe(), tmp_path, TRAIN, lambda: work(tmp_path, TRAIN))
    known = json.loads(marker(tmp_path, TRAIN).read_text())
    known["settings"]["data.eval_prompts"] = "starter"
    marker(tmp_path, TRAIN).write_text(json.dumps(known))
    assert is_finished(recipe(), tmp_path, TRAIN)


@pytest.mark.parametrize(
    ("block", "idle"),
    [
        ({"weights": "geometric"}, {"gamma": 9.0, "dpace_alpha": 0.1, "lk_eta": 1.0}),
        ({"weights": "exponential"}, {"decay": 0.1, "temperature": 2.0}),
        ({"weights": "dpace"}, {"decay": 0.1, "gamma": 9.0}),
        ({"loss": "e2e_tv"}, {"decay": 0.1, "weights": "exponential", "gamma": 9.0}),
        ({"loss": "kl"}, {"lk_eta": 1.0}),
    ],
)
def test_knobs_that_the_others_leave_unused_are_no_settings(
    tmp_path: Path, block: dict[str, Any], idle: dict[str, Any]
) -> None:
    run_stage(recipe(objective=block), tmp_path, TRAIN, lambda: work(tmp_path, TRAIN))
    assert is_finished(recipe(objective=block | idle), tmp_path, TRAIN)


@pytest.mark.parametrize(
    ("block", "used"),
    [
        ({}, {"decay": 0.1}),
        ({"weights": "exponential"}, {"gamma": 9.0}),
        ({"weights": "dpace"}, {"dpace_alpha": 0.1}),
        ({"loss": "kl"}, {"temperature": 2.0}),
        ({"loss": "lk"}, {"lk_eta": 1.0}),
    ],
)
def test_knobs_in_use_are_settings(
    tmp_path: Path, block: dict[str, Any], used: dict[str, Any]
) -> None:
    run_stage(recipe(objective=block), tmp_path, TRAIN, lambda: work(tmp_path, TRAIN))
    with pytest.raises(UserError, match="was made with other settings"):
        is_finished(recipe(objective=block | used), tmp_path, TRAIN)


@pytest.mark.parametrize("key", ["data.answers", "drafter.reads_root", "optim.betas"])
def test_a_knob_that_came_later_did_nothing_before(tmp_path: Path, key: str) -> None:
    """Its default is what was done before there was one; anything else is another setting."""
    run_stage(recipe(), tmp_path, TRAIN, lambda: work(tmp_path, TRAIN))
    known = json.loads(marker(tmp_path, TRAIN).read_text())
    del known["settings"][key]
    marker(tmp_path, TRAIN).write_text(json.dumps(known))
    assert is_finished(recipe(), tmp_path, TRAIN)
    block, name = key.split(".")
    others: dict[str, Any] = {
        "answers": {"answers": 2, "distil": {"temperature": 1.0}},
        "reads_root": {"kind": "medusa", "reads_root": True},
        "betas": {"betas": [0.8, 0.9]},
    }
    with pytest.raises(UserError, match=key):
        is_finished(recipe(**{block: others[name]}), tmp_path, TRAIN)


def test_files_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    work(tmp_path, DATA)
    with pytest.raises(UserError, match="holds files that no run of draftsmith marked"):
        is_finished(recipe(), tmp_path, DATA)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"state": "finished"}',
        '{"state": 1, "settings": 2}',
        '{"state": "finished", "settings": {}}',
        '{"state": "finished", "settings": []}',
        '{"state": "lost", "settings": {"seed": 0}}',
    ],
    ids=["empty", "cut", "list", "deep", "half", "numbers", "no settings", "a list", "state"],
)
def test_a_damaged_marker_is_refused_and_no_good_work_is_given_up(
    tmp_path: Path, text: str
) -> None:
    run_stage(recipe(), tmp_path, DATA, lambda: work(tmp_path, DATA))
    marker(tmp_path, DATA).write_text(text)
    with pytest.raises(UserError, match="is damaged") as caught:
        is_finished(recipe(), tmp_path, DATA)
    assert "delete" not in str(caught.value) and "name=" in str(caught.value)


def test_settings_are_kept_in_plain_sight(tmp_path: Path) -> None:
    run_stage(recipe(), tmp_path, DATA, lambda: work(tmp_path, DATA))
    known = json.loads(marker(tmp_path, DATA).read_text())
    assert known["state"] == "finished"
    assert known["settings"]["data.distil.temperature"] == 0.0
    assert not any(key.startswith(("optim", "eval")) for key in known["settings"])
