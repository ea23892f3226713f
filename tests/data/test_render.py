import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.render import (
    Rendered,
    TemplateRefusal,
    check_template,
    encode,
    render_conversation,
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
# The answer follows the question at once; the end token stands at the head of the next turn.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% if not loop.first %}{{ eos_token }}{% endif %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
# Written for training libraries that read generation markers, with the terminator outside of them.
MARKED = CHATML.replace(
    "message['content'] + '<|im_end|>' + '\n' }}",
    "message['content'] }}{{ '<|im_end|>\n' }}",
)
TOKENIZERS = {
    "chatml": (CHATML, {}),
    "llama": (LLAMA, {"bos": "<s>", "eos": "<|eot_id|>"}),
    "gemma": (GEMMA, {"bos": "<s>", "eos": "<end_of_turn>"}),
    "marked": (MARKED, {}),
    "qwen": (QWEN, {}),
}
ENDS = {"llama": "<|eot_id|>", "gemma": "<end_of_turn>"}


def named(name: str) -> PreTrainedTokenizerFast:
    template, options = TOKENIZERS[name]
    return tiny_tokenizer(template, **options)


def talk(*texts: str | None) -> list[dict[str, Any]]:
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def spoken(tokenizer: PreTrainedTokenizerFast, row: Rendered) -> list[str]:
    """The supervised runs of a row, as text."""
    runs = itertools.groupby(zip(row.ids, row.supervised, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]


@pytest.mark.parametrize("name", ["chatml", "llama", "gemma", "marked"])
def test_exactly_the_answers_and_their_ends_are_supervised(name: str) -> None:
    tokenizer, end = named(name), ENDS.get(name, "<|im_end|>")
    (row,) = render_conversation(tokenizer, talk("hi", "hello you", "bye", "so long"))
    assert spoken(tokenizer, row) == ["hello you" + end, "so long" + end]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_prompt_of_generation_is_a_prefix_of_the_row(name: str) -> None:
    """What is trained must be what the target sees when it is served."""
    tokenizer = named(name)
    for turns in (2, 4):
        said = talk("hi", "hello", "bye", "so long")[:turns]
        row = render_conversation(tokenizer, said)[-1]
        prompt = render_prompt(tokenizer, said[:-1])
        assert list(row.ids[: len(prompt)]) == prompt
        assert not any(row.supervised[: len(prompt)][-5:]) and all(row.supervised[len(prompt) :])


def test_history_that_is_rewritten_gives_one_row_per_answer() -> None:
    tokenizer = named("qwen")
    said = talk("1?", "<think>\nhm\n</think>\n\none", "2?", "<think>\nwell\n</think>\n\ntwo")
    first, second = render_conversation(tokenizer, said)
    assert spoken(tokenizer, first) == ["<think>\nhm\n</think>\n\none<|im_end|>"]
    assert spoken(tokenizer, second) == ["<think>\nwell\n</think>\n\ntwo<|im_end|>"]
    assert "hm" not in tokenizer.decode(second.ids) and "one" in tokenizer.decode(second.ids)


def test_thinking_off_is_rendered_as_it_is_generated() -> None:
    tokenizer = named("qwen")
    rows = render_conversation(tokenizer, talk("1?", "one", "2?", "two"), thinking=False)
    assert [spoken(tokenizer, row) for row in rows] == [["one<|im_end|>"], ["two<|im_end|>"]]
    for row, said in zip(rows, (talk("1?"), talk("1?", "one", "2?")), strict=True):
        prompt = render_prompt(tokenizer, said, thinking=False)
        assert list(row.ids[: len(prompt)]) == prompt
        assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")


def test_thinking_is_passed_only_when_it_is_given() -> None:
    template = "{{ enable_thinking is defined }} {{ enable_thinking }}"
    tokenizer = tiny_tokenizer(template)
    texts = [
        tokenizer.decode(render_prompt(tokenizer, talk("?"), mode)) for mode in (None, True, False)
    ]
    assert texts == ["False ", "True True", "True False"]


def test_a_system_prompt_of_the_template_and_one_of_the_user() -> None:
    tokenizer = named("chatml")
    assert "Be kind." in tokenizer.decode(render_prompt(tokenizer, talk("hi")))
    own = [{"role": "system", "content": "Be rude."}, *talk("hi", "no")]
    (row,) = render_conversation(tokenizer, own)
    assert "Be kind." not in tokenizer.decode(row.ids) and spoken(tokenizer, row) == [
        "no<|im_end|>"
    ]


@pytest.mark.parametrize("content", ["", None])
def test_an_answer_that_says_nothing_is_its_end_token(content: str | None) -> None:
    tokenizer = named("chatml")
    (row,) = render_conversation(tokenizer, talk("hi", content))
    assert spoken(tokenizer, row) == ["<|im_end|>"] and sum(row.supervised) == 1
    assert "None" not in tokenizer.decode(row.ids)


def test_nothing_said_and_no_end_token_is_nothing_supervised() -> None:
    (row,) = render_conversation(tiny_tokenizer(MISTRAL, bos="<s>"), talk("hi", ""))
    assert not any(row.supervised)


def test_conversations_without_an_answer_give_no_row() -> None:
    tokenizer = named("chatml")
    assert render_conversation(tokenizer, [{"role": "system", "content": "Be kind."}]) == []
    assert render_conversation(tokenizer, talk("hi")) == []


def test_turns_after_the_last_answer_are_cut() -> None:
    tokenizer = named("chatml")
    assert render_conversation(tokenizer, talk("hi", "yo", "and?")) == render_conversation(
        tokenizer, talk("hi", "yo")
    )


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


def test_an_end_token_at_the_head_of_the_next_turn_is_supervised() -> None:
    tokenizer = tiny_tokenizer(MISTRAL, bos="<s>")
    (row,) = render_conversation(tokenizer, talk("a", "one", "b", "two"))
    assert spoken(tokenizer, row) == ["one<|im_end|>", "two"]


def test_tokens_that_straddle_the_border_belong_to_the_answer() -> None:
    words = {"?": 0, ":": 1, "a": 2, ":a": 3, "b": 4}
    backend = Tokenizer(models.WordPiece(words, unk_token="?", continuing_subword_prefix=""))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}:"
        "{% endif %}{% endfor %}"
    )
    (row,) = render_conversation(tokenizer, talk("b", "ab"))
    assert row == Rendered((4, 3, 4), (False, True, True))


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


def test_an_answer_that_does_not_start_as_it_is_asked_for_is_refused() -> None:
    forced = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    with pytest.raises(TemplateRefusal, match="would not start as it is asked for"):
        render_conversation(tiny_tokenizer(forced), talk("hi", "no thought"))


def test_the_sample_is_coloured_where_it_is_supervised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = named("chatml")
    (row,) = render_conversation(tokenizer, talk("hi", "yo"))
    text = sample_text(tokenizer, row.ids, row.supervised, colour=True)
    assert "\x1b[32myo<|im_end|>\x1b[0m" in text and text.count("\x1b[32m") == 1
    assert text.endswith(f"[3 of {len(row.ids)} tokens supervised ({3 / len(row.ids):.0%})]")
    plain = sample_text(tokenizer, row.ids, row.supervised, colour=False)
    assert plain == text.replace("\x1b[32m", "").replace("\x1b[0m", "")

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert sample_text(tokenizer, row.ids, row.supervised) == plain
    monkeypatch.setenv("NO_COLOR", "")
    assert sample_text(tokenizer, row.ids, row.supervised) == text


def test_special_tokens_are_encoded_as_such() -> None:
    tokenizer = named("chatml")
    assert encode(tokenizer, "<|im_end|>") == [tokenizer.eos_token_id]
