"""In an environment with the PyPI package `speculators`: its training step on the inputs of
`draftsmith.train.bench_block`, for every line that comes in.

    python tests/interop/speculators_step.py FOLDER LOSS THREADS

As its trainer does it: bf16 autocast over fp32 weights, losses without its Triton kernels, SDPA.
"""

import ctypes
import gc
import json
import math
import resource
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.models.dflash import DFlashDraftModel, core

LOSSES = {"ce": "ce", "kl": "kl_div"}
GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def main(folder: str, loss: str, threads: str) -> None:
    """`step`, or `loss N` for the loss of N anchors in fp32."""
    torch.set_num_threads(int(threads))
    model, found = read_model(folder), load_file(f"{folder}/inputs")
    block = model.block_size
    gamma = GAMMA.get(block, 4.0 if block < 8 else 7.0)
    call, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn=LOSSES[loss],
        loss_implementation="eager",
        dflash_decay_gamma=gamma,
        max_anchors=len(found["anchors"]),
        per_position_loss_weight="fixed-exp-decay",
    )
    # It divides by the number of slots, we by their weights.
    weights = sum(math.exp(-slot / gamma) for slot in range(block - 1))
    scale = (block - 1) / weights

    def loss_of(count: int, dtype: torch.dtype) -> torch.Tensor:
        anchors = found["anchors"][:count]
        valid = torch.ones(count, dtype=torch.bool)
        core.select_anchors = lambda *_: (anchors, valid)  # ours, in place of random ones
        batch = {
            "hidden_states": found["layers"].to(dtype),
            "verifier_last_hidden_states": found["before"].to(dtype),
            "input_ids": found["ids"],
            "loss_mask": torch.ones_like(found["ids"]),
            "document_ids": torch.zeros_like(found["ids"]),
        }
        return model(**batch, **{**call, "max_anchors": count})[1] * scale

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss_of(len(found["anchors"]), torch.bfloat16)
        value.backward()
        model.zero_grad()

    for line in sys.stdin:
        words = line.split()
        if words[0] == "loss":
            value = float(loss_of(int(words[1]), torch.float32).detach())
            print(json.dumps({"loss": value}), flush=True)
        else:
            print(json.dumps(measured(step)), flush=True)


def read_model(folder: str) -> DFlashDraftModel:
    """The drafter of the folder, with SDPA."""
    config = DFlashDraftModel.config_class.from_pretrained(f"{folder}/speculators")
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = DFlashDraftModel.from_pretrained(
        f"{folder}/speculators", config=config, dtype=torch.float32
    )
    return model.float().train()


def measured(step) -> dict[str, float]:
    """Seconds of a step, and how far resident memory rose above what it was before (bytes)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    clock, cpu = time.perf_counter(), time.process_time()
    step()
    seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - cpu
    peak = resident("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": float(peak - before), "seconds": seconds, "cpu_seconds": cpu_seconds}


def resident(key: str) -> int:
    """Bytes resident now (VmRSS) or at most since the peak was reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    main(*sys.argv[1:])
