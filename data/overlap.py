"""Texts that share words: copies of evaluation prompts, and prompts that say the same again.

A run of n words stands for a text. Copies are found by a shared run, as is usual for benchmarks
(GPT-3, 2005.14165, appendix C: 13 words); near duplicates by the share of their runs.
"""

import re
from collections.abc import Iterable

_CJK = "\u3041-\u30ff\u3400-\u9fff"  # kana and Chinese characters: a word each, none has spaces
WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")


def runs_of_words(text: str, count: int) -> set[tuple[str, ...]]:
    """Every run of `count` words, without case and punctuation."""
    words = WORD.findall(text.casefold())
    return {tuple(words[i : i + count]) for i in range(len(words) - count + 1)}


class Runs:
    """The runs of many texts, as numbers: their memory does not depend on the words."""

    def __init__(self, count: int, texts: Iterable[str] = ()) -> None:
        self.count = count  # words; 0: nothing is ever found
        self.known: set[int] = set()
        for text in texts:
            self.add(text)

    def of(self, text: str) -> set[int]:
        """A text's runs. (The numbers are good for one process.)"""
        return set(map(hash, runs_of_words(text, self.count))) if self.count else set()

    def add(self, text: str) -> None:
        """Remember a text."""
        self.known |= self.of(text)

    def touches(self, text: str) -> bool:
        """Whether a text has a run that is known."""
        return not self.known.isdisjoint(self.of(text))

    def share(self, text: str) -> float:
        """How many of a text's runs are known, from 0 to 1; shorter texts have none."""
        runs = self.of(text)
        return len(runs & self.known) / len(runs) if runs else 0.0
