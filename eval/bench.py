"""The interleaved measurement: each prompt by every arm in turn, in one process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from draftsmith.data.bar import Bar
from draftsmith.drafters.target import Target
from draftsmith.eval.arms import Arm
from draftsmith.eval.decode import Decoded, decode_batch
from draftsmith.eval.reference import generate_batch
from draftsmith.eval.results import Results, packed, unpacked
from draftsmith.eval.summary import Trial


@dataclass(frozen=True)
class BenchPrompt:
    """A rendered evaluation prompt."""

    key: str
    category: str
    ids: list[int]
    text: str  # the last turn, for people


@dataclass(frozen=True)
class Cell:
    """What is measured at once: prompts that one arm decodes together."""

    arm: Arm
    repeat: int
    unit: int  # among the groups of this batch size
    prompts: list[int]  # their indices

    @property
    def key(self) -> tuple[str | int, ...]:
        """Its name among the results."""
        return (self.arm.name, self.repeat, self.unit)


def measure(
    target: Target,
    arms: Sequence[Arm],
    prompts: Sequence[BenchPrompt],
    results: Results,
    *,
    max_new_tokens: int,
    repeats: int,
    seed: int,
) -> dict[str, list[Trial]]:
    """Decode every prompt with every arm, `repeats` times; the order of arms rotates."""
    cells = list(cells_of(arms, len(prompts), repeats))
    missing = [cell for cell in cells if not results.has(cell.key)]
    for arm in {cell.arm.name: cell.arm for cell in missing}.values():  # warm-up, thrown away
        some = [prompts[at].ids for at in range(arm.batch)]
        limit = min(16, max_new_tokens)
        run_arm(target, arm, some, max_new_tokens=limit, seeds=[seed] * arm.batch)
    trials: dict[str, list[Trial]] = {arm.name: [] for arm in arms}
    with Bar("measure", len(cells), "cells", done=len(cells) - len(missing)) as bar:
        for cell in cells:
            new = not results.has(cell.key)
            trials[cell.arm.name] += measure_cell(
                target, cell, prompts, results, max_new_tokens=max_new_tokens, seed=seed
            )
            if new:
                bar.advance()
    return trials


def cells_of(arms: Sequence[Arm], prompts: int, repeats: int) -> Iterator[Cell]:
    """Every cell: of each batch size the groups of prompts in turn, of each group the arms."""
    by_batch = sorted(arms, key=lambda arm: arm.batch)  # stable
    for batch, group in groupby(by_batch, key=lambda arm: arm.batch):
        alike = list(group)
        units = prompts // batch  # what is left of the prompts makes no whole batch
        for repeat in range(repeats):
            for unit in range(units):
                together = list(range(unit * batch, (unit + 1) * batch))
                for arm in rotated(alike, repeat + unit):
                    yield Cell(arm, repeat, unit, together)


def rotated(arms: Sequence[Arm], start: int) -> list[Arm]:
    """The arms in turn, another one first each time."""
    start %= len(arms)
    return [*arms[start:], *arms[:start]]


def measure_cell(
    target: Target,
    cell: Cell,
    prompts: Sequence[BenchPrompt],
    results: Results,
    *,
    max_new_tokens: int,
    seed: int,
) -> list[Trial]:
    """One trial per prompt of the cell."""
    seeds = [seed + cell.repeat * len(prompts) + index for index in cell.prompts]
    ids = [prompts[index].ids for index in cell.prompts]

    def run() -> list[list[object]]:
        found = run_arm(target, cell.arm, ids, max_new_tokens=max_new_tokens, seeds=seeds)
        return [packed(decoded) for decoded in found]

    answers = [unpacked(value) for value in results.once(cell.key, run)]
    return [
        Trial(index, prompts[index].category, decoded, unit=cell.unit, repeat=cell.repeat)
        for index, decoded in zip(cell.prompts, answers, strict=True)
    ]


def run_arm(
    target: Target,
    arm: Arm,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    seeds: Sequence[int],
) -> list[Decoded]:
    """Answers of one arm to prompts that are decoded together."""
    if arm.engine == "transformers":
        return generate_batch(
            target, prompts, max_new_tokens=max_new_tokens, assistance=arm.assistance
        )
    return decode_batch(
        arm.target or target,
        arm.drafter,
        prompts,
        sampling=arm.sampling,
        max_new_tokens=max_new_tokens,
        seeds=seeds,
        tree=arm.tree,
        rule=arm.rule,
        draw=arm.draw,
    )
