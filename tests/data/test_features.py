"""The feature cache: what the target says of every row, resumable, and never of anything else."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data import features
from draftsmith.data.dataset import Document, PackedRows
from draftsmith.data.features import FeatureCache
from draftsmith.recipes.errors import UserError
from tests.tiny import tiny_target


@pytest.fixture(autouse=True)
def three_rows_per_shard(monkeypatch):
    monkeypatch.setattr(features, "ROWS_PER_SHARD", 3)


@pytest.fixture(scope="module")
def target():
    return tiny_target(64, layers=3)


def packed(count=18, *, first=0, max_length=24):
    """Documents of 5 to 11 tokens in rows of about two."""
    documents = []
    for number in range(first, first + count):
        length = 5 + number % 7
        ids = tuple((number * 5 + i * i) % 64 for i in range(length))
        supervised = tuple(i > 1 for i in range(length))
        documents.append(Document(str(number), "", ids, supervised, True, "stop"))
    return PackedRows(documents, max_length)


def filled(target, folder, rows=None, **options):
    cache = FeatureCache(target, rows or packed(), folder, **options)
    cache.check()
    cache.fill(cache.missing())
    return cache


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("taps", [(), (1, 0)])
@pytest.mark.parametrize("chosen", [[0], [5, 2], [6, 0, 6]])
def test_states_are_those_of_the_batch_and_zero_behind_a_row(target, tmp_path, chosen, taps):
    cache = filled(target, tmp_path / "features", taps=taps)
    batch = cache.rows.batch(chosen)
    want, have = target.states(batch, taps), cache.states(chosen)
    inside = batch.documents >= 0
    assert bool(inside.all()) == (len(chosen) == 1), "rows of unlike length"
    pairs = [(have.final, want.final)] + ([(have.layers, want.layers)] if taps else [])
    assert taps or have.layers is None
    for found, wanted in pairs:
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        torch.testing.assert_close(found[inside], wanted[inside], rtol=1e-5, atol=1e-5)
        assert not found[~inside].any()


def test_states_keep_the_target_s_dtype_and_bits(tmp_path):
    target = tiny_target(64, dtype=torch.bfloat16)
    cache = filled(target, tmp_path / "features")
    alone = target.states(cache.rows.batch([4])).final
    assert alone.dtype == torch.bfloat16
    assert torch.equal(cache.states([4]).final, alone)


def test_the_size_is_known_before(target, tmp_path):
    cache = FeatureCache(target, packed(), tmp_path / "features", taps=(0, 1))
    said = cache.check()
    assert "rows to compute" in said and "are free" in said
    assert not (tmp_path / "features").exists()
    cache.fill(cache.missing())
    for shard in range(3):
        tensors = load_file(cache.path(shard)).values()
        assert sum(t.numel() * t.element_size() for t in tensors) == cache.shard_bytes(shard)
    assert "are read from" in cache.check()


def test_killed_between_or_within_shards_it_ends_as_undisturbed(target, tmp_path, monkeypatch):
    folder, whole = tmp_path / "features", tmp_path / "whole"
    filled(target, whole)
    cache = filled(target, folder)
    assert len(contents(folder)) > 3
    cache.path(0).unlink()
    cache.path(1).write_bytes(cache.path(1).read_bytes()[:-8])  # the disk's fault, not a kill's
    (folder / f".{cache.path(0).name}.partial").write_bytes(b"half")
    kept = cache.path(2).stat().st_mtime_ns
    assert "6 of " in cache.check()
    cache.fill(cache.missing())
    assert contents(folder) == contents(whole)
    assert cache.path(2).stat().st_mtime_ns == kept


def test_ranks_share_the_work(target, tmp_path):
    filled(target, tmp_path / "one")
    for rank in range(2):
        cache = FeatureCache(target, packed(), tmp_path / "two")
        cache.fill(cache.missing(), share=(rank, 2), shown=rank == 0)
        assert bool(cache.missing()) == (rank == 0)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"rows": packed(first=1)}, "documents "),
        ({"rows": packed(count=21)}, "rows "),
        ({"rows": packed(max_length=32)}, "max_length 24 / 32"),
        ({"taps": (1,)}, r"taps \[\] / \[1\]"),
        ({"target": tiny_target(64, layers=3, dtype=torch.bfloat16)}, "dtype float32 / bfloat16"),
        ({"target": tiny_target(64, template="{{ 1 }}")}, r"target\.template"),
    ],
    ids=["documents", "rows", "max_length", "taps", "dtype", "target"],
)
def test_states_of_anything_else_are_refused(target, tmp_path, change, names):
    filled(target, tmp_path)
    before = contents(tmp_path)
    given = {"target": target, "rows": packed(), **change}
    other = FeatureCache(given.pop("target"), given.pop("rows"), tmp_path, **given)
    with pytest.raises(UserError, match=f"{names}.*there / here.*remove the folder"):
        other.check()
    assert contents(tmp_path) == before


def test_states_of_a_version_that_knew_no_quantisation_are_read(target, tmp_path):
    cache = filled(target, tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["target"]["quantisation"]
    path.write_text(json.dumps(manifest))
    assert "7 rows are read" in cache.check()


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", "[" * 100_000])
def test_states_that_nothing_answers_for_are_refused(target, tmp_path, text):
    cache = filled(target, tmp_path)
    (tmp_path / "manifest.json").unlink()
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="remove the folder"):
        cache.check()


def test_a_small_disk_is_refused_before_a_byte_is_written(target, tmp_path, monkeypatch):
    cache = FeatureCache(target, packed(), tmp_path / "features")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(UserError, match=r"of disk and 4 kB are free; .* leave out train.feature"):
        cache.check()
    assert not (tmp_path / "features").exists()


def test_a_full_cache_needs_no_more_room(target, tmp_path, monkeypatch):
    cache = filled(target, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert "are read from" in cache.check()


def test_a_disk_that_fills_up_keeps_whole_shards(target, tmp_path, monkeypatch):
    real, cache = features.save_file, FeatureCache(target, packed(), tmp_path)

    def full(tensors, path):
        if "00002" in path.name:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(features, "save_file", full)
        with pytest.raises(UserError, match="disk full; free some space and run again"):
            cache.fill(cache.missing())
    assert cache.missing()[0] == 2
    cache.fill(cache.missing())
    assert not cache.missing()


def test_a_shard_that_is_lost_while_training_is_named(target, tmp_path):
    cache = filled(target, tmp_path)
    cache.path(0).unlink()
    with pytest.raises(UserError, match=r"shard-00000.safetensors: cannot be read .* run again"):
        cache.states([0])
