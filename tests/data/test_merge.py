"""Rows of several machines as one folder; what the commands say of it."""

import json
import re
from pathlib import Path

import pytest

from draftsmith.data.distill import distil
from draftsmith.data.rows import check_complete, lacks_rows, read_rows
from draftsmith.data.tools import TOOLS
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from tests.data.asking import MIXED, make_config, make_prompts
from tests.data.serving import Server, ascii_target
from tests.data.test_conversations import talks


def files(folder: Path) -> dict[str, object]:
    """Manifest and rows, in whatever order they were written."""
    return {"manifest": (folder / "manifest.json").read_text(), "rows": read_rows(folder)}


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_shares_together_are_what_one_machine_makes(
    target: Target, tmp_path: Path, shares: int
) -> None:
    distil(target, make_prompts(30), make_config(**MIXED), tmp_path / "one", seed=0)
    folders = [tmp_path / str(share) for share in range(shares)]
    for share, folder in enumerate(folders, start=1):
        config = make_config(**MIXED, share=(share, shares))
        distil(target, make_prompts(30), config, folder, seed=0)
        if shares > 1:
            with pytest.raises(UserError, match="rows are missing"):
                check_complete(folder)
    TOOLS["merge"]([str(tmp_path / "all"), *map(str, folders)])
    assert files(tmp_path / "all") == files(tmp_path / "one")
    check_complete(tmp_path / "all")
    again = distil(target, make_prompts(30), make_config(**MIXED), tmp_path / "all", seed=0)
    assert again.made == 0
    TOOLS["merge"]([*map(str, folders), str(folders[0])])
    assert files(folders[0]) == files(tmp_path / "one")


def test_turns_are_merged_by_turn(target: Target, tmp_path: Path) -> None:
    distil(target, talks(12), make_config(max_new_tokens=30), tmp_path / "one", seed=0)
    for share in (1, 2):
        config = make_config(max_new_tokens=30, batch_size=4, share=(share, 2))
        distil(target, talks(12), config, tmp_path / str(share), seed=0)
    TOOLS["merge"]([str(tmp_path / "all"), str(tmp_path / "1"), str(tmp_path / "2")])
    assert read_rows(tmp_path / "all") == read_rows(tmp_path / "one")
    check_complete(tmp_path / "all")
    whole = make_config(max_new_tokens=30, batch_size=4)
    assert distil(target, talks(12), whole, tmp_path / "all", seed=0).made == 0


def test_other_prompts_join_and_repeated_rows_do_not(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = make_prompts(30)
    for name, some in (("a", prompts[:20]), ("b", prompts[10:])):
        distil(target, some, make_config(), tmp_path / name, seed=0)
    distil(target, prompts, make_config(), tmp_path / "one", seed=0)
    TOOLS["merge"]([str(tmp_path / "all"), str(tmp_path / "a"), str(tmp_path / "b")])
    assert "30 rows, 0 dropped prompts, 10 repeated rows left out" in capsys.readouterr().out
    assert files(tmp_path / "all") == files(tmp_path / "one")


def test_rows_that_cannot_be_mixed_are_refused_before_anything_is_written(
    target: Target, tmp_path: Path
) -> None:
    prompts = make_prompts(6)
    distil(target, prompts, make_config(), tmp_path / "a", seed=0)
    distil(target, prompts, make_config(temperature=0.5), tmp_path / "b", seed=0)
    distil(target, prompts[:4], make_config(share=(1, 2), batch_size=2), tmp_path / "c", seed=0)
    distil(target, prompts, make_config(batch_size=2), tmp_path / "d", seed=0)
    other = [make_prompts(3)[2], *prompts[3:]]
    renamed = [type(other[0])("k5", "c", other[0].messages), *prompts[:2]]
    distil(target, renamed, make_config(), tmp_path / "e", seed=0)
    for pair, says in (
        ("ab", r"distil\.temperature: 0\.0 there, 0\.5 here"),
        ("cd", "2 of its rows are missing"),
        ("ae", "its key 'k5' is another prompt"),
        ("ax", "holds no manifest.json"),
    ):
        with pytest.raises(UserError, match=says):
            TOOLS["merge"]([str(tmp_path / "out"), *(str(tmp_path / one) for one in pair)])
        assert not (tmp_path / "out").exists()


def test_dropped_prompts_are_merged_and_counted_by_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, count = ascii_target(), 20
    nonsense = {"choices": [{"text": "\ufffd", "finish_reason": "stop"}]}
    with Server(
        target, fault=lambda _, body: nonsense if body["seed"] % 3 == 0 else None
    ) as server:
        for share in (1, 2):
            config = make_config(
                backend="openai",
                urls=(server.url,),
                share=(share, 2),
                max_new_tokens=3,
                batch_size=5,
            )
            distil(target, make_prompts(count), config, tmp_path / str(share), seed=0)
    TOOLS["merge"]([str(tmp_path / "all"), str(tmp_path / "1"), str(tmp_path / "2")])
    rows = len(read_rows(tmp_path / "all"))
    assert 0 < rows < count and not lacks_rows(tmp_path / "all")
    check_complete(tmp_path / "all")
    capsys.readouterr()
    TOOLS["stats"]([str(tmp_path / "all")])
    said = capsys.readouterr().out
    (line,) = re.findall(r"^c +.*$", said, re.MULTILINE)
    assert line.split()[1] == str(rows) and line.split()[-1] == str(count - rows)
    assert "text cut inside a character" in said and "missing" not in said


def test_stats_count_what_the_run_s_recipe_drops(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    distil(target, make_prompts(20), make_config(), tmp_path / "rows", seed=0)
    (tmp_path / "rows" / "left_out.json").write_text(json.dumps({"duplicate": 7}))
    recipe = "name: x\ntarget: {model: tiny}\ndata: {cut_answers: drop}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    cut = sum(row["finish_reason"] == "length" for row in read_rows(tmp_path / "rows"))
    TOOLS["stats"]([str(tmp_path)])
    said = capsys.readouterr().out
    (line,) = re.findall(r"^c +.*$", said, re.MULTILINE)
    assert line.split()[1] == "20" and line.split()[-1] == str(cut) and cut > 0
    assert "prompts that were not asked: 7 duplicate" in said


def test_inspect_shows_answers_in_green(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    from draftsmith.recipes.schema import TargetConfig

    told = Target.load(TargetConfig(model=str(tiny_folder), device="cpu"))
    distil(told, make_prompts(5), make_config(), tmp_path, seed=0)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    TOOLS["inspect"]([str(tmp_path), "--count", "2"])
    said = capsys.readouterr().out
    assert said.count("tokens supervised") == 2 and said.count("\x1b[32m") == 2
    TOOLS["inspect"]([str(tmp_path), "--key", "k3"])
    assert capsys.readouterr().out.startswith("k3 (c), temperature 0.0, finish reason ")
    with pytest.raises(UserError, match="no row of that key or source"):
        TOOLS["inspect"]([str(tmp_path), "--source", "nobody"])
