"""The model card that lies beside a drafter's weights."""

from typing import Any

from draftsmith.drafters.fingerprint import NONE

CARD = """---
base_model: {model}
library_name: draftsmith
pipeline_tag: text-generation
tags: [speculative-decoding, {kind}]
---
# {kind} drafter for `{model}`

Made with draftsmith. It guesses ahead of its target; decoding with it gives the {whose}
output.

| | |
|---|---|
| target | `{model}`, weights {origin}{quantised}, states in {dtype} |
{knobs}
| draft vocabulary | {vocabulary} |

```
draftsmith eval PATH_TO_THIS_FOLDER
```
{adapted}
Limits: {limits}
"""
ADAPTED = """
**The output is not the original target's.** `adapter/` holds a LoRA adapter (peft's format) that
was trained beside the heads, which read the adapted target's states: both are needed together.
Decoding is exact with respect to the adapted target, whose law differs from the original's:

{change}
"""
LIMITS = {
    "dflash": "it is fitted to this target's states and chat template; acceptance falls on text "
    "unlike its\ntraining data. vLLM, SGLang, TensorRT-LLM and z-lab's code read this layout; they "
    "draft from the\nwhole vocabulary.",
    "draft_model": "it knows this target's vocabulary. A distilled one is fitted to its answers "
    "and chat\ntemplate; its folder is a plain Hugging Face model, which `assistant_model` of "
    "transformers'\n`generate` and servers with a draft model read. They draft from the whole "
    "vocabulary.",
    "medusa": "it is fitted to this target's states and chat template; acceptance falls on text "
    "unlike its\ntraining data. vLLM up to 0.32 reads this layout where every slot has an own "
    "full-vocabulary\nprojection and reads the state alone; vLLM 0.33 removed Medusa and SGLang "
    "never had it.",
    "mtp": "it is fitted to this target's states and chat template; acceptance falls on text "
    "unlike its\ntraining data. transformers' `use_mtp` reads this layout for dense targets and "
    "drafts one token a\nround with it; vLLM and SGLang read it for families that come "
    "with such\nlayers.",
    "ngram": "it knows the grams of the answers that it was counted on, and no other server reads "
    "its\nfile. It belongs to this target's vocabulary.",
    "prompt_lookup": "it helps where the answer repeats its prompt or itself, and drafts nothing "
    "elsewhere.\n`prompt_lookup_num_tokens` of transformers' `generate` does the same.",
}


def model_card(meta: dict[str, Any]) -> str:
    """Markdown with Hub metadata, from draftsmith.json."""
    drafter, target, vocab = meta["drafter"], meta["target"], meta["draft_vocab"]
    change = meta.get("change")
    shown = {name: value for name, value in drafter.items() if name not in ("kind", "draft_vocab")}
    return CARD.format(
        whose="target's own" if change is None else "adapted target's own",
        adapted=""
        if change is None
        else ADAPTED.format(change="\n".join(f"* {line}" for line in told_change(change))),
        model=target["model"],
        origin=target["origin"],
        quantised=""
        if target.get("quantisation", NONE) == NONE
        else f", linear layers in {target['quantisation']}",
        dtype=target["dtype"],
        kind=drafter["kind"],
        knobs="\n".join(f"| {name} | {value} |" for name, value in shown.items()),
        vocabulary="all of the target's"
        if vocab is None
        else f"{len(vocab)} rows of the target's head",
        limits=LIMITS[drafter["kind"]],
    )


def told_change(change: dict[str, Any]) -> list[str]:
    """What an adapter changed, in words: figures as `train/gate.py` measures them."""

    def shown(key: str, form: str) -> str:
        mean, interval = change[key]["mean"], change[key]["interval"]
        if interval is None:
            return format(mean, form)
        return f"{mean:{form}} ({interval[0]:{form}} to {interval[1]:{form}})"

    return [
        f"KL(original || adapted) {shown('kl', '.4f')} nats per token on {change['documents']} "
        "held-out answers",
        f"perplexity of these answers {change['perplexity_before']:.3f} before and "
        f"{change['perplexity']:.3f} now: log-likelihood changed by {shown('text', '.4f')} nats "
        "per token",
        f"greedy answers to {change['asked']} held-out prompts, under the original: "
        f"{shown('answers', '.3f')} nats per token beside its own; agreement "
        f"{shown('agreement', '.0%')}, identical {shown('identical', '.0%')}",
    ]
