"""The resolved recipe beside a run's results."""

import subprocess
from pathlib import Path

import pytest

from draftsmith.recipes import provenance
from draftsmith.recipes.files import write_text
from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.provenance import git_revision, write_resolved


def test_the_resolved_recipe_reloads_and_names_its_origin(tmp_path: Path) -> None:
    recipe = load_recipe("smollm2-135m_medusa", ["optim.lr=3e-4"])
    write_resolved(recipe, tmp_path, ["draftsmith", "run", "a b\nseed: 3", "optim.lr=3e-4"])
    text = (tmp_path / "recipe.yaml").read_text()
    assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe
    assert "optim.lr=3e-4" in text and "revision: " in text and "torch 2." in text
    write_resolved(recipe, tmp_path, ["draftsmith", "run", "a b\nseed: 3", "optim.lr=3e-4"])
    assert (tmp_path / "recipe.yaml").read_text() == text


def test_the_revision_is_draftsmiths_own_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True
        )

    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "schema.py").write_text("one")
    monkeypatch.setattr(provenance.resources, "files", lambda name: folder)
    assert git_revision() == "not a checkout"
    git("init")
    assert git_revision() == "not a checkout"  # in a repository, and not of it
    git("add", ".")
    git("commit", "-m", "first")
    revision = git_revision()
    assert len(revision) == 40
    (folder / "schema.py").write_text("two")
    assert git_revision() == f"{revision} with changes"


def test_a_file_is_there_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "file"
    write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
