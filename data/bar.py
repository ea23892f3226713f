"""How far a long piece of work is: a bar on a terminal, a line now and then in a log."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

EVERY = 15.0  # seconds between the lines of a log


class Bar:
    """Counts what is done, and shows it on stderr with its rate and the time that is left."""

    def __init__(
        self, what: str, total: float, unit: str, *, done: float = 0, quiet: bool = False
    ) -> None:
        self.what, self.total, self.unit, self.quiet = what, total, unit, quiet
        self.done = self.before = done  # `before`: done at no cost of time
        self.noted, self.tokens = "", 0
        self.began = self.told = time.perf_counter()
        self.bar: tqdm[Any] | None = None
        if sys.stderr.isatty() and not quiet:
            counts = "{n:.0f}/{total:.0f} {unit} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
            self.bar = tqdm(
                total=total,
                initial=done,
                desc=what,
                unit=unit,
                bar_format="{l_bar}{bar}| " + counts,
                mininterval=0.5,
            )

    def advance(self) -> None:
        """One more is done."""
        self.reach(self.done + 1)

    def reach(self, done: float) -> None:
        """So much is done now."""
        if self.bar is not None:
            self.bar.update(done - self.done)
        self.done = done
        if self.bar is None and not self.quiet and time.perf_counter() - self.told >= EVERY:
            self.tell()

    def skip(self, count: float) -> None:
        """So much was done before: no time was spent on it."""
        self.before += count
        if self.bar is not None:
            self.bar.initial += count
        self.reach(self.done + count)

    def count_tokens(self, more: int) -> None:
        """So many more tokens were made: their rate is shown from now on."""
        self.tokens += more
        self.note(f"{self.tokens / (time.perf_counter() - self.began):.0f} tokens a second")

    def note(self, text: str) -> None:
        """What is shown behind the numbers from now on."""
        self.noted = text
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)

    def say(self, text: str) -> None:
        """Print a line on stdout without breaking the bar."""
        if self.bar is not None:
            self.bar.write(text)
        else:
            print(text, flush=True)

    def tell(self) -> None:
        """Write the line of a log."""
        self.told = time.perf_counter()
        print(self.line(self.told - self.began), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """What is known after so many seconds."""
        made = self.done - self.before
        parts = [f"{self.what}: {self.done:.0f} of {self.total:.0f} {self.unit}"]
        if made > 0 and seconds > 0:
            parts.append(f"{made / seconds:.3g} a second")
            left = (self.total - self.done) * seconds / made
            parts.append(f"{span(left)} left" if self.done < self.total else f"in {span(seconds)}")
        return ", ".join([*parts, self.noted] if self.noted else parts)

    def close(self) -> None:
        """The last word."""
        if self.bar is not None:
            self.bar.close()
        elif not self.quiet:
            self.tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
