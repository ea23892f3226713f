"""The model card that lies beside a drafter's weights."""

from typing import Any

CARD = """---
base_model: {model}
library_name: draftsmith
pipeline_tag: text-generation
tags: [speculative-decoding, {kind}]
---
# {kind} drafter for `{model}`

Trained with draftsmith. It guesses ahead of its target; decoding with it gives the target's own
output.

| | |
|---|---|
| target | `{model}`, weights {origin}, states in {dtype} |
| slots | {heads} |
| heads read | {reads} |
| projection | {projection} |
| draft vocabulary | {vocabulary} |

```
draftsmith eval PATH_TO_THIS_FOLDER
```

Limits: it is fitted to this target's states and chat template; acceptance falls on text unlike its
training data. vLLM up to 0.32 reads this layout where every slot has an own full-vocabulary
projection and reads the state alone; vLLM 0.33 removed Medusa and SGLang never had it.
"""


def model_card(meta: dict[str, Any]) -> str:
    """Markdown with Hub metadata, from draftsmith.json."""
    drafter, target, vocab = meta["drafter"], meta["target"], meta["draft_vocab"]
    return CARD.format(
        model=target["model"],
        origin=target["origin"],
        dtype=target["dtype"],
        kind=drafter["kind"],
        heads=drafter["heads"],
        projection=drafter["projection"],
        reads="the state and the root" if drafter.get("reads_root") else "the state",
        vocabulary="all of the target's"
        if vocab is None
        else f"{len(vocab)} rows of the target's head",
    )
