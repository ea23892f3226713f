"""Proof on real prompts: every arm's greedy output is the target's own, and the walk counts its rounds.

`python -m draftsmith.eval.exact CHECKPOINT [--prompts N] [--max-new-tokens N] [--dtype D]`
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from draftsmith.drafters.checkpoint import load_drafter, read_metadata
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.assemble import documents_of
from draftsmith.eval.bench import Arm, BenchPrompt, greedy_arms, run_arm
from draftsmith.eval.check import Answer, greedy_divergences
from draftsmith.eval.prompts import evaluation_prompts
from draftsmith.eval.stage import stored_recipe
from draftsmith.eval.summary import Trial, emitted
from draftsmith.eval.walk import RankTable, rank_table, walk
from draftsmith.recipes.entry import guard
from draftsmith.recipes.schema import Recipe


@dataclass(frozen=True)
class Finding:
    """What an arm's output was found to be."""

    arm: str
    tokens: int
    differing: int  # answers that are not the plain arm's, token by token
    margins: list[float]  # of tokens that are not the argmax of a whole-answer pass
    decoded: tuple[int, int]  # tokens, rounds
    walked: tuple[int, int] | None

    @property
    def exact(self) -> bool:
        """Whether nothing differs: not the argmax, not the plain arm's answer, not the walk."""
        same_rounds = self.walked is None or self.walked == self.decoded
        return not self.margins and self.differing == 0 and same_rounds

    def sentence(self) -> str:
        """One line of the result."""
        worst = f" (largest margin {max(self.margins):.3g} logits)" if self.margins else ""
        tokens, rounds = self.decoded
        tau = f"tau {tokens}/{rounds} = {tokens / max(1, rounds):.4f}"
        walk = "" if self.walked is None else f", walk {self.walked[0]}/{self.walked[1]}"
        return (
            f"{self.arm}: {self.tokens} tokens, {len(self.margins)} not the argmax{worst}, "
            f"{self.differing} answers unlike plain, {tau}{walk}"
        )


def examine(
    target: Target, arms: Sequence[Arm], prompts: Sequence[BenchPrompt], *, max_new_tokens: int
) -> list[Finding]:
    """Decode every prompt with every greedy arm (the first is plain) and compare."""
    plain = decode_all(target, arms[0], prompts, max_new_tokens)
    table: RankTable | None = None
    findings = [compare(target, arms[0], plain, plain, prompts, None)]
    for arm in arms[1:]:
        trials = decode_all(target, arm, prompts, max_new_tokens)
        if arm.drafter is not None and table is None:
            documents = documents_of(plain, prompts, greedy=True)
            table = rank_table(target, arm.drafter, documents)
        findings.append(compare(target, arm, trials, plain, prompts, table))
    return findings


def decode_all(
    target: Target, arm: Arm, prompts: Sequence[BenchPrompt], max_new_tokens: int
) -> list[Trial]:
    """One answer per prompt."""
    return [
        Trial(
            index,
            prompt.category,
            run_arm(target, arm, prompt.ids, max_new_tokens=max_new_tokens, seed=0),
        )
        for index, prompt in enumerate(tqdm(prompts, desc=arm.name, disable=None))
    ]


def compare(
    target: Target,
    arm: Arm,
    trials: Sequence[Trial],
    plain: Sequence[Trial],
    prompts: Sequence[BenchPrompt],
    table: RankTable | None,
) -> Finding:
    """Hold an arm's answers against the target, the plain arm, and the walk."""
    answers = [Answer(prompts[trial.prompt].ids, trial.decoded.tokens) for trial in trials]
    pairs = zip(trials, plain, strict=True)
    walked = None
    if arm.drafter is not None and table is not None:
        total = walk(table, arm.tree).total
        walked = (total.emitted, total.rounds)
    return Finding(
        arm=arm.name,
        tokens=sum(len(answer.output) for answer in answers),
        differing=sum(mine.decoded.tokens != theirs.decoded.tokens for mine, theirs in pairs),
        margins=[d.margin for one in greedy_divergences(target, answers) for d in one],
        decoded=(sum(map(emitted, trials)), sum(len(t.decoded.rounds) for t in trials)),
        walked=walked,
    )


def stored_tree(folder: Path, depth: int) -> Tree:
    """The tree that the drafter's folder carries, else a bushy one: both must be exact."""
    paths = read_metadata(folder).get("tree")
    if paths is not None:
        return Tree(tuple(tuple(path) for path in paths))
    wide = [(rank, *(0,) * more) for rank in range(3) for more in range(depth)]
    return Tree(tuple(wide))


def settings(arguments: argparse.Namespace, folder: Path) -> Recipe:
    """The folder's recipe under the command line's conditions."""
    overrides = [f"target.dtype={arguments.dtype}", "eval.temperature=0"]
    overrides.append(f"eval.prompts={arguments.prompts or 'null'}")
    if arguments.max_new_tokens is not None:
        overrides.append(f"eval.max_new_tokens={arguments.max_new_tokens}")
    return stored_recipe(read_metadata(folder), folder, overrides)


def check(arguments: argparse.Namespace) -> None:
    """Examine, print, and fail where fp32 is not exact."""
    folder = Path(arguments.checkpoint)
    recipe = settings(arguments, folder)
    target = Target.load(recipe.target)
    drafter = load_drafter(folder, target)
    straight = chain(drafter.depth).to(target.device)
    tree = stored_tree(folder, drafter.depth).to(target.device)
    arms = greedy_arms(drafter, recipe.drafter.kind, straight, tree)
    prompts, _ = evaluation_prompts(target, recipe)
    findings = examine(target, arms, prompts, max_new_tokens=recipe.eval.max_new_tokens)
    print(
        f"{len(prompts)} prompts, {recipe.target.model} "
        f"({target.fingerprint['origin']} weights), {recipe.target.dtype}"
    )
    for finding in findings:
        print(finding.sentence())
    exact = all(finding.exact for finding in findings)
    print("exact" if exact else "not exact")
    if target.dtype == torch.float32 and not exact:
        raise SystemExit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 when exact or in half precision, 1 when not, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m draftsmith.eval.exact", description=__doc__)
    parser.add_argument("checkpoint", help="a drafter's folder")
    parser.add_argument("--prompts", type=int, help="at most this many; all by default")
    parser.add_argument("--max-new-tokens", type=int, help="the recipe's by default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args(argv)
    return guard(lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
