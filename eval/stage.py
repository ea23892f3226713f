"""The evaluation stage: drafters in, one report out."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.plan import check_graphs
from draftsmith.drafters.adapted import load_target
from draftsmith.drafters.checkpoint import META, read_metadata, update_metadata
from draftsmith.drafters.recorded import RecordedTarget
from draftsmith.drafters.target import RECURRENT, Target, is_path, local_folder
from draftsmith.drafters.tree import Tree, chain, expansion
from draftsmith.eval.adapted import adapted_notes, original_of
from draftsmith.eval.arms import Arm, Candidate, Grid, make_grid
from draftsmith.eval.assemble import (
    Memory,
    Verdicts,
    arm_report,
    check_arm,
    quality_of,
    sample_of,
)
from draftsmith.eval.bench import BenchPrompt, measure
from draftsmith.eval.conditions import conditions, launch_notes, notes, winners
from draftsmith.eval.costs import measure_costs
from draftsmith.eval.lossy import judged_arms, quality_from
from draftsmith.eval.prompts import evaluation_prompts
from draftsmith.eval.report import ArmReport, Report, Sample, TreeChoice, Walk, write_report
from draftsmith.eval.results import NAME, Results
from draftsmith.eval.served import Served, find_model, measure_served
from draftsmith.eval.subjects import (
    Subject,
    check_same_target,
    find_entries,
    find_entry,
    load_subjects,
    own_subject,
)
from draftsmith.eval.summary import Trial, rates
from draftsmith.eval.tables import leaderboard, terminal_table
from draftsmith.eval.theory import RoundCost
from draftsmith.eval.training_log import training_curve
from draftsmith.eval.tune import Calibration, Choice, choice_from, choose_tree, to_json
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.load import override_recipe
from draftsmith.recipes.provenance import versions
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.stages import EVALUATION, ROUNDING

SAMPLES = 4
COST_TURNS = 9  # of every arm's rounds, measured alone
# What may change when a drafter is measured from its folder; the rest says how it was trained.
CONDITIONS = (
    *("eval", "target", *EVALUATION, "data.max_prompt_tokens", "data.thinking"),
    *("seed", "runs", "name"),
)


@dataclass(frozen=True)
class Job:
    """What is evaluated, and where the report goes."""

    recipe: Recipe  # the conditions
    target: Target
    subjects: Sequence[Subject]
    report: Path
    log: Path  # training's, of the first subject; need not exist


@dataclass(frozen=True)
class Measured:
    """Everything that the report is made of."""

    grid: Grid
    prompts: Sequence[BenchPrompt]
    dropped: Mapping[str, int]
    context: int  # the length at which costs were measured alone
    choices: Mapping[str, Choice]  # by subject, where a tree was searched
    costs: Mapping[str, RoundCost]  # by arm
    trials: Mapping[str, Sequence[Trial]]  # by arm
    results: Results

    @property
    def judged(self) -> list[Arm]:
        """Arms whose quality is measured."""
        return judged_arms(self.grid.arms)


def evaluate(recipe: Recipe, run: Path) -> Path:
    """Measure run/drafter, and those of eval.drafters, on the evaluation prompts; writes
    run/report, returns the HTML's path.
    """
    prepare(recipe)
    folder = run / "drafter"
    meta = read_metadata(folder)  # before the target's weights are loaded
    entries = find_entries(recipe.eval.drafters)
    check_same_target(entries, meta["target"], str(folder))
    target = load_target(recipe.target, folder, meta)
    own, calibration = own_subject(recipe, run, target)
    if calibration is not None:
        update_metadata(folder, {"calibration": to_json(calibration)})
    others = load_subjects(entries, target, [own.name])
    return evaluate_job(Job(recipe, target, [own, *others], run / "report", run / "log.jsonl"))


def evaluate_checkpoint(folder: Path, recipe: Recipe, report: Path) -> Path:
    """Measure a drafter from its own folder alone, and those of eval.drafters; writes `report`,
    returns the HTML's path.

    `recipe` sets the conditions; `stored_recipe` is the one that the folder carries. What the
    folder says about its drafter stays as it is: conditions of a day are not shipped.
    """
    entries = [find_entry(str(folder)), *find_entries(recipe.eval.drafters)]
    meta = read_metadata(folder)
    check_same_target(entries, meta["target"], str(folder))
    check_writable(report)
    prepare(recipe)
    target = load_target(recipe.target, folder, meta)
    subjects = load_subjects(entries, target, [])
    return evaluate_job(Job(recipe, target, subjects, report, folder.parent / "log.jsonl"))


def check_writable(report: Path) -> None:
    """UserError where the report cannot be written, before anything is measured."""
    there = next(one for one in (report, *report.parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK):
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


def prepare(recipe: Recipe) -> None:
    """Torch threads, when the recipe fixes them; and a served engine must answer now, not in an
    hour.
    """
    config = recipe.eval
    check_graphs(recipe)
    if config.served is not None:
        find_model(config.served.rstrip("/"))
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def evaluate_job(job: Job) -> Path:
    """Costs, trees, measurement, checks, report. What a killed evaluation measured is kept."""
    measured = measure_job(job)
    report = make_report(job, measured)
    path = write_report(report, job.report)
    measured.results.finish()
    print(f"\n{terminal_table(leaderboard(report))}\n\nreport: {path}")
    return path


def measure_job(job: Job) -> Measured:
    """Choose every drafter's tree, and measure every arm."""
    config = job.recipe.eval
    deepest = max(subject.drafter.depth for subject in job.subjects)
    prompts, dropped = evaluation_prompts(job.target, job.recipe, drafts=deepest)
    results = Results(job.report / NAME, circumstances(job, prompts))
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    context = lengths[len(lengths) // 2] + config.max_new_tokens // 2
    choices = choose_trees(job, context, results)
    candidates = [candidate_of(job, subject, choices) for subject in job.subjects]
    follows = bool(job.target.layer_types & RECURRENT)
    recorded = recorded_target(job, candidates, lengths[-1]) if config.graphs else None
    grid = make_grid(
        candidates,
        config,
        prompts=len(prompts),
        follows=follows,
        recorded=recorded,
        original=original_of(job.target, job.recipe.target),
    )
    costs = {
        arm.name: arm_cost(job, arm, context, results)
        for arm in grid.arms
        if arm.drafter is not None
    }
    trials = measure(
        job.target,
        grid.arms,
        prompts,
        results,
        max_new_tokens=config.max_new_tokens,
        repeats=config.repeats,
        seed=job.recipe.seed,
    )
    return Measured(grid, prompts, dropped, context, choices, costs, trials, results)


def recorded_target(job: Job, candidates: Sequence[Candidate], longest: int) -> RecordedTarget:
    """The target with passes that are recorded, and room for the longest prompt and its answer."""
    nodes = max(max(one.chain.nodes, one.tree.nodes) for one in candidates)
    return RecordedTarget(job.target, longest + job.recipe.eval.max_new_tokens + 2 * (nodes + 1))


def circumstances(job: Job, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """What the measured figures depend on."""
    return {
        "target": job.target.fingerprint,
        "eval": job.recipe.eval.model_dump(mode="json"),
        "seed": job.recipe.seed,
        "prompts": [[prompt.key, prompt.ids] for prompt in prompts],
        "drafters": {subject.name: subject.described for subject in job.subjects},
        "threads": torch.get_num_threads(),
        "versions": list(versions()),
    }


def choose_trees(job: Job, context: int, results: Results) -> dict[str, Choice]:
    """For every drafter that ranks its guesses and has no shape of its own: the tree that held-out
    answers and costs speak for.
    """
    given = job.recipe.eval.tree_nodes
    nodes = None if given == "auto" else given
    found: dict[str, Choice] = {}
    for subject in job.subjects:
        drafter, calibration = subject.drafter, subject.calibration
        fixed = drafter.config.shape or (subject.tuned is not None and nodes is None)
        if fixed or calibration is None:
            continue

        def choose(drafter: Any = drafter, calibration: Calibration = calibration) -> Any:
            return asdict(
                choose_tree(job.target, drafter, calibration, nodes=nodes, context=context)
            )

        found[subject.name] = choice_from(results.once(("choice", subject.name), choose))
        if subject.keep_tree and subject.folder is not None:
            paths = [list(path) for path in found[subject.name].paths]
            update_metadata(subject.folder, {"tree": paths})
    return found


def candidate_of(job: Job, subject: Subject, choices: Mapping[str, Choice]) -> Candidate:
    """A drafter with its chain, and its tree."""
    device, drafter = job.target.device, subject.drafter
    straight = chain(drafter.depth)
    if subject.name in choices:
        tree = Tree(choices[subject.name].paths)
    elif subject.tuned is not None:
        tree = subject.tuned
    else:
        tree = expansion(drafter.config.shape) if drafter.config.shape else straight
    return Candidate(subject.name, drafter, straight.to(device), tree.to(device))


def arm_cost(job: Job, arm: Arm, context: int, results: Results) -> RoundCost:
    """What the parts of an arm's round cost, measured alone."""
    assert arm.drafter is not None and arm.tree is not None
    drafter, tree = arm.drafter, arm.tree

    def find() -> Any:
        (cost,) = measure_costs(
            arm.target or job.target,
            drafter,
            [tree],
            context=context,
            sampling=arm.sampling,
            rule=arm.rule,
            draw=arm.draw,
            batch=arm.batch,
            turns=COST_TURNS,
        )
        return asdict(cost)

    return RoundCost(**results.once(("cost", arm.name), find))


def make_report(job: Job, measured: Measured) -> Report:
    """Check every arm's output and gather the figures."""
    memory = Memory()
    arms = [report_of(job, arm, measured, memory) for arm in measured.grid.arms]
    walks = {one.name: walk_of(one.calibration) for one in job.subjects if one.calibration}
    trees = {one.name: tree_choice(one, measured.choices.get(one.name)) for one in job.subjects}
    return Report(
        name=job.recipe.name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),  # reports are given away
        versions=dict(entry.split(" ", 1) for entry in versions()),
        target=job.target.fingerprint,
        conditions=conditions(job.recipe, job.target, measured.prompts, measured.context),
        notes=[
            *winners(arms),
            *launch_notes(arms),
            *notes(job.target, job.subjects, measured.choices, measured.dropped),
            *changes(job, measured),
        ],
        arms=arms,
        skipped=measured.grid.skipped,
        costs_ms={name: cost.milliseconds() for name, cost in measured.costs.items()},
        walks=walks,
        trees={name: tree for name, tree in trees.items() if tree is not None},
        served=served_of(job, measured),
        samples=samples_of(job, measured),
        training=training_curve(job.log),
    )


def changes(job: Job, measured: Measured) -> list[str]:
    """What an adapted target's report says beside the rest."""
    arms = measured.grid.arms
    before = next((arm for arm in arms if arm.original), None)
    if before is None:
        return []
    original = before.target
    assert original is not None
    mine, theirs = measured.trials[before.baseline], measured.trials[before.name]

    def judge() -> Any:
        return asdict(quality_of(original, before, mine, theirs, measured.prompts))

    quality = quality_from(measured.results.once(("change", before.name), judge))
    change = None
    if job.subjects[0].folder is not None:
        change = read_metadata(job.subjects[0].folder).get("change")
    return adapted_notes(arms, measured.trials, change, quality)


def report_of(job: Job, arm: Arm, measured: Measured, memory: Memory) -> ArmReport:
    """Check one arm's output and gather its figures."""
    mine, plain = measured.trials[arm.name], measured.trials[arm.baseline]
    law = arm.target if arm.original and arm.target is not None else job.target

    def find() -> Any:
        known = Memory() if arm.original else memory
        found = check_arm(job.recipe, law, arm, mine, plain, measured.prompts, known)
        return asdict(found)

    def judge() -> Any:
        return asdict(quality_of(job.target, arm, mine, plain, measured.prompts))

    verdicts = Verdicts(**measured.results.once(("check", arm.name), find))
    quality = None
    if arm in measured.judged:
        quality = quality_from(measured.results.once(("quality", arm.name), judge))
    cost = measured.costs.get(arm.name)
    return arm_report(law, arm, mine, plain, verdicts, cost, quality)


def served_of(job: Job, measured: Measured) -> list[Served]:
    """The server that the recipe names, measured on the same prompts."""
    config = job.recipe.eval
    if config.served is None:
        return []
    return measure_served(
        config.served,
        job.target,
        measured.prompts,
        batches=config.batches,
        limit=config.max_new_tokens,
    )


def walk_of(calibration: Calibration) -> Walk:
    """The chain's walk over held-out answers."""
    return Walk(
        documents=calibration.documents,
        rounds=calibration.rounds,
        tau_micro=calibration.tau_micro,
        tau_macro=calibration.tau_macro,
        tau_by_category=calibration.tau_by_category,
        acceptance=rates(calibration.hit, calibration.reached),
    )


def tree_choice(subject: Subject, choice: Choice | None) -> TreeChoice | None:
    """What the search compared; nothing when the recipe fixed the size."""
    calibration = subject.calibration
    if calibration is None or choice is None or choice.sizes != calibration.sizes:
        return None
    return TreeChoice(
        nodes=choice.sizes,
        tau=calibration.tau,
        round_ms=[1000 * cost.round for cost in choice.costs],
        plain_ms=1000 * choice.cost.plain,
        chosen=len(choice.paths),
    )


def samples_of(job: Job, measured: Measured) -> list[Sample]:
    """One answer each of some categories, by the last greedy arm that answers one prompt at a
    time.
    """
    drafted = [arm for arm in measured.grid.arms if arm.drafter is not None and arm.rule.lossless]
    alone = [arm for arm in drafted if arm.batch == 1 and arm.sampling.greedy]
    arm = (alone or drafted)[-1]
    first: dict[str, Trial] = {}
    for trial in measured.trials[arm.name]:
        first.setdefault(trial.category, trial)
    chosen = [first[category] for category in sorted(first)][:SAMPLES]
    tokenizer, prompts = job.target.tokenizer, measured.prompts
    return [sample_of(tokenizer, arm, trial, prompts[trial.prompt]) for trial in chosen]
