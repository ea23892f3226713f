"""Drafters for engines: who loads which kind, how it is written, how it is served; and where an
engine cannot load a kind, why, and what to do instead.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.drafters.adapted import load_target
from draftsmith.drafters.checkpoint import load_drafter, read_metadata, replace_folder
from draftsmith.drafters.engine_files import Export, Source, copy_files
from draftsmith.drafters.export_medusa import (
    read_faster,
    read_tensorrt,
    read_vllm,
    write_faster,
    write_tensorrt,
    write_vllm,
)
from draftsmith.drafters.export_mtp import (
    read_served,
    read_transformers,
    run_transformers,
    write_mtp_tensorrt,
    write_mtp_vllm,
    write_sglang,
    write_transformers,
)
from draftsmith.drafters.export_plain import (
    generate,
    read_assistant,
    read_dflash,
    read_draft_model,
    read_speculators,
    run_assistant,
    run_draft_model,
    write_assistant,
    write_dflash,
    write_draft_model,
    write_speculators,
)
from draftsmith.drafters.methods import Drafter
from draftsmith.drafters.mtp_speculators import read_mtp_speculators, write_mtp_speculators
from draftsmith.eval.bundle import FOLDER, bundle
from draftsmith.eval.stage import stored_recipe
from draftsmith.eval.subjects import drafter_folder
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import cannot_write, write_text

ENGINES = ("vllm", "sglang", "transformers", "speculators", "tensorrt-llm", "fasterdecoding")
FAMILIES = {"dflash": ("dflash",)}  # parts of a path by which vLLM takes a drafter for that kind
MISTAKEN = ("eagle-", "eagle3", "dflash", "dspark")


def write_bundle(source: Source, folder: Path) -> None:
    """The native folder, with the decoding loop that plain transformers runs."""
    copy_files(source.folder, folder)
    for name, text in bundle(source.kind, "").items():
        write_text(folder / FOLDER / name, text)


def read_bundle(folder: Path, source: Source) -> Drafter:
    """The native folder. Raises ValueError."""
    try:
        return load_drafter(folder, source.target)
    except UserError as error:
        raise ValueError(str(error)) from error


def run_bundle(folder: Path, source: Source, prompt: Tensor, count: int) -> Tensor:
    """transformers with the code of the folder, which is ours."""
    how = {"custom_generate": str(folder), "trust_remote_code": True}
    return generate(source, prompt, count, **how)


BUNDLE = Export(
    write_bundle,
    read_bundle,
    'target.generate(**inputs, custom_generate="{drafter}", trust_remote_code=True)',
    run=run_bundle,
)
EXPORTS: dict[tuple[str, str], Export] = {
    ("dflash", "vllm"): Export(
        write_dflash,
        read_dflash,
        "vllm serve {target} --speculative-config "
        '\'{"method": "dflash", "model": "{drafter}", "num_speculative_tokens": {k}}\'',
        note="its target must hand out layer outputs, and its attention backend take blocks that "
        "see themselves (--attention-backend flash_attn)",
    ),
    ("dflash", "sglang"): Export(
        write_dflash,
        read_dflash,
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        "--speculative-draft-model-path {drafter} --speculative-num-draft-tokens {k+1}",
        note="it has no DFlash for Qwen2 targets, and no pipeline parallelism with it",
    ),
    ("dflash", "tensorrt-llm"): Export(
        write_dflash,
        read_dflash,
        'DFlashDecodingConfig(max_draft_len={k}, speculative_model="{drafter}")',
        note="PyTorch backend",
    ),
    ("dflash", "speculators"): Export(
        write_speculators,
        read_speculators,
        "vllm serve {drafter}",
        note="its config names the target (speculators_config.verifier.name_or_path), for vLLM by "
        "a Hub id or a folder",
    ),
    ("dflash", "transformers"): Export(
        write_assistant,
        read_assistant,
        'target.generate(**inputs, assistant_model=AutoModel.from_pretrained("{drafter}"), '
        'speculation_type="dflash")',
        note="from 5.15 on, one prompt at a time",
        run=run_assistant,
    ),
    ("draft_model", "vllm"): Export(
        write_draft_model,
        read_draft_model,
        "vllm serve {target} --speculative-config "
        '\'{"method": "draft_model", "model": "{drafter}", "num_speculative_tokens": {k}}\'',
    ),
    ("draft_model", "sglang"): Export(
        write_draft_model,
        read_draft_model,
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path {drafter} --speculative-num-steps {k} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {k+1}",
    ),
    ("draft_model", "tensorrt-llm"): Export(
        write_draft_model,
        read_draft_model,
        'DraftTargetDecodingConfig(max_draft_len={k}, speculative_model="{drafter}")',
        note="PyTorch backend",
    ),
    ("draft_model", "transformers"): Export(
        write_draft_model,
        read_draft_model,
        "target.generate(**inputs, "
        'assistant_model=AutoModelForCausalLM.from_pretrained("{drafter}"))',
        note="one prompt at a time",
        run=run_draft_model,
    ),
    ("medusa", "vllm"): Export(
        write_vllm,
        read_vllm,
        "vllm serve {target} --speculative-config "
        '\'{"method": "medusa", "model": "{drafter}", "num_speculative_tokens": {k}}\'',
        note="vLLM up to 0.32; 0.33 removed Medusa: pin 'vllm<0.33', decode with transformers "
        "(--to transformers), or train dflash, which later ones load",
    ),
    ("medusa", "tensorrt-llm"): Export(
        write_tensorrt,
        read_tensorrt,
        "python convert_checkpoint.py --model_dir {target} --medusa_model_dir {drafter} "
        "--num_medusa_heads {k} --num_medusa_layers 1 ...",
        note="the TensorRT engine backend, examples/medusa; its PyTorch backend has no Medusa",
    ),
    ("medusa", "fasterdecoding"): Export(
        write_faster,
        read_faster,
        "python -m medusa.inference.cli --model {drafter}",
        note="with the transformers of 2024",
    ),
    ("medusa", "transformers"): BUNDLE,
    ("mtp", "vllm"): Export(
        write_mtp_vllm,
        read_served,
        "vllm serve {target} --hf-overrides '{\"num_nextn_predict_layers\": 1}' "
        "--speculative-config "
        '\'{"method": "mtp", "model": "{drafter}", "num_speculative_tokens": {k}}\'',
        note="a family with MTP layers is served from the exported copy of the target itself "
        "(vllm serve FOLDER, no model and no overrides)",
    ),
    ("mtp", "sglang"): Export(
        write_sglang,
        read_served,
        "python -m sglang.launch_server --model-path {target} --speculative-algorithm NEXTN "
        "--speculative-draft-model-path {drafter} --speculative-num-steps {k} "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens {k+1}",
        note="a family with MTP layers is served from the exported copy of the target itself "
        "(--model-path FOLDER, no draft model path)",
    ),
    ("mtp", "tensorrt-llm"): Export(
        write_mtp_tensorrt,
        read_served,
        "MTPDecodingConfig(num_nextn_predict_layers=1)",
        note="PyTorch backend, serving the exported copy of the target",
    ),
    ("mtp", "transformers"): Export(
        write_transformers,
        read_transformers,
        "target.generate(**inputs, use_mtp=True)",
        note="from 5.20 on, one draft a round, one prompt at a time; for a target whose class "
        "knows no MTP layer, set config.num_mtp_layers, config.mtp_layer_types, "
        "config.mtp_hidden_states_first and config.name_or_path as in the folder's config.json, "
        "and _keys_to_ignore_on_load_unexpected = [r'^mtp\\.']",
        run=run_transformers,
    ),
    ("mtp", "speculators"): Export(
        write_mtp_speculators,
        read_mtp_speculators,
        "speculators stitch-mtp {drafter} {target}",
        note="the result is served as its family's own MTP layer",
    ),
    ("ngram", "transformers"): BUNDLE,
    ("prompt_lookup", "transformers"): BUNDLE,
}
HEADS_ONLY = "it decodes with Medusa heads alone; export --to transformers"
NO_TABLES = "no server reads such tables; export --to transformers, or let it look up the prompt"
LACKING = {
    ("medusa", "sglang"): "SGLang never had Medusa; export --to transformers, or train dflash",
    ("medusa", "speculators"): "the format has no Medusa; export --to vllm (up to 0.32)",
    ("dflash", "fasterdecoding"): HEADS_ONLY,
    ("draft_model", "fasterdecoding"): HEADS_ONLY,
    ("mtp", "fasterdecoding"): HEADS_ONLY,
    ("ngram", "fasterdecoding"): HEADS_ONLY,
    ("prompt_lookup", "fasterdecoding"): HEADS_ONLY,
    ("draft_model", "speculators"): "the format has no plain models, which need none: export --to "
    "vllm gives the folder that it reads",
    ("ngram", "speculators"): "the format has no tables; export --to transformers",
    ("ngram", "vllm"): NO_TABLES,
    ("ngram", "sglang"): NO_TABLES,
    ("ngram", "tensorrt-llm"): NO_TABLES,
    ("prompt_lookup", "vllm"): "it has no weights, and vLLM has it: vllm serve TARGET "
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 10, '
    '"prompt_lookup_max": 3, "prompt_lookup_min": 1}\'',
    ("prompt_lookup", "sglang"): "it has no weights, and SGLang has its like: "
    "--speculative-algorithm NGRAM",
    ("prompt_lookup", "tensorrt-llm"): "it has no weights, and TensorRT-LLM has its like: "
    "NGramDecodingConfig(max_draft_len=10, max_matching_ngram_size=3)",
    ("prompt_lookup", "speculators"): "it has no weights; vLLM has it as method `ngram`",
}


def open_source(name: str, overrides: Sequence[str] = ()) -> Source:
    """A drafter as a user names it. Overrides change the recipe that it carries: where its target
    is. Raises UserError.
    """
    folder = drafter_folder(name)
    meta = read_metadata(folder)
    recipe = stored_recipe(meta, folder, overrides)
    return Source(folder, meta, recipe, lambda: load_target(recipe.target, folder, meta))


def find_export(kind: str, engine: str) -> Export:
    """How an engine gets a kind. Raises UserError, with the way out, where it cannot."""
    if engine not in ENGINES:
        raise UserError(f"--to {engine}: no such engine; allowed: {', '.join(ENGINES)}")
    if (kind, engine) in EXPORTS:
        return EXPORTS[kind, engine]
    loads = [name for name in ENGINES if (kind, name) in EXPORTS]
    reason = LACKING.get((kind, engine), f"not written yet; {', '.join(loads)} can be exported to")
    raise UserError(f"--to {engine}: {engine} cannot load a {kind} drafter: {reason}")


def serving(export: Export, *, target: str, drafter: str, drafts: int) -> str:
    """The command or call that serves it."""
    values = {"{target}": target, "{drafter}": drafter, "{k}": drafts, "{k+1}": drafts + 1}
    text = export.serve
    for place, value in values.items():
        text = text.replace(place, str(value))
    return text


def write_export(export: Export, source: Source, folder: Path) -> None:
    """The engine's files, in a folder that is there whole or not at all. Raises UserError."""
    check_path(folder, source.kind)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        export.write(source, temporary)
        check_read(export, source, temporary)
        os.chmod(temporary, 0o755)
        replace_folder(temporary, folder)
    except OSError as error:
        raise UserError(cannot_write(folder, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_read(export: Export, source: Source, folder: Path) -> Drafter:
    """The files as the engine reads them. Raises UserError where it would refuse or misread."""
    try:
        with torch.no_grad():
            return export.read(folder, source)
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: the engine would not read this drafter ({reason})") from error


def check_path(folder: Path, kind: str) -> None:
    """vLLM guesses the kind from parts of a path. Raises UserError where it would guess wrong."""
    name = f"{folder.parent.name}/{folder.name}".lower()
    found = [part for part in MISTAKEN if part in name and part not in FAMILIES.get(kind, ())]
    if found:
        raise UserError(
            f"{folder}: vLLM takes a path with {found[0]!r} in it for another kind of drafter; "
            "give another name"
        )
