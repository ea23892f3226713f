"""Checkpoints: bit for bit, whole or absent, and never lost by what comes later."""

import errno
import json
import os
import random
import signal

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from draftsmith.recipes.errors import UserError
from draftsmith.train import checkpoint
from draftsmith.train.checkpoint import Snapshot, latest, load, save, tidy
from draftsmith.train.rng import rng_state, set_rng_state, undisturbed

FILES = [*checkpoint.TENSOR_FILES, checkpoint.STATE_FILE, checkpoint.MANIFEST]


def snapshot(step, seed=0):
    generator = torch.Generator().manual_seed(seed + step)
    weight = torch.randn(3, 4, generator=generator)
    weight[0, 0], weight[0, 1], weight[0, 2] = float("nan"), float("-inf"), -0.0
    moments = {"exp_avg.weight": weight * 0.1, "step.weight": torch.tensor(float(step))}
    state = {"seconds": 0.1 + step, "rng": [rng_state()]}
    return Snapshot(step, {"weight": weight}, moments, state)


def assert_same(have, want):
    assert have.step == want.step and have.state == want.state
    for one, other in ((have.trainables, want.trainables), (have.optimizer, want.optimizer)):
        assert one.keys() == other.keys()
        assert all(checkpoint.same_bits(one[name], other[name]) for name in one)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_is_read_is_what_was_written_nan_and_sign_of_zero_included(tmp_path):
    save(snapshot(7), tmp_path, keep=2)
    assert_same(latest(tmp_path), snapshot(7))


def test_a_run_without_an_optimizer_step_can_be_kept(tmp_path):
    save(Snapshot(1, {}, {}, {}), tmp_path, keep=1)
    assert latest(tmp_path).optimizer == {}


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path):
    tidy(tmp_path / "none")
    assert latest(tmp_path / "none") is None
    assert latest(tmp_path) is None


def test_the_newest_are_kept_by_number_not_by_name(tmp_path):
    for step in (5, 999_999, 1_000_000):
        save(snapshot(step), tmp_path, keep=2)
    assert names(tmp_path) == ["step-1000000", "step-999999"]
    assert latest(tmp_path).step == 1_000_000


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["bit", "cut", "gone", "empty"])
def test_a_damaged_newest_checkpoint_is_set_aside_with_a_warning(tmp_path, caplog, name, harm):
    for step in (1, 2):
        save(snapshot(step), tmp_path, keep=2)
    path = tmp_path / "step-000002" / name
    if harm == "bit":
        damage(path)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif harm == "gone":
        path.unlink()
    else:
        path.write_bytes(b"")
    tidy(tmp_path)
    assert "step-000002" in caplog.text and "corrupted" in caplog.text
    assert_same(latest(tmp_path), snapshot(1))
    # The damaged one, though newer by name, must not push a good one out.
    save(snapshot(2), tmp_path, keep=1)
    assert_same(latest(tmp_path), snapshot(2))
    assert names(tmp_path) == ["step-000002", "step-000002.corrupt"]


def test_every_bit_of_the_manifest_is_watched(tmp_path):
    save(snapshot(12), tmp_path, keep=1)
    path = tmp_path / "step-000012" / checkpoint.MANIFEST
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            again = load(path.parent, step=12)
        except checkpoint.Corrupt:
            continue
        assert_same(again, snapshot(12))  # a bit of white space


def test_a_checkpoint_under_another_step_is_refused(tmp_path):
    save(snapshot(3), tmp_path, keep=1)
    os.rename(tmp_path / "step-000003", tmp_path / "step-000004")
    with pytest.raises(UserError, match="every checkpoint is corrupted"):
        tidy(tmp_path)


def test_all_corrupted_is_an_error_that_names_them(tmp_path):
    for step in (1, 2):
        save(snapshot(step), tmp_path, keep=2)
        damage(tmp_path / f"step-{step:06d}" / checkpoint.STATE_FILE)
    with pytest.raises(UserError, match=r"step-000002 .* step-000001 .* remove it") as error:
        tidy(tmp_path)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["step-000001", "step-000002"]  # nothing is touched


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    # The text that safetensors 0.8 gave on a full file system.
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=["no space", "quota", "safetensors"])
@pytest.mark.parametrize("function", ["save_file", "write_json", "sync"])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, error, function):
    save(snapshot(10), tmp_path, keep=1)

    def fail(*_):
        raise error

    monkeypatch.setattr(checkpoint, function, fail)
    with pytest.raises(UserError, match=r"disk full.*nothing lost: last checkpoint at step 10"):
        save(snapshot(20), tmp_path, keep=1)
    assert names(tmp_path) == ["step-000010"]
    assert_same(latest(tmp_path), snapshot(10))


def test_a_write_that_reads_back_differently_is_refused(tmp_path, monkeypatch):
    real = checkpoint.save_file

    def lossy(tensors, path):
        real({name: tensor.bfloat16().float() for name, tensor in tensors.items()}, path)

    monkeypatch.setattr(checkpoint, "save_file", lossy)
    with pytest.raises(UserError, match="read back differs"):
        save(snapshot(1), tmp_path, keep=1)
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(UserError, match=r"checkpoints: cannot be written"):
        save(snapshot(1), tmp_path / "checkpoints", keep=1)


STEPS_OF_WRITING = [
    (checkpoint, "save_file"),
    (checkpoint, "write_json"),
    (checkpoint, "sync"),
    (checkpoint, "sha256"),
    (os, "rename"),
    (checkpoint.shutil, "rmtree"),
]


def kill_at_call(number):
    """Replace the calls that writing is made of; the `number`-th dies before it does anything."""
    count = 0

    def watch(real):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for module, name in STEPS_OF_WRITING:
        setattr(module, name, watch(getattr(module, name)))


def save_and_die(written, folder, number):
    """Save in a child that is killed at that call; returns whether it finished instead."""
    child = os.fork()
    if child == 0:
        kill_at_call(number)
        save(written, folder, keep=1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_killed_at_any_call_of_the_writing_one_checkpoint_is_whole(tmp_path):
    first, second = (Snapshot(n, {"weight": torch.full((99,), n)}, {}, {}) for n in (1, 2))
    ends = []
    while True:
        folder = tmp_path / str(len(ends))
        save(first, folder, keep=1)
        finished = save_and_die(second, folder, number=len(ends) + 1)
        tidy(folder)
        found = latest(folder)
        assert_same(found, first if found.step == 1 else second)
        assert checkpoint.PARTIAL not in names(folder)
        ends.append(found.step)
        if finished:
            break
    # Some kills came before the rename and some after it.
    assert ends == sorted(ends) and ends.count(1) > 10 and ends.count(2) > 2


def test_random_states_go_through_json():
    for draw in (random.random, np.random.standard_normal, lambda: torch.randn(3).tolist()):
        draw()
    state = json.loads(json.dumps(rng_state()))
    want = random.random(), float(np.random.standard_normal()), torch.randn(3).tolist()
    set_rng_state(state)
    assert (random.random(), float(np.random.standard_normal()), torch.randn(3).tolist()) == want


def test_undisturbed_gives_the_generators_back():
    before = rng_state()
    with undisturbed():
        random.random(), np.random.rand(), torch.rand(1)
    assert rng_state() == before
