"""Passes of fixed shapes say what passes of growing shapes say, at addresses that stay."""

from types import SimpleNamespace

import pytest

from draftsmith.data.plan import check_graphs
from draftsmith.drafters.recorded import RecordedTarget
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.arms import GRAPHS, Candidate, make_grid
from draftsmith.eval.bench import BenchPrompt, measure
from draftsmith.eval.conditions import launch_notes
from draftsmith.eval.decode import decode, decode_batch
from draftsmith.eval.results import Results
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import EvalConfig, Recipe
from tests.drafters.test_families import ATTENTION, RECURRENT, make_target
from tests.eval.test_decode import noisy_drafter
from tests.tiny import tiny_target

TREES = [None, chain(3), Tree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))]
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [11] * 20]


def answers(target, drafter, tree):
    """Greedy answers to all prompts, one after the other."""
    return [
        decode(
            target,
            None if tree is None else drafter,
            prompt,
            tree=tree,
            sampling=Sampling(),
            max_new_tokens=24,
            eos_ids=(),
        ).tokens
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("tree", TREES, ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("family", ATTENTION)
def test_recorded_passes_decode_the_same(family, tree) -> None:
    target = make_target(ATTENTION[family]())
    drafter = noisy_drafter(target)
    recorded = RecordedTarget(target, room=64)
    assert answers(recorded, drafter, tree) == answers(target, drafter, tree)
    assert len(recorded.recordings) == 1  # one shape, whatever the prompt


def test_addresses_stay() -> None:
    recorded = RecordedTarget(tiny_target(), room=64)

    def addresses():
        cache = recorded.new_cache()
        buffers = [one for layer in cache.buffered for one in layer.buffers]
        inputs = [one.inputs["attention_mask"] for one in recorded.recordings.values()]
        return [one.data_ptr() for one in [*buffers, *inputs]]

    decode(recorded, None, PROMPTS[0], sampling=Sampling(), max_new_tokens=8)
    before = addresses()
    decode(recorded, None, PROMPTS[2], sampling=Sampling(), max_new_tokens=16)
    assert before == addresses() and len(before) > 1


def test_what_cannot_be_recorded_is_refused() -> None:
    recorded = RecordedTarget(tiny_target(), room=16)
    with pytest.raises(UserError, match="one prompt at a time"):
        decode_batch(
            recorded, None, PROMPTS[:2], sampling=Sampling(), max_new_tokens=4, seeds=[0, 0]
        )
    with pytest.raises(ValueError, match="room of 16"):
        decode(recorded, None, PROMPTS[2], sampling=Sampling(), max_new_tokens=4)
    with pytest.raises(UserError, match="cannot be recorded"):
        RecordedTarget(make_target(RECURRENT["bamba"]()), room=16)
    knobs = {"name": "mine", "target": {"model": "smollm2-135m", "device": "cpu"}}
    with pytest.raises(UserError, match=r"eval\.graphs"):
        check_graphs(Recipe.model_validate({**knobs, "eval": {"graphs": True}}))


def compared(target: Target, recorded: RecordedTarget, tmp_path):
    """A measurement of every arm, eager and recorded."""
    drafter = noisy_drafter(target)
    candidate = Candidate("medusa", drafter, chain(3).to(target.device), TREES[2].to(target.device))
    prompts = [BenchPrompt(f"p{n}", "a", one, "") for n, one in enumerate(PROMPTS)]
    config = EvalConfig(batches=(1, 2), max_new_tokens=12)
    grid = make_grid([candidate], config, prompts=len(prompts), recorded=recorded)
    results = Results(tmp_path / "measured.jsonl", {})
    return grid, measure(target, grid.arms, prompts, results, max_new_tokens=12, repeats=1, seed=0)


def test_arms_are_compared_eager_and_recorded(tmp_path) -> None:
    target = tiny_target()
    grid, trials = compared(target, RecordedTarget(target, room=64), tmp_path)
    pairs = [arm for arm in grid.arms if arm.name.endswith(GRAPHS)]
    assert [arm.name.removesuffix(GRAPHS) for arm in pairs] == [
        *("plain", "medusa chain", "medusa tree")
    ]
    for arm in pairs:
        assert arm.baseline == "plain" + GRAPHS and arm.batch == 1
        eager = trials[arm.name.removesuffix(GRAPHS)]
        assert [t.decoded.tokens for t in trials[arm.name]] == [t.decoded.tokens for t in eager]


def test_the_share_of_launching_is_told() -> None:
    def arm(name: str, ms: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, drafter=None, milliseconds={"verify": ms})

    arms = [arm("plain", 8.0), arm("plain" + GRAPHS, 2.0), arm("plain T=1", 8.0)]
    (note,) = launch_notes(arms)
    assert "75 %" in note and "8.0 ms" in note and "2.0 ms" in note
    assert launch_notes(arms[:1]) == []


@pytest.mark.gpu
def test_graphs_on_cuda_decode_the_same(tmp_path) -> None:
    target = tiny_target()
    moved = Target.from_model(target.model.to("cuda"), target.tokenizer, name="tiny")
    grid, trials = compared(moved, RecordedTarget(moved, room=64), tmp_path)
    for arm in grid.arms:
        if arm.name.endswith(GRAPHS):
            eager = trials[arm.name.removesuffix(GRAPHS)]
            assert [t.decoded.tokens for t in trials[arm.name]] == [t.decoded.tokens for t in eager]
