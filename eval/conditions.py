"""What holds for every figure of a report, in words."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from draftsmith.drafters.fingerprint import NONE
from draftsmith.drafters.target import Target
from draftsmith.eval.arms import GRAPHS
from draftsmith.eval.bench import BenchPrompt
from draftsmith.eval.report import ArmReport
from draftsmith.eval.subjects import Subject
from draftsmith.eval.tune import Choice
from draftsmith.recipes.provenance import git_revision
from draftsmith.recipes.schema import Recipe


def conditions(
    recipe: Recipe, target: Target, prompts: Sequence[BenchPrompt], context: int
) -> dict[str, str]:
    """What holds for every arm; `context` is the length at which costs were measured alone."""
    categories = {prompt.category for prompt in prompts}
    thinking = recipe.data.thinking
    return {
        "prompt set": f"{recipe.data.eval_prompts}, split {recipe.data.eval_split}: "
        f"{len(prompts)} prompts in {len(categories)} categories",
        "answers": f"at most {recipe.eval.max_new_tokens} tokens, ended by the target's end tokens",
        "repeats": f"{recipe.eval.repeats} of every prompt and arm, arms in rotated order",
        "warm-up": "one short answer per arm, thrown away",
        "prefill": "not counted, nor is the token it yields; columns that count it say so",
        "transformers.generate": "timed from its first to its last token by a streamer, "
        "default cache, every logits processor off; assisted: with its defaults, its first round "
        "counted as prefill",
        "template": f"{target.fingerprint['template']}, thinking "
        f"{'not passed' if thinking is None else thinking}",
        "machine": machine(target),
        "engine": "eager PyTorch, one process; a batch shrinks as its answers end",
        "cost context": f"after {context} cached tokens",
        "revision": git_revision(),
        "seed": str(recipe.seed),
    }


def machine(target: Target) -> str:
    """The processor or GPU that decoded."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def notes(
    target: Target,
    subjects: Sequence[Subject],
    choices: Mapping[str, Choice],
    dropped: Mapping[str, int],
) -> list[str]:
    """What a reader must know before quoting a figure."""
    origin, kept = target.fingerprint["origin"], target.fingerprint["quantisation"]
    found = [f"The target's weights: {origin}."]
    if kept != NONE:
        found.append(
            f"The target's linear layers are in {kept}, its embedding, norms and head in "
            f"{target.fingerprint['dtype']}: figures are of this target."
        )
    if origin.startswith("de-quantised"):
        found.append("De-quantised weights are not the published ones: figures are of this target.")
    for subject in subjects:
        choice, calibration = choices.get(subject.name), subject.calibration
        if choice is None or calibration is None:
            continue
        if all(len(path) == depth for depth, path in enumerate(choice.paths, start=1)):
            found.append(
                f"{subject.name}: the tree search chose a chain: on this machine no branch pays "
                "for its node."
            )
        if not calibration.greedy:
            found.append(
                f"{subject.name}: the tree was searched on sampled answers; no held-out answer is "
                "greedy."
            )
    return found + [
        f"{count} evaluation prompts left out: {why}." for why, count in dropped.items()
    ]


def winners(arms: Sequence[ArmReport]) -> list[str]:
    """The fastest exact arm of every batch size and temperature, and whether that is certain."""
    found: list[str] = []
    for batch, heat in sorted({(arm.batch, arm.temperature) for arm in arms}):
        alike = [arm for arm in arms if (arm.batch, arm.temperature) == (batch, heat)]
        drafted = [arm for arm in alike if arm.drafter is not None and arm.lossless is True]
        best = max(drafted, key=lambda arm: arm.speedup or 0.0, default=None)
        if best is None or best.speedup is None:
            continue
        where = f"Batch {batch}, temperature {heat:g}"
        if best.speedup <= 1:
            found.append(f"{where}: no exact arm is faster than plain decoding.")
            continue
        bounds = best.speedup_interval
        certain = "one batch alone has no interval" if bounds is None else "95 % interval above 1"
        if bounds is not None and bounds[0] <= 1:
            certain = "not certain: its 95 % interval holds 1"
        found.append(
            f"{where}: the fastest exact arm is {best.name}, {best.speedup:.2f}x; {certain}."
        )
    return found


def launch_notes(arms: Sequence[ArmReport]) -> list[str]:
    """What plain steps gain by being recorded: the time that launching kernels takes."""
    steps = {arm.name: sum(arm.milliseconds.values()) for arm in arms if arm.drafter is None}
    return [
        f"{name}: {100 * (1 - steps[name + GRAPHS] / eager):.0f} % of a step's {eager:.1f} ms is "
        f"launching kernels; as a CUDA graph it takes {steps[name + GRAPHS]:.1f} ms."
        for name, eager in steps.items()
        if name + GRAPHS in steps and eager > 0
    ]
