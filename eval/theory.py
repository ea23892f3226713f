"""What a drafter should gain, from acceptance and from costs that were measured alone.

No law of acceptance is assumed: tau is the measured one, so this is exact where the costs are.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RoundCost:
    """Isolated costs in seconds: one plain step, and the three parts of one drafted round."""

    plain: float
    draft: float
    verify: float
    overhead: float

    @property
    def round(self) -> float:
        """Seconds of a whole drafted round."""
        return self.draft + self.verify + self.overhead

    def milliseconds(self) -> dict[str, float]:
        """Every part."""
        return {part: 1000 * seconds for part, seconds in asdict(self).items()}


def predicted_speedup(tau: float, cost: RoundCost, *, drafted: float = 1.0) -> float:
    """Tokens per second of rounds over tokens per second of plain steps.

    drafted: the share of rounds that have drafts; the others look for some and are plain steps.
    """
    return tau * cost.plain / (drafted * cost.round + (1 - drafted) * (cost.draft + cost.plain))


def choose_nodes(tau_by_nodes: Mapping[int, float], cost_by_nodes: Mapping[int, float]) -> int:
    """The tree size with the most tokens per second of round; the smaller one of equals.

    Keys are sizes without the root, costs are seconds of a whole round. Sizes need both entries.
    """
    sizes = sorted(tau_by_nodes.keys() & cost_by_nodes.keys())
    if not sizes:
        raise ValueError("no tree size has both an acceptance length and a cost")
    return max(sizes, key=lambda nodes: tau_by_nodes[nodes] / cost_by_nodes[nodes])
