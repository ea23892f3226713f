"""The target: a Hugging Face causal language model, frozen, with what drafters need from it."""

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters.adapter import Adapter
from draftsmith.drafters.builtin import BUILTINS, builtin_config, builtin_folder
from draftsmith.drafters.cache import Mark, TargetCache
from draftsmith.drafters.content import folder_content
from draftsmith.drafters.fingerprint import NONE
from draftsmith.drafters.geometry import Geometry, geometry_of
from draftsmith.drafters.layout import Nodes, chain_nodes
from draftsmith.drafters.quantised import (
    check_quantiser,
    check_spread,
    check_twice,
    load_options,
    plain_state,
    plain_weight,
    quantisation_of,
    settle,
)
from draftsmith.drafters.reach import layer_types, mask_refusal, masks, reaches
from draftsmith.drafters.sharding import own_part, shard, whole
from draftsmith.drafters.slots import Batch, TargetStates
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.schema import TargetConfig

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
RECURRENT = {"linear_attention", "conv", "hybrid"}  # layer types with a state that has no positions
STATELESS = {"moe", "mlp"}
OWN_CACHE = {"minimax"}  # families that take no cache but their own


@dataclass(frozen=True)
class TargetShape:
    """What a target's config says, without its weights."""

    vocab_size: int
    hidden_size: int
    layers: int
    max_positions: int
    cached_numbers: int  # keys and values of one position, in all layers
    parameters: int
    layer_parameters: tuple[int, ...]  # of every decoder layer; empty where they are no stack
    embedding_parameters: int  # and of the head, where it is not tied to the embedding
    linear_parameters: int  # of the decoder's linear layers, which quantisation takes,
    linear_sides: int  # and the sum of their widths, which adapters have
    template: str | None
    geometry: Geometry  # of its layers
    quantisation: str = NONE  # of the checkpoint itself


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
        settle(model)
        self.base = decoder_of(model)
        self.config = model.config.get_text_config()
        self.head_weight = dense_head(model)  # [V, D]
        self.embedding: Tensor = model.get_input_embeddings().weight  # [V, D]
        self.embedding_scale = embedding_scale(model.get_input_embeddings())
        self.vocab_size, self.hidden_size = self.head_weight.shape
        self.layers = int(self.config.num_hidden_layers)
        self.served_head = self.head_weight  # another one where an adapter was merged into it
        self.adapter: Adapter | None = None
        self.dtype, self.device = self.head_weight.dtype, self.head_weight.device
        self.eos_ids = eos_ids(model, tokenizer)
        self.logit_scale, self.logit_cap = logit_scalars(self.config.to_dict())
        self.adjust = logit_adjustment(self.logit_scale, self.logit_cap)
        self.reach = reaches(self.config)
        self.layer_types = set(layer_types(self.config) or ())
        # transformers renamed `past_key_values` to `cache`; both are in the supported range.
        parameters = inspect.signature(self.base.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.takes_cache = self.cache_argument in parameters
        self.check_weights()
        self.check_head()

    @staticmethod
    def load(config: TargetConfig, *, sharded: bool = False) -> "Target":
        """Load by built-in name, folder or Hub id. Raises UserError when that cannot work.

        sharded: the decoder layers are spread over the processes, all of which call this.
        """
        check_quantiser(config)
        source, device = locate(config), pick_device(config.device)
        options: dict[str, Any] = {
            "revision": config.revision,
            "trust_remote_code": config.trust_remote_code,
        }
        with hub_errors(config.model):
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            found = AutoConfig.from_pretrained(source, **options)
            check_twice(config, found)
            check_spread(config.load_in or quantisation_of(found), sharded=sharded)
            dtype = {"dtype": getattr(torch, config.dtype)}
            quantised = load_options(config, device)

            def read() -> Any:
                return AutoModelForCausalLM.from_pretrained(
                    source, use_safetensors=True, **dtype, **options, **quantised
                )

            def outline() -> Any:
                trust = config.trust_remote_code
                with torch.device("meta"):
                    return AutoModelForCausalLM.from_config(found, trust_remote_code=trust, **dtype)

            if sharded:
                model = shard(read, outline, stack_of, device)
            else:  # what is quantised while it is read is where it belongs
                model = read() if quantised else read().to(device)
        fingerprint = make_fingerprint(config, model, tokenizer)
        return Target(model, tokenizer, name=config.model, fingerprint=fingerprint)

    @staticmethod
    def from_model(model: Any, tokenizer: Any, *, name: str) -> "Target":
        """Wrap a model that is already in memory."""
        dtype = str(model.dtype).removeprefix("torch.")
        config = TargetConfig.model_construct(model=name, revision=None, dtype=dtype)
        fingerprint = make_fingerprint(config, model, tokenizer, in_memory=True)
        return Target(model, tokenizer, name=name, fingerprint=fingerprint)

    @torch.no_grad()
    def states(
        self, batch: Batch, taps: tuple[int, ...] = (), *, final: bool = True
    ) -> TargetStates:
        """States of packed rows. Taps are 0-based layer outputs.

        final: whether anybody reads the final states. Else the pass ends behind the last tap, and
        they are NaN.
        """
        if final or (taps and self.has_rows_apart(batch)):
            return self.differentiable_states(batch, taps)
        if not taps:
            return TargetStates(self.unread(batch))
        stack = self.decoder_layers()
        with tapped(stack, taps, self.layers, last=max(taps)) as layers, suppress(Enough):
            self.base(**packed_inputs(batch))
        return TargetStates(self.unread(batch), torch.cat([layers[i] for i in taps], dim=-1))

    def differentiable_states(self, batch: Batch, taps: tuple[int, ...] = ()) -> TargetStates:
        """`states`, with a gradient for what is trained of the target.

        Without mask and cache, transformers separates documents by their restarting positions, for
        full, sliding and chunked attention; documents of a target with recurrent states get rows of
        their own.
        """
        if self.has_rows_apart(batch):
            return self.states_by_document(batch, taps)
        return self.run(packed_inputs(batch), taps)

    def has_rows_apart(self, batch: Batch) -> bool:
        """Whether these documents get rows of their own."""
        return bool(self.layer_types & RECURRENT) and bool((batch.documents > 0).any())

    def unread(self, batch: Batch) -> Tensor:
        """What stands for final states [B, T, D] that were not computed: one NaN."""
        nothing = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        return nothing.expand(*batch.ids.shape, self.hidden_size)

    def run(self, inputs: dict[str, Any], taps: tuple[int, ...]) -> TargetStates:
        """The decoder on its own arguments."""
        stack = self.decoder_layers() if taps else nn.ModuleList()
        with tapped(stack, taps, self.layers) as layers:
            output = self.base(**inputs)
        stacked = torch.cat([layers[i] for i in taps], dim=-1) if taps else None
        # Quantised layers may give back another dtype than they were given.
        return TargetStates(output.last_hidden_state.to(self.dtype), stacked)

    def states_by_document(self, batch: Batch, taps: tuple[int, ...]) -> TargetStates:
        """`states` with one row per document, padded at the end; states of padding are 0."""
        row, column = (batch.documents >= 0).nonzero(as_tuple=True)
        names = torch.stack([row, batch.documents[row, column]])
        position, number = batch.positions[row, column], names.unique(dim=1, return_inverse=True)[1]
        ids = batch.ids.new_zeros((int(number.max()) + 1, int(position.max()) + 1))
        ids[number, position] = batch.ids[row, column]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        padded = Batch(ids, positions, torch.zeros_like(ids), ids > 0)
        states = self.differentiable_states(padded, taps)

        def repacked(one: Tensor) -> Tensor:
            packed = one.new_zeros((*batch.ids.shape, one.shape[-1]))
            packed[row, column] = one[number, position]
            return packed

        layers = None if states.layers is None else repacked(states.layers)
        return TargetStates(repacked(states.final), layers)

    def decoder_layers(self) -> nn.ModuleList:
        """The stack of decoder layers."""
        stack = layer_stack(self.base, self.layers)
        if stack is None:
            raise UserError(
                f"{self.name}: no stack of {self.layers} decoder layers found; taps and shallow "
                "copies need one"
            )
        return stack

    def layer_state(self, place: int) -> dict[str, Tensor]:
        """A decoder layer's tensors by name, whole and de-quantised. Of a spread target every
        process calls it.
        """
        state = plain_state(self.decoder_layers()[place], self.name)
        return {name: whole(value) for name, value in state.items()}

    def logits(self, hidden: Tensor) -> Tensor:
        """Final states [..., D] -> logits [..., V] with the model's own scale and soft-cap."""
        if self.adapter is not None:
            return self.adjust(self.adapter.project(hidden))
        return self.adjust(nn.functional.linear(hidden, self.served_head))

    @contextmanager
    def original(self) -> Iterator["Target"]:
        """The target with its adapter switched off, while the block runs."""
        with nullcontext() if self.adapter is None else self.adapter.off():
            yield self

    @torch.no_grad()
    def step(
        self,
        ids: Tensor,
        cache: TargetCache,
        nodes: Nodes | None = None,
        *,
        taps: tuple[int, ...] = (),
    ) -> TargetStates:
        """Feed ids [B, M] behind what every row has cached; the states there.

        nodes: how the fed tokens lie; None: each follows the one before it.
        """
        if cache.recurrent and any(cache.lengths):
            self.check_recurrent(ids, nodes)
        return self.feed(ids, cache, nodes, taps)

    @torch.no_grad()
    def feed(
        self,
        ids: Tensor,
        cache: TargetCache,
        nodes: Nodes | None = None,
        taps: tuple[int, ...] = (),
    ) -> TargetStates:
        """`step` without its checks."""
        states = self.run(self.pass_inputs(ids, cache, nodes), taps)
        cache.close(ids.shape[1])
        return states

    def pass_inputs(self, ids: Tensor, cache: TargetCache, nodes: Nodes | None) -> dict[str, Any]:
        """The decoder's arguments for one pass, for which the cache is opened."""
        batch, count = ids.shape
        nodes = nodes or chain_nodes(count, ids.device)
        extent = cache.open(batch, count, ids.device)
        positions = extent.starts + nodes.depth
        # On CPUs torch attends twice as slowly without a mask, where there are several rows (a step
        # of 64 rows at a context of 200: 0.51 s and 0.22 s).
        several = batch > 1 and extent.longest > 0 and self.device.type == "cpu"
        always = several and mask_refusal(self.config) is None
        where = extent.starts, extent.width(count) - count
        mask = masks(self.reach, nodes, positions, *where, always=always)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "attention_mask": None if mask is None else self.as_attention_mask(mask),
            "use_cache": True,
            self.cache_argument: cache.cache,
        }

    def prefill(
        self, ids: Tensor, lengths: Tensor, cache: TargetCache, *, taps: tuple[int, ...] = ()
    ) -> TargetStates:
        """Feed prompts [B, T] of these lengths [B] to an empty cache; the states there.

        Padding is at the end, where nothing that is causal looks: its states mean nothing.
        """
        cache.extent.set([0] * len(ids))
        before = cache.mark()
        states = self.step(ids, cache, taps=taps)
        self.settle(cache, before, ids, lengths.tolist())
        return states

    def check_recurrent(self, ids: Tensor, nodes: Nodes | None) -> None:
        """Refuse what recurrent states cannot follow."""
        kinds = ", ".join(sorted(self.layer_types & RECURRENT))
        if nodes is not None and nodes.visible is not None:
            raise UserError(
                f"{self.name} has {kinds} layers, whose state follows one path of tokens; give a "
                "drafter that drafts chains, not trees"
            )
        if ids.shape[1] > 1 and not self.continues:
            raise UserError(
                f"{self.name} forgets the state of its {kinds} layers where several tokens follow "
                "a cached context, as transformers' Mamba-1 does; it cannot verify drafts"
            )

    @cached_property
    def continues(self) -> bool:
        """Whether several tokens behind a cached context get the states that they get one by one,
        as far as this precision can tell.
        """
        ids = torch.arange(6, device=self.device)[None] % self.vocab_size
        whole, together, one_by_one = (
            torch.cat([self.feed(piece, cache).final for piece in ids.split(sizes, dim=1)], dim=1)[
                :, 2:
            ]
            for sizes, cache in (
                ([6], self.new_cache()),
                ([2, 4], self.new_cache()),
                ([2, 1, 1, 1, 1], self.new_cache()),
            )
        )
        rounding = (whole - one_by_one).norm()
        return bool((together - one_by_one).norm() <= 4 * rounding + 1e-4 * one_by_one.norm())

    def as_attention_mask(self, found: dict[str, Tensor]) -> Tensor | dict[str, Tensor | None]:
        """Masks by layer type as the model takes them: one tensor where all layers agree, else a
        dictionary, which every family with layer types takes.
        """
        refusal = mask_refusal(self.config)
        if refusal is not None:
            raise UserError(f"{self.name}: {refusal}, which trees and batches of unequal rows need")
        kinds = {kind: self.added(mask) for kind, mask in found.items()}
        if len(set(map(id, found.values()))) == 1:
            return next(iter(kinds.values()))
        return {kind: kinds.get(kind) for kind in self.layer_types}

    def added(self, mask: Tensor) -> Tensor:
        """Eager attention adds its mask to the scores: False becomes the lowest number."""
        if self.config._attn_implementation != "eager":
            return mask
        low = torch.finfo(self.dtype).min
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, low)

    def new_cache(self) -> TargetCache:
        """An empty cache. Refuses models whose state we cannot keep."""
        unknown = self.layer_types - set(self.reach) - RECURRENT - STATELESS
        if unknown or self.config.model_type in OWN_CACHE or not self.takes_cache:
            what = f"{', '.join(sorted(unknown))} layers" if unknown else "a cache of its own kind"
            raise UserError(
                f"{self.name} has {what}, whose state cannot be rolled back; decoding supports "
                "full, sliding-window, chunked and linear attention, Mamba and convolutions"
            )
        return TargetCache(self.model.config)

    def settle(
        self,
        cache: TargetCache,
        before: Mark,
        ids: Tensor,
        counts: list[int],
        path: Tensor | None = None,
    ) -> int:
        """After a pass over ids [B, M] from `before`: keep the first counts[row] nodes of path[row]
        ([B, P], padded with any node; None: the nodes as they came). Returns how many more passes
        that took: a state that cannot be cropped is put back and fed again.
        """
        if cache.recurrent:
            return self.replay(cache, before, ids, counts)
        if path is None:
            cache.crop([n + count for n, count in zip(before.lengths, counts, strict=True)])
        else:
            cache.keep(before.lengths, path, counts, moved=True)
        return 0

    def replay(self, cache: TargetCache, before: Mark, ids: Tensor, counts: list[int]) -> int:
        """Put rows back that keep less than all of ids [B, M], and feed them what they keep: one
        pass for all rows that keep as many. Returns the number of passes.
        """
        short = sorted({count for count in counts if count < ids.shape[1]})
        if short and len(set(counts)) == 1:
            cache.restore(before)
            self.step(ids[:, : counts[0]], cache)
            return 1
        for count in short:
            alike = [row for row, one in enumerate(counts) if one == count]
            rows = torch.tensor(alike, device=ids.device)
            part = cache.part(rows)
            part.restore(before.rows(rows))
            self.step(ids[rows, :count], part)
            cache.put(rows, part)
        return len(short)

    @torch.no_grad()
    def check_weights(self) -> None:
        """Refuse a model with a NaN anywhere: the row of a rare token may not be read for hours."""
        for name, value in self.model.named_parameters():
            # NaN is passed on by both extremes, which take a twentieth of isfinite's time.
            mine = own_part(value)
            ends = mine.aminmax() if value.dtype in FLOATS and mine.numel() else ()
            if not all(bool(end.isfinite()) for end in ends):
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


def stack_of(model: Any) -> nn.ModuleList:
    """A model's decoder layers. Raises UserError where they are no stack."""
    count = model.config.get_text_config().num_hidden_layers
    found = layer_stack(decoder_of(model), count)
    if found is None:
        raise UserError(
            f"target.model: no stack of {count} decoder layers found, which could be spread over "
            "processes; use --accelerate ddp or zero2"
        )
    return found


def decoder_of(model: Any) -> Any:
    """A causal language model without its head."""
    base = model.get_decoder()
    return model.model if base is model else base  # Llama 4's is not where transformers looks


def packed_inputs(batch: Batch) -> dict[str, Any]:
    """The decoder's arguments for packed rows."""
    return {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}


def layer_stack(base: Any, layers: int) -> nn.ModuleList | None:
    """A decoder's stack of so many layers, if it has one."""
    found = (one for one in base.children() if isinstance(one, nn.ModuleList))
    return next((stack for stack in found if len(stack) == layers), None)


class Enough(Exception):
    """A pass has gone as far as anybody reads it."""


@contextmanager
def tapped(
    layers: nn.ModuleList, taps: tuple[int, ...], count: int, *, last: int | None = None
) -> Iterator[dict[int, Tensor]]:
    """Collect the outputs of these layers while the block runs. The one called `last` ends the pass
    by `Enough`.
    """
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
            if index == last:
                raise Enough

        return hook

    handles = [layers[tap].register_forward_hook(keep(tap)) for tap in taps]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def dense_head(model: Any) -> Tensor:
    """The head's weight [V, D]. That of a checkpoint with a quantised head is de-quantised."""
    head: nn.Module = model.get_output_embeddings()
    weight = plain_weight(head)
    if weight is head.weight:
        return weight
    return nn.Parameter(weight.to(model.dtype), requires_grad=False)


def embedding_scale(module: nn.Module) -> float:
    """By what a target's embedding module multiplies its rows, as Gemma 3's does."""
    return float(vars(module).get("scalar_embed_scale", 1.0))


def logit_scalars(config: dict[str, Any]) -> tuple[float, float | None]:
    """What raw logits are multiplied by, and the soft-cap on that, if there is one."""
    scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
    cap = config.get("final_logit_softcapping")
    return scale, None if cap is None else float(cap)


def logit_adjustment(scale: float, cap: float | None) -> Callable[[Tensor], Tensor]:
    """Logit scale (Cohere multiplies, Granite divides) and soft-cap (Gemma 2) of a config."""

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
        "quantisation": quantisation_of(model.config),
        "adapter": NONE,
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
    check_quantiser(config)
    if config.model in BUILTINS:
        return shape_of(builtin_config(config.model), BUILTINS[config.model].template)
    options: dict[str, Any] = {
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }
    source = locate(config)
    with hub_errors(config.model):
        loaded = AutoConfig.from_pretrained(source, **options)
        check_twice(config, loaded)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        trust = config.trust_remote_code
        return shape_of(loaded, tokenizer.chat_template, trust_remote_code=trust)


def skeleton(config: TargetConfig) -> Any:
    """A target's model without its weights, on the meta device."""
    if config.model in BUILTINS:
        return bare_model(builtin_config(config.model))
    trust = config.trust_remote_code
    with hub_errors(config.model):
        loaded = AutoConfig.from_pretrained(
            locate(config), revision=config.revision, trust_remote_code=trust
        )
    return bare_model(loaded, trust_remote_code=trust)


def bare_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """A model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def shape_of(config: Any, template: Any, *, trust_remote_code: bool = False) -> TargetShape:
    """Count parameters on the meta device, quantised or not."""
    quantisation, config = quantisation_of(config), copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    model = bare_model(config, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    values = text.to_dict()
    heads = values.get("num_key_value_heads") or text.num_attention_heads
    size = values.get("head_dim") or text.hidden_size // text.num_attention_heads
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    stack = layer_stack(decoder_of(model), text.num_hidden_layers) or nn.ModuleList()
    inner = [one for one in model.get_decoder().modules() if isinstance(one, nn.Linear)]
    tied = bool(text.tie_word_embeddings)
    return TargetShape(
        vocab_size=head.shape[0],
        hidden_size=head.shape[1],
        layers=text.num_hidden_layers,
        max_positions=text.max_position_embeddings,
        cached_numbers=2 * text.num_hidden_layers * heads * size,
        parameters=sum(p.numel() for p in model.parameters()),
        layer_parameters=tuple(sum(p.numel() for p in layer.parameters()) for layer in stack),
        embedding_parameters=embedding.numel() + (0 if tied else head.numel()),
        template=template if template is None or isinstance(template, str) else str(template),
        geometry=geometry_of(text),
        linear_parameters=sum(one.weight.numel() for one in inner),
        linear_sides=sum(one.in_features + one.out_features for one in inner),
        quantisation=quantisation,
    )
