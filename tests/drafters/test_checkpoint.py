import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters import checkpoint, methods
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import MedusaConfig
from tests.tiny import tiny_target

CASES = [
    ("shared", None),
    ("shared", [1, 5, 9]),
    ("low_rank", [1, 5, 9]),
    ("own", None),
    ("own", [0, 2, 39]),
]


def trained(target, projection="shared", ids=None, heads=3, **more):
    ids = None if ids is None else torch.tensor(ids)
    config = MedusaConfig(heads=heads, projection=projection, rank=4, **more)
    drafter = methods.build(config, target, ids)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter))
    return drafter


def save(drafter, target, folder, **extra):
    meta = {"target": checkpoint.target_metadata(target), **extra}
    checkpoint.save_drafter(drafter, folder, meta)


@pytest.mark.parametrize("reads_root", [False, True])
@pytest.mark.parametrize(("projection", "ids"), CASES)
def test_what_is_loaded_is_what_was_saved(tmp_path, projection, ids, reads_root):
    target = tiny_target(40)
    drafter = trained(target, projection, ids, reads_root=reads_root)
    save(drafter, target, tmp_path / "drafter", tree=[[0], [0, 1]])
    again = checkpoint.load_drafter(tmp_path / "drafter", target)
    assert again.config == drafter.config
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    ids = None if ids is None else torch.tensor(ids)
    assert again.draft_ids is ids or torch.equal(again.draft_ids, ids)
    assert checkpoint.read_metadata(tmp_path / "drafter")["tree"] == [[0], [0, 1]]
    assert sorted(os.listdir(tmp_path)) == ["drafter"]  # nothing temporary is left


def test_own_heads_are_what_fasterdecoding_reads(tmp_path):
    target = tiny_target(40)
    drafter = trained(target, "own")
    save(drafter, target, tmp_path / "d")
    tensors = load_file(tmp_path / "d" / "medusa_lm_head.safetensors")
    d = target.hidden_size
    want = {}
    for i in range(3):
        want |= {
            f"{i}.0.linear.weight": (d, d),
            f"{i}.0.linear.bias": (d,),
            f"{i}.1.weight": (40, d),
        }
    assert {k: tuple(v.shape) for k, v in tensors.items()} == want
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["medusa_num_heads"] == 3 and config["medusa_num_layers"] == 1
    assert config["medusa_fc_bias"] is True and config["original_lm_head"] is False
    assert config["vocab_size"] == 40 and config["hidden_size"] == d
    assert "num_hidden_layers" not in config and "num_attention_heads" not in config
    x = torch.randn(5, d)
    block = x + torch.nn.functional.silu(
        x @ tensors["1.0.linear.weight"].T + tensors["1.0.linear.bias"]
    )
    from draftsmith.drafters.projection import slot_logits

    ours = slot_logits(drafter.states(x, torch.zeros(5).long()), drafter.head())[:, 1]
    torch.testing.assert_close(block @ tensors["1.1.weight"].T, ours)


def test_reduced_rows_never_take_the_name_of_a_whole_head(tmp_path):
    target = tiny_target(40)
    save(trained(target, "own", [1, 2, 3]), target, tmp_path / "d")
    keys = load_file(tmp_path / "d" / "medusa_lm_head.safetensors").keys()
    assert not any(key.endswith(".1.weight") for key in keys)
    assert json.loads((tmp_path / "d" / "config.json").read_text())["original_lm_head"] is True


def test_an_older_drafter_is_replaced_whole(tmp_path):
    target = tiny_target(40)
    save(trained(target, heads=2), target, tmp_path / "d")
    save(trained(target, heads=3), target, tmp_path / "d")
    assert checkpoint.load_drafter(tmp_path / "d", target).depth == 3
    assert sorted(os.listdir(tmp_path)) == ["d"]


def test_metadata_changes_are_kept(tmp_path):
    target = tiny_target(40)
    save(trained(target), target, tmp_path / "d")
    checkpoint.update_metadata(tmp_path / "d", {"tree": [[0]]})
    assert checkpoint.read_metadata(tmp_path / "d")["tree"] == [[0]]
    checkpoint.load_drafter(tmp_path / "d", target)


def corrupt_weights(folder):
    path = folder / "medusa_lm_head.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def nan_weights(folder):
    path = folder / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    tensors["0.0.linear.bias"][0] = float("nan")
    save_file(tensors, path)


def lost_head(folder):
    path = folder / "medusa_lm_head.safetensors"
    tensors = {k: v for k, v in load_file(path).items() if not k.startswith("2.")}
    save_file(tensors, path)


def bad_json(folder):
    (folder / "draftsmith.json").write_text('{"format": 1,')


def other_format(folder):
    (folder / "draftsmith.json").write_text('{"format": 99}')


def no_metadata(folder):
    (folder / "draftsmith.json").unlink()


def no_weights(folder):
    (folder / "medusa_lm_head.safetensors").unlink()


@pytest.mark.parametrize(
    "damage",
    [corrupt_weights, nan_weights, lost_head, bad_json, other_format, no_metadata, no_weights],
)
def test_a_damaged_folder_is_one_clear_line(tmp_path, damage):
    target = tiny_target(40)
    save(trained(target), target, tmp_path / "d")
    damage(tmp_path / "d")
    with pytest.raises(UserError) as caught:
        checkpoint.load_drafter(tmp_path / "d", target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff", b"null", b"[]", b'"x"', b"{}", b'{"format": "1"}', b"[" * 100_000],
    ids=["empty", "not utf-8", "null", "list", "text", "nothing", "format", "deep"],
)
def test_metadata_that_is_none_is_a_broken_checkpoint(tmp_path, text):
    target = tiny_target(40)
    save(trained(target), target, tmp_path / "d")
    (tmp_path / "d" / "draftsmith.json").write_bytes(text)
    with pytest.raises(UserError, match="broken drafter checkpoint"):
        checkpoint.read_metadata(tmp_path / "d")


@pytest.mark.parametrize(
    "change",
    [
        {"target": 3},
        {"target": {}},
        {"target": {"vocab_size": "40"}},
        {"drafter": []},
        {"drafter": {"kind": "eagle"}},
        {"drafter": {"kind": ["medusa"]}},
        {"drafter": {"kind": "medusa", "heads": 0}},
        {"drafter": {"kind": "medusa", "heads": "many", "rank": [], "more": 1}},
        *({"draft_vocab": ids} for ids in ("all", 3, [], [1, 1], [3, 2], [1, 40], [-1, 2])),
        *({"draft_vocab": ids} for ids in ([True, 2], [1.0, 2], ["1"], [10**30])),
        *({"tree": tree} for tree in (3, [], [0], [[0], [0, "1"]], [[0, 0]], [[0], [0]])),
        *({"tree": tree} for tree in ([[40]], [[0] * n for n in range(1, 5)])),  # wide, deep
    ],
    ids=str,
)
def test_metadata_of_other_kinds_is_a_broken_checkpoint(tmp_path, change):
    target = tiny_target(40)
    save(trained(target), target, tmp_path / "d")
    path = tmp_path / "d" / "draftsmith.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match="broken drafter checkpoint") as caught:
        checkpoint.load_drafter(tmp_path / "d", target)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_metadata_without_a_draft_vocabulary_is_a_broken_checkpoint(tmp_path):
    target = tiny_target(40)
    save(trained(target), target, tmp_path / "d")
    path = tmp_path / "d" / "draftsmith.json"
    meta = json.loads(path.read_text())
    del meta["draft_vocab"]
    path.write_text(json.dumps(meta))
    with pytest.raises(UserError, match="broken drafter checkpoint"):
        checkpoint.load_drafter(tmp_path / "d", target)


def test_another_target_is_refused(tmp_path):
    target = tiny_target(40)
    save(trained(target), target, tmp_path / "d")
    with pytest.raises(UserError, match="hidden_size 32 / 16"):
        checkpoint.load_drafter(tmp_path / "d", tiny_target(40, hidden=16))


def test_a_failed_write_leaves_the_old_folder(tmp_path, monkeypatch):
    target = tiny_target(40)
    save(trained(target, heads=2), target, tmp_path / "d")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save(trained(target, heads=3), target, tmp_path / "d")
    assert checkpoint.load_drafter(tmp_path / "d", target).depth == 2
    assert sorted(os.listdir(tmp_path)) == ["d"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path, monkeypatch):
    target = tiny_target(40)
    save(trained(target, heads=2), target, tmp_path / "d")
    real = os.rename

    def rename(source, place):
        if str(source).startswith(str(tmp_path / ".d-")):
            raise OSError(5, "Input/output error")
        real(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(OSError, match="Input/output"):
            save(trained(target, heads=3), target, tmp_path / "d")
    assert os.listdir(tmp_path) == ["d"]
    assert checkpoint.load_drafter(tmp_path / "d", target).depth == 2


@pytest.mark.parametrize("opened", [True, False], ids=["loaded", "saved"])
def test_a_kill_between_the_renames_loses_nothing(tmp_path, opened, monkeypatch):
    target = tiny_target(40)
    save(trained(target, heads=2), target, tmp_path / "d")
    os.rename(tmp_path / "d", tmp_path / ".d.old")  # as a killed process leaves it
    if opened:
        assert checkpoint.load_drafter(tmp_path / "d", target).depth == 2
    else:
        monkeypatch.setattr(checkpoint, "sync", lambda path: None)
        save(trained(target, heads=3), target, tmp_path / "d")
        assert checkpoint.load_drafter(tmp_path / "d", target).depth == 3
    assert os.listdir(tmp_path) == ["d"]


def test_temporaries_of_killed_runs_are_swept_and_nothing_else(tmp_path):
    target = tiny_target(40)
    for name in (".d-ab12_xyz", ".d-mine", ".d-other-ab12_xyz", ".e-ab12_xyz", "d-ab12_xyz"):
        (tmp_path / name).mkdir()
    save(trained(target), target, tmp_path / "d")
    kept = [".d-mine", ".d-other-ab12_xyz", ".e-ab12_xyz", "d", "d-ab12_xyz"]
    assert sorted(os.listdir(tmp_path)) == kept


def test_a_drafter_that_does_not_name_its_target_s_content_is_not_warned_of(tmp_path, caplog):
    target = tiny_target(40)
    del target.fingerprint["content"]
    save(trained(target), target, tmp_path / "d")
    target.fingerprint["content"] = "another"
    checkpoint.load_drafter(tmp_path / "d", target)
    assert not caplog.text


def test_what_a_model_in_memory_does_not_say_is_not_warned_of(tmp_path, caplog):
    target = tiny_target(40)
    target.fingerprint |= {"revision": "abc", "content": "abc"}
    save(trained(target), target, tmp_path / "d")
    target.fingerprint |= {"revision": "none", "content": "none"}
    checkpoint.load_drafter(tmp_path / "d", target)
    assert not caplog.text


@pytest.mark.parametrize("key", ["model", "revision", "origin", "content"])
def test_another_model_of_the_same_shape_is_warned_of(tmp_path, caplog, key):
    target = tiny_target(40)
    save(trained(target), target, tmp_path / "d")
    checkpoint.load_drafter(tmp_path / "d", target)
    assert not caplog.text
    now = target.fingerprint[key]
    target.fingerprint[key] = "another"
    checkpoint.load_drafter(tmp_path / "d", target)
    assert f"({key} {now} / another; trained / given)" in caplog.text
