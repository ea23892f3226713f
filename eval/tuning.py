"""Which chain or tree decodes fastest on this machine: measured, and kept with the drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.dataset import Document
from draftsmith.drafters.adapted import load_target
from draftsmith.drafters.checkpoint import load_drafter, read_metadata, update_metadata
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import RECURRENT, Target
from draftsmith.drafters.tree import Tree, chain
from draftsmith.eval.arms import PLAIN, Arm
from draftsmith.eval.bench import BenchPrompt, measure
from draftsmith.eval.costs import measure_costs
from draftsmith.eval.results import Results
from draftsmith.eval.stage import prepare
from draftsmith.eval.subjects import held_out_documents
from draftsmith.eval.summary import prompt_totals, rates, speedup, tau_micro
from draftsmith.eval.tune import Calibration, calibrate
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import LARGEST_TREE, Recipe

PROMPTS = 8  # held-out prompts that the finalists decode, unless eval.prompts says otherwise
FINALISTS = 4  # shapes that are decoded with; the others are only predicted


@dataclass(frozen=True)
class Shape:
    """A chain or a tree, what it should give, and what it gave."""

    name: str
    tree: Tree
    predicted: float  # speedup: walked tokens per round, over costs measured alone
    measured: float | None = None  # speedup over plain decoding of the same prompts
    tau: float | None = None


def tune(folder: Path, recipe: Recipe) -> Shape:
    """Choose, write the choice into the drafter's metadata, and print what was compared."""
    if not recipe.drafter.walks:
        raise UserError(f"{folder}: merged trees of several models have no shape to choose")
    prepare(recipe)
    documents = held_out_documents(recipe, folder.parent)
    target = load_target(recipe.target, folder, read_metadata(folder))
    drafter = load_drafter(folder, target)
    calibration = calibrate(recipe, target, drafter, documents)
    prompts = prompts_of(documents)[: recipe.eval.prompts or PROMPTS]
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    context = lengths[len(lengths) // 2] + recipe.eval.max_new_tokens // 2
    shapes = predict(target, drafter, shapes_of(recipe, target, drafter, calibration), context)
    finalists = sorted(shapes, key=lambda shape: -shape.predicted)[:FINALISTS]
    found = decode_all(recipe, target, drafter, finalists, prompts)
    best = max(found, key=lambda shape: shape.measured or 0.0)
    paths = [list(path) for path in best.tree.paths]
    update_metadata(folder, {"tree": paths, "tuned": kept(recipe, target, best, len(prompts))})
    print(table([*found, *[one for one in shapes if one.name not in {f.name for f in found}]]))
    print(f"\nchosen: {best.name}; written to {folder}")
    return best


def kept(recipe: Recipe, target: Target, best: Shape, prompts: int) -> dict[str, Any]:
    """What the drafter's metadata says about the choice."""
    return {
        "shape": best.name,
        "speedup": best.measured,
        "tau": best.tau,
        "prompts": prompts,
        "max_new_tokens": recipe.eval.max_new_tokens,
        "device": str(target.device),
    }


def prompts_of(documents: Sequence[Document]) -> list[BenchPrompt]:
    """The prompts of held-out answers: choosing on the report's own would flatter the choice."""
    found: dict[tuple[int, ...], BenchPrompt] = {}
    for document in documents:
        ids = document.ids[: document.supervised.index(True)]
        found.setdefault(ids, BenchPrompt(document.key, document.category, list(ids), ""))
    return list(found.values())


def shapes_of(
    recipe: Recipe, target: Target, drafter: Drafter, calibration: Calibration
) -> Mapping[str, tuple[Tree, float]]:
    """Chains of every length and the searched tree of every size, within the budget of nodes
    (eval.tree_nodes), each with the tokens per round that held-out answers give it.
    """
    asked = recipe.eval.tree_nodes
    budget = LARGEST_TREE if asked == "auto" else asked
    joint = rates(calibration.hit, calibration.reached).joint
    found: dict[str, tuple[Tree, float]] = {}
    for length in range(1, min(drafter.depth, budget) + 1):
        tau = 1 + sum(rate or 0.0 for rate in joint[:length])
        found[f"chain of {length}"] = chain(length), tau
    if recipe.drafter.shape or target.layer_types & RECURRENT:
        return found
    chains = {tree.paths for tree, _ in found.values()}
    for size, tau in zip(calibration.sizes, calibration.tau, strict=True):
        tree = calibration.tree(size, drafter.width)
        if size <= budget and tree.paths not in chains:
            found[f"tree of {size}"] = tree, tau
    return found


def predict(
    target: Target,
    drafter: Drafter,
    shapes: Mapping[str, tuple[Tree, float]],
    context: int,
) -> list[Shape]:
    """Costs of every shape, measured alone, against its walked tokens per round."""
    trees = [tree.to(target.device) for tree, _ in shapes.values()]
    costs = measure_costs(target, drafter, trees, context=context, sampling=Sampling())
    rows = zip(shapes.items(), trees, costs, strict=True)
    return [
        Shape(name, tree, tau * cost.plain / cost.round) for (name, (_, tau)), tree, cost in rows
    ]


def decode_all(
    recipe: Recipe,
    target: Target,
    drafter: Drafter,
    shapes: Sequence[Shape],
    prompts: Sequence[BenchPrompt],
) -> list[Shape]:
    """Decode with every shape, prompt by prompt in turn with plain decoding."""
    arms = [Arm(PLAIN, PLAIN, Sampling())]
    arms += [Arm(s.name, PLAIN, Sampling(), drafter=drafter, tree=s.tree) for s in shapes]
    trials = measure(
        target,
        arms,
        prompts,
        Results(None, {}),
        max_new_tokens=recipe.eval.max_new_tokens,
        repeats=recipe.eval.repeats,
        seed=recipe.seed,
    )
    plain = prompt_totals(trials[PLAIN], prefill=False)
    return [
        Shape(
            shape.name,
            shape.tree,
            shape.predicted,
            speedup(plain, prompt_totals(trials[shape.name], prefill=False)),
            tau_micro(trials[shape.name]),
        )
        for shape in shapes
    ]


def table(shapes: Sequence[Shape]) -> str:
    """For the terminal, what was decoded with first."""
    lines = [f"{'shape':14}{'nodes':>6}{'predicted':>11}{'measured':>10}{'tau':>7}"]
    for shape in shapes:
        measured = "-" if shape.measured is None else f"{shape.measured:.2f}x"
        tau = "-" if shape.tau is None else f"{shape.tau:.2f}"
        lines.append(
            f"{shape.name:14}{shape.tree.nodes:6}{shape.predicted:10.2f}x{measured:>10}{tau:>7}"
        )
    return "\n".join(lines)
