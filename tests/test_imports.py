"""Imports run one way: recipes <- drafters <- data <- eval <- train."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("recipes", "drafters", "data", "eval", "train")


def imported_folders(file: Path) -> Iterator[str]:
    """The folders of draftsmith that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "draftsmith":
            names = [f"draftsmith.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        yield from (name.split(".")[1] for name in names if name.startswith("draftsmith."))


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imports_only_those_to_its_left(folder: str) -> None:
    allowed = set(ORDER[: ORDER.index(folder) + 1])
    wrong = [
        f"{file.relative_to(ROOT)} imports draftsmith.{other}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for other in imported_folders(file)
        if other not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("folder", ORDER)
def test_init_holds_a_docstring_and_nothing_else(folder: str) -> None:
    for file in (ROOT / folder).rglob("__init__.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr), file


def test_the_check_sees_a_forbidden_import(tmp_path: Path) -> None:
    for line in (
        "import draftsmith.train.cli",
        "from draftsmith import train",
        "from draftsmith.train.cli import x",
    ):
        file = tmp_path / "module.py"
        file.write_text(f"def f() -> None:\n    {line}\n")
        assert list(imported_folders(file)) == ["train"]
