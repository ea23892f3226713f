"""Distilling: the target's own answers, the same ones however often it was stopped."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.data.distill import distil, make_requests, manifest, plan, sampling_of
from draftsmith.data.prompts import Prompt, load_prompts
from draftsmith.data.rows import read_rows
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from tests.data.asking import ENDS, MIXED, make_config, make_prompts
from tests.tiny import CHATML, tiny_target

ROOT = Path(__file__).resolve().parents[2]


@torch.no_grad()
def greedy_alone(target: Target, ids: list[int], count: int) -> list[int]:
    """The readable reference: no batch, no cache, no padding."""
    said: list[int] = []
    while len(said) < count and (not said or said[-1] not in target.eos_ids):
        logits = target.model(input_ids=torch.tensor([ids + said]), use_cache=False).logits
        said.append(int(logits[0, -1].argmax()))
    return said


def test_batched_greedy_answers_are_those_of_each_prompt_alone(
    target: Target, tmp_path: Path
) -> None:
    summary = distil(target, make_prompts(20), make_config(), tmp_path, seed=0)
    rows = read_rows(tmp_path)
    assert len(rows) == 20 == summary.rows == summary.made
    for row in rows:
        assert row["response_ids"] == greedy_alone(target, row["prompt_ids"], 20)
        ended = row["response_ids"][-1] in ENDS
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert not set(row["response_ids"][:-1]) & set(ENDS)
    reasons = [row["finish_reason"] for row in rows]
    assert {"stop", "length"} == set(reasons)  # or the test shows too little
    assert summary.cut == reasons.count("length")
    assert len({len(row["response_ids"]) for row in rows}) > 4
    assert summary.response_tokens == sum(len(row["response_ids"]) for row in rows)


def test_rows_hold_what_training_needs(target: Target, tmp_path: Path) -> None:
    prompts = make_prompts(6)
    distil(target, prompts, make_config(**MIXED), tmp_path, seed=7)
    for row in read_rows(tmp_path):
        (prompt,) = (p for p in prompts if p.key == row["key"])
        assert row["messages"] == list(prompt.messages) and row["category"] == "c"
        assert target.tokenizer.decode(row["prompt_ids"]).endswith("<|im_start|>assistant\n")
        text = target.tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert row["response"] == text and row["thinking"] is None and row["seed"] == 7
        assert (
            row["temperature"]
            == sampling_of(row["key"], make_config(**MIXED).distil, 7).temperature
        )


def test_tools_are_part_of_what_is_asked(tmp_path: Path) -> None:
    teller = tiny_target(eos=ENDS, template="{{ tools | tojson }}" + CHATML)
    prompts = [replace(prompt, tools=({"name": prompt.key},)) for prompt in make_prompts(2)]
    distil(teller, prompts, make_config(), tmp_path, seed=0)
    for row in read_rows(tmp_path):
        assert row["tools"] == [{"name": row["key"]}]
        assert teller.tokenizer.decode(row["prompt_ids"]).startswith(json.dumps(row["tools"]))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_sampled_answers_do_not_depend_on_batch_mates(
    target: Target, tmp_path: Path, batch_size: int
) -> None:
    for folder, size in (("a", 8), ("b", batch_size)):
        config = make_config(**MIXED, batch_size=size)
        distil(target, make_prompts(12), config, tmp_path / folder, seed=0)
    assert read_rows(tmp_path / "a") == read_rows(tmp_path / "b")
    distil(target, make_prompts(12), make_config(**MIXED), tmp_path / "c", seed=1)
    assert read_rows(tmp_path / "a") != read_rows(tmp_path / "c")


def test_greedy_share_is_chosen_by_key() -> None:
    config = make_config(temperature=1.0, greedy_share=0.3).distil
    greedy = [sampling_of(str(i), config, 0).greedy for i in range(2000)]
    assert 0.26 < sum(greedy) / 2000 < 0.34
    assert all(
        sampling_of(str(i), make_config(greedy_share=0.3).distil, 0).greedy for i in range(9)
    )
    all_sampled = make_config(temperature=1.0).distil
    assert not any(sampling_of(str(i), all_sampled, 0).greedy for i in range(200))


def test_the_plan_does_not_depend_on_the_order_of_the_prompts(target: Target) -> None:
    prompts = make_prompts(30)
    requests, _ = make_requests(target, prompts, make_config(), 0)
    batches = plan(requests, 8)
    assert [len(batch) for batch in batches] == [8, 8, 8, 6]
    lengths = [len(request.ids) for batch in batches for request in batch]
    assert lengths == sorted(lengths, reverse=True)
    random.Random(1).shuffle(prompts)
    shuffled, _ = make_requests(target, prompts, make_config(), 0)
    assert plan(shuffled, 8) == batches
    kinds = [manifest(target, some, make_config(), 0) for some in (requests, shuffled)]
    assert kinds[0] == kinds[1]


def test_a_finished_run_asks_nothing_again(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key that is written is the key that is looked for."""
    source = tmp_path / "p.jsonl"
    source.write_text(
        '{"id": 3, "prompt": "a"}\n{"prompt": "b"}\n{"question_id": "q", "turns": ["c"]}\n'
    )
    config = make_config().model_copy(update={"prompts": str(source)})
    prompts = load_prompts(config, split="train", seed=0).prompts
    distil(target, prompts, config, tmp_path / "rows", seed=0)
    before = (tmp_path / "rows" / "rows.jsonl").read_bytes()
    monkeypatch.setattr(target, "step", None)
    again = distil(target, prompts, config, tmp_path / "rows", seed=0)
    assert again.made == 0 and again.rows == 3 and again.tokens_per_second == 0
    assert (tmp_path / "rows" / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_cut_anywhere_is_completed_to_the_same_bytes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    target, prompts, config = (
        tiny_target(eos=ENDS, dtype=dtype),
        make_prompts(20),
        make_config(**MIXED),
    )
    distil(target, prompts, config, tmp_path, seed=0)
    path = tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    line = whole.index(b"\n") + 1
    for size in (0, 1, line - 1, line, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        made = distil(target, prompts, config, tmp_path, seed=0).made
        assert path.read_bytes() == whole
        assert made == 20 - whole[:size].count(b"\n")


def test_rows_are_found_by_key_in_whatever_order_they_were_written(
    target: Target, tmp_path: Path
) -> None:
    prompts, config = make_prompts(20), make_config()
    distil(target, prompts, config, tmp_path, seed=0)
    path, rows = tmp_path / "rows.jsonl", read_rows(tmp_path)
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[i] for i in (13, 4, 0, 5, 1)), "utf-8")
    assert distil(target, prompts, config, tmp_path, seed=0).made == 15
    assert read_rows(tmp_path) == rows
    assert len(path.read_text("utf-8").splitlines()) == 20


KILLED = """
import sys, time
from pathlib import Path
import torch
from tests.data.asking import ENDS, MIXED, make_config, make_prompts
from tests.tiny import tiny_target
from draftsmith.data.distill import distil

torch.set_num_threads(1)
target = tiny_target(eos=ENDS)
step = target.step
target.step = lambda *a, **k: (time.sleep(0.005), step(*a, **k))[1]
distil(target, make_prompts(60), make_config(**MIXED), Path(sys.argv[1]), seed=0)
"""


def test_a_run_killed_and_resumed_gives_the_same_rows(target: Target, tmp_path: Path) -> None:
    distil(target, make_prompts(60), make_config(**MIXED), tmp_path / "undisturbed", seed=0)
    path = tmp_path / "killed" / "rows.jsonl"
    paths = [str(ROOT), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path.parent)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not path.exists() or path.stat().st_size == 0:
        assert process.poll() is None, process.stderr and process.stderr.read().decode()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    if process.stderr:
        process.stderr.close()
    there = path.read_bytes().count(b"\n")
    assert 0 < there < 60
    summary = distil(target, make_prompts(60), make_config(**MIXED), path.parent, seed=0)
    assert summary.made == 60 - there
    for name in ("rows.jsonl", "manifest.json"):
        assert (path.parent / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()


def test_other_settings_are_refused_and_named(target: Target, tmp_path: Path) -> None:
    distil(target, make_prompts(4), make_config(), tmp_path, seed=0)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError) as error:
        distil(
            target, make_prompts(4), make_config(temperature=0.5, batch_size=4), tmp_path, seed=1
        )
    said = str(error.value)
    assert "distil.temperature was 0.0, now 0.5" in said and "seed was 0, now 1" in said
    assert "distil.batch_size was 8, now 4" in said and "top_p" not in said and "\n" not in said
    with pytest.raises(UserError, match=r"prompts\.count was 4, now 5"):
        distil(target, make_prompts(5), make_config(), tmp_path, seed=0)
    with pytest.raises(UserError, match=r"target.dtype was 'float32', now 'bfloat16'"):
        distil(
            tiny_target(eos=ENDS, dtype=torch.bfloat16),
            make_prompts(4),
            make_config(),
            tmp_path,
            seed=0,
        )
    other = tiny_target(eos=ENDS, template=CHATML.replace("kind", "rude"))
    with pytest.raises(UserError, match=r"target.template was"):
        distil(other, make_prompts(4), make_config(), tmp_path, seed=0)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_prompts_that_cannot_be_asked_are_counted(target: Target, tmp_path: Path) -> None:
    own = ({"role": "system", "content": "x"}, {"role": "user", "content": "y"})
    long = ({"role": "user", "content": "x" * 200},)
    prompts = [*make_prompts(3), Prompt("own", "c", own), Prompt("long", "c", long)]
    refusal = "{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    picky = tiny_target(
        eos=ENDS, template=CHATML.replace("messages %}", "messages %}" + refusal, 1)
    )
    config = make_config().model_copy(update={"max_prompt_tokens": 150})
    requests, dropped = make_requests(picky, prompts, config, 0)
    assert {request.key for request in requests} == {"k0", "k1", "k2"}
    assert dropped == {
        "the chat template refuses: no system": 1,
        "prompt longer than 150 tokens": 1,
    }
    with pytest.raises(UserError, match="Dropped: 1 the chat template refuses"):
        make_requests(picky, prompts[3:], config, 0)


def test_targets_that_cannot_be_asked_are_refused(tmp_path: Path) -> None:
    for template, says in ((None, "no chat template"), ("{{ messages }}", "no generation prompt")):
        with pytest.raises(UserError, match=f"tiny: its .*{says}"):
            distil(tiny_target(template=template), make_prompts(2), make_config(), tmp_path, seed=0)
    assert not list(tmp_path.iterdir())


def test_answers_beyond_the_model_s_positions_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tiny has 4096 positions and the longest prompt"):
        distil(target, make_prompts(2), make_config(max_new_tokens=4090), tmp_path, seed=0)
    assert not list(tmp_path.iterdir())


def test_too_little_memory_is_one_clear_line(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise torch.OutOfMemoryError("a long story")

    monkeypatch.setattr(target, "step", fail)
    with pytest.raises(UserError, match="8 answers at once do not fit the memory of cpu"):
        distil(target, make_prompts(2), make_config(), tmp_path, seed=0)
