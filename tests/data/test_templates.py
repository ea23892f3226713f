"""Every family's chat template: what is trained is what the target said to what it was asked."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from draftsmith.data.dataset import documents_from_rows
from draftsmith.data.distill import distil
from draftsmith.data.prompts import load_prompts, next_turns
from draftsmith.data.render import check_template, render_prompt, said
from draftsmith.data.rows import read_rows
from draftsmith.drafters.speaker import Weightless
from draftsmith.recipes.schema import DataConfig
from tests.data.test_render import GEMMA, LLAMA, MISTRAL
from tests.tiny import CHATML, tiny_tokenizer

QWEN3 = (  # reasoning of earlier turns is dropped; thinking is switched off by an empty block
    "{% for message in messages %}{% set text = message['content'] or '' %}"
    "{% if message['role'] == 'assistant' %}"
    "{% set thought = message['reasoning_content'] if message['reasoning_content'] else '' %}"
    "{% if not thought and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ text }}{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
DEEPSEEK = (  # the prompt opens the thought; answers end the turn with the end of the text
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{% set text = message['content'] %}"
    "{% if '</think>' in text %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|Assistant|>' + text + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
HARMONY = (  # answers speak in channels; a thought of an earlier turn is dropped
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{% if loop.last and message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}"
    "{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "chatml": (CHATML, {}, ()),
    "llama3": (LLAMA, {"bos": "<s>", "eos": "<|eot_id|>"}, ()),
    "gemma": (GEMMA, {"bos": "<s>", "eos": "<end_of_turn>"}, ()),
    "mistral": (MISTRAL, {"bos": "<s>", "eos": "<|endoftext|>"}, ()),
    "qwen3": (QWEN3, {}, ()),
    "deepseek": (DEEPSEEK, {"bos": "<s>", "eos": "<|endoftext|>"}, ("<|User|>", "<|Assistant|>")),
    "gpt-oss": (
        HARMONY,
        {"eos": "<|return|>"},
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
    ),
}
TALK = ["How many?", "Four, é 数.", "And now?", " Five  "]
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
ENDS |= {"mistral": "<|endoftext|>", "qwen3": "<|im_end|>", "deepseek": "<|endoftext|>"}
ENDS |= {"gpt-oss": "<|return|>"}


def speaker(name: str) -> Weightless:
    """A target of a family, without weights."""
    template, options, more = CASES[name]
    tokenizer = tiny_tokenizer(template, **{**options, "eos": "<|endoftext|>"})
    if more:
        tokenizer.add_special_tokens({"additional_special_tokens": list(more)})
    tokenizer.eos_token = options.get("eos", "<|im_end|>")
    size = len(tokenizer) + 8
    shape = LlamaConfig(vocab_size=size, max_position_embeddings=4096)
    end = tokenizer.convert_tokens_to_ids(ENDS[name])
    said_of_it = {"model": name, "content": "none", "quantisation": "none"}
    return Weightless(name, tokenizer, shape, (end,), size, said_of_it)


def rows_of(
    name: str,
    folder: Path,
    row: dict[str, Any],
    *,
    thinking: bool | None = None,
    turns: str = "all",
) -> list[dict[str, Any]]:
    """The training rows of one given conversation, by turn."""
    file = folder / f"{name}.jsonl"
    file.write_text(json.dumps(row) + "\n")
    config = DataConfig.model_validate(
        {
            "prompts": str(file),
            "turns": turns,
            "thinking": thinking,
            "distil": {"backend": "given", "max_new_tokens": 400},
        }
    )
    prompts = load_prompts(config, split="train", seed=0).prompts
    rows = folder / "rows"
    distil(speaker(name), prompts, config, rows, seed=0)
    found = read_rows(rows)
    (documents, dropped) = documents_from_rows(found, config)
    assert not dropped
    for one, document in zip(found, documents, strict=True):
        assert list(document.ids) == one["prompt_ids"] + one["response_ids"]
        mask = [False] * len(one["prompt_ids"]) + [True] * len(one["response_ids"])
        assert list(document.supervised) == mask
    return sorted(found, key=lambda one: len(one["messages"]))


def turns(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_what_serving_renders_and_then_the_answer_with_its_end(
    name: str, tmp_path: Path
) -> None:
    tokenizer, talk = speaker(name).tokenizer, turns(*TALK)
    check_template(tokenizer, None, name=name)
    rows = rows_of(name, tmp_path, {"id": "a", "messages": talk})
    assert [row["key"] for row in rows] == ["a", "a (turn 2)"]
    for row, after in zip(rows, (1, 3), strict=True):
        assert row["prompt_ids"] == render_prompt(tokenizer, talk[:after])
        answer = text_of(tokenizer, row["response_ids"])
        head = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
        assert answer == head + talk[after]["content"] + ENDS[name]
        assert row["finish_reason"] == "stop" and row["temperature"] is None
        assert row["response"].strip() == talk[after]["content"].strip()
        bos = tokenizer.bos_token_id
        assert bos is None or row["prompt_ids"].count(bos) == 1


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("gemma", "mistral")])
def test_a_system_message_is_read_and_not_trained(name: str, tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, *turns(*TALK[:2])]
    (row,) = rows_of(name, tmp_path, {"messages": talk})
    tokenizer = speaker(name).tokenizer
    assert "Be brief." in text_of(tokenizer, row["prompt_ids"])
    assert "Be brief." not in text_of(tokenizer, row["response_ids"])


def test_a_template_without_a_system_role_drops_such_rows_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "g.jsonl"
    system = [{"role": "system", "content": "Be brief."}, *turns("A?", "b")]
    lines = [{"messages": system}, {"messages": turns("C?", "d")}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = DataConfig.model_validate({"prompts": str(file), "distil": {"backend": "given"}})
    prompts = load_prompts(config, split="train", seed=0).prompts
    summary = distil(speaker("gemma"), prompts, config, tmp_path / "rows", seed=0)
    assert summary.rows == 1
    assert dict(summary.dropped) == {"the chat template refuses: System role not supported": 1}


def test_qwen3_thinks_as_it_was_served_and_forgets_thoughts_of_earlier_turns(
    tmp_path: Path,
) -> None:
    talk = turns(*TALK)
    talk[1]["reasoning_content"], talk[3]["reasoning_content"] = "Count.", "Count\nagain."
    rows = rows_of("qwen3", tmp_path, {"messages": talk})
    tokenizer = speaker("qwen3").tokenizer
    first, second = (text_of(tokenizer, row["response_ids"]) for row in rows)
    assert first == "<think>\nCount.\n</think>\n\nFour, é 数.<|im_end|>"
    assert second == "<think>\nCount\nagain.\n</think>\n\n Five  <|im_end|>"
    asked = text_of(tokenizer, rows[1]["prompt_ids"])
    assert "Count" not in asked and asked.endswith("<|im_start|>assistant\n")


def test_a_thought_within_the_text_stays_as_it_is(tmp_path: Path) -> None:
    said_so = "<think>\nHm.\n</think>\n\nFour."
    (row,) = rows_of("qwen3", tmp_path, {"messages": turns("How many?", said_so)})
    assert text_of(speaker("qwen3").tokenizer, row["response_ids"]) == said_so + "<|im_end|>"


def test_qwen3_without_thinking_is_asked_with_the_empty_thought(tmp_path: Path) -> None:
    rows = rows_of("qwen3", tmp_path, {"messages": turns(*TALK)}, thinking=False)
    tokenizer = speaker("qwen3").tokenizer
    for row, answer in zip(rows, TALK[1::2], strict=True):
        assert text_of(tokenizer, row["prompt_ids"]).endswith("<think>\n\n</think>\n\n")
        assert text_of(tokenizer, row["prompt_ids"]).count("<think>") == 1
        assert text_of(tokenizer, row["response_ids"]) == answer + "<|im_end|>"
        assert row["thinking"] is False


def test_a_tool_call_is_trained_as_the_template_writes_it(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    rows = rows_of("qwen3", tmp_path, {"messages": talk}, thinking=False)
    tokenizer = speaker("qwen3").tokenizer
    first, second = (text_of(tokenizer, row["response_ids"]) for row in rows)
    assert '"name": "add"' in first and first.endswith("</tool_call><|im_end|>")
    assert "None" not in first
    assert second == "It is 3.<|im_end|>"
    assert "<tool_call>" in text_of(tokenizer, rows[1]["prompt_ids"])


def test_deepseek_goes_on_in_the_thought_that_its_prompt_opens(tmp_path: Path) -> None:
    talk = turns("How many?", "Count.\n</think>\nFour.", "And now?", "More.\n</think>\nFive.")
    rows = rows_of("deepseek", tmp_path, {"messages": talk})
    tokenizer = speaker("deepseek").tokenizer
    for row, answer in zip(rows, (talk[1], talk[3]), strict=True):
        assert text_of(tokenizer, row["prompt_ids"]).endswith("<|Assistant|><think>\n")
        assert text_of(tokenizer, row["response_ids"]) == answer["content"] + "<|endoftext|>"
    assert "Count" not in text_of(tokenizer, rows[1]["prompt_ids"])


def test_gpt_oss_speaks_in_channels(tmp_path: Path) -> None:
    talk = turns(*TALK)
    talk[1]["thinking"] = "Count."
    rows = rows_of("gpt-oss", tmp_path, {"messages": talk})
    tokenizer = speaker("gpt-oss").tokenizer
    assert text_of(tokenizer, rows[0]["response_ids"]) == (
        "<|channel|>analysis<|message|>Count.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Four, é 数.<|return|>"
    )
    assert rows[0]["response"] == "Four, é 数."
    assert "Count" not in text_of(tokenizer, rows[1]["prompt_ids"])
    assert "final<|message|>Four, é 数.<|end|>" in text_of(tokenizer, rows[1]["prompt_ids"])


def test_an_answer_in_channels_goes_into_later_turns_without_them() -> None:
    tokenizer = speaker("gpt-oss").tokenizer
    whole = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    )
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert said(tokenizer, ids) == "Four."
    assert next_turns([], {}, 2) == []
