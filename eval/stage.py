"""The evaluation stage: a trained drafter in, a report out."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.dataset import Document, split_held_out, training_documents
from draftsmith.drafters.checkpoint import (
    META,
    drafter_config,
    load_drafter,
    read_metadata,
    update_metadata,
)
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target, is_path, local_folder
from draftsmith.drafters.tree import Tree, chain, expansion
from draftsmith.eval.assemble import Memory, arm_report, check_arm, sample_of
from draftsmith.eval.bench import Arm, BenchPrompt, greedy_arms, measure, sampled_arms
from draftsmith.eval.conditions import conditions, notes
from draftsmith.eval.costs import measure_costs
from draftsmith.eval.prompts import evaluation_prompts
from draftsmith.eval.report import Report, Sample, TreeChoice, Walk, write_report
from draftsmith.eval.summary import Trial, rates
from draftsmith.eval.tables import result_table, terminal_table
from draftsmith.eval.theory import RoundCost
from draftsmith.eval.training_log import training_curve
from draftsmith.eval.tune import (
    Calibration,
    Choice,
    calibrate,
    choose_tree,
    fixed_choice,
    from_json,
    to_json,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.load import override_recipe
from draftsmith.recipes.provenance import versions
from draftsmith.recipes.schema import EvalConfig, Recipe
from draftsmith.recipes.stages import EVALUATION, ROUNDING

SAMPLES = 4
# What may change when a drafter is measured from its folder; the rest says how it was trained.
CONDITIONS = (
    *("eval", "target", *EVALUATION, "data.max_prompt_tokens", "data.thinking"),
    *("seed", "runs", "name"),
)


@dataclass(frozen=True)
class Job:
    """What is evaluated, and where the report goes."""

    recipe: Recipe
    target: Target
    drafter: Drafter
    folder: Path  # the drafter's
    report: Path
    calibration: Calibration | None  # None: the drafter's guesses have no ranks
    log: Path  # training's; need not exist
    keep_tree: bool  # whether the drafter is told which tree was chosen

    @property
    def kind(self) -> str:
        """The drafter's name in the arms."""
        return self.recipe.drafter.kind


@dataclass(frozen=True)
class Costs:
    """Isolated costs by arm, and the tree that they chose."""

    choice: Choice
    by_arm: dict[str, RoundCost]
    context: int


def evaluate(recipe: Recipe, run: Path) -> Path:
    """Measure run/drafter on the evaluation prompts; writes run/report, returns the HTML's path."""
    set_threads(recipe.eval)
    folder = run / "drafter"
    read_metadata(folder)  # before the target's weights are loaded
    held_out = held_out_documents(recipe, run)
    target = Target.load(recipe.target)
    drafter = load_drafter(folder, target)
    calibration = None
    if recipe.drafter.walks:
        calibration = calibrate(recipe, target, drafter, held_out)
        update_metadata(folder, {"calibration": to_json(calibration)})
    return evaluate_job(
        Job(
            recipe=recipe,
            target=target,
            drafter=drafter,
            folder=folder,
            report=run / "report",
            calibration=calibration,
            log=run / "log.jsonl",
            keep_tree=recipe.eval.tree_nodes == "auto",
        )
    )


def evaluate_checkpoint(folder: Path, recipe: Recipe) -> Path:
    """Measure a drafter from its own folder alone; writes folder/report, returns the HTML's path.

    `recipe` sets the conditions; `stored_recipe` is the one that the folder carries. What the
    folder says about its drafter stays as it is: conditions of a day are not shipped.
    """
    meta = read_metadata(folder)
    check_writable(folder)
    calibration = stored_calibration(meta, folder)
    set_threads(recipe.eval)
    target = Target.load(recipe.target)
    drafter = load_drafter(folder, target)
    return evaluate_job(
        Job(
            recipe=recipe,
            target=target,
            drafter=drafter,
            folder=folder,
            report=folder / "report",
            calibration=calibration,
            log=folder.parent / "log.jsonl",
            keep_tree=False,
        )
    )


def stored_calibration(meta: Mapping[str, Any], folder: Path) -> Calibration | None:
    """The calibration that a drafter's folder carries, for drafters that have one."""
    config = drafter_config(dict(meta))
    if not config.walks:
        return None
    if meta.get("calibration") is None:
        raise UserError(
            f"{folder} carries no calibration, which the tree search needs; "
            "evaluate its run once, which writes it"
        )
    return from_json(meta["calibration"], folder, depth=config.depth)


def check_writable(folder: Path) -> None:
    """UserError where the report cannot be written, before anything is measured."""
    report = folder / "report"
    if not os.access(report if report.exists() else folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{report}: no permission to write the report; copy the drafter to a folder that you "
            "may write to, or evaluate its run: `draftsmith eval RECIPE runs=FOLDER`"
        )


def stored_recipe(meta: Mapping[str, Any], folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that a drafter's folder carries, under other conditions. Raises UserError."""
    if not isinstance(meta.get("recipe"), dict):
        raise UserError(f"{folder} carries no recipe; give one beside it")
    recipe = override_recipe(meta["recipe"], overrides, source=str(folder))
    check_overrides(overrides, folder)
    check_place(meta["target"], recipe, folder)
    return recipe


def check_overrides(overrides: Sequence[str], folder: Path) -> None:
    """Refuse knobs that would do nothing, or say something else than what was trained."""
    for override in overrides:
        key = override.partition("=")[0]
        # Those that change rounding alone say how much is computed at once: memory may need them.
        if not any(key == part or key.startswith(f"{part}.") for part in (*CONDITIONS, *ROUNDING)):
            raise UserError(
                f"command line: {key}: the drafter in {folder} is trained, and what it was trained "
                f"with stays as it is; what may change here: {', '.join(CONDITIONS)}"
            )


def check_place(trained: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """UserError where the target's folder is gone, as after a move of a relative one."""
    model = recipe.target.model
    if model != trained.get("model") or local_folder(model) is not None:
        return
    if is_path(model) or trained.get("content", "none") != "none":
        raise UserError(
            f"{folder}/{META} says that the target is in {model}, and no such folder is there "
            f"(seen from {Path.cwd()}); say where it is: target.model=PATH"
        )


def set_threads(config: EvalConfig) -> None:
    """Torch threads, when the recipe fixes them."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def held_out_documents(recipe: Recipe, run: Path) -> list[Document]:
    """The documents that training did not see."""
    documents, _ = training_documents(run / "rows", recipe.data)
    return split_held_out(documents, recipe.data.held_out, recipe.seed)[1]


def evaluate_job(job: Job) -> Path:
    """Costs, tree, measurement, checks, report."""
    config = job.recipe.eval
    prompts, dropped = evaluation_prompts(job.target, job.recipe)
    costs = prepare_costs(job, prompts)
    arms = arms_of(job, costs.choice.tree)
    trials = measure(
        job.target,
        arms,
        prompts,
        max_new_tokens=config.max_new_tokens,
        repeats=config.repeats,
        seed=job.recipe.seed,
    )
    report = make_report(job, arms, trials, prompts, costs, dropped)
    path = write_report(report, job.report)
    print(f"\n{terminal_table(result_table(report))}\n\nreport: {path}")
    return path


def sampling_of(config: EvalConfig) -> Sampling | None:
    """The sampled arms' law, if there are such arms."""
    if config.temperature == 0.0:
        return None
    return Sampling(config.temperature, config.top_k, config.top_p)


def full_chain(job: Job) -> Tree:
    """The best guess of every slot."""
    return chain(job.drafter.depth).to(job.target.device)


def arms_of(job: Job, tree: Tree) -> list[Arm]:
    """Greedy arms, and sampled ones where the recipe has a temperature."""
    straight, sampling = full_chain(job), sampling_of(job.recipe.eval)
    arms = greedy_arms(job.drafter, job.kind, straight, tree)
    if sampling is not None:
        arms += sampled_arms(job.drafter, job.kind, straight, tree, sampling)
    return arms


def prepare_costs(job: Job, prompts: Sequence[BenchPrompt]) -> Costs:
    """Measure the parts of a round alone and choose the tree."""
    config, straight = job.recipe.eval, full_chain(job)
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    context = lengths[len(lengths) // 2] + config.max_new_tokens // 2
    choice, others = choose(job, straight, context)
    tree = choice.tree
    if job.keep_tree:
        update_metadata(job.folder, {"tree": [list(path) for path in tree.paths]})
    greedy = {straight.paths: others[0], tree.paths: choice.cost}
    by_arm: dict[str, RoundCost] = {}
    sampled = sampled_costs(job, [straight, tree], context)
    for arm in arms_of(job, tree):
        if arm.tree is not None and arm.draw == "point":
            by_arm[arm.name] = (greedy if arm.sampling.greedy else sampled)[arm.tree.paths]
    return Costs(choice, by_arm, context)


def choose(job: Job, straight: Tree, context: int) -> tuple[Choice, list[RoundCost]]:
    """The recipe's tree, or the one that held-out answers and costs speak for."""
    shape, given = job.recipe.drafter.shape, job.recipe.eval.tree_nodes
    if shape or job.calibration is None:
        tree = expansion(shape).to(job.target.device)
        return fixed_choice(job.target, job.drafter, tree, context=context, extra=[straight])
    nodes = None if given == "auto" else given
    return choose_tree(
        job.target, job.drafter, job.calibration, nodes=nodes, context=context, extra=[straight]
    )


def sampled_costs(
    job: Job, trees: Sequence[Tree], context: int
) -> dict[tuple[tuple[int, ...], ...], RoundCost]:
    """Costs at the sampled arms' temperature: drawing from V tokens at every node is not free."""
    sampling = sampling_of(job.recipe.eval)
    if sampling is None:
        return {}
    costs = measure_costs(job.target, job.drafter, trees, context=context, sampling=sampling)
    return {tree.paths: cost for tree, cost in zip(trees, costs, strict=True)}


def make_report(
    job: Job,
    arms: Sequence[Arm],
    trials: Mapping[str, list[Trial]],
    prompts: Sequence[BenchPrompt],
    costs: Costs,
    dropped: Mapping[str, int],
) -> Report:
    """Check every arm's output and gather the figures."""
    reports, memory = [], Memory()
    searched = None if job.recipe.drafter.shape else job.calibration
    for arm in arms:
        plain = trials[arm.baseline]
        verdicts = check_arm(job.recipe, job.target, arm, trials[arm.name], plain, prompts, memory)
        cost = costs.by_arm.get(arm.name)
        reports.append(
            arm_report(job.target, arm, trials[arm.name], plain, verdicts, cost, kind=job.kind)
        )
    return Report(
        name=job.recipe.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(sys.argv),
        versions=dict(entry.split(" ", 1) for entry in versions()),
        target=job.target.fingerprint,
        conditions=conditions(job.recipe, job.target, prompts, costs.context),
        notes=notes(job.target, arms, dropped, searched=searched),
        arms=reports,
        costs_ms={name: cost.milliseconds() for name, cost in costs.by_arm.items()},
        walk=walk_of(job.calibration),
        tree=tree_choice(job.calibration, costs.choice),
        samples=samples_of(job, arms, trials, prompts),
        training=training_curve(job.log),
    )


def walk_of(calibration: Calibration | None) -> Walk | None:
    """The chain's walk over held-out answers."""
    if calibration is None:
        return None
    return Walk(
        documents=calibration.documents,
        rounds=calibration.rounds,
        tau_micro=calibration.tau_micro,
        tau_macro=calibration.tau_macro,
        tau_by_category=calibration.tau_by_category,
        acceptance=rates(calibration.hit, calibration.reached),
    )


def tree_choice(calibration: Calibration | None, choice: Choice) -> TreeChoice | None:
    """What the search compared; nothing when the recipe fixed the size."""
    if calibration is None or choice.sizes != calibration.sizes:
        return None
    return TreeChoice(
        nodes=choice.sizes,
        tau=calibration.tau,
        round_ms=[1000 * cost.round for cost in choice.costs],
        plain_ms=1000 * choice.cost.plain,
        chosen=choice.tree.nodes,
    )


def samples_of(
    job: Job,
    arms: Sequence[Arm],
    trials: Mapping[str, list[Trial]],
    prompts: Sequence[BenchPrompt],
) -> list[Sample]:
    """One answer each of some categories, by the last greedy arm."""
    arm = [arm for arm in arms if arm.drafter is not None and arm.sampling.greedy][-1]
    first: dict[str, Trial] = {}
    for trial in trials[arm.name]:
        first.setdefault(trial.category, trial)
    chosen = [first[category] for category in sorted(first)][:SAMPLES]
    return [sample_of(job.target.tokenizer, arm, t, prompts[t.prompt]) for t in chosen]
