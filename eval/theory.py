"""What speculative decoding should gain: Leviathan et al. (2211.17192), and more general forms.

Alpha is the acceptance rate, gamma the number of drafted tokens, cost the draft step over the
target step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul


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


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a round when every draft is accepted with probability alpha: (1-a^(g+1))/(1-a)."""
    return chain_tau([alpha] * gamma)


def walltime_factor(alpha: float, gamma: int, cost: float) -> float:
    """Theorem 3.8: the speedup, if scoring gamma + 1 positions costs one target step."""
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def walltime_bound(alpha: float, cost: float) -> float:
    """Corollary 3.9: what the best gamma reaches at least, when alpha > cost."""
    return (1 + alpha) / (1 + cost)


def operations_factor(alpha: float, gamma: int, cost: float) -> float:
    """Theorem 3.11: how many times the arithmetic; cost is in operations here."""
    return (gamma * cost + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, cost: float, *, limit: int = 256) -> int:
    """The gamma that maximises the wall-time factor; 0 when no draft pays, at most `limit`."""
    return max(range(limit + 1), key=lambda gamma: walltime_factor(alpha, gamma, cost))


def chain_tau(conditional: Sequence[float]) -> float:
    """Tokens of a round from conditional acceptance by slot: 1 + sum of the running products."""
    return 1.0 + float(sum(accumulate(conditional, mul)))


def predicted_speedup(tau: float, cost: RoundCost) -> float:
    """Tokens per second of drafted rounds over tokens per second of plain steps."""
    return tau * cost.plain / cost.round


def choose_nodes(tau_by_nodes: Mapping[int, float], cost_by_nodes: Mapping[int, float]) -> int:
    """The tree size with the most tokens per second of round; the smaller one of equals.

    Keys are sizes without the root, costs are seconds of a whole round. Sizes need both entries.
    """
    sizes = sorted(tau_by_nodes.keys() & cost_by_nodes.keys())
    if not sizes:
        raise ValueError("no tree size has both an acceptance length and a cost")
    return max(sizes, key=lambda nodes: tau_by_nodes[nodes] / cost_by_nodes[nodes])
