"""In an environment with the PyPI package `dflash`: decode with its own class and loop, and say
what it drafts.

    python tests/interop/dflash_package.py JOB.json OUT.json
"""

import json
import sys

import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM


def main(job_file: str, out_file: str) -> None:
    """Every prompt of the job: its output and the drafts by the place of their root."""
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    torch.set_num_threads(job["threads"])
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    drafter, found = DFlashDraftModel.from_pretrained(
        job["drafter"], dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"], found
    watch = Watch(drafter.eval())
    answers = []
    for prompt in job["prompts"]:
        watch.drafts = {}
        out = dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            max_new_tokens=job["tokens"],
            stop_token_ids=job["stops"],
        )
        answers.append({"tokens": out[0, len(prompt) :].tolist(), "drafts": watch.drafts})
    with open(out_file, "w", encoding="utf-8") as file:
        json.dump(answers, file)


class Watch:
    """Notes what a drafter says, by the place of the root."""

    def __init__(self, drafter):
        self.drafts, self.root = {}, 0
        logits = drafter.compute_logits
        drafter.register_forward_pre_hook(self.before, with_kwargs=True)
        drafter.compute_logits = lambda *given: self.after(logits(*given))

    def before(self, _module, _given, options):
        """Positions end with those of the block."""
        size = options["noise_embedding"].shape[1]
        self.root = int(options["position_ids"][0, -size])

    def after(self, logits):
        """The likeliest tokens."""
        self.drafts[self.root] = logits.argmax(-1)[0].tolist()
        return logits


if __name__ == "__main__":
    main(*sys.argv[1:])
