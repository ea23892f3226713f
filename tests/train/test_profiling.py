"""A profile says what a step costs and leaves the run alone."""

import json

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.profiling import profile_training
from tests.train.counting import recipe_for

PHASES = {
    "batches",
    "target forward",
    "drafter forward",
    "projection and loss",
    "backward",
    "optimizer",
}


def test_every_phase_has_its_time_and_the_run_is_untouched(target, run, capsys):
    before = sorted(path.name for path in run.iterdir())
    folder = profile_training(recipe_for(target), run)
    found = json.loads((folder / "profile.json").read_text())
    assert set(found["phases"]) == PHASES
    assert sum(one["share"] for one in found["phases"].values()) == pytest.approx(1)
    seconds = sum(one["seconds"] for one in found["phases"].values())
    assert seconds == pytest.approx(found["step_seconds"]) and found["tokens_per_second"] > 0
    assert all(one["peak_bytes"] > 0 for one in found["phases"].values())
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event.get("name") for event in events} >= PHASES
    assert sorted(path.name for path in run.iterdir()) == sorted([*before, "profile"])
    said = capsys.readouterr().out
    assert all(phase in said for phase in PHASES)


def test_what_takes_no_steps_has_no_profile(run):
    recipe = {"name": "n", "target": {"model": "x"}, "drafter": {"kind": "ngram"}}
    with pytest.raises(UserError, match="ngram takes no gradient steps"):
        profile_training(Recipe.model_validate(recipe), run)
