"""Decode with transformers' own assisted generation, and say what the assistant drafts.

python tests/interop/transformers_assistant.py JOB.json OUT.json
"""

import json
import sys

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator


def main(job_file: str, out_file: str) -> None:
    """Every prompt of the job: its output and the drafts by the place of their root."""
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    torch.set_num_threads(job["threads"])
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    drafter, found = AutoModel.from_pretrained(
        job["assistant"], dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"], found
    drafts = watched()
    answers = []
    for prompt in job["prompts"]:
        drafts.clear()
        out = target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=drafter,
            speculation_type="dflash",
            max_new_tokens=job["tokens"],
            do_sample=False,
            eos_token_id=job["stops"],
            pad_token_id=job["stops"][0],
        )
        answers.append({"tokens": out[0, len(prompt) :].tolist(), "drafts": dict(drafts)})
    with open(out_file, "w", encoding="utf-8") as file:
        json.dump(answers, file)


def watched() -> dict[int, list[int]]:
    """Drafts of every round from now on, by the place of their root."""
    drafts, draw = {}, DFlashTokenCandidateGenerator.get_candidates

    def noted(self, input_ids, *given, **options):
        found = draw(self, input_ids, *given, **options)
        length = input_ids.shape[1]
        if found[0].shape[1] > length:
            drafts[length - 1] = found[0][0, length:].tolist()
        return found

    DFlashTokenCandidateGenerator.get_candidates = noted
    return drafts


if __name__ == "__main__":
    main(*sys.argv[1:])
