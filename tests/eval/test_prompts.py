"""The evaluation prompts as the target sees them."""

import json

from draftsmith.eval.prompts import evaluation_prompts
from draftsmith.recipes.schema import DataConfig, Recipe, TargetConfig
from tests.tiny import CHATML, tiny_target


def test_tools_are_part_of_what_is_asked(tmp_path):
    tools = [{"name": "look_up"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "Who?", "tools": tools}) + '\n{"prompt": "Why?"}\n')
    target = tiny_target(template="{{ tools | tojson }}" + CHATML)
    data = DataConfig(eval_prompts=str(path))
    recipe = Recipe(name="tiny", target=TargetConfig(model="tiny"), data=data)
    prompts, _ = evaluation_prompts(target, recipe)
    told = [target.tokenizer.decode(prompt.ids).partition("<|im_start|>")[0] for prompt in prompts]
    assert told == [json.dumps(tools), "null"]
