"""Every knob of a recipe, typed. Defaults are the values of the source paper where there is one.

Blocks are frozen and refuse unknown keys; `recipes/load.py` says errors in one clear line.
"""

from itertools import accumulate
from operator import mul
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Positive = Annotated[int, Field(ge=1, le=2**31)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Momentum = Annotated[float, Field(ge=0.0, lt=1.0)]
Text = Annotated[str, Field(min_length=1)]
RuleName = Literal[
    "point_mass",
    "token",
    "block",
    "multi_step",
    "without_replacement",
    "k_sequential",
    "typical",
    "lenient",
]
LARGEST_TREE = 255  # nodes without the root


class Block(BaseModel):
    """A group of knobs: frozen after load, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TargetConfig(Block):
    """The language model that is served. It stays frozen."""

    model: Text  # built-in name (`smollm2-135m`), local folder, or Hub id
    revision: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    # quantise the layers while loading, by bitsandbytes; embedding, norms and head stay in `dtype`
    load_in: Literal["nf4", "int8"] | None = None
    device: str = "auto"  # auto: cuda where there is one, else cpu
    trust_remote_code: bool = False


class ServerConfig(Block):
    """How servers are asked, with `distil.backend: openai`."""

    model: Text | None = None  # its name there; None: the target's, or the only one that is served
    # `completions`: the prompt as we render it; `chat`: messages, which the server renders
    api: Literal["completions", "chat"] = "completions"
    key_variable: Text = "DRAFTSMITH_API_KEY"  # environment variable that holds the API key, if any
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 32  # requests in flight, per server
    timeout: Annotated[float, Field(gt=0.0)] = 600.0  # seconds that an answer may take
    tries: Positive = 5  # of a prompt that servers fail at, before it is dropped
    patience: Annotated[float, Field(ge=0.0)] = 600.0  # seconds without any server before giving up


class DistilConfig(Block):
    """How the target answers the prompts (its answers are the training data)."""

    # `openai`: servers with its API (vLLM, SGLang, TGI, `transformers serve`) answer in our place.
    # `given`: nobody does, the rows of `prompts` hold the target's answers (their assistant turns)
    backend: Literal["transformers", "openai", "given"] = "transformers"
    urls: tuple[Text, ...] = ()  # of these servers, such as http://localhost:8000/v1
    server: ServerConfig = ServerConfig()
    # [i, n]: only the i-th of n shares of the prompts; `draftsmith data merge` joins them
    share: tuple[Positive, Positive] = (1, 1)

    max_new_tokens: Positive = 256
    temperature: Annotated[float, Field(ge=0.0)] = 0.0  # 0: greedy
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off
    greedy_share: Fraction = 0.0  # with temperature > 0: share of the prompts answered greedily
    batch_size: Positive = 64

    @model_validator(mode="after")
    def check_servers(self) -> Self:
        """Servers are named where they are asked, and their addresses hold no secrets."""
        if (self.backend == "openai") != bool(self.urls):
            raise ValueError("urls: give them with backend: openai, and only then")
        for url in self.urls:
            found = urlsplit(url)
            if found.scheme not in ("http", "https") or not found.hostname or found.fragment:
                raise ValueError(f"urls: {url!r} is no address such as http://localhost:8000/v1")
            if found.query or "@" in found.netloc:
                raise ValueError(
                    "urls: an address may hold no password and no query, for recipes are kept in "
                    "files; put the API key into the environment (distil.server.key_variable)"
                )
        if self.share[0] > self.share[1]:
            raise ValueError(f"share: there is no share {self.share[0]} of {self.share[1]}")
        return self


class SelfWrittenConfig(Block):
    """Prompts that the target writes itself, as a user would (Magpie, 2406.08464).

    They come on top of the others, `limit` or not, and are answered like them.
    """

    count: Annotated[int, Field(ge=0)] = 0  # turns that are sampled; the filters leave fewer
    max_new_tokens: Positive = 96  # a longer turn is dropped
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95


class DataConfig(Block):
    """Prompts, their answers, and how answers become training rows."""

    # `starter`, a .jsonl file, a local `datasets` folder, or a Hub data set id
    prompts: Text = "starter"
    split: str = "train"
    eval_prompts: Text = "starter"  # the same choices; `starter` is the shipped evaluation set
    eval_split: str = "test"
    grow: Annotated[int, Field(ge=0)] = 0  # prompts that the seeded offline generator adds
    limit: Positive | None = None  # at most this many training prompts, drawn by the seed
    # weights of categories among the training prompts, such as {code: 2, math: 1}: as many prompts
    # as `limit` and the scarcest of them allow, others are left out; empty: as they come
    mix: dict[Text, Annotated[float, Field(gt=0.0)]] = {}
    answers: Positive = 1  # answers to each of them, sampled: for prompts that are few but good
    # of a conversation: `last`, the answer to its end; `all`, every turn anew on the answers so far
    turns: Literal["last", "all"] = "last"
    # words in a row that make a training prompt a copy of an evaluation prompt; 0: only whole ones
    overlap_words: Annotated[int, Field(ge=0)] = 13
    # share of such runs that earlier prompts hold, from which on one is dropped; None: none is
    near_duplicates: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    self_written: SelfWrittenConfig = SelfWrittenConfig()
    thinking: bool | None = None  # passed to the template as `enable_thinking`; None: not passed
    max_prompt_tokens: Positive = 1024
    max_length: Positive = 2048  # tokens of a packed row
    min_supervised_tokens: Positive = 1
    # answers that ran into max_new_tokens
    cut_answers: Literal["keep", "mask_last", "drop"] = "keep"
    held_out: Positive = 64  # documents kept away from training, for the walk
    distil: DistilConfig = DistilConfig()

    @model_validator(mode="after")
    def check_answers(self) -> Self:
        """Greedy answers to one prompt are all the same, and given ones cannot be added to."""
        if self.distil.backend == "given":
            for name, idle in (
                ("answers", self.answers > 1),
                ("grow", self.grow > 0),
                ("self_written.count", self.self_written.count > 0),
                ("prompts", self.prompts == "starter"),
            ):
                if idle:
                    raise ValueError(
                        f"{name}: with distil.backend: given, answers come with the prompts of a "
                        "file or data set; nothing else has any"
                    )
        if self.answers > 1 and self.distil.temperature == 0:
            raise ValueError(
                f"answers: {self.answers} of a prompt are equal at temperature 0; "
                "set distil.temperature, or answers: 1"
            )
        return self


class DrafterBlock(Block):
    """The knobs of a drafter, and what the rest asks of them: kinds differ in some of it."""

    @property
    def trained_slots(self) -> int:
        """Slots that gradient steps are taken on; 0: none are."""
        return 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Children of every node, by depth, where that is fixed; empty: held-out answers choose."""
        return ()

    @property
    def heals(self) -> bool:
        """Whether it starts from a trained drafter, which it must not end worse than."""
        return False

    @property
    def counts(self) -> bool:
        """Whether it counts answers, and is nothing without them."""
        return False

    @property
    def walks(self) -> bool:
        """Whether every slot ranks its guesses, so that decoding can be simulated."""
        return True


class MedusaConfig(DrafterBlock):
    """Medusa heads (Medusa paper, section 3.1): residual blocks on the target's final state."""

    kind: Literal["medusa"] = "medusa"
    heads: Annotated[int, Field(ge=1, le=16)] = 5
    # shared: through the frozen head. low_rank: plus a trained low-rank correction per slot.
    # own: one projection per slot, started from the target's head (the paper's).
    projection: Literal["shared", "low_rank", "own"] = "shared"
    rank: Positive = 64  # of low_rank
    draft_vocab: Positive | None = None  # rows of the head that drafts may use; None: all
    # the heads also read the root's embedding (as Hydra's do); no other engine reads such heads
    reads_root: bool = False

    @property
    def depth(self) -> int:
        """K, the slots."""
        return self.heads

    @property
    def trained_slots(self) -> int:
        """All of them."""
        return self.heads


class PromptLookupConfig(DrafterBlock):
    """Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding): what followed the same tokens
    earlier in the prompt and the answer. Nothing is trained.
    """

    kind: Literal["prompt_lookup"]
    max_ngram: Annotated[int, Field(ge=1, le=64)] = 3  # tokens at the end that are looked for first
    min_ngram: Annotated[int, Field(ge=1, le=64)] = 1  # and last
    draft_tokens: Annotated[int, Field(ge=1, le=63)] = 10

    @model_validator(mode="after")
    def check_ngrams(self) -> Self:
        """Something must be looked for."""
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram: {self.min_ngram} is more than max_ngram ({self.max_ngram})"
            )
        return self

    @property
    def depth(self) -> int:
        """K, the slots."""
        return self.draft_tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """A chain: a text goes on in one way."""
        return (1,) * self.draft_tokens


class NgramConfig(DrafterBlock):
    """A table of n-grams with back-off, counted on the distilled answers; no gradient steps
    (Leviathan et al., 2211.17192, section 4.2: bigrams).
    """

    kind: Literal["ngram"]
    order: Annotated[int, Field(ge=1, le=4)] = 2  # tokens of the longest grams; 2: bigrams
    # The law of the next shorter grams counts like so many occurrences.
    backoff: Annotated[float, Field(gt=0.0)] = 1.0
    draft_tokens: Annotated[int, Field(ge=1, le=63)] = 3

    @property
    def depth(self) -> int:
        """K, the slots."""
        return self.draft_tokens

    @property
    def counts(self) -> bool:
        """Yes."""
        return True


class DraftModelConfig(DrafterBlock):
    """A small causal language model (Leviathan et al., 2211.17192): distilled from the target's own
    layers, or ready ones, whose drafts are merged into one tree (SpecInfer, 2305.09781).
    """

    kind: Literal["draft_model"]
    # ready models with the target's tokenizer, folders or Hub ids; none: one is distilled
    models: tuple[Text, ...] = ()
    layers: Positive = 4  # of the distilled one: taken from the target, evenly spread
    # of the distilled one: the target's frozen embedding and head, or trained copies
    embedding: Literal["shared", "own"] = "shared"
    draft_vocab: Positive | None = None  # rows of its head that drafts may use; None: all
    # of the distilled one: a draft model whose hits it need not learn (SpecInfer's boost-tuning)
    boosts: Text | None = None
    draft_tokens: Annotated[int, Field(ge=1, le=63)] = 4
    # children of every node, by depth (SpecInfer's <k1, k2, ..>); empty: chain and searched tree
    expansion: Annotated[tuple[Annotated[int, Field(ge=1, le=8)], ...], Field(max_length=63)] = ()

    @model_validator(mode="after")
    def check_expansion(self) -> Self:
        """A tree is one pass of the target."""
        nodes = sum(accumulate(self.expansion, mul))
        if nodes > LARGEST_TREE:
            raise ValueError(f"expansion: {nodes} nodes are too many; allowed: {LARGEST_TREE}")
        return self

    @property
    def depth(self) -> int:
        """K, the slots."""
        return len(self.expansion) or self.draft_tokens

    @property
    def trained_slots(self) -> int:
        """One: its state says the next token. Ready models are not trained."""
        return 0 if self.models else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The expansion; of several models a chain each."""
        return self.expansion or (1,) * (self.draft_tokens if len(self.models) > 1 else 0)

    @property
    def walks(self) -> bool:
        """Merged trees have no common ranks."""
        return len(self.models) < 2


class DFlashConfig(DrafterBlock):
    """A block drafter (DFlash, 2602.06036): a few layers that read the target's states fill a block
    of masks in one pass. Defaults are the paper's, section 4.
    """

    kind: Literal["dflash"]
    block_size: Annotated[int, Field(ge=2, le=64)] = 16  # the root and its drafts
    layers: Positive = 5
    # target layers that it reads (0-based, ascending); empty: as many as it has layers, spread out
    taps: tuple[Annotated[int, Field(ge=0)], ...] = ()
    # a token that no text has; null: an unused one of the target is taken
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    start: Literal["random", "target"] = "random"  # target: from copies of the target's layers
    # measures of its layers; null: the target's
    heads: Positive | None = None
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    intermediate: Positive | None = None
    draft_vocab: Positive | None = None  # rows of the head that drafts may use; None: all
    anchors_per_row: Positive = 512  # blocks trained on per packed row, drawn anew in every epoch

    @model_validator(mode="after")
    def check_taps(self) -> Self:
        """Every engine sorts them; ours are sorted."""
        if list(self.taps) != sorted(set(self.taps)):
            raise ValueError(f"taps: {list(self.taps)} must ascend; give every layer once")
        return self

    @property
    def depth(self) -> int:
        """K, the slots."""
        return self.block_size - 1

    @property
    def trained_slots(self) -> int:
        """All of them."""
        return self.block_size - 1


class MtpConfig(DrafterBlock):
    """Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2): a decoder layer of the
    target's own kind reads the target's state and the next token, and then its own states.
    """

    kind: Literal["mtp"]
    draft_tokens: Annotated[int, Field(ge=1, le=16)] = 3  # K (FastMTP, 2509.18362)
    # 1: one layer that is applied again for every slot; as many as draft_tokens: one for each
    depths: Annotated[int, Field(ge=1, le=16)] = 1
    # last_layer: the block starts as the target's last layer of full attention. random: as new.
    # checkpoint: as the MTP layer that comes with the target's weights (healing, 2604.12374)
    start: Literal["last_layer", "random", "checkpoint"] = "last_layer"
    # what a slot after the first learns from. teacher: the text's tokens, its own states.
    # on_policy: its own likeliest tokens, its own states. mixed: the text's tokens; states drawn
    # evenly from the target's and those of all earlier slots (Megatron's hidden-state mixing).
    recursion: Literal["teacher", "on_policy", "mixed"] = "teacher"
    order: Literal["embedding_first", "hidden_first"] = "embedding_first"  # into the projection
    # the state that a slot reads, after the norm before the head or before it: slot 1 the
    # target's, a later one the layer's own
    reads: Literal["post_norm", "pre_norm"] = "post_norm"
    recycles: Literal["post_norm", "pre_norm"] = "post_norm"
    router: Literal["trained", "frozen"] = "trained"  # of a layer with experts
    position_shift: Literal[0, -1] = (
        0  # of a slot's rotary position from that of the token it reads
    )
    draft_vocab: Positive | None = None  # rows of the head that drafts may use; None: all

    @model_validator(mode="after")
    def check_depths(self) -> Self:
        """Layers of their own read the states of the one before, at every position."""
        if self.depths not in (1, self.draft_tokens):
            raise ValueError(
                f"depths: {self.depths} is neither 1 nor draft_tokens ({self.draft_tokens})"
            )
        if self.depths > 1 and self.recursion != "teacher":
            raise ValueError(
                f"recursion: {self.recursion} is for one layer that is applied again; "
                "use teacher, or depths: 1"
            )
        return self

    @property
    def depth(self) -> int:
        """K, the slots."""
        return self.draft_tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """A chain where every slot has a layer of its own; else held-out answers choose."""
        return (1,) * self.draft_tokens if self.depths > 1 else ()

    @property
    def trained_slots(self) -> int:
        """All of them."""
        return self.draft_tokens

    @property
    def heals(self) -> bool:
        """From the target's own MTP layer it does."""
        return self.start == "checkpoint"


DrafterConfig = (
    MedusaConfig | MtpConfig | DraftModelConfig | DFlashConfig | PromptLookupConfig | NgramConfig
)


class ObjectiveConfig(Block):
    """What the slots are trained for (drafters share one objective)."""

    loss: Literal["ce", "kl", "tv", "lk", "e2e_tv"] = "ce"
    weights: Literal["geometric", "exponential", "dpace", "list"] = "geometric"
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8  # geometric: decay^k (Medusa)
    # exponential: exp(-(k-1)/gamma); null: DFlash's for the number of slots (4, 5 or 7)
    gamma: Annotated[float, Field(gt=0.0)] | None = None
    slot_weights: tuple[Annotated[float, Field(ge=0.0)], ...] = ()  # list: one weight per slot
    dpace_alpha: Fraction = 0.5  # D-PACE's smoothing
    lk_eta: Annotated[float, Field(ge=0.0)] = 3.0  # LK hybrid's eta
    temperature: Annotated[float, Field(gt=0.0)] = 1.0  # of kl: both laws, times T^2

    @model_validator(mode="after")
    def check_weights(self) -> Self:
        """D-PACE reweights cross-entropy; end-to-end TV has weights of its own."""
        if self.weights == "dpace" and self.loss != "ce":
            raise ValueError(f"weights: dpace needs loss: ce, not {self.loss}")
        if self.weights == "list" and (not self.slot_weights or sum(self.slot_weights) == 0):
            raise ValueError("weights: list needs slot_weights with a positive sum")
        return self


class GateConfig(Block):
    """What an adapted target may lose before its drafter is refused; null: anything."""

    answers: Positive = 16  # held-out prompts that both answer, greedily
    max_new_tokens: Positive = 64
    # nats per token of held-out answers that the adapted law may lie from the original
    max_kl: Annotated[float, Field(gt=0.0)] | None = 0.1
    # nats per token by which its own answers may be less likely to the original than the original's
    max_fall: Annotated[float, Field(gt=0.0)] | None = 0.1


class AdapterConfig(Block):
    """LoRA on the target, trained with Medusa's heads (Medusa-2, 2401.10774, sections 2.2 and 2.3).
    It changes what the target says. Defaults are the paper's for Vicuna.
    """

    rank: Positive = 32
    alpha: Positive = 16
    dropout: Momentum = 0.05
    head: bool = True  # the target's head is adapted too, beside all linear layers
    lr: Annotated[float, Field(gt=0.0)] = 5e-4  # the heads' is optim.lr: 4 times that
    # what keeps it a language model. text: cross-entropy on the answers. original: KL to the same
    # network with its adapters off (self-distillation)
    language: Literal["text", "original"] = "text"
    head_share: Annotated[float, Field(ge=0.0)] = 0.2  # lambda_0: weight of the heads' loss
    ramp: Literal["none", "sine"] = "none"  # sine: lambda_0 sin(pi/2 * share of the steps done)
    # share of the steps that train the heads alone, under a schedule of their own
    heads_first: Momentum = 0.5
    checkpointing: bool = True  # recompute the layers' activations in the backward pass
    merged: bool = False  # also keep the adapted target as a plain model, beside the adapter
    gate: GateConfig = GateConfig()


class OptimConfig(Block):
    """AdamW, warm-up, and a schedule."""

    lr: Annotated[float, Field(gt=0.0)] = 2e-3  # Medusa's heads
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    clip: Annotated[float, Field(gt=0.0)] = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 40
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    min_lr_share: Fraction = 0.0  # the schedule ends at this share of lr
    wsd_decay: Fraction = 0.2  # wsd: share of the steps spent decaying


class TrainConfig(Block):
    """How long, how much at once, and what is kept."""

    epochs: Positive = 2
    max_steps: Positive | None = None  # ends training early; the schedule is stretched over it
    rows_per_step: Positive = 8  # packed rows of an optimizer step, over all processes
    rows_per_micro_batch: Positive = 4  # packed rows of one forward; the rest is accumulation
    precision: Literal["bf16", "fp32"] = "bf16"
    chunk: Positive = 256  # groups projected to the vocabulary at once
    feature_cache: bool = (
        False  # keep the target's states on disk; epochs after the first read them
    )
    patience: Annotated[float, Field(gt=0.0)] = 1800.0  # seconds that processes wait for another
    log_every: Positive = 10
    eval_every: Positive = 200
    save_every: Positive = 200
    keep_checkpoints: Positive = 2
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()


class EvalConfig(Block):
    """What the report measures."""

    prompts: Positive | None = None  # at most this many, spread over the categories
    # the first one comes from prefill, which is not timed
    max_new_tokens: Annotated[int, Field(ge=2)] = 128
    repeats: Positive = 1  # timed repeats of every prompt and arm, interleaved
    # nodes without the root
    tree_nodes: Annotated[int, Field(ge=1, le=63)] | Literal["auto"] = "auto"
    # a block drafter's drafts of a round, from a block as much smaller; null: as many as it was
    # trained for
    draft_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0.0)] = 0.0  # > 0 adds sampled arms to the greedy ones
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    threads: Positive | None = None  # torch threads; None: as torch finds them
    # further drafters in the same report: folders, or kinds that need neither training nor answers
    drafters: tuple[Text, ...] = ()
    # of sampled arms, each with the drafters that draw as it needs; at temperature 0 drafts are
    # accepted where they are the target's choice (or, lenient, nearly)
    rules: tuple[RuleName, ...] = ("point_mass", "token", "without_replacement")
    # prompts that are decoded together
    batches: Annotated[
        tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(min_length=1, max_length=16)
    ] = (1,)
    # on CUDA, our arms by recorded passes as well (CUDA graphs), one prompt at a time
    graphs: bool = False
    # a server with OpenAI's API that is measured too, such as http://localhost:8000/v1
    served: Text | None = None

    @model_validator(mode="after")
    def check_lists(self) -> Self:
        """Nothing is measured twice under one name."""
        for name, listed in (("rules", self.rules), ("batches", self.batches)):
            if len(set(listed)) < len(listed):
                raise ValueError(f"{name}: something is listed twice")
        return self


class Recipe(Block):
    """One reproducible run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # numpy's seeds end there
    runs: Text = "runs"  # folder that holds the run's folder
    target: TargetConfig
    data: DataConfig = DataConfig()
    drafter: Annotated[DrafterConfig, Field(discriminator="kind")] = MedusaConfig()
    adapter: AdapterConfig | None = None  # null: the target stays frozen
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    @field_validator("drafter", mode="before")
    @classmethod
    def default_kind(cls, given: object) -> object:
        """A drafter that does not say its kind is Medusa's."""
        if not isinstance(given, dict):
            return given
        # What passes here is Python's and no longer JSON's: strictly, a list is no tuple there.
        listed = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
        return {"kind": "medusa", **listed}
