"""The estimated memory against what torch allocates."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from draftsmith.data.generate import Request, answer
from draftsmith.data.memory import answering_memory
from draftsmith.data.needs import (
    FROZEN,
    LOGITS,
    STATES,
    TRAINED,
    estimate_memory,
    reduced_rows,
    trained_parameters,
)
from draftsmith.drafters.methods import Learned, build
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.slots import Batch, all_roots
from draftsmith.drafters.target import Target, TargetShape, shape_of
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sharing import Shares
from draftsmith.train.objective import Objective
from tests.tiny import tiny_target

VOCAB = 6000


def allocated(action: Callable[[], object]) -> int:
    """The most that torch held at once of what it allocated meanwhile, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def make_recipe(dtype: str = "bfloat16", **blocks: Any) -> Recipe:
    base = {
        "name": "tiny",
        "target": {"model": "tiny", "dtype": dtype},
        "data": {"max_length": 512, "max_prompt_tokens": 64, "distil": {"batch_size": 8}},
        "train": {"rows_per_step": 1, "rows_per_micro_batch": 1, "chunk": 128},
    }
    return Recipe.model_validate({**base, **blocks})


def described(target: Target) -> TargetShape:
    return shape_of(target.model.config, target.tokenizer.chat_template)


def step(recipe: Recipe, target: Target) -> Callable[[], None]:
    """The drafter's part of a logged training step on a full row, all of it supervised."""
    rows = reduced_rows(recipe.drafter)
    ids = None if rows is None else torch.arange(rows)
    drafter = cast(Learned, build(recipe.drafter, target, ids))
    objective = Objective(recipe.objective, recipe.drafter.trained_slots)
    tokens = torch.randint(rows or VOCAB, (1, recipe.data.max_length))
    positions = torch.arange(tokens.shape[1])[None]
    row = Batch(tokens, positions, torch.zeros_like(tokens), torch.ones_like(tokens).bool())
    states = target.states(row)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            slots = drafter.slots(row, states, all_roots(row))
            loss, _ = objective(slots, states, target, chunk=recipe.train.chunk, metrics=True)
        loss.backward()

    return run


CASES: dict[str, dict[str, Any]] = {
    "ce": {},
    "fp32": {"dtype": "float32"},
    "kl": {"objective": {"loss": "kl"}},
    "reduced": {"drafter": {"draft_vocab": 1000}},
    "coupled": {"objective": {"weights": "dpace"}},
    "low_rank": {"drafter": {"projection": "low_rank", "rank": 64}},
    "own": {"drafter": {"projection": "own", "heads": 2}},
    "root": {"drafter": {"reads_root": True}},
    "draft model": {"drafter": {"kind": "draft_model", "layers": 1}},
    "own embedding": {"drafter": {"kind": "draft_model", "layers": 1, "embedding": "own"}},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_training_step_holds_what_was_estimated(case: dict[str, Any]) -> None:
    recipe = make_recipe(**case)
    dtype = getattr(torch, recipe.target.dtype)
    target = tiny_target(VOCAB, hidden=64, dtype=dtype)
    shape = described(target)
    trained = trained_parameters(recipe.drafter, shape)
    estimate = estimate_memory(recipe, shape, trained)
    parts = {LOGITS, STATES, "draft model's activations"} & estimate.keys()
    # Of what is trained, the optimizer's two moments and the weights are there already.
    gradients = estimate[TRAINED] - 3 * 4 * trained
    ratio = allocated(step(recipe, target)) / (sum(estimate[part] for part in parts) + gradients)
    assert 0.65 < ratio <= 1


@pytest.mark.parametrize(("prompt", "most"), [(60, 20), (20, 60), (30, 31), (30, 35), (30, 36)])
def test_answers_hold_the_cache_that_was_estimated(
    prompt: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(VOCAB, hidden=64, layers=3, eos=(), dtype=torch.bfloat16)
    data = {"max_prompt_tokens": 64, "distil": {"batch_size": 8, "max_new_tokens": most}}
    recipe = make_recipe(data=data)
    caches = [target.new_cache()]
    monkeypatch.setattr(target, "new_cache", lambda: caches[0])
    batch = [Request(str(i), [5] * (prompt - i), Sampling(), i) for i in range(8)]
    answer(target, batch, most, lambda done: None)
    estimate = answering_memory(recipe, described(target), prompt)
    held = sum(buffer.nbytes for layer in caches[0].buffered for buffer in layer.buffers)
    assert estimate["keys and values"] == held


@pytest.mark.parametrize("sharing", ["fsdp2", "zero2", "zero3"])
def test_shares_shrink_with_every_process_but_not_below_what_all_hold(sharing: Any) -> None:
    recipe = make_recipe(drafter={"projection": "own", "heads": 2})
    shape = described(tiny_target(VOCAB, hidden=64, layers=8))
    trained = trained_parameters(recipe.drafter, shape)
    found = [
        estimate_memory(recipe, shape, trained, Shares(sharing, count)) for count in (2, 4, 64)
    ]
    moments = [one[TRAINED] for one in found]
    assert moments[0] > moments[1] > moments[2] > 3 * 4 * trained  # gathered for a step
    frozen = [one[FROZEN] for one in found]
    if sharing == "zero2":
        assert frozen[0] == frozen[2]
    else:
        layer, rest = shape.layer_parameters[0], shape.parameters - sum(shape.layer_parameters)
        assert frozen[0] > frozen[1] > frozen[2] > 2 * (rest + 2 * layer)
    alone = estimate_memory(recipe, shape, trained)
    assert all(one[LOGITS] == alone[LOGITS] for one in found)
