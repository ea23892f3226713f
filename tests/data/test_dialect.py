"""What servers say, read: certain ids or a reason."""

from typing import Any

import pytest

from draftsmith.data.dialect import Dialect, Garbled, Reader, body_of, find_end
from draftsmith.data.generate import Answer, Request
from draftsmith.data.prompts import Prompt, Unusable
from draftsmith.data.render import encode
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from tests.data.asking import make_config
from tests.tiny import EOS, tiny_target


@pytest.fixture(scope="module")
def speaker() -> Target:
    return tiny_target(eos=(EOS, 0))


REQUEST = Request("k", [5, 6, 7], Sampling(0.7, 40, 0.9), 2**40 + 3)


def read(speaker: Target, choice: Any, usage: Any = None, **rest: Any) -> Answer:
    reader = Reader(speaker, find_end(speaker, None), 8)
    return reader.read({"choices": [choice], "usage": usage, **rest}, REQUEST)


def ids(speaker: Target, text: str) -> list[int]:
    return encode(speaker.tokenizer, text)


def test_the_template_says_which_of_several_end_tokens_ends_an_answer(speaker: Target) -> None:
    assert find_end(speaker, None) == EOS


@pytest.mark.parametrize("reason", ["stop", "eos_token", "stop_sequence", "tool_calls"])
def test_an_answer_that_ended_has_its_end_token(speaker: Target, reason: str) -> None:
    said = ids(speaker, "abc")
    for choice in (
        {"text": "abc"},
        {"message": {"content": "abc"}},
        {"text": "abc<|im_end|>"},
        {"text": "?", "token_ids": [*said, EOS]},
        {"text": "?", "token_ids": said},
        {"text": "?", "token_ids": [*said, EOS, 9, 9]},
    ):
        assert read(speaker, {**choice, "finish_reason": reason}).ids == [*said, EOS]
    other = {"text": "abc", "finish_reason": "stop", "stop_reason": 0}
    assert read(speaker, other).ids == [*said, 0]


def test_a_cut_answer_has_none(speaker: Target) -> None:
    said = ids(speaker, "abcdefgh")
    for choice in ({"text": "abcdefgh"}, {"text": "?", "token_ids": said}):
        answer = read(speaker, {**choice, "finish_reason": "length"}, {"completion_tokens": 8})
        assert answer == Answer(said, "length")


@pytest.mark.parametrize("content", ["", None])
def test_an_empty_answer_is_the_end_token(speaker: Target, content: str | None) -> None:
    choice = {"message": {"content": content}, "finish_reason": "stop"}
    assert read(speaker, choice).ids == [EOS]


def test_special_tokens_in_text_are_tokens(speaker: Target) -> None:
    answer = read(speaker, {"text": "<think>a</think>b", "finish_reason": "stop"})
    assert answer.ids == [*ids(speaker, "<think>a</think>b"), EOS] and len(answer.ids) == 5


UNUSABLE: dict[str, tuple[Any, Any, str]] = {
    "half a character": ({"text": "ab\ufffd"}, None, "inside a character"),
    "other tokens": ({"text": "abc"}, {"completion_tokens": 2}, "another number"),
    "too many tokens": ({"text": "abc"}, {"completion_tokens": 9}, "another number"),
    "prompt": ({"text": "a"}, {"prompt_tokens": 4}, "prompt of another length"),
    "prompt ids": ({"text": "a", "prompt_token_ids": [5, 6, 8]}, None, "rendered otherwise"),
    "reasoning": (
        {"message": {"content": "a", "reasoning_content": "hm"}},
        None,
        "reasoning apart",
    ),
    "tool": ({"message": {"content": None, "tool_calls": [{}]}}, None, "tool calls apart"),
    "vocabulary": ({"text": "a", "token_ids": [999]}, None, "does not have"),
    "too long": ({"text": "a", "token_ids": [9] * 12}, None, "more than asked"),
    "filter": ({"text": "a", "finish_reason": "content_filter"}, None, "'content_filter'"),
    "no reason": ({"text": "a", "finish_reason": None}, None, "finish reason None"),
}


@pytest.mark.parametrize(("choice", "usage", "says"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_is_not_certain_is_not_used(
    speaker: Target, choice: Any, usage: Any, says: str
) -> None:
    with pytest.raises(Unusable, match=says):
        read(speaker, {"finish_reason": "stop", **choice}, usage)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [],
        {},
        {"choices": []},
        {"choices": [3]},
        {"choices": {"a": 1}},
        {"choices": [{"finish_reason": "stop"}]},
        {"choices": [{"finish_reason": "stop", "text": 3}]},
        {"choices": [{"finish_reason": "stop", "message": "a"}]},
        {"choices": [{"finish_reason": "stop", "text": "a"}], "usage": 3},
    ],
    ids=repr,
)
def test_a_reply_without_form_may_be_asked_for_again(speaker: Target, reply: Any) -> None:
    with pytest.raises(Garbled):
        Reader(speaker, EOS, 8).read(reply, REQUEST)


def test_log_probabilities_are_kept_where_there_is_one_for_each_id(speaker: Target) -> None:
    choice = {"text": "?", "token_ids": [9, 9, EOS], "finish_reason": "stop"}
    content = [{"token": "x", "logprob": -0.1234567}] * 3
    for told, kept in (
        ({"token_logprobs": [-1, -2.5, -3.0]}, [-1.0, -2.5, -3.0]),
        ({"content": content}, [-0.12346] * 3),
        ({"token_logprobs": [-1.0]}, None),
        ({"token_logprobs": [None, -2.5, -3.0]}, None),
        ({"content": None}, None),
        (None, None),
        ([1, 2, 3], None),
    ):
        assert read(speaker, {**choice, "logprobs": told}).logprobs == kept


def test_a_request_says_how_it_is_answered(speaker: Target) -> None:
    prompt = Prompt("k", "c", ({"role": "user", "content": "a"},))
    config = make_config(temperature=0.7)
    body = body_of(REQUEST, prompt, speaker, config, Dialect(ids=True, extras=True))
    assert body["prompt"] == [5, 6, 7] and body["seed"] == 3 and body["max_tokens"] == 20
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 40)
    assert body["return_token_ids"] is True and body["add_special_tokens"] is False
    plain = body_of(REQUEST, prompt, speaker, config, Dialect(ids=False, extras=False))
    assert plain.keys() == {"prompt", "max_tokens", "temperature", "top_p", "seed"}
    knobs = {"backend": "openai", "urls": ("http://a",), "server": {"api": "chat"}}
    config = make_config(**knobs).model_copy(update={"thinking": False})
    chat = body_of(REQUEST, prompt, speaker, config, Dialect(ids=False, extras=False))
    assert chat["messages"] == list(prompt.messages) and "prompt" not in chat
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}
