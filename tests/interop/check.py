"""An exported block drafter in real clients: each drafts, token for token, what our loop drafts.

    python -m tests.interop.check [DRAFTER] [--prompts N] [--tokens N] [--clients FOLDER]

DRAFTER is a block drafter's folder, or its run's; without one, the start of an untrained drafter.
The target is SmolLM2-135M in fp32, decoding is greedy, and every output must be plain greedy
decoding's. `--clients` holds the environments of the PyPI packages, as `make interop` makes them.
All draft from the whole vocabulary, whatever the drafter drafts from here.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.checkpoint import load_drafter, save_drafter, target_metadata
from draftsmith.drafters.dflash import DFlash
from draftsmith.drafters.dflash_speculators import export_speculators
from draftsmith.drafters.export import export_assistant
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.drafters.tree import chain
from draftsmith.eval.decode import decode
from draftsmith.eval.prompts import evaluation_prompts
from draftsmith.eval.subjects import drafter_folder
from draftsmith.recipes.load import load_recipe

HERE = Path(__file__).parent
RECIPE = "smollm2-135m_dflash"
CLIENTS = {  # script -> environment; None: this one
    "transformers_assistant.py": None,
    "dflash_package.py": "dflash",
    "speculators_loader.py": "speculators",
}


def main(argv: list[str] | None = None) -> int:
    """0 where every client drafts what we draft."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    overrides = [
        "target.dtype=float32",
        f"eval.prompts={options.prompts}",
        f"eval.max_new_tokens={options.tokens}",
    ]
    recipe = load_recipe(RECIPE, overrides)
    target = Target.load(recipe.target)
    drafter = whole_vocabulary(options.drafter, recipe, target)
    prompts = [one.ids for one in evaluation_prompts(target, recipe)[0]]
    with tempfile.TemporaryDirectory() as name:
        job = write_job(Path(name), drafter, target, prompts, options)
        wanted = job["answers"]
        count = sum(len(one["drafts"]) for one in wanted)
        print(f"ours: {len(prompts)} prompts, {count} rounds, τ {tau(wanted):.2f}", flush=True)
        wrong = 0
        for script, environment in CLIENTS.items():
            python = options.clients / environment / "bin/python" if environment else sys.executable
            if environment and not python.exists():
                print(f"{script}: skipped, there is no {python}", flush=True)
                continue
            have = run_client(Path(name), python, script)
            differing = compare(have, wanted, options.tokens)
            print(f"{script}: {differing or 'the same outputs and drafts'}", flush=True)
            wrong += bool(differing)
    return wrong


def parse(argv: list[str] | None) -> argparse.Namespace:
    """What to check."""
    parser = argparse.ArgumentParser(description=__doc__, prog="tests.interop.check")
    parser.add_argument("drafter", nargs="?", help="a block drafter's folder, or its run's")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--clients", type=Path, default=Path(".interop"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


def whole_vocabulary(name: str | None, recipe: Any, target: Target) -> DFlash:
    """The drafter, from all tokens."""
    if name is None:
        torch.manual_seed(0)
        config = recipe.drafter.model_copy(update={"draft_vocab": None})
        made = DFlash(config, target, None)
        made.begin(target)
        return made.eval()
    given = load_drafter(drafter_folder(name), target)
    assert isinstance(given, DFlash), f"{name} is no block drafter"
    made = DFlash(given.config.model_copy(update={"draft_vocab": None}), target, None)
    made.load_native(given.native_tensors())
    return made.eval()


def write_job(
    folder: Path, drafter: DFlash, target: Target, prompts: list[list[int]], options: Any
) -> dict[str, Any]:
    """All that clients read: models, prompts, and what we decoded."""
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    save_drafter(drafter, folder / "drafter", {"target": target_metadata(target)})
    export_assistant(folder / "drafter", folder / "assistant")
    export_speculators(
        folder / "drafter",
        folder / "speculators",
        verifier=str(folder / "target"),
        architectures=[type(target.model).__name__],
    )
    # A block more than is compared: near the end every client cuts blocks in its own way.
    count = options.tokens + drafter.block_size
    answers = [ours(target, drafter, prompt, count) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        plain = decode(target, None, prompt, sampling=Sampling(), max_new_tokens=count)
        assert answer["tokens"] == plain.tokens, "our own output is not the target's"
    job = {
        **{name: str(folder / name) for name in ("target", "drafter", "assistant", "speculators")},
        "prompts": prompts,
        "tokens": count,
        "stops": list(target.eos_ids),
        "threads": options.threads,
        "answers": answers,
        "texts": [p + a["tokens"] for p, a in zip(prompts, answers, strict=True)],
        "roots": [sorted(answer["drafts"]) for answer in answers],
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    return job


def ours(target: Target, drafter: DFlash, prompt: list[int], count: int) -> dict[str, Any]:
    """Our loop: the output, and the drafts by the place of their root."""
    drafts: dict[int, list[int]] = {}
    propose = drafter.propose

    def noted(state: Any, root: Any, plan: Any) -> Any:
        proposal = propose(state, root, plan)
        drafts[state.cache.lengths[0]] = proposal.tokens[0].tolist()
        return proposal

    drafter.propose = noted  # type: ignore[method-assign]
    tree = chain(drafter.depth)
    decoded = decode(target, drafter, prompt, sampling=Sampling(), max_new_tokens=count, tree=tree)
    drafter.propose = propose  # type: ignore[method-assign]
    accepted = [one.accepted for one in decoded.rounds]
    return {"tokens": decoded.tokens, "drafts": drafts, "accepted": accepted, "start": len(prompt)}


def tau(answers: list[dict[str, Any]]) -> float:
    """Tokens per round."""
    rounds = [one + 1 for answer in answers for one in answer["accepted"]]
    return sum(rounds) / len(rounds)


def run_client(folder: Path, python: Path | str, script: str) -> list[dict[str, Any]]:
    """What a client says to the job."""
    job, out = folder / "job.json", folder / f"{script}.json"
    subprocess.run([str(python), str(HERE / script), str(job), str(out)], check=True)
    found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def compare(have: list[dict[str, Any]], want: list[dict[str, Any]], tokens: int) -> str:
    """What differs, in a line; empty where nothing does."""
    for number, (mine, theirs) in enumerate(zip(want, have, strict=True)):
        if theirs["tokens"] is not None and theirs["tokens"][:tokens] != mine["tokens"][:tokens]:
            return f"prompt {number}: another output"
        drafts = {int(root): one for root, one in theirs["drafts"].items()}
        for root, draft in mine["drafts"].items():
            if root < mine["start"] + tokens and drafts.get(root) != draft:
                return f"prompt {number}: drafts {drafts.get(root)} at {root}, and ours are {draft}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
