import itertools
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.data.render import (
    TemplateRefusal,
    check_template,
    encode,
    render_prompt,
    sample_text,
)
from draftsmith.recipes.errors import UserError
from tests.tiny import CHATML, tiny_tokenizer

LLAMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Reasoning is kept in the last turn only, and thinking can be switched off by an empty block.
QWEN = (
    "{% for message in messages %}"
    "{% set text = message['content'] %}"
    "{% if message['role'] == 'assistant' %}"
    "{% set thought = '' %}"
    "{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}"
    "{% set text = '<think>\n' + thought + '\n</think>\n\n' + text %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# The answer follows the question at once.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% if not loop.first %}{{ eos_token }}{% endif %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
TOKENIZERS = {
    "chatml": (CHATML, {}),
    "llama": (LLAMA, {"bos": "<s>", "eos": "<|eot_id|>"}),
    "gemma": (GEMMA, {"bos": "<s>", "eos": "<end_of_turn>"}),
    "qwen": (QWEN, {}),
}


def named(name: str) -> PreTrainedTokenizerFast:
    template, options = TOKENIZERS[name]
    return tiny_tokenizer(template, **options)


def talk(*texts: str | None) -> list[dict[str, Any]]:
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_thinking_off_is_asked_for_as_the_template_writes_it() -> None:
    tokenizer = named("qwen")
    for said in (talk("1?"), talk("1?", "one", "2?")):
        prompt = tokenizer.decode(render_prompt(tokenizer, said, thinking=False))
        assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_history_is_rendered_as_the_template_rewrites_it() -> None:
    said = talk("1?", "<think>\nhm\n</think>\n\none", "2?")
    prompt = named("qwen").decode(render_prompt(named("qwen"), said))
    assert "hm" not in prompt and "one<|im_end|>" in prompt


def test_thinking_is_passed_only_when_it_is_given() -> None:
    template = "{{ enable_thinking is defined }} {{ enable_thinking }}"
    tokenizer = tiny_tokenizer(template)
    texts = [
        tokenizer.decode(render_prompt(tokenizer, talk("?"), mode)) for mode in (None, True, False)
    ]
    assert texts == ["False ", "True True", "True False"]


def test_tools_are_given_to_the_template_and_their_absence_is_none() -> None:
    tokenizer = tiny_tokenizer("{{ tools is none }} {{ tools | tojson }}" + CHATML)
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    texts = [
        tokenizer.decode(render_prompt(tokenizer, talk("?"), tools=some)) for some in (tools, ())
    ]
    assert texts[0].startswith("False " + json.dumps(tools) + "<|im_start|>")
    assert texts[1].startswith("True null<|im_start|>")


def test_a_system_prompt_of_the_template_and_one_of_the_user() -> None:
    tokenizer = named("chatml")
    assert "Be kind." in tokenizer.decode(render_prompt(tokenizer, talk("hi")))
    own = [{"role": "system", "content": "Be rude."}, *talk("hi")]
    said = tokenizer.decode(render_prompt(tokenizer, own))
    assert "Be kind." not in said and "Be rude." in said


def test_one_bos_and_the_template_writes_it() -> None:
    tokenizer = named("llama")
    assert (
        tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    )  # the trap: the tokenizer adds one too
    ids = render_prompt(tokenizer, talk("hi"))
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    doubled = tiny_tokenizer("{{ bos_token }}" + LLAMA, bos="<s>")
    with pytest.raises(UserError, match="toy: its chat template starts with the token '<s>' twice"):
        check_template(doubled, name="toy")


def test_templates_that_cannot_ask_are_refused() -> None:
    with pytest.raises(UserError, match="toy: its tokenizer has no chat template"):
        check_template(tiny_tokenizer(None), name="toy")
    with pytest.raises(UserError, match="has no chat template"):
        render_prompt(tiny_tokenizer(None), talk("hi"))
    silent = CHATML.split("{% if add_generation_prompt %}")[0]
    with pytest.raises(UserError, match="toy: its chat template has no generation prompt"):
        check_template(tiny_tokenizer(silent), name="toy")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_usual_templates_pass_the_check(name: str) -> None:
    check_template(named(name), name=name)


def test_a_template_that_needs_no_generation_prompt_passes_the_check() -> None:
    check_template(tiny_tokenizer(MISTRAL, bos="<s>"), name="toy")


def test_what_the_template_refuses_is_a_refusal_of_one_conversation() -> None:
    own = [{"role": "system", "content": "Be rude."}, *talk("hi")]
    with pytest.raises(TemplateRefusal, match="System role not supported"):
        render_prompt(named("gemma"), own)


def test_the_sample_is_coloured_where_it_is_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = named("chatml")
    prompt, answer = render_prompt(tokenizer, talk("hi")), encode(tokenizer, "yo<|im_end|>")
    ids, supervised = prompt + answer, [False] * len(prompt) + [True] * len(answer)
    text = sample_text(tokenizer, ids, supervised, colour=True)
    assert "\x1b[32myo<|im_end|>\x1b[0m" in text and text.count("\x1b[32m") == 1
    assert text.endswith(f"[3 of {len(ids)} tokens supervised ({3 / len(ids):.0%})]")
    plain = sample_text(tokenizer, ids, supervised, colour=False)
    assert plain == text.replace("\x1b[32m", "").replace("\x1b[0m", "")

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert sample_text(tokenizer, ids, supervised) == plain
    monkeypatch.setenv("NO_COLOR", "")
    assert sample_text(tokenizer, ids, supervised) == text


def test_special_tokens_are_encoded_as_such() -> None:
    tokenizer = named("chatml")
    assert encode(tokenizer, "<|im_end|>") == [tokenizer.eos_token_id]
