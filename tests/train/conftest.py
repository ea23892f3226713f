"""A target of the toy language, and a run with its rows."""

import pytest

from tests.train.counting import counting_row, save_rows, save_target


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(target, tmp_path):
    return save_rows(tmp_path / "run", [counting_row(number) for number in range(48)], target)
