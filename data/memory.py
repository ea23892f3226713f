"""What a run holds in memory at its two peaks, from the recipe and the target's config alone.

A sum is what is held at most: measured peaks are 0.7 to 1 of it (a test compares them).
"""

from draftsmith.drafters.target import TargetShape
from draftsmith.recipes.schema import Recipe

BYTES = {"bfloat16": 2, "float32": 4}
FULL = 4  # bytes of an fp32 number
PROGRAM = 400 << 20  # Python with torch and transformers; a CUDA context is as large
# Widths of the hidden state that a layer holds at its widest moment: attention's heads, an MLP of
# four times the width, before and after its activation.
WIDEST = 20


def training_memory(recipe: Recipe, shape: TargetShape, trained: int) -> dict[str, int]:
    """Bytes of one training step, by part, every position supervised."""
    drafter, width = recipe.drafter, BYTES[recipe.target.dtype]
    positions = recipe.train.rows_per_micro_batch * recipe.data.max_length
    size = shape.hidden_size + (drafter.rank if drafter.projection == "low_rank" else 0)
    rows = 0 if drafter.draft_vocab is None else drafter.draft_vocab * shape.hidden_size
    # Weights, gradients and two moments; what projects has its gradient twice more, added up.
    optimizer = (4 * trained + 2 * projecting(recipe, shape)) * FULL
    return {
        "Python and its libraries": PROGRAM,
        "frozen weights": (shape.parameters + rows) * width,
        "trained weights, gradients, optimizer": optimizer,
        "one chunk of logits": chunk_memory(recipe, shape),
        "target's activations": positions
        * (WIDEST * shape.hidden_size + recipe.data.max_length)
        * width,
        # The states and their gradient, before and after it is scaled; half-precision temporaries.
        "slot states and their gradients": 4 * positions * drafter.heads * size * FULL,
    }


def projecting(recipe: Recipe, shape: TargetShape) -> int:
    """Trained parameters that project slot states to the vocabulary."""
    drafter = recipe.drafter
    columns = {"shared": 0, "low_rank": drafter.rank, "own": shape.hidden_size}
    return drafter.heads * (drafter.draft_vocab or shape.vocab_size) * columns[drafter.projection]


def chunk_memory(recipe: Recipe, shape: TargetShape) -> int:
    """Bytes that the chunked projection holds at once: it takes one slot after the other."""
    loss, heads, chunk = recipe.objective, recipe.drafter.heads, recipe.train.chunk
    width = BYTES[recipe.target.dtype]
    rows = recipe.drafter.draft_vocab or shape.vocab_size
    whole = recipe.drafter.draft_vocab is None
    # Logits in the target's precision, in fp32, their gradient, and the teacher's law for a slot.
    slot = chunk * rows * (width + 3 * FULL)
    # A loss that weighs a slot by the others keeps the gradients of all.
    kept = chunk * rows * width * heads if {loss.loss, loss.weights} & {"e2e_tv", "dpace"} else 0
    # The teacher's logits and law; kl and lk temper them too. Groups share positions. Every loss
    # has them in the steps that are logged.
    copies = 4 if whole and loss.loss in ("kl", "lk") else 2
    return slot + kept + (chunk + heads) * shape.vocab_size * copies * FULL


def answering_memory(recipe: Recipe, shape: TargetShape, longest: int) -> dict[str, int]:
    """Bytes while the target answers its first batch, by part; `longest` prompt in tokens."""
    distil, width = recipe.data.distil, BYTES[recipe.target.dtype]
    positions = cached_positions(longest, distil.max_new_tokens)
    logits = 4 if distil.temperature == 0 else 12  # filters sort and sum in double precision
    return {
        "Python and its libraries": PROGRAM,
        "frozen weights": shape.parameters * width,
        "keys and values": distil.batch_size * positions * shape.cached_numbers * width,
        "target's activations": distil.batch_size
        * longest
        * (WIDEST * shape.hidden_size + longest)
        * width,
        "logits": distil.batch_size * shape.vocab_size * logits * FULL,
    }


def cached_positions(prompt: int, answer: int) -> int:
    """Room of the cache at the end: a buffer that starts with twice the prompt, and doubles for
    whatever comes when it is full. An answer's last token is not fed.
    """
    room = max(64, 2 * prompt)
    while room < prompt + answer - 1:
        room = 2 * (room + 1)
    return room
