"""A progress bar that reads well in logs too."""

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm


class Bar:
    """Progress in `unit`s, moving within a batch too, with tokens per second and the time left."""

    def __init__(self, total: int, *, name: str, unit: str, shown: bool = True) -> None:
        terminal = sys.stderr.isatty()
        self.done, self.tokens = 0, 0
        self.started = time.perf_counter()
        self.bar = tqdm(
            total=total,
            desc=name,
            unit=unit,
            disable=not shown,
            mininterval=0.5 if terminal else 15,
            bar_format="{l_bar}{bar}| {n:.0f}/{total} {unit} [{elapsed}<{remaining}{postfix}]",
        )

    def skip(self, count: int) -> None:
        """What was done before: no time was spent on it."""
        self.bar.initial += count
        self.finish_batch(count, 0)

    def within_batch(self, part: float) -> None:
        """So much of the running batch is done."""
        self.bar.update(self.done + part - self.bar.n)

    def finish_batch(self, count: int, tokens: int) -> None:
        """A batch is done; so many `tokens` were made in it."""
        self.done += count
        self.tokens += tokens
        if tokens:
            speed = self.tokens / (time.perf_counter() - self.started)
            self.bar.set_postfix_str(f"{speed:.0f} tok/s", refresh=False)
        self.bar.update(self.done - self.bar.n)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.close()
