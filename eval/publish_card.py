"""The card of a drafter on the Hub: metadata, figures with their conditions, and how it is used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from draftsmith.drafters.card import LIMITS
from draftsmith.drafters.checkpoint import drafter_config
from draftsmith.eval.exports import EXPORTS, serving
from draftsmith.recipes.provenance import version

CONDITIONS = (  # of an arm, which every figure carries
    *("rule", "draw", "temperature", "top_p", "top_k", "batch", "draft_tokens", "tree", "dtype"),
    *("quantisation", "device", "threads", "baseline", "prompts", "tokens"),
)
FIGURES = {
    "acceptance_length": (
        "tau_micro",
        "acceptance length (tokens per target pass, bonus included)",
    ),
    "speedup": ("speedup", "speedup over plain decoding"),
}
ROOT = {  # engines that load a kind from the repository itself
    "dflash": ("vllm", "sglang", "tensorrt-llm"),
    "draft_model": ("vllm", "sglang", "tensorrt-llm", "transformers"),
}
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
BODY = """# {title}

A speculative-decoding drafter ({kind}) for [`{base}`](https://huggingface.co/{base}), trained with
draftsmith. It guesses ahead of its target, which checks the guesses: decoding with it gives the
target's own output.

## Use

With plain transformers (5.15 or newer; the code is in `custom_generate/`):

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{base}", dtype=torch.{dtype})
tokenizer = AutoTokenizer.from_pretrained("{base}")
messages = [{{"role": "user", "content": "Name three rivers."}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
output = target.generate(
    **inputs, max_new_tokens=64, custom_generate="{repository}", trust_remote_code=True
)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

With draftsmith, which measures it on your machine:

```
draftsmith eval {repository}
```
{engines}
## Measured

{table}

{conditions}

Speedup is seconds per token of plain decoding over those of the arm, on the same prompts in the
same process, in turn; prefill is not counted. In brackets its 95 % interval. `report.json` holds
everything that was measured, with definitions.

## Training

{training}

## Limits

{limits}

It was measured on the prompts above, on one machine: on others, and on other text, figures differ.

## Licence

This drafter: {license}. The target has a licence of its own. Training data: {data_license}.
"""


@dataclass(frozen=True)
class Labels:
    """What the user says about a drafter."""

    repository: str
    base: str  # the target's name on the Hub
    license: str
    data_license: str
    exports: Sequence[str]  # engines that have a folder of their own


def card(
    labels: Labels, meta: Mapping[str, Any], report: Mapping[str, Any], arms: Sequence[Any]
) -> str:
    """README.md."""
    data = metadata(labels, meta, report, arms)
    kind = meta["drafter"]["kind"]
    body = BODY.format(
        title=labels.repository.partition("/")[2],
        kind=kind,
        base=labels.base,
        repository=labels.repository,
        dtype=meta["target"]["dtype"],
        engines=engine_lines(labels, meta),
        table=table(arms),
        conditions=conditions(report),
        training=training(meta),
        limits=LIMITS[kind],
        license=labels.license,
        data_license=labels.data_license,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{body}"


def metadata(
    labels: Labels, meta: Mapping[str, Any], report: Mapping[str, Any], arms: Sequence[Any]
) -> ModelCardData:
    """The card's YAML."""
    kind = meta["drafter"]["kind"]
    tags = ["speculative-decoding", kind.replace("_", "-"), "draftsmith", "custom_generate"]
    engines = (*ROOT.get(kind, ()), *labels.exports)
    tags += [name for name in dict.fromkeys(engines) if name not in tags]
    return ModelCardData(
        base_model=labels.base,
        license=labels.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        model_name=labels.repository.partition("/")[2],
        eval_results=results(meta, report, arms),
    )


def results(
    meta: Mapping[str, Any], report: Mapping[str, Any], arms: Sequence[Any]
) -> list[EvalResult]:
    """One entry for every figure of every arm, with the conditions it holds under."""
    data = (meta.get("recipe") or {}).get("data", {})
    prompts = str(data.get("eval_prompts", "unknown"))
    shared = {"created": report["created"], **report["conditions"]}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=prompts,
            dataset_name=f"evaluation prompts: {prompts}",
            metric_type=metric,
            metric_name=f"{words}, {arm['name']}",
            metric_value=round(arm[field], 4),
            metric_args={
                **{name: arm[name] for name in CONDITIONS},
                **({"interval_95": arm["speedup_interval"]} if metric == "speedup" else {}),
                **shared,
            },
        )
        for arm in arms
        for metric, (field, words) in FIGURES.items()
        if arm[field] is not None
    ]


def table(arms: Sequence[Any]) -> str:
    """Markdown: every arm's figures."""
    lines = [
        "| arm | rule | temperature | batch | drafts | acceptance length | speedup |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        nodes = len(arm["tree"]) if arm["tree"] else arm["draft_tokens"]
        shape = f"tree of {nodes}" if arm["tree"] and not arm["draft_tokens"] else str(nodes)
        low_high = arm["speedup_interval"]
        between = f" ({low_high[0]:.2f} to {low_high[1]:.2f})" if low_high else ""
        gain = "not timed" if arm["speedup"] is None else f"{arm['speedup']:.2f}x{between}"
        tau = "none" if arm["tau_micro"] is None else f"{arm['tau_micro']:.2f}"
        lines.append(
            f"| {arm['name']} | {arm['rule']} | {arm['temperature']} | {arm['batch']} | {shape} "
            f"| {tau} | {gain} |"
        )
    return "\n".join(lines)


def conditions(report: Mapping[str, Any]) -> str:
    """What holds for all of them, a line each."""
    return "\n".join(f"- {name}: {value}" for name, value in report["conditions"].items())


def training(meta: Mapping[str, Any]) -> str:
    """What the recipe says about it. recipe.yaml has every knob."""
    recipe = meta.get("recipe") or {}
    data, target = recipe.get("data", {}), meta["target"]
    shown = {
        "target's weights": f"{target['origin']}, revision {target['revision']}",
        "states computed in": target["dtype"],
        "prompts": data.get("prompts"),
        "answers": f"the target's own, at temperature {data.get('distil', {}).get('temperature')}",
        "optimizer steps": meta.get("steps"),
        "made with": version("draftsmith"),
        **{f"drafter.{name}": value for name, value in meta["drafter"].items()},
    }
    return "\n".join(f"- {name}: {value}" for name, value in shown.items())


def engine_lines(labels: Labels, meta: Mapping[str, Any]) -> str:
    """How other engines are started with it."""
    kind, depth = meta["drafter"]["kind"], drafter_config(dict(meta)).depth
    blocks = []
    for engine in dict.fromkeys((*ROOT.get(kind, ()), *labels.exports)):
        export = EXPORTS[kind, engine]
        root = engine in ROOT.get(kind, ()) and engine not in labels.exports
        local = labels.repository.partition("/")[2]
        place = labels.repository if root else f"{local}/{engine}"
        said = serving(export, target=labels.base, drafter=place, drafts=depth)
        first = f'hf download {labels.repository} --include "{engine}/*" --local-dir {local}\n'
        note = f"\n{export.note[0].upper()}{export.note[1:]}.\n" if export.note else ""
        title = NAMES.get(engine, engine)
        blocks.append(f"\nWith {title}:\n{note}\n```\n{'' if root else first}{said}\n```\n")
    return "".join(blocks)
