"""A drafter that starts from a trained one must not end worse: hard-label training of ready MTP
layers has lowered their acceptance.
"""

import json
from typing import Any

from draftsmith.recipes.errors import UserError
from draftsmith.train.setup import Training
from draftsmith.train.watch import evaluate


def measure_start(t: Training) -> None:
    """Walk the held-out answers before the first step."""
    if t.recipe.drafter.heals and t.step == 0:
        evaluate(t)


def check_end(t: Training) -> None:
    """Compare with the start, by category. Raises UserError where the end is worse overall."""
    if not t.recipe.drafter.heals:
        return
    with open(t.journal.path, encoding="utf-8") as file:
        records = [record for record in map(json.loads, file) if record["kind"] == "held_out"]
    start, end = records[0], records[-1]
    told = comparison(start, end)
    if end["tau"] < start["tau"]:
        raise UserError(
            f"{t.folder / 'drafter'} is not written: training made the drafter worse on held-out "
            f"answers ({told}); lower optim.lr or try objective.loss: kl with another name"
        )
    t.journal.say(f"held-out answers, before and after training: {told}")


def comparison(start: dict[str, Any], end: dict[str, Any]) -> str:
    """Tokens per pass, overall and by category."""
    pairs = {"all": (start["tau"], end["tau"])}
    for name, before in start["tau_by_category"].items():
        pairs[name] = before, end["tau_by_category"][name]
    return ", ".join(
        f"{name} {before:.3f} -> {after:.3f}" for name, (before, after) in pairs.items()
    )
