"""Every random number of decoding: drafts, acceptance tests and corrections draw from here.

One place, so that tests can put an enumeration of all outcomes in its stead and read off the exact
law of what the real code emits.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.drafters.sampler import inverse


class Coins(Protocol):
    """What decides by chance. `rows` [b] says whose numbers are used: a row's outcomes depend on
    its own seed, and not on who else is in the batch.
    """

    def draw(self, law: Tensor, rows: Tensor) -> Tensor:
        """One token [b] from every law [b, V]; a law need not sum to 1."""
        ...

    def flip(self, p: Tensor, q: Tensor, rows: Tensor) -> Tensor:
        """True with probability min(1, p / q), for p, q [b]; never where p is 0."""
        ...


class SeededCoins:
    """One generator per row of the batch."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def uniform(self, rows: Tensor) -> Tensor:
        """The next number in [0, 1) of these rows, [b] fp64."""
        numbers = [
            torch.rand((), generator=self.generators[row], dtype=torch.float64)
            for row in rows.tolist()
        ]
        return torch.stack(numbers).to(rows.device)

    def draw(self, law: Tensor, rows: Tensor) -> Tensor:
        """One token [b] from every law [b, V]."""
        return inverse(law, self.uniform(rows))

    def flip(self, p: Tensor, q: Tensor, rows: Tensor) -> Tensor:
        """u q < p, strictly: a token of probability 0 is never accepted."""
        return self.uniform(rows) * q < p


class SeatedCoins:
    """The coins of a batch that rows have left: row i goes on with the numbers of seats[i]."""

    def __init__(self, coins: Coins, seats: Tensor) -> None:
        self.coins, self.seats = coins, seats

    def draw(self, law: Tensor, rows: Tensor) -> Tensor:
        """One token [b] from every law [b, V]."""
        return self.coins.draw(law, self.seats[rows])

    def flip(self, p: Tensor, q: Tensor, rows: Tensor) -> Tensor:
        """True with probability min(1, p / q), [b]."""
        return self.coins.flip(p, q, self.seats[rows])
