"""Memory and time of a Medusa training step: the chunked projection against the un-chunked one.

    python -m draftsmith.train.bench_step

Drafter forward, loss and backward of one packed row under a random target. Each version has a
process of its own, so that its peak is its own; the processes take turns, so that a busy machine
slows both.
"""

import argparse
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from draftsmith.drafters.medusa import MedusaHeads
from draftsmith.drafters.slots import Batch
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import MedusaConfig, ObjectiveConfig, TrainConfig
from draftsmith.train.objective import Objective
from draftsmith.train.phases import reset_peak, resident

VERSIONS = ("whole", "chunked")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__, prog="draftsmith.train.bench_step")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=TrainConfig().chunk)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--losses", nargs="+", default=["ce", "kl"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=3, metavar=("VERSION", "LOSS", "DTYPE"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and the same as JSON."""
    options = parse(argv)
    if sys.platform != "linux":
        sys.exit("the benchmark reads its memory from /proc, which only Linux has")
    if options.worker:
        serve(options)
        return
    results = []
    print(
        f"{'dtype':6}{'loss':8}{'version':9}{'peak MiB':>10}{'seconds':>9}{'CPU s':>8}", flush=True
    )
    for dtype in options.dtypes:
        for loss in options.losses:
            missing = whole_bytes(options, loss) - psutil.virtual_memory().available
            if missing > 0:
                print(f"{dtype:6}{loss:8}skipped: {missing / 2**30:.1f} GiB more must be free")
                continue
            found = compare(options, loss, dtype)
            results.append({"dtype": dtype, "loss": loss, **found})
            print(table(found, loss, dtype), flush=True)
    names = ("tokens", "hidden", "vocab", "heads", "chunk", "repeats", "threads")
    setting = {name: getattr(options, name) for name in names} | {"torch": torch.__version__}
    text = json.dumps({"setting": setting, "results": results})
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


def whole_bytes(options: argparse.Namespace, loss: str) -> int:
    """What the un-chunked version needs, roughly: so many fp32 logits of all slots at once."""
    copies = 4 if loss == "ce" else 8
    return int(copies * 4 * options.tokens * options.heads * options.vocab)


def table(found: dict[str, Any], loss: str, dtype: str) -> str:
    """Both versions, and the chunked one as a share of the whole one."""
    lines = [
        f"{dtype:6}{loss:8}{version:9}{row['peak'] / 2**20:10.0f}"
        f"{row['seconds']:9.2f}{row['cpu_seconds']:8.2f}"
        for version, row in ((version, found[version]) for version in VERSIONS)
    ]
    ratios = f"{found['peak_ratio']:10.3f}{found['time_ratio']:9.2f}{found['cpu_ratio']:8.2f}"
    return "\n".join([*lines, f"{dtype:6}{loss:8}{'ratio':9}{ratios}"])


def compare(options: argparse.Namespace, loss: str, dtype: str) -> dict[str, Any]:
    """Let the versions take turns; peaks are maxima, times medians without the first turn."""
    command = [sys.executable, "-m", "draftsmith.train.bench_step"]
    for name in ("tokens", "hidden", "vocab", "heads", "chunk", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    workers = {
        version: subprocess.Popen(
            [*command, "--worker", version, loss, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for version in VERSIONS
    }
    turns: dict[str, list[dict[str, float]]] = {version: [] for version in VERSIONS}
    try:
        for _ in range(options.repeats + 1):
            for version, worker in workers.items():
                turns[version].append(ask(worker))
    finally:
        for worker in workers.values():
            worker.terminate()
            worker.wait()
    found: dict[str, Any] = {version: summary(turns[version]) for version in VERSIONS}
    whole, chunked = (found[version] for version in VERSIONS)
    for ratio, key in (("peak", "peak"), ("time", "seconds"), ("cpu", "cpu_seconds")):
        found[f"{ratio}_ratio"] = chunked[key] / whole[key]
    return found


def ask(worker: subprocess.Popen[str]) -> dict[str, float]:
    """One step of a worker."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write("step\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        sys.exit(f"a step did not finish (exit code {worker.wait()}); out of memory? try --tokens")
    found: dict[str, float] = json.loads(answer)
    return found


def summary(turns: list[dict[str, float]]) -> dict[str, float]:
    """Peak of all turns; medians of all but the first, which warms up."""
    timed = turns[1:] or turns
    return {
        "peak": max(turn["peak"] for turn in turns),
        "seconds": statistics.median(turn["seconds"] for turn in timed),
        "cpu_seconds": statistics.median(turn["cpu_seconds"] for turn in timed),
    }


def serve(options: argparse.Namespace) -> None:
    """Worker: a step for every line that comes in."""
    version, loss, dtype = options.worker
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    target = random_target(options, DTYPES[dtype])
    drafter = MedusaHeads(MedusaConfig(heads=options.heads), target, None)
    batch = random_batch(options)
    states, roots = target.states(batch), drafter.roots(batch)
    objective = Objective(ObjectiveConfig(loss=loss), options.heads)
    denominator = objective.denominator(drafter.slots(batch, states, roots).labels, drafter.head())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            slots = drafter.slots(batch, states, roots)
            if version == "whole":
                total, _ = objective.reference(slots, states, target)
            else:
                total, _ = objective(slots, states, target, chunk=options.chunk)
        (total / denominator).backward()
        drafter.zero_grad()

    for _ in sys.stdin:
        print(json.dumps(measured(step)), flush=True)


def random_target(options: argparse.Namespace, dtype: torch.dtype) -> Target:
    """A Llama of one layer with a head of the right size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    return Target.from_model(model.to(dtype), None, name="random")


def random_batch(options: argparse.Namespace) -> Batch:
    """One row, one document, all of it supervised."""
    ids = torch.randint(options.vocab, (1, options.tokens))
    positions = torch.arange(options.tokens)[None]
    return Batch(ids, positions, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool))


def measured(step: Callable[[], None]) -> dict[str, float]:
    """Seconds of a step, and how far resident memory rose above what it was before (bytes)."""
    trim_heap()
    before, reset = resident("VmRSS"), reset_peak()
    clock, cpu = time.perf_counter(), time.process_time()
    step()
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
    peak = resident("VmHWM") if reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": float(peak - before), "seconds": seconds, "cpu_seconds": cpu_seconds}


def trim_heap() -> None:
    """Give freed memory back, so that one step's leftovers do not hide in the next one's base."""
    ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
