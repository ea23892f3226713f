"""The training stage of drafters that take no gradient steps: what they need is counted, or there
already.
"""

from pathlib import Path
from typing import cast

from safetensors import SafetensorError

from draftsmith.data.dataset import split_held_out, training_documents
from draftsmith.drafters.checkpoint import save_drafter, target_metadata
from draftsmith.drafters.methods import Untrained, build
from draftsmith.drafters.target import Target
from draftsmith.recipes.entry import is_main_process, tell
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import cannot_write
from draftsmith.recipes.schema import Recipe
from draftsmith.train.setup import check_ids, check_origin


def keep(recipe: Recipe, run: Path) -> Path:
    """Build the drafter on run/rows and write it; returns run/drafter. Raises UserError.

    Held-out documents are kept out of tables too.
    """
    folder = run / "drafter"
    if not is_main_process():
        return folder
    documents, _ = training_documents(run / "rows", recipe.data)
    training, _ = split_held_out(documents, recipe.data.held_out, recipe.seed)
    target = Target.load(recipe.target)
    check_origin(run / "rows", target, tell)
    check_ids(documents, target, run / "rows")
    drafter = cast(Untrained, build(recipe.drafter, target, None))
    drafter.count((document.ids, document.supervised) for document in training)
    metadata = {
        "target": target_metadata(target),
        "recipe": recipe.model_dump(mode="json"),
        "steps": 0,
    }
    try:
        save_drafter(drafter, folder, metadata)
    except (OSError, SafetensorError) as error:
        raise UserError(cannot_write(folder, error)) from error
    return folder
