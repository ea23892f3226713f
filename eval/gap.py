"""Why a measured speedup is not the one that costs measured alone predict."""

from collections.abc import Mapping

from draftsmith.eval.theory import RoundCost

NEAR = 0.10  # relative difference that needs no words
PARTS = ("draft", "verify", "overhead")


def explain_gap(
    measured: float | None,
    predicted: float | None,
    *,
    cost: RoundCost | None,
    plain_ms: Mapping[str, float],
    round_ms: Mapping[str, float],
) -> str:
    """What differs, part by part; empty where they agree within 10 % or one is missing.

    plain_ms, round_ms: mean milliseconds of the plain arm's and of this arm's rounds, by part.
    """
    if not measured or not predicted or cost is None or abs(measured / predicted - 1) <= NEAR:
        return ""
    alone = cost.milliseconds()
    step, whole = sum(plain_ms.values()), sum(round_ms.values())
    apart = sum(alone[part] for part in PARTS)
    words = [
        f"a plain step took {step:.1f} ms in the run and {alone['plain']:.1f} alone "
        f"({change(step, alone['plain'])} speedup)",
        f"a round {whole:.1f} ms and {apart:.1f} alone ({change(apart, whole)})",
    ]
    largest = max(PARTS, key=lambda part: abs(round_ms[part] - alone[part]))
    words.append(
        f"most of that in {largest}: {round_ms[largest]:.1f} ms and {alone[largest]:.1f} alone"
    )
    left = measured / predicted / ((step / alone["plain"]) * (apart / whole))
    if abs(left - 1) > NEAR:
        words.append(
            f"the rest ({100 * (left - 1):+.0f} %) is rounds of other kinds than were costed: "
            "without drafts, or with fewer rows after others have ended"
        )
    return (
        f"measured {measured:.2f}x, predicted {predicted:.2f}x ({change(measured, predicted)}): "
        + "; ".join(words)
    )


def change(value: float, reference: float) -> str:
    """A signed percentage."""
    return f"{100 * (value / reference - 1):+.0f} %"
