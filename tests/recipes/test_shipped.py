"""The recipes that come with draftsmith."""

from pathlib import Path

import pytest

from draftsmith.drafters.methods import CONFIGS
from draftsmith.recipes.load import dump_recipe, load_recipe, shipped_recipes
from draftsmith.recipes.schema import (
    DFlashConfig,
    DraftModelConfig,
    EvalConfig,
    MedusaConfig,
    Recipe,
)
from draftsmith.recipes.stages import flat
from draftsmith.recipes.text import parse

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
FILES = sorted(set(FOLDER.rglob("*.yaml")) - set(FOLDER.glob("accelerate/*")))

# Knobs that change where a run lies and what is shown or kept, not its numbers.
WITHOUT_EFFECT = {
    "runs",
    "target.device",
    "target.revision",
    "target.trust_remote_code",
    "eval.served",
    "eval.graphs",
    "data.distil.urls",
    "data.distil.share",
    "data.distil.server.key_variable",
    "data.distil.server.concurrency",
    "data.distil.server.timeout",
    "data.distil.server.tries",
    "data.distil.server.patience",
    "train.patience",
    "train.save_every",
    "train.keep_checkpoints",
    "train.trackers",
}
# Blocks of gradient steps.
TRAINED = ("objective.", "optim.", "train.")


def is_low_rank(drafter: object) -> bool:
    """Heads with a low-rank correction."""
    return isinstance(drafter, MedusaConfig) and drafter.projection == "low_rank"


def distils(drafter: object) -> bool:
    """A draft model that is trained."""
    return isinstance(drafter, DraftModelConfig) and not drafter.models


def is_expanded(drafter: object) -> bool:
    """A draft model with a tree of its own."""
    return isinstance(drafter, DraftModelConfig) and bool(drafter.expansion)


def is_block(drafter: object) -> bool:
    """A block drafter."""
    return isinstance(drafter, DFlashConfig)


def compares(config: EvalConfig) -> bool:
    """Whether the report is about several drafters."""
    return bool(config.drafters)


# Knobs that only count when another one has a certain value.
CONDITIONAL = {
    "adapter": lambda recipe: recipe.adapter is not None,
    "target.load_in": lambda recipe: recipe.target.load_in is not None,
    "data.distil.server.model": lambda recipe: recipe.data.distil.backend == "openai",
    "data.distil.server.api": lambda recipe: recipe.data.distil.backend == "openai",
    "data.distil.top_p": lambda recipe: recipe.data.distil.temperature > 0,
    "data.distil.top_k": lambda recipe: recipe.data.distil.temperature > 0,
    "data.distil.greedy_share": lambda recipe: recipe.data.distil.temperature > 0,
    "data.self_written.max_new_tokens": lambda recipe: recipe.data.self_written.count > 0,
    "data.self_written.temperature": lambda recipe: recipe.data.self_written.count > 0,
    "data.self_written.top_p": lambda recipe: recipe.data.self_written.count > 0,
    "drafter.rank": lambda recipe: is_low_rank(recipe.drafter),
    "drafter.layers": lambda recipe: distils(recipe.drafter) or is_block(recipe.drafter),
    "drafter.embedding": lambda recipe: distils(recipe.drafter),
    "drafter.boosts": lambda recipe: distils(recipe.drafter),
    "drafter.draft_tokens": lambda recipe: not is_expanded(recipe.drafter),
    "objective.decay": lambda recipe: recipe.objective.weights == "geometric",
    "objective.gamma": lambda recipe: recipe.objective.weights == "exponential",
    "objective.slot_weights": lambda recipe: recipe.objective.weights == "list",
    "objective.dpace_alpha": lambda recipe: recipe.objective.weights == "dpace",
    "objective.lk_eta": lambda recipe: recipe.objective.loss == "lk",
    "objective.temperature": lambda recipe: recipe.objective.loss == "kl",
    "optim.wsd_decay": lambda recipe: recipe.optim.schedule == "wsd",
    "eval.draft_tokens": lambda recipe: is_block(recipe.drafter),
    "eval.drafters": lambda recipe: compares(recipe.eval),
    "eval.rules": lambda recipe: compares(recipe.eval) and recipe.eval.temperature > 0,
    "eval.batches": lambda recipe: compares(recipe.eval),
    "eval.top_p": lambda recipe: recipe.eval.temperature > 0,
    "eval.top_k": lambda recipe: recipe.eval.temperature > 0,
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_recipe_loads_by_file_and_by_name(file: Path) -> None:
    recipe = load_recipe(str(file))
    assert recipe == load_recipe(file.stem)
    assert recipe.name == file.stem
    assert parse(dump_recipe(recipe), "dumped") == recipe.model_dump(mode="json")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_recipe_shows_every_knob_that_changes_the_numbers(file: Path) -> None:
    recipe = load_recipe(str(file))
    shown = set(flat(parse(file.read_text(encoding="utf-8"), file.name)))
    knobs = set(flat(recipe.model_dump(mode="json")))
    idle = {key for key, counts in CONDITIONAL.items() if not counts(recipe)}
    if not recipe.drafter.trained_slots:
        idle |= {key for key in knobs if key.startswith(TRAINED)}
    assert knobs - shown - idle - WITHOUT_EFFECT == set()
    assert shown & idle == set(), "a knob without effect misleads"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_recipe_opens_with_command_hardware_time_and_result(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    opening = [line for line in lines[: lines.index("")]]
    assert all(line.startswith("#") for line in opening)
    assert any(line.startswith(f"#   draftsmith run {file.stem}") for line in opening)
    for word in ("# Hardware", "# Time", "# Result"):
        assert any(line.startswith(word) for line in opening), word


def test_names_are_target_method_variant_and_unique() -> None:
    kinds = {load_recipe(str(file)).drafter.kind for file in FILES}
    methods = (*kinds, "compare")
    assert all(file.stem.partition("_")[2].startswith(methods) for file in FILES)
    assert len({file.stem for file in FILES}) == len(FILES)
    assert set(shipped_recipes()) == {file.stem for file in FILES}


def test_the_tables_of_this_test_name_real_knobs() -> None:
    knobs: set[str] = set()
    for kind in CONFIGS:
        given = {"name": "x", "target": {"model": "y"}, "drafter": {"kind": kind}}
        knobs |= set(flat(Recipe.model_validate(given).model_dump()))
    assert WITHOUT_EFFECT | set(CONDITIONAL) <= knobs
