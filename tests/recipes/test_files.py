"""Paths as users write them."""

from pathlib import Path

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path


def test_the_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a"
    assert user_path("a/~b") == Path("a/~b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("~nobody-of-this-name/a", "the home folder that ~ stands for is not known"),
        ("a\0b", "holds a NUL character"),
        ("a\ud800b", "holds half a surrogate pair"),
    ],
    ids=["nobody's home", "NUL", "half a pair"],
)
def test_what_no_system_opens_is_one_clear_line(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        user_path(text)
    assert str(caught.value).isprintable()
