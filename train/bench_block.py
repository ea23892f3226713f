"""Memory and time of a block drafter's training step: ours against a dense mask with every logit at
once, and against the step of the PyPI package `speculators`.

    python -m draftsmith.train.bench_block [--speculators PYTHON SCRIPT]

Drafter forward, loss and backward of one packed row under random states of a random target, all
versions from the same weights, states and anchors: the losses are compared first, in fp32 and on a
few anchors, then steps are timed under bf16 autocast. Each version has a process of its own; they
take turns.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.drafters.checkpoint import save_drafter, target_metadata
from draftsmith.drafters.dflash import Contexts, DFlash
from draftsmith.drafters.dflash_attention import gather
from draftsmith.drafters.dflash_layers import Attend
from draftsmith.drafters.dflash_speculators import export_speculators
from draftsmith.drafters.slots import Batch, Roots, TargetStates, label_slots
from draftsmith.drafters.target import Target
from draftsmith.recipes.schema import DFlashConfig, ObjectiveConfig, TrainConfig
from draftsmith.train.bench_step import ask, measured, summary
from draftsmith.train.objective import Objective

OURS, DENSE, THEIRS = "ours", "dense", "speculators"
KNOBS = ("tokens", "hidden", "vocab", "block", "anchors", "layers", "chunk", "threads", "loss")
TAPS = (1, 3, 5, 7, 9)
TOLERANCE = 1e-4


def parse(argv: list[str] | None) -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__, prog="draftsmith.train.bench_block")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--loss", default="ce", choices=["ce", "kl"])
    parser.add_argument("--chunk", type=int, default=TrainConfig().chunk)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--speculators", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=2, metavar=("VERSION", "FOLDER"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table and the same as JSON."""
    options = parse(argv)
    if options.worker:
        return serve(options)
    versions = [OURS, DENSE, *([THEIRS] if options.speculators else [])]
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), options)
        few = min(options.anchors, 32)
        losses = {one: check(options, one, name, few) for one in versions}
        for version, loss in losses.items():
            print(f"{version}: loss {loss:.6f}", flush=True)
            if abs(loss - losses[OURS]) > TOLERANCE * abs(losses[OURS]):
                sys.exit(f"{version} computes another loss than ours; nothing is timed")
        found = compare(options, versions, name)
    print(f"{'version':13}{'peak MiB':>10}{'seconds':>9}{'CPU s':>8}")
    for version, row in found.items():
        print(
            f"{version:13}{row['peak'] / 2**20:10.0f}{row['seconds']:9.2f}{row['cpu_seconds']:8.2f}"
        )
    setting = {knob: getattr(options, knob) for knob in KNOBS} | {"torch": torch.__version__}
    text = json.dumps({"setting": setting, "losses": losses, "results": found})
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


def command(options: argparse.Namespace, version: str, folder: str) -> list[str]:
    """What a worker is started with."""
    if version == THEIRS:
        python, script = options.speculators
        return [python, script, folder, options.loss, str(options.threads)]
    line = [sys.executable, "-m", "draftsmith.train.bench_block", "--worker", version, folder]
    for knob in KNOBS:
        line += [f"--{knob}", str(getattr(options, knob))]
    return line


@contextmanager
def worker(
    options: argparse.Namespace, version: str, folder: str
) -> Iterator[subprocess.Popen[str]]:
    """A process that takes a step for every line."""
    process = subprocess.Popen(
        command(options, version, folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def check(options: argparse.Namespace, version: str, folder: str, anchors: int) -> float:
    """The loss of the first so many anchors, in fp32."""
    with worker(options, version, folder) as process:
        return ask(process, f"loss {anchors}")["loss"]


def compare(options: argparse.Namespace, versions: list[str], folder: str) -> dict[str, Any]:
    """Let the versions take turns; one that memory cannot hold beside the others goes alone."""
    turns: dict[str, list[dict[str, float]]] = {version: [] for version in versions}
    for _ in range(options.repeats + 1):
        for version in versions:
            missing = whole_bytes(options, version) - psutil.virtual_memory().available
            if missing > 0:
                sys.exit(f"{version}: {missing / 2**30:.1f} GiB more must be free")
            with worker(options, version, folder) as process:
                ask(process, "step")  # warms up
                turns[version].append(ask(process, "step"))
    return {version: summary(taken) for version, taken in turns.items()}


def whole_bytes(options: argparse.Namespace, version: str) -> int:
    """What logits at once need, roughly."""
    copies = 0 if version == OURS else 5
    return int(copies * 4 * options.anchors * options.block * options.vocab)


def serve(options: argparse.Namespace) -> None:
    """Worker: `step`, or `loss N` for the loss of N anchors in fp32."""
    version, folder = options.worker
    torch.set_num_threads(options.threads)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "loss":
            step = Step(options, version, Path(folder), torch.float32)
            answer = {"loss": float(step.loss(int(words[1])).detach())}
        else:
            step = Step(options, version, Path(folder), torch.bfloat16)
            answer = measured(step)
        print(json.dumps(answer), flush=True)


class Step:
    """A training step on what `write_inputs` wrote; frozen weights and states in this dtype."""

    def __init__(
        self, options: argparse.Namespace, version: str, folder: Path, dtype: torch.dtype
    ) -> None:
        from transformers import LlamaForCausalLM

        model: Any = LlamaForCausalLM.from_pretrained(folder / "target", dtype=dtype)
        self.target, self.dense = Target.from_model(model, None, name="random"), version == DENSE
        kind = DenseDFlash if self.dense else DFlash
        self.drafter = make_drafter(options, self.target, kind)
        self.drafter.load_native(load_file(folder / "drafter" / "model.safetensors"))
        objective = ObjectiveConfig(loss=options.loss, weights="exponential")
        self.objective = Objective(objective, self.drafter.depth)
        self.chunk, found = options.chunk, load_file(folder / "inputs")
        ids, self.anchors = found["ids"], found["anchors"]
        places = torch.arange(ids.shape[1])[None]
        supervised = torch.ones_like(ids, dtype=torch.bool)
        self.batch = Batch(ids, places, torch.zeros_like(ids), supervised)
        self.states = TargetStates(found["final"].to(dtype), found["layers"].to(dtype))

    def loss(self, count: int) -> Tensor:
        """Of the first so many anchors."""
        anchors = self.anchors[:count]
        roots = Roots(torch.zeros_like(anchors), anchors)
        labels = label_slots(self.batch, roots, self.drafter.depth)
        slots = self.drafter.slots(self.batch, self.states, roots)
        if self.dense:
            total, _ = self.objective.reference(slots, self.states, self.target)
        else:
            total, _ = self.objective(slots, self.states, self.target, chunk=self.chunk)
        loss: Tensor = total / self.objective.denominator(labels, self.drafter.head())
        return loss

    def __call__(self) -> None:
        """Forward and backward of all anchors under bf16 autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(len(self.anchors))
        loss.backward()
        self.drafter.zero_grad()


class DenseDFlash(DFlash):
    """One mask over the context and all blocks."""

    def states(self, batch: Batch, contexts: Contexts, roots: Roots) -> Tensor:
        """As the name says."""
        block, count = self.block_size, len(roots.row)
        places = torch.arange(batch.ids.shape[1])
        context = (places < roots.position[:, None]).repeat_interleave(block, dim=0)
        group = torch.arange(count).repeat_interleave(block)
        mask = torch.cat([context, group[:, None] == group], dim=1)

        def attend(layer: int) -> Attend:
            keys, values = contexts[layer]

            def over(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                skipped = block - q.shape[1]
                rows = mask.view(count, block, -1)[:, skipped:].flatten(0, 1)
                seen = torch.cat([keys[0], k.flatten(0, 1)])[None]
                read = torch.cat([values[0], v.flatten(0, 1)])[None]
                mixed = gather(q.flatten(0, 1)[None], seen, read, rows)
                return mixed[0].view(count, -1, *q.shape[2:])

            return over

        at = roots.row, roots.position
        return self.blocks(batch.ids[at], batch.positions[at], attend)


# --- the same inputs for all ---


def random_target(options: argparse.Namespace) -> Target:
    """A Llama with the shapes of a 135M one, but for its depth."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=TAPS[-1] + 2,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 192,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    return Target.from_model(model, None, name="random")


def make_drafter(options: argparse.Namespace, target: Target, kind: type[DFlash]) -> DFlash:
    """Untrained."""
    config = DFlashConfig(
        kind="dflash",
        block_size=options.block,
        layers=options.layers,
        taps=TAPS,
        mask_token_id=options.vocab - 1,
        anchors_per_row=options.anchors,
    )
    return kind(config, target, None)


def write_inputs(folder: Path, options: argparse.Namespace) -> None:
    """Target, drafter, states, anchors, and a text that is what the target would say."""
    torch.manual_seed(0)
    target = random_target(options)
    target.model.save_pretrained(folder / "target")
    save_drafter(
        make_drafter(options, target, DFlash),
        folder / "drafter",
        {"target": target_metadata(target)},
    )
    export_speculators(
        folder / "drafter",
        folder / "speculators",
        verifier=str(folder / "target"),
        architectures=["LlamaForCausalLM"],
    )
    layers = torch.randn(1, options.tokens, len(TAPS) * options.hidden)
    before = torch.randn(1, options.tokens, options.hidden)  # the final norm
    final = target.base.norm(before)
    ids = torch.zeros(1, options.tokens, dtype=torch.int64)
    ids[:, 1:] = target.logits(final).argmax(-1)[:, :-1]
    # Whole blocks alone: what others do at a text's end differs.
    every = torch.randperm(options.tokens - options.block - 2)[: options.anchors] + 1
    anchors = every.sort().values
    tensors = {"layers": layers, "before": before, "final": final, "ids": ids, "anchors": anchors}
    save_file({name: one.detach().contiguous() for name, one in tensors.items()}, folder / "inputs")


if __name__ == "__main__":
    main()
