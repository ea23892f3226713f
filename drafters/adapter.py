"""LoRA on a target (Hu et al., 2106.09685, by peft): its linear layers and its head, as Medusa-2
trains them beside the heads.

The layers are wrapped in place, over plain weights or quantised ones (QLoRA, 2305.14314): there is
one network, which says what the original said while its adapters are off. The wrapped head is read
through `project`; in training the head's own part is a term of a slot's projection (`head_term`).

Files are peft's own: `adapter_config.json` and `adapter_model.safetensors`.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import sync, write_text
from draftsmith.recipes.schema import AdapterConfig

FOLDER, MERGED = "adapter", "merged"  # in a drafter's folder
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ONLY = "default"  # peft's name for an only adapter


class Adapter:
    """The adapters of one model."""

    def __init__(self, model: Any, settings: Any) -> None:
        from peft import get_peft_model

        self.model = model
        with warnings.catch_warnings():
            # A tied head's adapter stays apart from the embedding: merging unties them.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            self.wrapped: Any = get_peft_model(model, settings)
        self.head: Any = model.get_output_embeddings()
        self.adapts_head = hasattr(self.head, "lora_A")
        self.parameters: dict[str, nn.Parameter] = {
            name: value for name, value in model.named_parameters() if value.requires_grad
        }
        self.layers: list[nn.Module] = []  # whose activations are recomputed
        self.train(False)

    def checkpoint(self, layers: nn.ModuleList) -> None:
        """From now on keep no activations inside of these layers in training."""
        # transformers is renaming it; both names are in the supported range.
        old = self.model.gradient_checkpointing_enable
        enable = getattr(self.model, "activation_checkpointing_enable", old)
        try:
            enable({"use_reentrant": False})
        except ValueError as error:
            raise UserError(f"adapter.checkpointing: {error}; set it to false") from error
        self.layers = list(layers)

    def train(self, on: bool) -> None:
        """Dropout of the adapters, and recomputation. The network's own dropout stays off.

        transformers recomputes in layers that are told to train; the modules in them are not.
        """
        for name, module in self.model.named_modules():
            if ".lora_dropout" in name:
                module.training = on
        for layer in self.layers:
            layer.training = on

    @contextmanager
    def off(self) -> Iterator[None]:
        """The original network, bit for bit, while the block runs."""
        with self.wrapped.disable_adapter():
            yield

    def project(self, hidden: Tensor) -> Tensor:
        """Final states [..., D] -> raw logits [..., V], as the model does it."""
        logits: Tensor = self.head(hidden)
        return logits

    def head_term(self, hidden: Tensor) -> tuple[Tensor, nn.Parameter]:
        """What the head's adapter adds to the logits of [N, D], as two factors: [N, R], [V, R]."""
        inner = self.head.lora_dropout[ONLY](hidden.to(self.head.lora_A[ONLY].weight.dtype))
        factor: nn.Parameter = self.head.lora_B[ONLY].weight
        return self.head.lora_A[ONLY](inner) * self.head.scaling[ONLY], factor

    def tensors(self) -> dict[str, Tensor]:
        """Weights under peft's names in files, on the CPU."""
        from peft import get_peft_model_state_dict

        found = get_peft_model_state_dict(self.wrapped, save_embedding_layers=False)
        return {name: found[name].detach().contiguous().cpu() for name in sorted(found)}

    def settings(self, name: str) -> dict[str, Any]:
        """`adapter_config.json`. name: the target's."""
        values = self.wrapped.peft_config[ONLY].to_dict()
        listed = {k: sorted(v) if isinstance(v, set) else v for k, v in values.items()}
        plain = {key: getattr(value, "value", value) for key, value in listed.items()}
        return {**plain, "base_model_name_or_path": name, "inference_mode": True}

    def digest(self) -> str:
        """Names these very weights."""
        found = hashlib.sha256()
        for name, value in self.tensors().items():
            found.update(name.encode())
            found.update(value.view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def save(self, folder: Path, name: str) -> None:
        """Write peft's two files. name: the target's. Raises OSError where they read back as
        something else.
        """
        folder.mkdir()
        tensors = self.tensors()
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        sync(folder / WEIGHTS)
        again = load_file(folder / WEIGHTS)
        if again.keys() != tensors.keys() or any(
            not torch.equal(again[key], value) for key, value in tensors.items()
        ):
            raise OSError(f"{WEIGHTS} read back differs from what was written")
        write_text(folder / CONFIG, json.dumps(self.settings(name), indent=1) + "\n")

    def merge(self) -> Tensor:
        """Add the adapters to the weights, once and for all; the head's weight [V, D] then.

        The head is untied from the embedding, which stays what it was.
        """
        base = getattr(self.head, "base_layer", self.head)
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        for config in (self.model.config, self.model.config.get_text_config()):
            config.tie_word_embeddings = False
        self.wrapped.merge_and_unload(safe_merge=True)
        self.model.requires_grad_(False)
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight


def fresh(model: Any, config: AdapterConfig) -> Adapter:
    """New adapters, which change nothing yet: one of their two factors is zero. fp32."""
    from peft import LoraConfig

    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=linear_names(model, head=config.head),
        bias="none",
        task_type="CAUSAL_LM",
    )
    return Adapter(model, settings)


def linear_names(model: Any, *, head: bool) -> list[str]:
    """The last names of the decoder's linear layers, and the head's."""
    outer = model.get_output_embeddings()
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (head or module is not outer)
    }
    return sorted(found)


def stored(model: Any, folder: Path) -> Adapter:
    """The adapters in a folder, on a model. Raises UserError."""
    from peft import LoraConfig, set_peft_model_state_dict

    try:
        values = json.loads((folder / CONFIG).read_bytes())
        known = LoraConfig.__dataclass_fields__
        values.pop("base_model_name_or_path", None)  # a name for people
        settings = LoraConfig(**{k: v for k, v in values.items() if k in known})
        tensors = load_file(folder / WEIGHTS)
        adapter = Adapter(model, settings)
        expected = adapter.tensors()
        shapes = {name: value.shape for name, value in tensors.items()}
        if shapes != {name: value.shape for name, value in expected.items()}:
            raise ValueError("its tensors are not those that it describes")
        set_peft_model_state_dict(adapter.wrapped, tensors)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{folder}: broken adapter ({reason}); train again or restore the folder"
        ) from error
    model.requires_grad_(False)
    return adapter
