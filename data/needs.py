"""What a drafter needs to train: its parameters, and the bytes of a step."""

from draftsmith.drafters.draft_model import called
from draftsmith.drafters.shallow import spread
from draftsmith.drafters.target import TargetShape, describe
from draftsmith.recipes.schema import (
    DrafterConfig,
    DraftModelConfig,
    MedusaConfig,
    MtpConfig,
    Recipe,
    TargetConfig,
)

BYTES = {"bfloat16": 2, "float32": 4}
FULL = 4  # bytes of an fp32 number: what is trained, its gradient and its two moments
FROZEN, TRAINED = "frozen weights", "trained weights, gradients, optimizer"


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
            return max(shape.layer_parameters) + 2 * size * size + 3 * size
        case DraftModelConfig(models=()):
            layers = [shape.layer_parameters[i] for i in spread(shape.layers, config.layers)]
            embedding = shape.embedding_parameters
            norms = shape.parameters - sum(shape.layer_parameters) - embedding
            return sum(layers) + norms + (embedding if config.embedding == "own" else 0)
    return 0


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


def estimate_memory(recipe: Recipe, shape: TargetShape, trained: int) -> dict[str, int]:
    """Bytes of one training step, by part; of a walk over held-out answers where none is taken."""
    train = recipe.train
    width = BYTES[recipe.target.dtype]
    positions = train.rows_per_micro_batch * recipe.data.max_length
    return {
        FROZEN: (shape.parameters + ready_parameters(recipe.drafter)) * width,
        TRAINED: trained * 4 * FULL,
        **step_memory(recipe.drafter, recipe, shape, positions),
        # A layer's widest moment (an MLP of four times the width), the mask between documents.
        "target's activations": positions
        * (16 * shape.hidden_size + recipe.data.max_length)
        * width,
    }


def step_memory(
    config: DrafterConfig, recipe: Recipe, shape: TargetShape, positions: int
) -> dict[str, int]:
    """Bytes that the drafter's part of a step takes, by part."""
    # Cross-entropy works in one buffer; the divergences hold the teacher and their temporaries too.
    buffers = 2 if recipe.objective.loss == "ce" else 5
    match config:
        case MedusaConfig():
            rows = config.draft_vocab or shape.vocab_size
            logits = recipe.train.chunk * config.heads * rows
            states = positions * config.heads * shape.hidden_size
            return {
                "one chunk of logits": buffers * logits * FULL,
                "slot states and their gradients": 4 * states * FULL,
            }
        case MtpConfig():
            rows = config.draft_vocab or shape.vocab_size
            # What a layer keeps for its gradient: about as much as 20 states. Attention masks.
            kept = config.draft_tokens * (20 * shape.hidden_size + recipe.data.max_length // 4)
            return {
                "one chunk of logits": buffers
                * recipe.train.chunk
                * config.draft_tokens
                * rows
                * FULL,
                "mtp block's activations": positions * kept * FULL,
            }
        case DraftModelConfig(models=()):
            rows = config.draft_vocab or shape.vocab_size
            # What a layer keeps for its gradient: about as much as 20 states.
            kept = config.layers * (20 * shape.hidden_size + recipe.data.max_length)
            return {
                "one chunk of logits": buffers * recipe.train.chunk * rows * FULL,
                "draft model's activations": positions * kept * FULL,
            }
    return {}
