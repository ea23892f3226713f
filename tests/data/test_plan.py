"""The plan: counts that agree with the real thing, and refusals before any weight is loaded."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.data import plan as planning
from draftsmith.data.counts import TEMPLATE_TOKENS, estimate_steps
from draftsmith.data.needs import trained_parameters
from draftsmith.data.plan import (
    free_disk,
    make_plan,
    render,
    size,
)
from draftsmith.drafters.geometry import geometry_of
from draftsmith.drafters.methods import build, trainable
from draftsmith.drafters.target import TargetShape, describe, shape_of
from draftsmith.recipes.entry import run_folder
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DFlashConfig, MedusaConfig, MtpConfig, Recipe, TargetConfig
from tests.tiny import tiny_target

GIGABYTE = 1 << 30


@pytest.fixture
def make(tiny_folder: Path, tmp_path: Path):
    """A recipe for the tiny target with changed blocks."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(20)))
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(f'{{"prompt": "request {i}"}}\n' for i in range(20)))

    def make(**changes: Any) -> Recipe:
        data = {
            "prompts": str(prompts),
            "eval_prompts": str(questions),
            "max_prompt_tokens": 64,
            "max_length": 128,
            "held_out": 4,
            "distil": {"max_new_tokens": 32},
            **changes.pop("data", {}),
        }
        base = {"name": "mine", "runs": str(tmp_path), "target": {"model": str(tiny_folder)}}
        return Recipe.model_validate({**base, "data": data, **changes})

    return make


@pytest.mark.parametrize("projection", ["shared", "low_rank", "own"])
@pytest.mark.parametrize("draft_vocab", [None, 100])
@pytest.mark.parametrize("reads_root", [False, True])
def test_trained_parameters_are_those_of_the_real_heads(
    projection: str, draft_vocab: int | None, reads_root: bool
) -> None:
    import torch

    target = tiny_target()
    config = MedusaConfig.model_validate(
        {"heads": 3, "projection": projection, "rank": 8, "draft_vocab": draft_vocab}
        | {"reads_root": reads_root}
    )
    ids = None if draft_vocab is None else torch.arange(draft_vocab)
    real = sum(parameter.numel() for parameter in trainable(build(config, target, ids)).values())
    shape = TargetShape(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        layers=target.layers,
        layer_parameters=(1,),
        embedding_parameters=1,
        linear_parameters=0,
        linear_sides=0,
        max_positions=4096,
        cached_numbers=1,
        parameters=1,
        template="x",
        geometry=geometry_of(target.config),
    )
    assert trained_parameters(config, shape) == real


@pytest.mark.parametrize("taps", [(), (0,), (0, 2, 3)], ids=str)
def test_parameters_of_a_block_drafter_are_counted_from_shapes_alone(taps: tuple[int, ...]) -> None:
    target = tiny_target(layers=5)
    config = DFlashConfig(kind="dflash", layers=2, taps=taps)
    real = sum(parameter.numel() for parameter in trainable(build(config, target, None)).values())
    assert trained_parameters(config, shape_of(target.model.config, "x")) == real


def test_parameters_of_an_mtp_block_are_counted_from_shapes_alone() -> None:
    target = tiny_target(layers=3)
    config = MtpConfig(kind="mtp")
    real = sum(parameter.numel() for parameter in trainable(build(config, target, None)).values())
    assert trained_parameters(config, shape_of(target.model.config, "x")) == real


def test_the_plan_counts_without_loading_weights(
    make, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def loaded(*arguments: object, **options: object) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    recipe = make()
    plan = make_plan(recipe)
    assert plan.frozen == describe(TargetConfig(model=str(tiny_folder))).parameters
    assert (plan.prompts, plan.eval_prompts) == (20, 20)
    assert plan.tokens is not None and 20 * 32 < plan.tokens <= 20 * (32 + 64)
    text = render(plan, recipe)
    for word in (f"{plan.trained:,} parameters trained", f"{plan.frozen:,} parameters frozen"):
        assert word in text
    assert "at most" in text and "are free" in text
    assert "for a batch of answers" in text and "for a training step" in text


def test_self_written_prompts_are_counted_as_if_all_were_kept(make) -> None:
    plain, recipe = (
        make_plan(make()),
        make(data={"self_written": {"count": 7, "max_new_tokens": 9}}),
    )
    plan = make_plan(recipe)
    assert plan.prompts == 27 and plan.tokens is not None and plain.tokens is not None
    assert plan.tokens - plain.tokens == 7 * (9 + TEMPLATE_TOKENS + 32)
    assert plan.disk["self-written turns"] > 0 and "self-written turns" not in plain.disk
    assert plan.disk["rows"] > plain.disk["rows"]
    assert "27 to train on (up to 7 self-written), 20 to report on" in render(plan, recipe)
    assert "self-written" not in render(plain, make())


def test_steps_are_an_upper_bound_that_max_steps_cuts(make) -> None:
    recipe = make(train={"epochs": 3, "rows_per_step": 4, "rows_per_micro_batch": 2})
    assert estimate_steps(recipe, tokens=128 * 4) == 3
    assert estimate_steps(recipe, tokens=128 * 4 + 1) == 6
    assert estimate_steps(make(train={"max_steps": 2}), tokens=10**6) == 2
    assert estimate_steps(recipe, tokens=None) is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"drafter": {"draft_vocab": 289}}, "drafter.draft_vocab: 289 is more than the 288 tokens"),
        ({"drafter": {"projection": "low_rank", "rank": 64}}, "drafter.rank: 64 is more than"),
        ({"train": {"rows_per_step": 2}}, "train.rows_per_micro_batch: 4 does not divide"),
        ({"train": {"rows_per_step": 6}}, "train.rows_per_micro_batch: 4 does not divide"),
        ({"data": {"max_prompt_tokens": 128}}, "data.max_prompt_tokens: 128 leaves no room"),
        (
            {"data": {"self_written": {"count": 1, "max_new_tokens": 64}}},
            "data.self_written.max_new_tokens: turns of 64 tokens leave no room",
        ),
        ({"data": {"held_out": 20}}, "data.held_out: 20 documents are kept away"),
        (
            {"data": {"distil": {"max_new_tokens": 4096}}},
            "data.distil.max_new_tokens: prompts of up",
        ),
        ({"eval": {"max_new_tokens": 4030}}, "eval.max_new_tokens: prompts of up to 64 tokens"),
        (
            {"objective": {"weights": "list", "slot_weights": [1.0, 1.0]}},
            "objective.slot_weights: 2 given for 5 slots",
        ),
        ({"objective": {"slot_weights": [1.0]}}, "objective.slot_weights: not used with"),
        ({"target": {"model": "/nowhere"}}, "target.model: no folder /nowhere"),
        ({"target": {"model": "no/such-model"}}, "target.model: cannot load 'no/such-model'"),
        ({"data": {"prompts": "/nowhere.jsonl"}}, "/nowhere.jsonl: cannot be read"),
        ({"data": {"eval_prompts": "/nowhere.jsonl"}}, "/nowhere.jsonl: cannot be read"),
    ],
)
def test_what_cannot_work_is_refused(make, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(make(**changes))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_target_without_chat_template_is_refused(make, tmp_path: Path) -> None:
    from tests.tiny import tiny_model, tiny_tokenizer

    tiny_model().save_pretrained(tmp_path / "bare")
    tiny_tokenizer(None).save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="has no chat template"):
        make_plan(make(target={"model": str(tmp_path / "bare")}))


def test_a_folder_without_config_is_refused(make, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no config\.json"):
        make_plan(make(target={"model": str(tmp_path / "empty")}))


def test_a_disk_that_is_too_small_is_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_disk", lambda folder: 1000)
    with pytest.raises(UserError, match=r"of disk and 1 kB are free; free some"):
        make_plan(make())


def test_the_feature_cache_is_a_part_of_the_disk(make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "features" not in make_plan(make()).disk
    recipe = make(train={"feature_cache": True})
    plan = make_plan(recipe)
    assert plan.tokens is not None and plan.disk["features"] == plan.tokens * 32 * 2
    assert re.search(r"\n +[0-9.]+ kB  features\n", render(plan, recipe))
    shard = run_folder(recipe) / "features" / "shard-00000.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"x" * 1000)
    assert make_plan(recipe).disk["features"] == plan.disk["features"] - 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"1 kB are free; .* or leave out train\.feature_cache"):
        make_plan(recipe)


def test_a_memory_that_is_too_small_is_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "device_memory", lambda recipe: 1000)
    with pytest.raises(UserError, match="weights, gradients and optimizer need"):
        make_plan(make())


def test_a_tracker_that_is_not_installed_is_refused(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'draftsmith\[wandb\]'"):
        planning.check_trackers(make(train={"trackers": ["wandb"]}))


def test_a_file_where_the_runs_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file; give a folder"):
        free_disk(tmp_path / "file" / "run")
    assert free_disk(tmp_path / "not" / "yet" / "there") > 0


def test_prompts_of_the_evaluation_are_not_counted_and_named(make, tmp_path: Path) -> None:
    same = tmp_path / "same.jsonl"
    same.write_text('{"prompt": "QUESTION  3"}\n{"prompt": "question 30"}\n')
    recipe = make(data={"eval_prompts": str(same)})
    plan = make_plan(recipe)
    assert (plan.prompts, plan.eval_prompts) == (19, 2)
    assert plan.notes[-1] == "training prompts that are evaluation prompts too are left out: 1"
    with pytest.raises(UserError, match="Dropped: 20 copy of an evaluation prompt"):
        make_plan(make(data={"eval_prompts": recipe.data.prompts}))


def test_notes_name_what_does_nothing(make) -> None:
    recipe = make(
        data={"distil": {"max_new_tokens": 32, "top_p": 0.9, "greedy_share": 0.5}},
        optim={"warmup_steps": 1000},
        train={"epochs": 1, "feature_cache": True},
    )
    notes = "\n".join(make_plan(recipe).notes)
    assert "data.distil: top_p and top_k do nothing" in notes
    assert "greedy_share does nothing" in notes
    assert "optim.warmup_steps (1000) outlasts" in notes
    assert "train.feature_cache saves no time" in notes
    assert make_plan(make(optim={"warmup_steps": 0})).notes == ()
    same = make(data={"self_written": {"count": 2, "max_new_tokens": 8, "temperature": 0.0}})
    assert "every turn is the same at temperature 0" in "\n".join(make_plan(same).notes)


def test_prompts_on_the_hub_are_not_fetched_for_a_plan(make) -> None:
    plan = make_plan(make(data={"prompts": "somebody/prompts"}))
    assert plan.prompts is None and plan.steps is None
    assert "not known before the prompts are loaded" in render(plan, make())


@pytest.mark.parametrize(
    ("count", "text"), [(1023, "1 kB"), (5 << 20, "5.0 MB"), (3 * GIGABYTE // 2, "1.5 GB")]
)
def test_sizes_are_for_people(count: int, text: str) -> None:
    assert size(count) == text


def test_every_turn_of_a_conversation_is_counted(make, tmp_path: Path) -> None:
    prompts = tmp_path / "turns.jsonl"
    prompts.write_text("".join(f'{{"turns": ["a {i}", "b", "c"]}}\n' for i in range(10)))
    last, every = (
        make_plan(make(data={"prompts": str(prompts), "turns": turns})) for turns in ("last", "all")
    )
    assert (last.prompts, every.prompts) == (10, 30)
    assert last.tokens is not None and every.tokens is not None
    assert every.tokens > 3 * last.tokens  # later turns hold the earlier answers


@pytest.mark.parametrize(
    ("distil", "says"),
    [
        ({"backend": "openai", "urls": ["http://a"], "server": {"api": "chat"}}, "by chat"),
        ({"share": [1, 2]}, "written in shares"),
    ],
)
def test_self_written_prompts_need_the_raw_opening_and_one_machine(
    make, distil: dict, says: str
) -> None:
    recipe = make(data={"self_written": {"count": 3, "max_new_tokens": 8}, "distil": distil})
    with pytest.raises(UserError, match=says):
        make_plan(recipe)
