"""What is fitted to the data before the first gradient step."""

import time
from collections.abc import Iterator

from accelerate.utils import broadcast

from draftsmith.drafters.methods import trainable
from draftsmith.drafters.mtp import MtpModule
from draftsmith.drafters.mtp_fit import fit
from draftsmith.drafters.slots import Batch
from draftsmith.train.setup import Training


def fit_start(t: Training) -> None:
    """The projection of an MTP block whose layer is a copy; equal in all processes."""
    if t.step > 0 or not isinstance(t.drafter, MtpModule) or t.drafter.config.start != "last_layer":
        return
    began = time.perf_counter()
    with t.parallel.whole():
        fit(t.drafter, first_rows(t))
        weight = t.drafter.block.fc.weight
        weight.data.copy_(broadcast(weight.data))
        for further in list(t.drafter.blocks)[1:]:  # each starts as the first one, applied again
            further.load_state_dict(t.drafter.block.state_dict())
        weights = {name: value.detach().clone() for name, value in trainable(t.drafter).items()}
    t.parallel.load(weights, {})
    t.seconds += time.perf_counter() - began


def first_rows(t: Training) -> Iterator[Batch]:
    """The first epoch's rows, in the order in which they will be trained on."""
    size = t.recipe.train.rows_per_micro_batch
    for rows in t.planned[1]:
        for start in range(0, len(rows), size):
            yield t.rows.batch(rows[start : start + size]).to(t.target.device)
