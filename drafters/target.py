"""The target: a Hugging Face causal language model, frozen, with what drafters need from it."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters.builtin import BUILTINS, builtin_config, builtin_folder
from draftsmith.drafters.cache import TargetCache
from draftsmith.drafters.content import folder_content
from draftsmith.drafters.slots import Batch, TargetStates
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.schema import TargetConfig

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROLLBACK_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class TargetShape:
    """What a target's config says, without its weights."""

    vocab_size: int
    hidden_size: int
    layers: int
    max_positions: int
    cached_numbers: int  # keys and values of one position, in all layers
    parameters: int
    template: str | None


class Target:
    """A frozen causal language model: states for training, steps for decoding, its head, its
    fingerprint.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str, fingerprint: dict[str, str]
    ) -> None:
        self.model, self.tokenizer, self.name, self.fingerprint = (
            model,
            tokenizer,
            name,
            fingerprint,
        )
        model.requires_grad_(False)
        model.eval()
        self.base = model.get_decoder()
        self.config = model.config.get_text_config()
        self.head_weight: Tensor = model.get_output_embeddings().weight  # [V, D]
        self.vocab_size, self.hidden_size = self.head_weight.shape
        self.layers = int(self.config.num_hidden_layers)
        self.dtype, self.device = self.head_weight.dtype, self.head_weight.device
        self.eos_ids = eos_ids(model, tokenizer)
        self.adjust = logit_adjustment(self.config.to_dict())
        # transformers renamed `past_key_values` to `cache`; both are in the supported range.
        parameters = inspect.signature(self.base.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.check_weights()
        self.check_head()

    @staticmethod
    def load(config: TargetConfig) -> "Target":
        """Load by built-in name, folder or Hub id. Raises UserError when that cannot work."""
        source, device = locate(config), pick_device(config.device)
        options: dict[str, Any] = {
            "revision": config.revision,
            "trust_remote_code": config.trust_remote_code,
        }
        with hub_errors(config.model):
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, config.dtype), use_safetensors=True, **options
            )
        fingerprint = make_fingerprint(config, model, tokenizer)
        return Target(model.to(device), tokenizer, name=config.model, fingerprint=fingerprint)

    @staticmethod
    def from_model(model: Any, tokenizer: Any, *, name: str) -> "Target":
        """Wrap a model that is already in memory."""
        dtype = str(model.dtype).removeprefix("torch.")
        config = TargetConfig.model_construct(model=name, revision=None, dtype=dtype)
        fingerprint = make_fingerprint(config, model, tokenizer, in_memory=True)
        return Target(model, tokenizer, name=name, fingerprint=fingerprint)

    @torch.no_grad()
    def states(self, batch: Batch, taps: tuple[int, ...] = ()) -> TargetStates:
        """States of packed rows. Without mask and cache, transformers separates documents by their
        restarting positions, for full and for sliding attention. Taps are 0-based layer outputs."""
        stack = self.decoder_layers() if taps else nn.ModuleList()
        with tapped(stack, taps, self.layers) as layers:
            output = self.base(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
        stacked = torch.cat([layers[i] for i in taps], dim=-1) if taps else None
        return TargetStates(output.last_hidden_state, stacked)

    def decoder_layers(self) -> nn.ModuleList:
        """The stack of decoder layers."""
        for module in self.base.children():
            if isinstance(module, nn.ModuleList) and len(module) == self.layers:
                return module
        raise UserError(
            f"{self.name}: no stack of {self.layers} decoder layers found; taps need one"
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Final states [..., D] -> logits [..., V] with the model's own scale and soft-cap."""
        return self.adjust(nn.functional.linear(hidden, self.head_weight))

    @torch.no_grad()
    def step(
        self, ids: Tensor, positions: Tensor, cache: TargetCache, mask: Tensor | None = None
    ) -> Tensor:
        """Feed ids [B, M] after what is cached; returns final states [B, M, D].

        mask [B, 1, M, S+M] bool (True: visible), S cached positions; None: causal.
        """
        total = cache.length + ids.shape[1]
        window = self.window()
        if mask is not None and window is not None and total > window:
            raise UserError(
                f"{self.name} attends to a window of {window} positions and {total} are needed; "
                "trees and batched generation need the whole context inside the window: "
                "shorten the prompts or the answers"
            )
        output = self.base(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self.as_attention_mask(mask),
            use_cache=True,
            **{self.cache_argument: cache.cache},
        )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def as_attention_mask(self, mask: Tensor | None) -> Tensor | None:
        """Eager attention adds its mask to the scores: False becomes the lowest number."""
        if mask is None or self.config._attn_implementation != "eager":
            return mask
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill(
            ~mask, torch.finfo(self.dtype).min
        )

    def new_cache(self) -> TargetCache:
        """An empty cache. Refuses models whose state cannot be rolled back."""
        kinds = set(self.config.to_dict().get("layer_types") or ["full_attention"])
        if kinds - ROLLBACK_LAYERS:
            raise UserError(
                f"{self.name} has {', '.join(sorted(kinds - ROLLBACK_LAYERS))} layers, whose "
                "state cannot be rolled back; decoding supports full and sliding-window attention"
            )
        return TargetCache(self.layers)

    def window(self) -> int | None:
        """Sliding window in positions, if any layer has one."""
        config = self.config.to_dict()
        kinds = config.get("layer_types")
        if kinds is None:  # older families slide on every layer where a window is set
            kinds = ["sliding_attention"]
        window: int | None = config.get("sliding_window") if "sliding_attention" in kinds else None
        return window

    @torch.no_grad()
    def check_weights(self) -> None:
        """Refuse a model with a NaN anywhere: the row of a rare token may not be read for hours."""
        for name, value in self.model.named_parameters():
            # NaN is passed on by both extremes, which take a twentieth of isfinite's time.
            if value.dtype in FLOATS and not all(bool(end.isfinite()) for end in value.aminmax()):
                raise UserError(
                    f"{self.name}: its weight {name} holds NaN or infinite numbers: the file is "
                    "damaged or was written half; restore the model"
                )

    @torch.no_grad()
    def check_head(self) -> None:
        """Refuse a model whose logits are not head(final state) under the scale and soft-cap we
        read.
        """
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        want = self.model(input_ids=ids, use_cache=False).logits.float()
        have = self.logits(self.base(input_ids=ids, use_cache=False).last_hidden_state).float()
        if not bool(torch.isfinite(want).all()):
            raise UserError(
                f"{self.name}: its logits are NaN or infinite: "
                f"{str(self.dtype).removeprefix('torch.')} is too narrow for its weights, or they "
                "are damaged; try target.dtype=float32, or restore the model"
            )
        if want.shape != have.shape or not torch.allclose(
            want, have, rtol=1e-3, atol=1e-3 * float(want.abs().max())
        ):
            raise UserError(
                f"{self.name}: its logits are not its head applied to its final state (an "
                "unknown logit scale, a head bias or a padded head); supported: logit_scale, "
                "logits_scaling, final_logit_softcapping"
            )


@contextmanager
def tapped(layers: nn.ModuleList, taps: tuple[int, ...], count: int) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of these layers while the block runs."""
    outputs: dict[int, Tensor] = {}
    bad = [tap for tap in taps if not 0 <= tap <= count - 2]
    if bad:
        raise UserError(
            f"taps {bad}: allowed are 0..{count - 2} (0-based layer outputs; the last is read "
            "as `final`)"
        )

    def keep(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[index] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[tap].register_forward_hook(keep(tap)) for tap in taps]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def logit_adjustment(config: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Logit scale (Cohere multiplies, Granite divides) and soft-cap (Gemma 2) of a config."""
    scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
    cap = config.get("final_logit_softcapping")

    def adjust(logits: Tensor) -> Tensor:
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return adjust


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer, from the generation config and the tokenizer."""
    given = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = list(given) if isinstance(given, list) else [] if given is None else [given]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(sorted(set(found)))


def make_fingerprint(
    config: TargetConfig, model: Any, tokenizer: Any, *, in_memory: bool = False
) -> dict[str, str]:
    """What must agree between data, drafter and report."""
    template = "" if tokenizer is None else (tokenizer.chat_template or "")
    builtin = BUILTINS.get(config.model)
    folder = None if in_memory else local_folder(config.model)
    return {
        "model": config.model,
        "revision": config.revision
        or (builtin.revision if builtin else hub_commit(config.model) or "none"),
        "architecture": type(model).__name__,
        "dtype": config.dtype,
        "origin": builtin.origin if builtin else "as published",
        "template": hashlib.sha256(str(template).encode()).hexdigest()[:16],
        "content": "none" if folder is None else folder_content(folder),
    }


def hub_commit(model: str) -> str | None:
    """The commit of a Hub model that was loaded without a revision, read off the Hub's cache.

    (transformers has stopped keeping it in the config.)
    """
    if is_path(model) or Path(model).is_dir():
        return None
    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a name that somebody gave to a model in memory
        return None
    return Path(found).parent.name if isinstance(found, str) else None


def pick_device(name: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,3})?", name) is None:
        raise UserError(f"target.device: {name!r} is no device; use auto, cpu, cuda, cuda:N or mps")
    kind, _, number = name.partition(":")
    if int(number or 0) >= count_devices(kind):
        raise UserError(
            f"target.device: {name} was asked for and no such device is there; use auto or cpu"
        )
    return torch.device(kind, int(number)) if number else torch.device(kind)


def count_devices(kind: str) -> int:
    """How many devices of a kind this machine has."""
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    return int(kind == "cpu" or torch.backends.mps.is_available())


def is_path(model: str) -> bool:
    """Whether a model's name can only mean a folder."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def local_folder(model: str) -> Path | None:
    """The folder of this machine that a model's name means, if it means one."""
    if model in BUILTINS:
        return None
    path = user_path(model)
    return path if path.is_dir() else None


def locate(config: TargetConfig) -> str:
    """Where transformers should load from."""
    if config.model in BUILTINS:
        return str(builtin_folder(config.model))
    folder = local_folder(config.model)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise UserError(
                f"target.model: {folder} has no config.json; give a Hugging Face model folder"
            )
        return str(folder)
    if is_path(config.model):
        raise UserError(
            f"target.model: no folder {config.model}; give a folder, a Hub id or {sorted(BUILTINS)}"
        )
    return config.model


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn loading errors into one line that says what to do."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"target.model: cannot load {name!r} ({reason}); give a built-in name "
            f"({', '.join(BUILTINS)}), a local folder with safetensors, or a Hub id "
            "that this machine can reach"
        ) from error


def describe(config: TargetConfig) -> TargetShape:
    """Read a target's shape from its config alone; no weights are loaded."""
    pick_device(config.device)
    if config.model in BUILTINS:
        return shape_of(builtin_config(config.model), BUILTINS[config.model].template)
    options: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    source = locate(config)
    with hub_errors(config.model):
        loaded = AutoConfig.from_pretrained(source, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        trust = config.trust_remote_code
        return shape_of(loaded, tokenizer.chat_template, trust_remote_code=trust)


def shape_of(config: Any, template: Any, *, trust_remote_code: bool = False) -> TargetShape:
    """Count parameters on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    values = text.to_dict()
    heads = values.get("num_key_value_heads") or text.num_attention_heads
    size = values.get("head_dim") or text.hidden_size // text.num_attention_heads
    head = model.get_output_embeddings().weight
    return TargetShape(
        vocab_size=head.shape[0],
        hidden_size=head.shape[1],
        layers=text.num_hidden_layers,
        max_positions=text.max_position_embeddings,
        cached_numbers=2 * text.num_hidden_layers * heads * size,
        parameters=sum(p.numel() for p in model.parameters()),
        template=template if template is None or isinstance(template, str) else str(template),
    )
