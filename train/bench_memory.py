"""The memory of a training step, as `--dry-run` estimates it and as it is.

    python -m draftsmith.train.bench_memory            measure the built-in target's drafters here
    python -m draftsmith.train.bench_memory --estimate   larger targets, as a Markdown table

Measured is the most that a process of its own held (resident memory) in two steps on full rows of
random tokens, all of them supervised but the first.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.needs import estimate_memory, trained_parameters
from draftsmith.drafters.target import Target, describe, shape_of
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sharing import Shares, Sharing
from draftsmith.train.bench_step import trim_heap
from draftsmith.train.phases import reset_peak, resident

DRAFTERS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa"},
    "medusa, own heads": {"kind": "medusa", "projection": "own", "heads": 3},
    "mtp": {"kind": "mtp"},
    "dflash": {"kind": "dflash", "layers": 2, "anchors_per_row": 128},
    "draft_model": {"kind": "draft_model", "layers": 2},
}
# The papers' defaults, and Medusa's projections of its own.
PAPERS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa"},
    "medusa, own heads": {"kind": "medusa", "projection": "own"},
    "mtp": {"kind": "mtp"},
    "dflash": {"kind": "dflash"},
}
MACHINES = (("1 x 24 GB", 24, 1), ("1 x 80 GB", 80, 1), ("8 x 80 GB", 80, 8))
ROOM = 0.95  # of a device's memory: the rest is fragments
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__, prog="draftsmith.train.bench_memory")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--loss", default="ce")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--worker", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table."""
    options = parse(argv)
    if options.estimate:
        print("\n".join(estimates()))
        return
    if sys.platform != "linux":
        sys.exit("the benchmark reads its memory from /proc, which only Linux has")
    if options.worker:
        serve(options)
        return
    print(f"{'drafter':20}{'dtype':6}{'estimated MB':>14}{'measured MB':>13}{'ratio':>7}")
    for drafter in options.drafters:
        for dtype in options.dtypes:
            found = measure(options, drafter, dtype)
            whole = sum(found["estimate"].values())
            print(
                f"{drafter:20}{dtype:6}{whole / 2**20:14.0f}{found['peak'] / 2**20:13.0f}"
                f"{whole / found['peak']:7.2f}",
                flush=True,
            )
            print(json.dumps({k: round(v / 2**20) for k, v in found["estimate"].items()}))


def estimates() -> list[str]:
    """What a step of the drafters' own recipes needs beside two targets, and where it fits."""
    cells = " | ".join(name for name, *_ in MACHINES)
    lines = [f"| target | drafter | {cells} |", "|---|---|" + "---|" * len(MACHINES)]
    for model, config in published().items():
        for load_in in (None, "nf4"):
            for drafter in PAPERS:
                recipe = Recipe.model_validate(
                    {
                        "name": "estimate",
                        "target": {"model": model, "load_in": load_in},
                        "drafter": PAPERS[drafter],
                        "train": {"rows_per_micro_batch": 1},
                    }
                )
                row = " | ".join(cell(recipe, config, *machine[1:]) for machine in MACHINES)
                lines.append(f"| {model}, {load_in or 'bf16'} | `{drafter}` | {row} |")
    return lines


def cell(recipe: Recipe, config: Any, memory: int, processes: int) -> str:
    """The least sharing that fits, and the GB it takes on every device."""
    shape = shape_of(config, None)
    trained = trained_parameters(recipe.drafter, shape)
    ways: list[Sharing] = ["alone"] if processes == 1 else ["ddp", "zero2", "fsdp2"]
    if recipe.target.load_in is not None:
        ways = [way for way in ways if way != "fsdp2"]
    found = {}
    for way in ways:
        estimate = estimate_memory(recipe, shape, trained, Shares(way, processes))
        found[way] = sum(estimate.values()) / 1e9
        if found[way] < ROOM * memory:
            return f"{found[way]:.0f} GB" + ("" if way == "alone" else f", {way}")
    least = min(found, key=found.__getitem__)
    return f"no ({found[least]:.0f} GB)"


def published() -> dict[str, Any]:
    """Configs of two targets, as their makers publish them."""
    from transformers import LlamaConfig, Qwen3Config

    qwen: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    llama: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    return {"Qwen3-8B": Qwen3Config(**qwen), "Llama-3.1-70B": LlamaConfig(**llama)}


def measure(options: argparse.Namespace, drafter: str, dtype: str) -> dict[str, Any]:
    """One row of the table, in a process of its own."""
    command = [sys.executable, "-m", "draftsmith.train.bench_memory", "--worker"]
    for name in ("model", "length", "rows", "loss"):
        command += [f"--{name}", str(getattr(options, name))]
    command += ["--drafters", drafter, "--dtypes", dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def serve(options: argparse.Namespace) -> None:
    """Worker: two steps."""
    from draftsmith.train.setup import prepare
    from draftsmith.train.trainer import take_step

    (drafter,), (dtype,) = options.drafters, options.dtypes
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(options, drafter, dtype)
        write_rows(recipe, Path(folder))
        training = prepare(recipe, Path(folder))
        trim_heap()
        assert reset_peak(), "this kernel does not let the peak be read"
        for _ in range(2):
            take_step(training)
        shape = describe(recipe.target)
        trained = trained_parameters(recipe.drafter, shape)
        estimate = estimate_memory(recipe, shape, trained)
        print(json.dumps({"peak": resident("VmHWM"), "estimate": estimate}))


def recipe_of(options: argparse.Namespace, drafter: str, dtype: str) -> Recipe:
    """A recipe of full rows."""
    return Recipe.model_validate(
        {
            "name": "memory",
            "target": {"model": options.model, "dtype": DTYPES[dtype]},
            "data": {"max_length": options.length, "max_prompt_tokens": 8, "held_out": 1},
            "drafter": DRAFTERS[drafter],
            "objective": {"loss": options.loss},
            "train": {
                "rows_per_step": options.rows,
                "rows_per_micro_batch": options.rows,
                "precision": dtype,
                "log_every": 1,
            },
        }
    )


def write_rows(recipe: Recipe, run: Path) -> None:
    """Rows as the data stage leaves them, of random tokens."""
    target = Target.load(recipe.target)
    coins = torch.Generator().manual_seed(0)
    rows = []
    for number in range(1 + 2 * recipe.train.rows_per_step):
        ids = torch.randint(target.vocab_size // 2, (recipe.data.max_length,), generator=coins)
        rows.append(
            {
                "key": str(number),
                "category": "random",
                "messages": [],
                "prompt_ids": ids[:1].tolist(),
                "response_ids": ids[1:].tolist(),
                "response": "",
                "finish_reason": "stop",
                "temperature": 0.0,
                "seed": 0,
                "thinking": None,
            }
        )
    folder = run / "rows"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = {"prompts": {"count": len(rows)}, "target": target.fingerprint}
    (folder / "manifest.json").write_text(json.dumps(manifest))


if __name__ == "__main__":
    main()
