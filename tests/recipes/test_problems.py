"""Messages for schemas that recipes will grow into: several kinds of one block."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError

from draftsmith.recipes.problems import explain
from draftsmith.recipes.schema import Block


class Heads(Block):
    """One kind."""

    kind: Literal["medusa"] = "medusa"
    heads: int = 5


class Chain(Block):
    """Another."""

    kind: Literal["mtp"]
    depth: Annotated[int, Field(ge=1)] = 3


class Whole(Block):
    """A block of either kind."""

    drafter: Annotated[Heads | Chain, Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("drafter", "problem"),
    [
        ({"kind": "eagle"}, ("drafter.kind", "'eagle' is not allowed; allowed: medusa, mtp")),
        ({}, ("drafter.kind", "null is not allowed; allowed: medusa, mtp")),
        (
            {"kind": "mtp", "depth": 0},
            ("drafter.depth", "0 is not allowed; allowed: a whole number at least 1"),
        ),
        ({"kind": "mtp", "deph": 2}, ("drafter.deph", "unknown key; did you mean drafter.depth?")),
        (
            {"kind": "mtp", "heads": 2},
            ("drafter.heads", "unknown key; allowed here: kind, depth"),
        ),
        (
            3,
            (
                "drafter",
                "3 is not allowed; allowed: keys such as kind, heads or keys such as kind, depth",
            ),
        ),
    ],
)
def test_kinds_are_not_part_of_a_key(drafter: object, problem: tuple[str, str]) -> None:
    data = {"drafter": drafter}
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(data, strict=True)
    assert explain(caught.value, data, Whole) == [problem]
