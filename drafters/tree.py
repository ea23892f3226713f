"""Token trees over ranks: node (i_1, .., i_d) takes the i_k-th best guess of slot k at every depth.

Medusa paper, section 2.3.1 and appendix C; slots are independent, so the same ranks serve under
every parent.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from draftsmith.recipes.errors import UserError

Path = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """A set of rank paths that contains every prefix of its members, ordered by (length, path)."""

    paths: tuple[Path, ...]
    parent: Tensor = field(init=False, compare=False)  # [M] int64, 0 is the root
    depth: Tensor = field(init=False, compare=False)  # [M] int64, from 1
    rank: Tensor = field(init=False, compare=False)  # [M] int64
    width: int = field(init=False, compare=False)  # guesses of a slot that it uses
    visible: Tensor = field(init=False, compare=False)  # [M+1, M+1] bool: ancestors and self

    def __post_init__(self) -> None:
        paths = tuple(
            sorted((tuple(path) for path in self.paths), key=lambda path: (len(path), path))
        )
        check_paths(paths)
        number = {(): 0, **{path: node for node, path in enumerate(paths, start=1)}}
        parent = [number[path[:-1]] for path in paths]
        visible = torch.eye(len(paths) + 1, dtype=torch.bool)
        for node, above in enumerate(parent, start=1):
            visible[node] |= visible[above]
        object.__setattr__(self, "paths", paths)
        object.__setattr__(self, "parent", torch.tensor(parent))
        object.__setattr__(self, "depth", torch.tensor([len(path) for path in paths]))
        object.__setattr__(self, "rank", torch.tensor([path[-1] for path in paths]))
        object.__setattr__(self, "visible", visible)
        # Kept as a number: reading it off `rank` would make every proposal wait for the GPU.
        object.__setattr__(self, "width", 1 + max(path[-1] for path in paths))

    @property
    def nodes(self) -> int:
        """Nodes without the root."""
        return len(self.paths)

    @property
    def is_chain(self) -> bool:
        """Whether every depth has one node."""
        return len(self.paths[-1]) == len(self.paths)

    def to(self, device: torch.device) -> "Tree":
        """The same tree with its tensors on another device."""
        moved = Tree(self.paths)
        for name in ("parent", "depth", "rank", "visible"):
            object.__setattr__(moved, name, getattr(moved, name).to(device))
        return moved


def check_paths(paths: tuple[Path, ...]) -> None:
    """Refuse what is no tree."""
    known = {(), *paths}
    if not paths or len(set(paths)) != len(paths):
        raise UserError("a tree needs at least one node, each listed once")
    for path in paths:
        if not path or path[:-1] not in known or min(path) < 0:
            raise UserError(
                f"tree node {list(path)}: give non-negative ranks, and list its parent "
                f"{list(path[:-1])}"
            )


def chain(depth: int) -> Tree:
    """The best guess of every slot."""
    return Tree(tuple((0,) * length for length in range(1, depth + 1)))


def expansion(widths: Sequence[int]) -> Tree:
    """Every node of depth k-1 has widths[k-1] children (SpecInfer's <k1, k2, ..>)."""
    ranks = [range(width) for width in widths]
    depths = range(1, len(widths) + 1)
    return Tree(tuple(path for depth in depths for path in product(*ranks[:depth])))


def search_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of at most `nodes` nodes with the longest expected acceptance.

    accuracy[k][i]: measured probability that slot k+1's guess of rank i is right. A node's value is
    the product along its path; values fall along paths, so taking the best open node each time is
    optimal (Medusa paper, appendix C; there the sum of values is the expected accepted length).
    """
    if not accuracy or not accuracy[0] or nodes < 1:
        raise UserError("a tree search needs at least one slot, one rank and one node")
    frontier: list[tuple[float, Path]] = [
        (-accuracy[0][rank], (rank,)) for rank in range(len(accuracy[0]))
    ]
    heapq.heapify(frontier)
    chosen: list[Path] = []
    while frontier and len(chosen) < nodes:
        value, path = heapq.heappop(frontier)
        chosen.append(path)
        if len(path) < len(accuracy):
            for rank, share in enumerate(accuracy[len(path)]):
                heapq.heappush(frontier, (value * share, (*path, rank)))
    return Tree(tuple(chosen))
