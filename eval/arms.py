"""Arms: every way of decoding that a report compares, and why some are not among them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.proposal import Draw
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree
from draftsmith.eval.rules import RULES
from draftsmith.eval.verify import RuleSpec, point_mass
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import EvalConfig, PromptLookupConfig

PLAIN, GENERATE = "plain", "transformers.generate"
ORIGINAL = "plain, original target"  # of an adapted one
ASSISTED, LOOKUP = "transformers assisted", "transformers prompt lookup"
LOOKUP_TOKENS = "prompt_lookup_num_tokens"  # transformers' name, by which its lookup is told
GRAPHS = ", CUDA graphs"  # a name's mark of recorded passes
TOKEN_RULES = ("multi_step", "without_replacement", "k_sequential")  # token rejection on a chain
AT_ZERO = ("lenient",)  # rules of sampling that say something at temperature 0 too


@dataclass(frozen=True)
class Arm:
    """One way of decoding. `baseline` names the arm that its speedup is over."""

    name: str
    baseline: str
    sampling: Sampling
    engine: Literal["draftsmith", "transformers", "served"] = "draftsmith"
    kind: str | None = None  # the drafter's name in the report
    drafter: Drafter | None = None
    tree: Tree | None = None
    rule: RuleSpec = point_mass
    draw: Draw = "point"
    assistance: Mapping[str, Any] | None = None  # what `transformers` drafts with
    batch: int = 1  # prompts that are decoded together
    target: Target | None = None  # that decodes in the place of the report's: one that is recorded,
    original: bool = False  # or what the report's was before it was adapted, judged by its own law

    @property
    def acceptance(self) -> str:
        """How tokens are accepted, or chosen where nothing is drafted."""
        if self.drafter is None:
            return "none (greedy)" if self.sampling.greedy else "none (sampling)"
        return "greedy" if self.sampling.greedy and self.rule.lossless else self.rule.described


@dataclass(frozen=True)
class Candidate:
    """A drafter and the tree that was chosen for it."""

    name: str
    drafter: Drafter
    chain: Tree
    tree: Tree

    @cached_property
    def assistance(self) -> Mapping[str, Any] | None:
        """What transformers can draft with in its place. Kept: it may be a model made for that."""
        return self.drafter.assistance()

    @property
    def shapes(self) -> Mapping[str, Tree]:
        """The chain of all slots, and the tree where that is another shape."""
        if self.tree.paths == self.chain.paths:
            return {"chain": self.chain}
        name = f"chain of {self.tree.nodes}" if self.tree.is_chain else "tree"
        return {"chain": self.chain, name: self.tree}


@dataclass(frozen=True)
class Grid:
    """Arms in the order of the report, and what was asked for and cannot be: name -> why."""

    arms: list[Arm] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def sampling_of(config: EvalConfig) -> Sampling | None:
    """The sampled arms' law, if there are such arms."""
    if config.temperature == 0.0:
        return None
    return Sampling(config.temperature, config.top_k, config.top_p)


def make_grid(
    candidates: Sequence[Candidate],
    config: EvalConfig,
    *,
    prompts: int,
    follows: bool = False,
    recorded: Target | None = None,
    original: Target | None = None,
) -> Grid:
    """Every drafter by every shape, rule, temperature and batch size, and what they are held to.

    follows: whether the target has states that follow one path of tokens, so that it takes no
    trees. original: what the target was before it was adapted. recorded: the target with passes
    that are recorded, by which batches of one are decoded as well.
    """
    grid, sampled = Grid(), sampling_of(config)
    for batch in config.batches:
        if batch > prompts:
            grid.skipped[f"every arm{batched(batch)}"] = f"there are {prompts} prompts"
            continue
        for sampling in [Sampling(), *([] if sampled is None else [sampled])]:
            suffix = heated(sampling) + batched(batch)
            plain = Arm(PLAIN + suffix, PLAIN + suffix, sampling, batch=batch)
            grid.arms.append(plain)
            if original is not None:
                name = ORIGINAL + suffix
                grid.arms.append(replace(plain, name=name, target=original, original=True))
            if sampling.greedy:
                add_references(grid, candidates, plain)
            for candidate in candidates:
                for shape, tree in candidate.shapes.items():
                    if follows and not tree.is_chain:
                        name = f"{candidate.name} {shape}{suffix}"
                        grid.skipped[name] = "the target's recurrent states take no trees"
                        continue
                    add_drafted(grid, candidate, shape, tree, config.rules, plain)
    if recorded is not None:
        grid.arms.extend([graphed(arm, recorded) for arm in grid.arms if may_be_graphed(arm)])
    if not grid.arms:
        raise UserError(
            f"eval.batches: {list(config.batches)} are all more than the {prompts} prompts; give a "
            "smaller batch size, or more prompts (eval.prompts)"
        )
    return grid


def may_be_graphed(arm: Arm) -> bool:
    """Recorded passes are of one prompt, and of our loop."""
    return arm.batch == 1 and arm.engine == "draftsmith" and not arm.original


def graphed(arm: Arm, recorded: Target) -> Arm:
    """The same arm by recorded passes."""
    return replace(arm, name=arm.name + GRAPHS, baseline=arm.baseline + GRAPHS, target=recorded)


def heated(sampling: Sampling) -> str:
    """A name's mark of its temperature."""
    return "" if sampling.greedy else f" T={sampling.temperature:g}"


def batched(batch: int) -> str:
    """A name's mark of its batch size."""
    return "" if batch == 1 else f" B={batch}"


def add_references(grid: Grid, candidates: Sequence[Candidate], plain: Arm) -> None:
    """transformers' own ways, greedy: plain, assisted by our draft models, prompt lookup."""
    suffix = batched(plain.batch)

    def reference(name: str, assistance: Mapping[str, Any] | None = None) -> Arm:
        return Arm(
            name + suffix,
            plain.name,
            plain.sampling,
            engine="transformers",
            assistance=assistance,
            batch=plain.batch,
        )

    grid.arms.append(reference(GENERATE))
    for name, assistance in assistances(candidates).items():
        if plain.batch == 1:
            grid.arms.append(reference(name, assistance))
        else:
            grid.skipped[name + suffix] = "transformers drafts for one prompt at a time"
    for candidate in candidates:
        if candidate.assistance is None and plain.batch == 1:
            name = f"{ASSISTED} by {candidate.name}"
            grid.skipped[name] = "transformers' assisted generation cannot use this drafter"


def assistances(candidates: Sequence[Candidate]) -> dict[str, Mapping[str, Any]]:
    """What transformers can draft with, by the arm's name. A comparison always has its lookup."""
    given = [(one.name, one.assistance) for one in candidates]
    usable = [(name, assistance) for name, assistance in given if assistance is not None]
    models = [name for name, assistance in usable if LOOKUP_TOKENS not in assistance]
    found: dict[str, Mapping[str, Any]] = {}
    for name, assistance in usable:
        if LOOKUP_TOKENS in assistance:
            found.setdefault(LOOKUP, assistance)
        else:
            found[f"{ASSISTED} by {name}" if len(models) > 1 else ASSISTED] = assistance
    if len(candidates) > 1 and LOOKUP not in found:
        usual = PromptLookupConfig(kind="prompt_lookup")
        found[LOOKUP] = {
            LOOKUP_TOKENS: usual.draft_tokens,
            "max_matching_ngram_size": usual.max_ngram,
        }
    return found


def add_drafted(
    grid: Grid,
    candidate: Candidate,
    shape: str,
    tree: Tree,
    rules: Sequence[str],
    plain: Arm,
) -> None:
    """One drafter in one shape, by every rule that says something at this temperature."""
    for rule in rules_at(plain.sampling, rules):
        named = "" if rule == "greedy" else f", {rule}"
        name = f"{candidate.name} {shape}{named}{heated(plain.sampling)}{batched(plain.batch)}"
        draw = draw_for(RULES[rule], candidate.drafter, tree, plain.sampling)
        if draw is None:
            grid.skipped[name] = why_not(RULES[rule], candidate.drafter, tree)
        elif draw == "chain" and rule in TOKEN_RULES:
            grid.skipped[name] = "of one draft a node it is token rejection"
        else:
            grid.arms.append(
                Arm(
                    name,
                    plain.name,
                    plain.sampling,
                    kind=candidate.name,
                    drafter=candidate.drafter,
                    tree=tree,
                    rule=RULES[rule],
                    draw=draw,
                    batch=plain.batch,
                )
            )


def rules_at(sampling: Sampling, rules: Sequence[str]) -> Iterator[str]:
    """Of the rules that were asked for, those that differ at this temperature. Greedy acceptance
    is always there: at temperature 0 every lossless rule is that.
    """
    if not sampling.greedy:
        yield from rules
        return
    yield "greedy"
    yield from (rule for rule in rules if rule in AT_ZERO)


def draw_for(rule: RuleSpec, drafter: Drafter, tree: Tree, sampling: Sampling) -> Draw | None:
    """How this drafter draws a tree's siblings for a rule; None where it cannot."""
    if sampling.greedy or "point" in rule.draws:
        return "point"
    wanted: tuple[Draw, ...] = ("chain",) if tree.is_chain else ()
    wanted += ("without_replacement", "iid")
    usable = [draw for draw in wanted if draw in rule.draws and draw in drafter.draws]
    return usable[0] if usable else None


def why_not(rule: RuleSpec, drafter: Drafter, tree: Tree) -> str:
    """Why a drafter cannot draw for a rule."""
    if not drafter.draws:
        return "its guesses are not drawn: it has no q that a rule could weigh them by"
    if not tree.is_chain and rule.draws == ("chain",):
        return "the rule is for chains"
    return f"the rule needs draw {' or '.join(rule.draws)}; it draws {', '.join(drafter.draws)}"


def greedy_arms(candidate: Candidate) -> list[Arm]:
    """The baselines, the chain of all slots, and the searched tree, one prompt at a time."""
    return make_grid([candidate], EvalConfig(), prompts=1).arms
