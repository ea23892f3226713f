"""What is installed: exactly the five folders under one name, with recipes and starter prompts."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("recipes", "drafters", "data", "eval", "train")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel, built from a copy: a stale build/ would add deleted modules."""
    copy = tmp_path_factory.mktemp("copy")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", "wheels", "."], cwd=copy, check=True)
    (built,) = (copy / "wheels").glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


def expected(pattern: str) -> set[str]:
    """Files of the checkout under the names that they are installed by."""
    return {
        f"draftsmith/{file.relative_to(ROOT)}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob(pattern)
    }


def test_wheel_holds_every_module_and_no_other(wheel: set[str]) -> None:
    assert {name for name in wheel if name.endswith(".py")} == expected("*.py")


def test_no_other_top_level_name_is_installed(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"draftsmith"}
    assert "draftsmith/__init__.py" not in wheel  # a namespace, as in the editable install


def test_wheel_holds_recipes_and_starter_prompts(wheel: set[str]) -> None:
    recipes, prompts = expected("*.yaml"), expected("starter_set/*")
    assert recipes and prompts
    assert recipes | prompts <= wheel


def test_wheel_has_the_license_and_the_command(wheel: set[str]) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel)
    assert any(name.endswith("entry_points.txt") for name in wheel)
