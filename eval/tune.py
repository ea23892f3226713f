"""Which tree to draft: acceptance from held-out answers over costs on this machine."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.dataset import Document
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import Tree, search_tree
from draftsmith.eval.costs import measure_costs
from draftsmith.eval.theory import RoundCost, choose_nodes
from draftsmith.eval.walk import RankTable, WalkResult, recipe_ranks, walk
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe

SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 63)  # nodes without the root


@dataclass(frozen=True)
class Calibration:
    """What held-out answers say about a drafter; kept in its draftsmith.json."""

    documents: int
    greedy: bool  # whether the answers are the target's greedy ones
    accuracy: list[list[float]]  # [K][ranks]: slot k's guess of this rank is right
    sizes: list[int]
    tau: list[float]  # walked with the searched tree of each size
    rounds: int  # of the chain's walk, as what follows
    tau_micro: float
    tau_macro: float
    tau_by_category: dict[str, float]
    hit: list[int]  # by slot: rounds that accepted it
    reached: list[int]  # by slot: rounds that reached it

    def tree(self, nodes: int, guesses: int | None = None) -> Tree:
        """The searched tree of a size, of at most so many guesses per slot."""
        return search_tree([row[:guesses] for row in self.accuracy], nodes)


@dataclass(frozen=True)
class Choice:
    """The tree that was chosen, and what it was chosen from."""

    paths: tuple[tuple[int, ...], ...]
    sizes: list[int]
    costs: list[RoundCost]
    cost: RoundCost  # of the chosen tree


def choice_from(value: dict[str, Any]) -> Choice:
    """What `asdict` made of a choice."""
    return Choice(
        tuple(tuple(path) for path in value["paths"]),
        value["sizes"],
        [RoundCost(**cost) for cost in value["costs"]],
        RoundCost(**value["cost"]),
    )


def calibrate(
    recipe: Recipe, target: Target, drafter: Drafter, documents: Sequence[Document]
) -> Calibration:
    """Rank the held-out answers' tokens and walk them with the tree of every size.

    Greedy answers where there are any: greedy decoding is what most of the report measures.
    """
    greedy = [document for document in documents if document.greedy]
    chosen = greedy or list(documents)
    if not chosen:
        raise UserError("the tree search needs held-out answers; raise data.held_out")
    table = recipe_ranks(recipe, target, drafter, chosen)
    accuracy = table.accuracy()
    trees = {nodes: search_tree(accuracy, nodes) for nodes in SIZES}
    sizes = [nodes for nodes, tree in trees.items() if tree.nodes == nodes]
    tau = [walk(table, trees[nodes]).total.tau_micro for nodes in sizes]
    return make_calibration(table, walk(table), bool(greedy), accuracy, sizes, tau)


def make_calibration(
    table: RankTable,
    chain: WalkResult,
    greedy: bool,
    accuracy: list[list[float]],
    sizes: list[int],
    tau: list[float],
) -> Calibration:
    """Put the figures into one object."""
    return Calibration(
        documents=len(table.documents),
        greedy=greedy,
        accuracy=accuracy,
        sizes=sizes,
        tau=tau,
        rounds=chain.total.rounds,
        tau_micro=chain.total.tau_micro,
        tau_macro=chain.total.tau_macro,
        tau_by_category={
            name: counts.tau_micro for name, counts in sorted(chain.by_category.items())
        },
        hit=chain.total.hit,
        reached=chain.total.reached,
    )


def choose_tree(
    target: Target,
    drafter: Drafter,
    calibration: Calibration,
    *,
    nodes: int | None,
    context: int,
) -> Choice:
    """The tree with the most tokens per second, or of `nodes` nodes."""
    sizes = calibration.sizes if nodes is None else [nodes]
    rows = drafter.width  # a drafter cannot guess more tokens than it has
    trees = [calibration.tree(size, rows).to(target.device) for size in sizes]
    costs = measure_costs(target, drafter, trees, context=context, sampling=Sampling())
    seconds = {size: cost.round for size, cost in zip(sizes, costs, strict=True)}
    tau = dict(zip(calibration.sizes, calibration.tau, strict=True))
    best = sizes.index(choose_nodes(tau, seconds) if nodes is None else nodes)
    return Choice(trees[best].paths, sizes, costs, costs[best])


def from_json(value: Any, folder: Path, *, depth: int | None = None) -> Calibration:
    """Read back what `asdict` wrote, for a drafter of `depth` slots (None: of any)."""
    try:
        found = Calibration(**value)
        check_figures(found)
        if depth is not None and len(found.accuracy) != depth:
            raise ValueError(f"it has {len(found.accuracy)} slots and the drafter {depth}")
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{folder}: its calibration is damaged or of another version ({error}); "
            "evaluate the run again"
        ) from error
    return found


def check_figures(found: Calibration) -> None:
    """Raises ValueError, TypeError or AttributeError unless all is of its kind and length."""
    shares = [share for row in found.accuracy for share in row]
    taus = [*found.tau, found.tau_micro, found.tau_macro, *found.tau_by_category.values()]
    counts = [found.documents, found.rounds, *found.sizes, *found.hit, *found.reached]
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
        raise ValueError("a count is no whole number")
    if not all(type(real) in (int, float) and 0 <= real < 1e9 for real in (*shares, *taus)):
        raise ValueError("a share or an acceptance length is no such number")
    if not shares or max(shares) > 1 or len({len(row) for row in found.accuracy}) != 1:
        raise ValueError("accuracy is no table of shares")
    if not set(found.sizes) <= set(SIZES) or found.sizes != sorted(set(found.sizes)):
        raise ValueError(f"sizes are not among {', '.join(map(str, SIZES))}")
    if not 0 < len(found.sizes) == len(found.tau) or len(found.hit) != len(found.reached):
        raise ValueError("lists that belong together are of different lengths")
    if type(found.greedy) is not bool:
        raise ValueError("greedy is neither true nor false")


def to_json(calibration: Calibration) -> dict[str, Any]:
    """For draftsmith.json."""
    return asdict(calibration)
