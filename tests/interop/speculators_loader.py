"""In an environment with the PyPI package `speculators`: its loader reads the export, every tensor
as it was written, and its modules draft what we drafted.

    python tests/interop/speculators_loader.py JOB.json OUT.json
"""

import json
import sys

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel
from transformers import AutoModelForCausalLM


@torch.no_grad()
def main(job_file: str, out_file: str) -> None:
    """Every prompt of the job: the drafts in the rounds that we had."""
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    torch.set_num_threads(job["threads"])
    drafter = SpeculatorModel.from_pretrained(job["speculators"], dtype=torch.float32).eval()
    for layer in drafter.layers:  # theirs is FlexAttention, with masks of its own kind
        layer.self_attn.config._attn_implementation = "sdpa"
    have = drafter.state_dict()
    for name, value in load_file(f"{job['drafter']}/model.safetensors").items():
        assert torch.equal(have[name].float(), value.float()), name
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    taps = drafter.target_layer_ids  # the embedding counts as 0
    answers = []
    for text, roots in zip(job["texts"], job["roots"], strict=True):
        states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        seen = torch.cat([states[tap] for tap in taps], dim=-1)
        drafts = {root: draft(drafter, seen[:, :root], text[root]) for root in roots}
        answers.append({"tokens": None, "drafts": drafts})
    with open(out_file, "w", encoding="utf-8") as file:
        json.dump(answers, file)


def draft(drafter, seen, root: int) -> list[int]:
    """One block behind a context, through the modules of their class."""
    block = torch.full((1, drafter.block_size), drafter.mask_token_id)
    block[0, 0] = root
    fused = drafter.hidden_norm(drafter.fc(seen))
    states = drafter.embed_tokens(block)
    places = torch.arange(seen.shape[1] + block.shape[1])[None]
    rope = drafter.rotary_emb(states, places)
    nothing = torch.zeros(1, 1, block.shape[1], places.shape[1])
    for layer in drafter.layers:
        states = layer(
            target_hidden=fused,
            hidden_states=states,
            attention_mask=nothing,
            position_ids=places,
            position_embeddings=rope,
        )
    logits = drafter.lm_head(drafter.norm(states))
    return logits[0, 1:].argmax(-1).tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])
