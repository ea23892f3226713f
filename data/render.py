"""Conversations to token ids and the tokens that the assistant wrote, for any chat template.

Templates do not say which part of their text the assistant wrote, so the template is asked twice:
for the conversation up to a turn (with the generation prompt) and for the whole. Where the first is
a prefix of the second, what follows it is the turn. Templates that rewrite history (reasoning is
stripped from earlier turns) break that, and then every assistant turn becomes a row of its own,
rendered as it was when it was generated.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from draftsmith.data.prompts import Message
from draftsmith.recipes.errors import UserError

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Rendered:
    """A training row. `supervised` marks what the assistant wrote, with its end-of-turn token."""

    ids: tuple[int, ...]
    supervised: tuple[bool, ...]


class TemplateRefusal(UserError):
    """The chat template does not take this conversation (no system role, odd turns, ...)."""


def render_prompt(
    tokenizer: Any, messages: Sequence[Message], thinking: bool | None = None
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer."""
    return encode(tokenizer, render_text(tokenizer, messages, thinking, prompt=True))


def render_conversation(
    tokenizer: Any, messages: Sequence[Message], thinking: bool | None = None
) -> list[Rendered]:
    """Rows of a conversation with answers; turns after the last answer are cut.

    One row, or one per assistant turn where the template rewrites history. None without an answer.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return []
    whole = render_text(tokenizer, messages[: turns[-1] + 1], thinking, prompt=False)
    spans = [_span(tokenizer, messages, turn, thinking) for turn in turns]
    if all(whole.startswith(before) and whole.startswith(upto) for before, upto in spans):
        return [_row(tokenizer, spans[-1][1], spans)]
    return [_row(tokenizer, span[1], [span]) for span in spans]


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
    tokenizer: Any, messages: Sequence[Message], thinking: bool | None, *, prompt: bool
) -> str:
    """The template's text. `enable_thinking` is passed only when the recipe says so."""
    if not tokenizer.chat_template:
        raise UserError(_no_template(tokenizer.name_or_path or "the tokenizer"))
    mode = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text: str = tokenizer.apply_chat_template(
            [_filled(message) for message in messages],
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


def _filled(message: Message) -> Message:
    """Templates add `content` to text: null, which a tool call has, would become the word None."""
    return message | {"content": ""} if message.get("content") is None else dict(message)


def _span(
    tokenizer: Any, messages: Sequence[Message], turn: int, thinking: bool | None
) -> tuple[str, str]:
    """Text before an assistant turn, and text up to its end."""
    before = render_text(tokenizer, messages[:turn], thinking, prompt=True)
    upto = render_text(tokenizer, messages[: turn + 1], thinking, prompt=False)
    if not upto.startswith(before):
        raise TemplateRefusal(
            "the chat template refuses: an answer would not start as it is asked for"
        )
    # What the template writes after the end-of-turn token (a newline) is not the assistant's.
    return before, upto[: max(len(before), len(upto.rstrip()))]


def _row(tokenizer: Any, text: str, spans: Sequence[tuple[str, str]]) -> Rendered:
    """Ids of `text`, supervised in the spans; borders are found in ids, as generation sees them."""
    ids = encode(tokenizer, text)
    supervised = [False] * len(ids)
    for before, upto in spans:
        start = _shared(ids, encode(tokenizer, before))
        end = _shared(ids, encode(tokenizer, upto))
        if end < len(ids) and ids[end] == tokenizer.eos_token_id != ids[end - 1]:
            end += 1  # a template that writes the end of a turn at the head of the next one
        supervised[start:end] = [True] * (end - start)
    return Rendered(tuple(ids), tuple(supervised))


def _shared(ids: Sequence[int], prefix: Sequence[int]) -> int:
    """Length of the common prefix: all of it, unless a token straddles the border."""
    pairs = zip(ids, prefix, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(prefix)))
