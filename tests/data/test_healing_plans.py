"""The recipes for targets that come with an MTP layer, planned on configs of their real sizes."""

from pathlib import Path

import pytest
from transformers import DeepseekV3Config, Qwen3_5MoeTextConfig, Qwen3NextConfig

from draftsmith.data import plan
from draftsmith.data.plan import make_plan
from draftsmith.recipes.load import load_recipe
from tests.tiny import tiny_tokenizer

TARGETS = {  # recipe -> (config, billions of parameters of the target and of its MTP layer)
    "deepseek-v3_mtp_heal": (lambda: DeepseekV3Config(), 671, 11.5),
    "qwen3-next-80b-a3b_mtp_boost": (lambda: Qwen3NextConfig(num_hidden_layers=48), 80, 1.6),
    "qwen3.5-35b-a3b_mtp_heal": (
        lambda: Qwen3_5MoeTextConfig(hidden_size=2048, num_hidden_layers=40),
        35,
        0.85,
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_healing_recipe_is_planned_with_its_target_s_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config, frozen, trained = TARGETS[name]
    config().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(plan, "free_disk", lambda path: 1 << 60)
    monkeypatch.setattr(plan, "device_memory", lambda recipe: 1 << 60)
    found = make_plan(load_recipe(name, [f"target.model={tmp_path}", "data.grow=100"]))
    assert found.frozen / 1e9 == pytest.approx(frozen, rel=0.05)
    assert found.trained / 1e9 == pytest.approx(trained, rel=0.1)
