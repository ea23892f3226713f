"""What a drafter needs to train: its parameters, and the bytes of a step."""

from draftsmith.data.memory import (
    ALONE,
    BYTES,
    FROZEN,
    FULL,
    LIBRARIES,
    PROGRAM,
    WIDEST,
    frozen_bytes,
)
from draftsmith.drafters.draft_model import called
from draftsmith.drafters.geometry import own_geometry
from draftsmith.drafters.shallow import spread
from draftsmith.drafters.target import TargetShape, describe
from draftsmith.recipes.schema import (
    DFlashConfig,
    DrafterConfig,
    DraftModelConfig,
    MedusaConfig,
    MtpConfig,
    Recipe,
    TargetConfig,
)
from draftsmith.recipes.sharing import Shares

TRAINED = "trained weights, gradients, optimizer"
LOGITS, STATES = "one chunk of logits", "slot states and their gradients"


def trained_parameters(config: DrafterConfig, shape: TargetShape) -> int:
    """Parameters that take gradient steps (a test counts the real ones)."""
    match config:
        case MedusaConfig():
            size, rows = shape.hidden_size, config.draft_vocab or shape.vocab_size
            extra = {"shared": 0, "low_rank": config.rank * (size + rows), "own": rows * size}
            blocks = (1 + config.reads_root) * size * size + size
            return config.heads * (blocks + extra[config.projection])
        case MtpConfig():
            size = shape.hidden_size
            return config.depths * (max(shape.layer_parameters) + 2 * size * size + 3 * size)
        case DFlashConfig():
            size, taps = shape.hidden_size, len(config.taps) or config.layers
            layer = own_geometry(config, shape.geometry).layer_parameters
            return taps * size**2 + 2 * size + config.layers * layer
        case DraftModelConfig(models=()):
            layers = [shape.layer_parameters[i] for i in spread(shape.layers, config.layers)]
            embedding = shape.embedding_parameters
            norms = shape.parameters - sum(shape.layer_parameters) - embedding
            return sum(layers) + norms + (embedding if config.embedding == "own" else 0)
    return 0


def adapted_parameters(recipe: Recipe, shape: TargetShape) -> int:
    """Parameters of the target's adapters (a test counts the real ones)."""
    if recipe.adapter is None:
        return 0
    head = shape.hidden_size + shape.vocab_size if recipe.adapter.head else 0
    return recipe.adapter.rank * (shape.linear_sides + head)


def kept_by_layers(recipe: Recipe, shape: TargetShape, positions: int) -> dict[str, int]:
    """Bytes of activations that a target that learns keeps for its gradient, by part."""
    if recipe.adapter is None:
        return {}
    wide = shape.geometry
    # About ten states and four of its MLP's moments, as a drafter's layer; adapters read fp32.
    layer = positions * (10 * wide.hidden + 4 * wide.intermediate) * FULL
    inputs = positions * wide.hidden * BYTES[recipe.target.dtype]
    whole = layer * shape.layers
    kept = layer + inputs * shape.layers if recipe.adapter.checkpointing else whole
    head = {"one chunk of the target's own logits": chunk_memory(recipe, shape, whole=True)}
    return {"activations of the target's layers": kept, **head}


def ready_parameters(config: DrafterConfig) -> int:
    """Parameters of ready draft models that are read. Raises UserError for missing ones."""
    if not isinstance(config, DraftModelConfig):
        return 0
    named = [("drafter.models", name) for name in config.models]
    if config.boosts is not None and not config.models:
        named.append(("drafter.boosts", config.boosts))
    total = 0
    for knob, name in named:
        with called(knob):
            total += describe(TargetConfig(model=name)).parameters
    return total


def estimate_memory(
    recipe: Recipe, shape: TargetShape, trained: int, shares: Shares = ALONE
) -> dict[str, int]:
    """Bytes of one training step, by part, every position supervised; of a walk over held-out
    answers where no step is taken. With several processes: of each.

    A sum is what is held at most: what torch allocates is 0.65 to 1 of it (a test compares them).
    """
    drafter, width = recipe.drafter, BYTES[recipe.target.dtype]
    positions = recipe.train.rows_per_micro_batch * recipe.data.max_length
    rows = (reduced_rows(drafter) or 0) * shape.hidden_size
    return {
        LIBRARIES: PROGRAM,
        FROZEN: frozen_bytes(recipe, shape, shares) + (rows + ready_parameters(drafter)) * width,
        TRAINED: trained_bytes(trained, shares),
        **step_memory(drafter, recipe, shape, positions),
        **kept_by_layers(recipe, shape, positions),
        "target's activations": positions
        * (WIDEST * shape.hidden_size + recipe.data.max_length)
        * width,
    }


def trained_bytes(trained: int, shares: Shares = ALONE) -> int:
    """Weights, gradients and two moments; the buckets in which gradients travel; where they are
    spread, what is gathered for a step, and DeepSpeed's second copy of the weights.
    """
    parts, whole = {
        "alone": (0, 4),
        "ddp": (0, 5),
        "fsdp2": (4, 3),
        "zero2": (4, 3),
        "zero3": (5, 3),
    }[shares.sharing]
    return round((parts / shares.processes + whole) * trained * FULL)


def step_memory(
    config: DrafterConfig, recipe: Recipe, shape: TargetShape, positions: int
) -> dict[str, int]:
    """Bytes that the drafter's part of a step takes, by part."""
    # The states and their gradient, before and after it is scaled; half-precision temporaries.
    states = 4 * positions * shape.hidden_size * FULL
    match config:
        case MedusaConfig():
            inner = config.rank if config.projection == "low_rank" else 0
            states += 4 * positions * inner * FULL
            return {LOGITS: chunk_memory(recipe, shape), STATES: config.heads * states}
        case DFlashConfig():
            wide = own_geometry(config, shape.geometry)
            roots = min(config.anchors_per_row, recipe.data.max_length)
            blocks = recipe.train.rows_per_micro_batch * roots * config.block_size
            # What a layer keeps for its gradient: about ten states, of which four are as wide as
            # products are, and four of its MLP's moments, which all are.
            narrow = 2 if recipe.train.precision == "bf16" else FULL
            states = 6 * FULL * wide.hidden + narrow * (4 * wide.hidden + 4 * wide.intermediate)
            taps = len(config.taps) or config.layers
            context = (taps + 2) * wide.hidden + 4 * config.layers * wide.kv_heads * wide.head_dim
            return {
                LOGITS: chunk_memory(recipe, shape),
                STATES: 4 * blocks * wide.hidden * FULL,
                "activations of the blocks": config.layers * blocks * states,
                "the context's keys and values": positions * context * FULL,
            }
        case MtpConfig():
            # What a layer keeps of every slot: about ten states and four of its MLP's moments.
            kept = 10 * shape.hidden_size + 4 * shape.geometry.intermediate
            return {
                LOGITS: chunk_memory(recipe, shape),
                STATES: config.draft_tokens * states,
                "activations of the slots": positions * config.draft_tokens * kept * FULL,
                "attention's scores": scores_memory(config, recipe, shape),
            }
        case DraftModelConfig(models=()):
            # What a layer keeps for its gradient: about as much as 20 states.
            kept = config.layers * (20 * shape.hidden_size + recipe.data.max_length)
            return {
                LOGITS: chunk_memory(recipe, shape),
                STATES: states,
                "draft model's activations": positions * kept * FULL,
            }
    return {}


def scores_memory(config: MtpConfig, recipe: Recipe, shape: TargetShape) -> int:
    """Bytes of the scores and laws that slots after the first keep, a row being one document."""
    length, rows = recipe.data.max_length, recipe.train.rows_per_micro_batch
    return (config.draft_tokens - 1) * 2 * rows * shape.geometry.heads * length**2 * FULL


def reduced_rows(config: DrafterConfig) -> int | None:
    """Rows of the head that drafts may use; None: all."""
    return getattr(config, "draft_vocab", None)


def projecting(config: DrafterConfig, shape: TargetShape) -> int:
    """Trained parameters that project slot states to the vocabulary."""
    rows = reduced_rows(config) or shape.vocab_size
    match config:
        case MedusaConfig():
            columns = {"shared": 0, "low_rank": config.rank, "own": shape.hidden_size}
            return config.heads * rows * columns[config.projection]
        case DraftModelConfig(models=(), embedding="own"):
            return rows * shape.hidden_size
    return 0


def chunk_memory(recipe: Recipe, shape: TargetShape, *, whole: bool = False) -> int:
    """Bytes that the chunked projection holds at once: it takes one slot after the other. whole:
    of the target's vocabulary, whatever drafts may use.
    """
    loss, slots, chunk = recipe.objective, recipe.drafter.trained_slots, recipe.train.chunk
    width = BYTES[recipe.target.dtype]
    reduced = None if whole else reduced_rows(recipe.drafter)
    rows = reduced or shape.vocab_size
    half = width < FULL
    # Logits in the target's precision, in fp32, their gradient, and the teacher's law for a slot.
    slot = chunk * rows * (half * width + 3 * FULL)
    own = projecting(recipe.drafter, shape)
    # CPUs sort a half-precision head anew for a product; trained parts of one have a copy in it.
    slot += half * width * (max(rows, shape.vocab_size) * shape.hidden_size + own)
    # A loss that weighs a slot by the others keeps the gradients of all.
    kept = chunk * rows * width * slots if {loss.loss, loss.weights} & {"e2e_tv", "dpace"} else 0
    # The teacher's logits and law; kl and lk temper them too. Groups share positions. Every loss
    # has them in the steps that are logged.
    copies = 4 if reduced is None and loss.loss in ("kl", "lk") else 2
    laws = (chunk + slots) * shape.vocab_size * (copies * FULL + half * width)
    # Afterwards the gradient of what projects is there twice, before and after it is scaled.
    return max(slot + kept + laws, own * FULL)
