"""Conversations to token ids, by any chat template, and token ids to text for the eye.

The target's answer is what is trained, in the ids that it was generated in: the template is asked
for the prompt alone, and nobody has to find the answer in rendered text.
"""

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from draftsmith.data.prompts import Message, Tool
from draftsmith.recipes.errors import UserError

CHANNEL = "<|message|>"  # what opens a channel's text
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


class TemplateRefusal(UserError):
    """The chat template does not take this conversation (no system role, odd turns, ...)."""


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    thinking: bool | None = None,
    *,
    tools: Sequence[Tool] = (),
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer."""
    return encode(tokenizer, render_text(tokenizer, messages, thinking, prompt=True, tools=tools))


def check_template(tokenizer: Any, thinking: bool | None = None, *, name: str) -> None:
    """UserError unless the template can ask for an answer and begins with at most one BOS."""
    if not tokenizer.chat_template:
        raise UserError(_no_template(name))
    question = [{"role": "user", "content": "Question?"}]
    answer = [*question, {"role": "assistant", "content": "Answer."}]
    prompt = render_text(tokenizer, question, thinking, prompt=True)
    plain = render_text(tokenizer, question, thinking, prompt=False)
    whole = render_text(tokenizer, answer, thinking, prompt=False)
    # Some templates need no generation prompt: the answer simply follows the question.
    follows = whole.startswith(prompt) and whole[len(prompt) :].lstrip().startswith("Answer.")
    if prompt == plain and not follows:
        raise UserError(
            f"{name}: its chat template has no generation prompt (add_generation_prompt changes "
            "nothing), so the target cannot be asked to answer; give a tokenizer whose template "
            "has one"
        )
    bos = tokenizer.bos_token_id
    if bos is not None and encode(tokenizer, prompt)[:2] == [bos, bos]:
        raise UserError(
            f"{name}: its chat template starts with the token {tokenizer.bos_token!r} twice; give "
            "a tokenizer whose template writes it once"
        )


def render_text(
    tokenizer: Any,
    messages: Sequence[Message],
    thinking: bool | None,
    *,
    prompt: bool,
    tools: Sequence[Tool] = (),
) -> str:
    """The template's text. `enable_thinking` is passed only when the recipe says so."""
    if not tokenizer.chat_template:
        raise UserError(_no_template(tokenizer.name_or_path or "the tokenizer"))
    mode = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=prompt,
            **mode,
        )
    except TemplateError as error:
        raise TemplateRefusal(f"the chat template refuses: {error}") from error
    return text


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered text; the template has written the special tokens already (BOS too)."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def said(tokenizer: Any, ids: Sequence[int]) -> str:
    """An answer's text, without special tokens; where it speaks in channels (gpt-oss), the last
    one's, which is what later turns are told of it.
    """
    whole = tokenizer.decode(list(ids), skip_special_tokens=False)
    if CHANNEL not in whole:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    last = encode(tokenizer, whole.rpartition(CHANNEL)[2])
    return str(tokenizer.decode(last, skip_special_tokens=True))


def sample_text(
    tokenizer: Any,
    ids: Sequence[int],
    supervised: Sequence[bool],
    *,
    colour: bool | None = None,
) -> str:
    """A row for the eye: supervised text in green, and the share of supervised tokens below.

    Without colours when the output is no terminal or NO_COLOR is set, unless `colour` says so.
    """
    if colour is None:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    pieces = []
    for trained, run in groupby(zip(ids, supervised, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        pieces.append(f"{GREEN}{text}{PLAIN}" if trained and colour else text)
    count = sum(supervised)
    share = f"{count} of {len(ids)} tokens supervised ({count / max(1, len(ids)):.0%})"
    return "".join(pieces).rstrip("\n") + f"\n[{share}]"


def _no_template(name: str) -> str:
    return (
        f"{name}: its tokenizer has no chat template, so conversations cannot be rendered; "
        "give a target whose tokenizer has one (instruction-tuned models do)"
    )
