"""The reduced draft vocabulary: the token ids that a drafter may propose."""

from collections import Counter
from collections.abc import Iterable, Sequence

from draftsmith.data.dataset import Document
from draftsmith.recipes.errors import UserError


def most_frequent(
    documents: Iterable[Document], size: int, vocab_size: int, *, always: Sequence[int] = ()
) -> list[int]:
    """The `size` ids most often supervised, and `always` (end of answer); ascending.

    Ties and ids that never occur are taken in id order, so that the list is full and repeatable.
    """
    wanted = sorted({token for token in always if token < vocab_size})
    if not len(wanted) <= size <= vocab_size:
        raise UserError(
            f"drafter.draft_vocab: {size} rows of a head with {vocab_size} were asked for; "
            f"allowed are {len(wanted)} (the end tokens) to {vocab_size}, or leave it out for all"
        )
    counts: Counter[int] = Counter()
    for document in documents:
        pairs = zip(document.ids, document.supervised, strict=True)
        counts.update(token for token, supervised in pairs if supervised)
    by_count = sorted(
        set(range(vocab_size)) - set(wanted), key=lambda token: (-counts[token], token)
    )
    return sorted(wanted + by_count[: size - len(wanted)])
