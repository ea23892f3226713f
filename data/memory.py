"""What a batch of answers holds in memory, from the recipe and the target's config alone."""

from draftsmith.drafters.quantised import bytes_per_weight
from draftsmith.drafters.target import TargetShape
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sharing import Shares

ALONE = Shares()
BYTES = {"bfloat16": 2, "float32": 4}
FULL = 4  # bytes of an fp32 number: what is trained, its gradient and its two moments
FROZEN, LIBRARIES = "frozen weights", "Python and its libraries"
PROGRAM = 400 << 20  # Python with torch and transformers; a CUDA context is as large
# Widths of the hidden state that a layer holds at its widest moment: attention's heads, an MLP of
# four times the width, before and after its activation.
WIDEST = 20


def answering_memory(recipe: Recipe, shape: TargetShape, longest: int) -> dict[str, int]:
    """Bytes while the target answers its first batch, by part; `longest` prompt in tokens."""
    distil, width = recipe.data.distil, BYTES[recipe.target.dtype]
    positions = cached_positions(longest, distil.max_new_tokens)
    logits = 4 if distil.temperature == 0 else 12  # filters sort and sum in double precision
    return {
        LIBRARIES: PROGRAM,
        FROZEN: frozen_bytes(recipe, shape),
        "keys and values": distil.batch_size * positions * shape.cached_numbers * width,
        "target's activations": distil.batch_size
        * longest
        * (WIDEST * shape.hidden_size + longest)
        * width,
        "logits": distil.batch_size * shape.vocab_size * logits * FULL,
    }


def frozen_bytes(recipe: Recipe, shape: TargetShape, shares: Shares = ALONE) -> int:
    """The target's weights: linear layers may be quantised, the rest has the target's dtype. Where
    layers are spread, one is there as a whole and the next is on its way.
    """
    width, inner = BYTES[recipe.target.dtype], shape.linear_parameters
    method = recipe.target.load_in or shape.quantisation
    if shares.target_is_sharded and shape.layer_parameters:
        layers = sum(shape.layer_parameters)
        there = layers / shares.processes + 2 * max(shape.layer_parameters)
        return round((shape.parameters - layers + min(there, layers)) * width)
    return (shape.parameters - inner) * width + round(inner * bytes_per_weight(method, width))


def cached_positions(prompt: int, answer: int) -> int:
    """Room of the cache at the end: a buffer that starts with twice the prompt, and doubles for
    whatever comes when it is full. An answer's last token is not fed.
    """
    room = max(64, 2 * prompt)
    while room < prompt + answer - 1:
        room = 2 * (room + 1)
    return room
