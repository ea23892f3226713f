"""A toy language, a target for it, and a run's folder: x[t+1] = x[t] + 1 among 16 tokens."""

import hashlib
import json
import random

import torch

from draftsmith.drafters.target import make_fingerprint
from draftsmith.recipes.schema import Recipe, TargetConfig
from draftsmith.train.checkpoint import latest
from tests.tiny import tiny_model, tiny_tokenizer

FIRST, WORDS = 16, 16  # the ids of the language


def save_target(folder, **options):
    """A random Llama with a tokenizer, as a Hugging Face folder."""
    tiny_model(32, **{"layers": 1, "spread": 0.5, **options}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def counting_row(number, *, answer=None):
    """A distilled row: three tokens of prompt, then 5 to 16 of answer (or `answer`)."""
    draw = random.Random(number)
    start, length = draw.randrange(WORDS), 3 + (answer or draw.randrange(5, 17))
    ids = [FIRST + (start + i) % WORDS for i in range(length)]
    return {
        "key": f"{number:03d}",
        "category": "even" if start % 2 == 0 else "odd",
        "messages": [],
        "prompt_ids": ids[:3],
        "response_ids": ids[3:],
        "response": "",
        "finish_reason": "stop",
        "temperature": 0.0,
        "seed": 0,
        "thinking": None,
    }


def save_rows(run, rows, target):
    """As the data stage leaves them."""
    (run / "rows").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    (run / "rows" / "rows.jsonl").write_text("".join(lines))
    config = TargetConfig(model=str(target), dtype="float32")
    made = make_fingerprint(config, tiny_model(32, layers=1), tiny_tokenizer())
    manifest = {"prompts": {"count": len(rows)}, "target": made}
    (run / "rows" / "manifest.json").write_text(json.dumps(manifest))
    return run


def recipe_for(target, *, train=None, optim=None, drafter=None, dtype="float32", **blocks):
    """A small fp32 recipe on the CPU."""
    return Recipe.model_validate(
        {
            "name": "counting",
            "target": {"model": str(target), "dtype": dtype, "device": "cpu"},
            "data": {"max_length": 64, "held_out": 8, "max_prompt_tokens": 16},
            "drafter": drafter
            if drafter and "kind" in drafter
            else {"heads": 3, **(drafter or {})},
            "optim": {"lr": 1e-2, "warmup_steps": 5, **(optim or {})},
            "train": {
                "epochs": 3,
                "rows_per_step": 4,
                "rows_per_micro_batch": 2,
                "precision": "fp32",
                "log_every": 1,
                "eval_every": 1000,
                "save_every": 1000,
                **(train or {}),
            },
            **blocks,
        }
    )


def read_log(run, kind="train"):
    """Records of log.jsonl of one kind."""
    lines = (run / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def weights(run):
    """The trained weights of the newest checkpoint."""
    return latest(run / "checkpoints").trainables


def digest(values):
    """One text for the bits of many tensors."""
    total = hashlib.sha256()
    for value in values:
        total.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
