"""However processes share the work, they train what one process trains."""

import json
import random
import time

import pytest
import torch
from accelerate.utils import DistributedType

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sharing import asked_sharing
from draftsmith.train.checkpoint import latest
from draftsmith.train.processes import check_type
from draftsmith.train.pulse import Pulse
from draftsmith.train.trainer import train
from draftsmith.train.zero import part
from tests.train.children import SHARINGS, in_children, job_of
from tests.train.counting import (
    counting_row,
    digest,
    read_log,
    recipe_for,
    save_rows,
    save_target,
    weights,
)

# Three rows in a step of two processes: shares are unequal, and where answers are of one token
# there is nothing to learn in some.
ROWS = [counting_row(n, answer=1 if n % 3 == 0 else 28) for n in range(25)]
DRAFTERS = {
    "medusa": {"heads": 2, "projection": "own", "reads_root": True},
    "mtp": {"kind": "mtp", "draft_tokens": 3},
    "dflash": {
        "kind": "dflash",
        "layers": 1,
        "block_size": 4,
        "anchors_per_row": 6,
        "start": "target",
        "mask_token_id": 5,
    },
    "draft_model": {"kind": "draft_model", "layers": 2, "embedding": "own"},
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"), layers=3)


def recipe_of(deep, drafter, *, dtype="float32", **knobs):
    return recipe_for(
        deep,
        drafter=DRAFTERS[drafter],
        train={"rows_per_step": 3, "rows_per_micro_batch": 1, "epochs": 1, **knobs},
        optim={"lr": 1e-3},
        data={"max_length": 32, "held_out": 3, "max_prompt_tokens": 16},
        dtype=dtype,
    )


def assert_same_training(have, want, *, atol):
    """Losses, norms, walks and weights, up to rounding."""
    for one, other in zip(read_log(have), read_log(want), strict=True):
        assert one["supervised_tokens"] == other["supervised_tokens"]
        if other["loss"] is not None:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert read_log(have, "held_out") == read_log(want, "held_out")
    for name, value in weights(have).items():
        torch.testing.assert_close(value, weights(want)[name], rtol=0, atol=atol)
    left, right = (latest(run / "checkpoints").optimizer for run in (have, want))
    assert left.keys() == right.keys() and left
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_processes_equal_one_however_they_share(deep, tmp_path):
    # Several of them fill a feature cache together first.
    pairs = [
        ("medusa", "zero3"),
        ("mtp", "fsdp2"),
        ("dflash", "zero2"),
        ("dflash", "fsdp2"),
        ("draft_model", "ddp"),
    ]
    jobs = []
    for drafter, sharing in pairs:
        recipe = recipe_of(deep, drafter, feature_cache=drafter != "draft_model")
        one, two = (save_rows(tmp_path / name / drafter, ROWS, deep) for name in ("one", sharing))
        if not (one / "drafter").exists():
            train(recipe, one)
        jobs.append(job_of(recipe, two, processes=2, sharing=sharing))
    in_children(tmp_path, jobs)
    for drafter, sharing in pairs:
        one, two = (tmp_path / name / drafter for name in ("one", sharing))
        assert_same_training(two, one, atol=1e-6)
        names = [sorted(path.name for path in (run / "drafter").iterdir()) for run in (one, two)]
        assert names[0] == names[1]
        assert not (two / "ranks").exists()


@pytest.mark.slow
def test_killed_and_resumed_on_other_numbers_of_processes(deep, tmp_path):
    recipe = recipe_of(deep, "dflash", save_every=2)
    whole = save_rows(tmp_path / "whole", ROWS, deep)
    train(recipe, whole)
    step, steps = "draftsmith.train.trainer", read_log(whole)[-1]["step"]
    sharings = ("ddp", "zero2", "zero3")
    jobs = []
    for sharing in sharings:
        run = save_rows(tmp_path / sharing, ROWS, deep)
        # Two processes, of which the second is killed; then one, which is; then two again.
        death = [step, "take_step", random.randrange(3, steps)]
        jobs.append(job_of(recipe, run, processes=2, sharing=sharing, call=death, rank=1))
        jobs.append(job_of(recipe, run, call=[step, "take_step", 2]))
        jobs.append(job_of(recipe, run, processes=2, sharing=sharing))
    killed = in_children(tmp_path, jobs)
    assert killed == [True, True, False] * len(sharings)
    for sharing in sharings:
        assert_same_training(tmp_path / sharing, whole, atol=2e-6)


@pytest.mark.parametrize("sharing", ["fsdp2", "zero3"])
def test_bf16_compute_keeps_fp32_weights_and_moments(deep, tmp_path, sharing):
    recipe = recipe_of(deep, "medusa", precision="bf16", dtype="bfloat16", max_steps=3, log_every=1)
    recipe = recipe.model_copy(
        update={"optim": recipe.optim.model_copy(update={"lr": 1e-6, "warmup_steps": 0})}
    )
    alone, run = (save_rows(tmp_path / name, ROWS, deep) for name in ("alone", "run"))
    train(recipe, alone)
    in_children(tmp_path, [job_of(recipe, run, processes=2, sharing=sharing)])
    kept = latest(run / "checkpoints")
    assert {value.dtype for value in (*kept.trainables.values(), *kept.optimizer.values())} == {
        torch.float32
    }
    # Steps of 1e-6 on weights of 0.5 would vanish in bf16.
    moved = kept.trainables["own"] - latest(alone / "checkpoints").trainables["own"]
    assert moved.abs().max() < 2e-6
    assert digest([kept.trainables["own"]]) != digest([kept.trainables["own"].bfloat16().float()])


@pytest.mark.parametrize("sharing", SHARINGS)
def test_what_the_launcher_asks_for_is_read(sharing):
    assert asked_sharing(SHARINGS[sharing]) == sharing


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP version 1"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
            "ZeRO stage 1 was asked for; allowed: 2, 3",
        ),
    ],
)
def test_what_is_not_supported_is_refused(environment, says):
    with pytest.raises(UserError, match=says):
        asked_sharing(environment)


def test_what_accelerate_made_of_it_is_checked():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    check_type("fsdp2", DistributedType.FSDP, cuda)
    check_type("fsdp2", DistributedType.MULTI_CPU, cpu)
    with pytest.raises(UserError, match=r"fsdp2 on cuda .* made MULTI_GPU of it instead of FSDP"):
        check_type("fsdp2", DistributedType.MULTI_GPU, cuda)
    with pytest.raises(UserError, match=r"zero3 on cpu .* made NO of it instead of MULTI_CPU"):
        check_type("zero3", DistributedType.NO, cpu)


@pytest.mark.parametrize(("count", "ranks"), [(7, 2), (8, 2), (3, 4), (1, 3)])
def test_parts_of_a_tensor_make_it_whole_again(count, ranks):
    whole = torch.arange(1.0, count + 1)
    parts = [part(whole, rank, ranks) for rank in range(ranks)]
    assert len({len(one) for one in parts}) == 1
    assert torch.equal(torch.cat(parts)[:count], whole) and not torch.cat(parts)[count:].any()


def test_an_error_of_a_collective_names_the_process_that_caused_it(tmp_path):
    mine = Pulse(tmp_path, 0, 3, patience=100.0)
    for rank, doing, age in ((1, "waiting", 0), (2, "training", 60)):
        other = Pulse(tmp_path, rank, 3, patience=100.0)
        other.does(doing, 17)
        other.write()
        sign = json.loads(other.path(rank).read_text())
        sign |= {"written": time.time() - age, "since": time.time() - age, "host": "elsewhere"}
        other.path(rank).write_text(json.dumps(sign))
    mine.does("waiting", 18)
    told = mine.explain(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert "process 0 lost process 2 (pid" in told and "elsewhere, dead or stuck" in told
    assert "training at step 17" in told and "process 1" not in told
    assert mine.explain(RuntimeError("shapes do not fit")) is None
    mine.now["since"] -= 50
    assert "process 0 waits for process 2" in mine.late()
    assert mine.late() is None  # said once


def test_a_process_that_is_gone_is_known_by_its_number(tmp_path):
    mine = Pulse(tmp_path, 0, 2, patience=100.0)
    other = Pulse(tmp_path, 1, 2, patience=100.0)
    other.write()
    error = RuntimeError("gloo: timed out")
    assert "alive" in mine.explain(error)
    sign = json.loads(other.path(1).read_text())
    other.path(1).write_text(json.dumps({**sign, "pid": 2**22 + 1}))
    assert "dead or stuck" in mine.explain(error)
    other.path(1).unlink()
    assert "process 1, which has ended or never began" in mine.explain(error)
