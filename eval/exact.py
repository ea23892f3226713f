"""Proof on real prompts: greedy output of every arm is the target's, and the walk is exact.

`python -m draftsmith.eval.exact [CHECKPOINT] [--prompts N] [--max-new-tokens N] [--dtype D]`
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.data.bar import Bar
from draftsmith.drafters.adapted import load_target
from draftsmith.drafters.checkpoint import load_drafter, read_metadata
from draftsmith.drafters.methods import Drafter, build
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.arms import Arm, Candidate, greedy_arms
from draftsmith.eval.assemble import documents_of, judge_greedy, told_quantisation
from draftsmith.eval.bench import BenchPrompt, run_arm
from draftsmith.eval.check import Answer, Divergence, greedy_divergences
from draftsmith.eval.prompts import evaluation_prompts
from draftsmith.eval.stage import stored_recipe
from draftsmith.eval.summary import Trial, emitted
from draftsmith.eval.walk import RankTable, recipe_ranks, walk
from draftsmith.recipes.entry import Parser, guard, run_folder
from draftsmith.recipes.files import user_path
from draftsmith.recipes.load import load_recipe
from draftsmith.recipes.schema import Recipe

DEMO = "smollm2-135m_medusa_demo"


@dataclass(frozen=True)
class Finding:
    """What an arm's output was found to be."""

    arm: str
    tokens: int
    differing: int  # answers that are not the plain arm's, token by token
    divergences: list[Divergence]
    decoded: tuple[int, int]  # tokens, rounds
    walked: tuple[int, int] | None

    @property
    def exact(self) -> bool:
        """Whether nothing differs: not the argmax, not the plain arm's answer, not the walk."""
        same_rounds = self.walked is None or self.walked == self.decoded
        return not self.divergences and self.differing == 0 and same_rounds

    def passed(self, dtype: torch.dtype) -> bool:
        """fp32: exact. Half precision: no margin beyond what rounding can turn."""
        if dtype == torch.float32:
            return self.exact
        return judge_greedy(self.divergences, self.tokens, dtype)[0]

    def sentence(self, dtype: torch.dtype) -> str:
        """One line of the result."""
        tokens, rounds = self.decoded
        tau = f"tau {tokens}/{rounds} = {tokens / max(1, rounds):.4f}"
        walk = "" if self.walked is None else f", walked {self.walked[0]}/{self.walked[1]}"
        judgement = judge_greedy(self.divergences, self.tokens, dtype)[1]
        return f"{self.arm}: {judgement}; {self.differing} answers unlike plain; {tau}{walk}"


def examine(
    recipe: Recipe, target: Target, arms: Sequence[Arm], prompts: Sequence[BenchPrompt]
) -> list[Finding]:
    """Decode every prompt with every greedy arm (the first is plain) and compare."""
    max_new_tokens = recipe.eval.max_new_tokens
    plain = decode_all(target, arms[0], prompts, max_new_tokens)
    table: RankTable | None = None
    findings = [compare(target, arms[0], plain, plain, prompts, None)]
    for arm in arms[1:]:
        trials = decode_all(target, arm, prompts, max_new_tokens)
        if arm.drafter is not None and arm.drafter.config.walks and table is None:
            documents = documents_of(plain, prompts, greedy=True)
            table = recipe_ranks(recipe, target, arm.drafter, documents)
        findings.append(compare(target, arm, trials, plain, prompts, table))
    return findings


def decode_all(
    target: Target, arm: Arm, prompts: Sequence[BenchPrompt], max_new_tokens: int
) -> list[Trial]:
    """One answer per prompt."""
    trials = []
    with Bar(arm.name, len(prompts), "answers") as bar:
        for index, prompt in enumerate(prompts):
            limit = max_new_tokens
            (decoded,) = run_arm(target, arm, [prompt.ids], max_new_tokens=limit, seeds=[0])
            trials.append(Trial(index, prompt.category, decoded))
            bar.advance()
    return trials


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
        divergences=[d for one in greedy_divergences(target, answers) for d in one],
        decoded=(sum(map(emitted, trials)), sum(len(t.decoded.rounds) for t in trials)),
        walked=walked,
    )


@dataclass(frozen=True)
class Subject:
    """What is examined."""

    recipe: Recipe
    target: Target
    drafter: Drafter
    tree: Tree


def open_subject(arguments: argparse.Namespace, dtype: str) -> Subject:
    """The given drafter; else the demo's; else heads that nobody trained."""
    prompts = "null" if arguments.prompts is None else arguments.prompts
    overrides = [f"target.dtype={dtype}", f"eval.prompts={prompts}"]
    if arguments.max_new_tokens is not None:
        overrides.append(f"eval.max_new_tokens={arguments.max_new_tokens}")
    if arguments.checkpoint is not None:
        return load_subject(user_path(arguments.checkpoint), overrides)
    recipe = load_recipe(DEMO, overrides)
    folder = run_folder(recipe) / "drafter"
    if folder.is_dir():
        return load_subject(folder, overrides)
    print(
        f"{folder} is not there: fresh heads take its place; they are exact too, and accept little"
    )
    target = Target.load(recipe.target)
    drafter = build(recipe.drafter.model_copy(update={"draft_vocab": None}), target, None)
    return Subject(recipe, target, drafter, bushy_tree(drafter))


def load_subject(folder: Path, overrides: Sequence[str]) -> Subject:
    """A drafter's folder under the command line's conditions."""
    meta = read_metadata(folder)
    recipe = stored_recipe(meta, folder, overrides)
    target = load_target(recipe.target, folder, meta)
    drafter = load_drafter(folder, target)
    paths = meta.get("tree")
    tree = bushy_tree(drafter) if paths is None else Tree(tuple(map(tuple, paths)))
    return Subject(recipe, target, drafter, tree)


def bushy_tree(drafter: Drafter) -> Tree:
    """Three guesses of the first slot (if it has as many), each with a chain below."""
    ranks = range(min(3, drafter.width))
    return Tree(tuple((rank, *(0,) * more) for rank in ranks for more in range(drafter.depth)))


def check(subject: Subject) -> bool:
    """Examine and print; whether nothing was found that rounding does not explain."""
    recipe, target, drafter = subject.recipe, subject.target, subject.drafter
    straight = chain(drafter.depth).to(target.device)
    tree = subject.tree.to(target.device)
    arms = greedy_arms(Candidate(recipe.drafter.kind, drafter, straight, tree))
    prompts, _ = evaluation_prompts(target, recipe)
    findings = examine(recipe, target, arms, prompts)
    print(
        f"\n{target.name} ({told_quantisation(target.fingerprint)}), {recipe.target.dtype}, "
        f"{len(prompts)} prompts, at most {recipe.eval.max_new_tokens} tokens each"
    )
    passed = [finding.passed(target.dtype) for finding in findings]
    for finding in findings:
        print(finding.sentence(target.dtype))
    print("passed" if all(passed) else "FAILED")
    return all(passed)


def run(arguments: argparse.Namespace) -> None:
    """One check per precision; ends the process with 1 when one fails."""
    dtypes = ("float32", "bfloat16") if arguments.dtype == "both" else (arguments.dtype,)
    if not all([check(open_subject(arguments, dtype)) for dtype in dtypes]):
        raise SystemExit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 when the checks pass, 1 when one fails, 2 for bad input."""
    parser = Parser(prog="python -m draftsmith.eval.exact", description=__doc__)
    parser.add_argument("checkpoint", nargs="?", help="a drafter's folder; the demo's by default")
    parser.add_argument("--prompts", type=int, help="at most this many; all by default")
    parser.add_argument("--max-new-tokens", type=int, help="the recipe's by default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    return guard(lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
