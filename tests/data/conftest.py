"""The tiny target that answers."""

import pytest

from draftsmith.drafters.target import Target
from tests.data.asking import ENDS
from tests.tiny import tiny_target


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target(eos=ENDS)
