"""The given backend of distillation: no one is asked, the answers come with the prompts.

Token ids are taken as they are where the target has them. Text is tokenised as it stands and must
survive that. Reasoning and tool calls that stand apart from the text are written by the chat
template, as the target said them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from draftsmith.data.answering import Answering
from draftsmith.data.dialect import find_end, survives
from draftsmith.data.generate import Answer, Request, until_end
from draftsmith.data.given import Given
from draftsmith.data.prompts import Prompt, Unusable
from draftsmith.data.render import TemplateRefusal, encode, render_text
from draftsmith.data.rows import DROPPED, Row, RowFile, check_drop

APART = ("tool_calls", "reasoning_content", "thinking")  # what a message's text does not hold
THOUGHTS = ("<think>", "</think>")  # an empty thought is no part of an answer without one
AT_ONCE = 1024  # rows that are written together


def fan_out(prompts: Iterable[Prompt]) -> list[Prompt]:
    """A prompt for every answer: thinking templates show a turn otherwise once it is history."""
    found = []
    for prompt in prompts:
        for number, one in enumerate(prompt.given, start=1):
            key = prompt.key if number == 1 else f"{prompt.key} (turn {number})"
            messages = prompt.messages[: one.after]
            found.append(replace(prompt, key=key, messages=messages, given=(one,)))
    return found


def answer_given(job: Answering, batches: Sequence[Sequence[Request]], folder: object) -> None:
    """Tokenise the answers that the prompts bring."""
    with RowFile(job.rows.path.with_name(DROPPED), check_drop) as dropped:
        end = find_end(job.speaker, job.config.thinking)
        known = job.rows.keys | dropped.keys
        left = [one for batch in batches for one in batch if one.key not in known]
        job.bar.skip(sum(map(len, batches)) - len(left))
        for start in range(0, len(left), AT_ONCE):
            take(job, left[start : start + AT_ONCE], dropped, end)


def take(job: Answering, requests: Sequence[Request], dropped: RowFile, end: int) -> None:
    """Some answers: rows, and why others are none."""
    kept: list[tuple[Request, Answer]] = []
    lost: list[Row] = []
    for request in requests:
        prompt = job.prompts[request.key]
        try:
            kept.append((request, answer_of(job, prompt, end)))
        except (Unusable, TemplateRefusal) as reason:
            told = {"reason": str(reason), "detail": ""}
            lost.append({"key": prompt.key, "category": prompt.category, **told})
    job.keep(kept)
    dropped.append(lost)
    job.bar.reach(job.bar.done + len(requests))


def answer_of(job: Answering, prompt: Prompt, end: int) -> Answer:
    """What was said, at most as long as answers may be. Raises Unusable."""
    (given,), speaker, most = prompt.given, job.speaker, job.config.distil.max_new_tokens
    ids = list(given.ids) if given.ids else ids_of(job, prompt, given)
    if max(ids, default=0) >= speaker.vocab_size:
        raise Unusable("token ids that the target does not have")
    ids = until_end(ids, speaker.eos_ids).ids
    if given.finish == "stop" and not (ids and ids[-1] in speaker.eos_ids):
        ids = [*ids, end]
    if not ids:
        raise Unusable("answer without a token")
    if len(ids) > most:
        return Answer(ids[:most], "length")
    return Answer(ids, "stop" if ids[-1] in speaker.eos_ids else "length")


def ids_of(job: Answering, prompt: Prompt, given: Given) -> list[int]:
    """The ids of an answer that is text. Raises Unusable where they are not certain."""
    text = str(given.message["content"])
    apart = any(given.message.get(name) for name in APART)
    if apart or in_a_channel(job, prompt, given):
        text = written_by_template(job, prompt, given)
    if not survives(job.speaker, text):
        raise Unusable("text that does not survive tokenising")
    return encode(job.speaker.tokenizer, text)


def in_a_channel(job: Answering, prompt: Prompt, given: Given) -> bool:
    """Whether the target says something before an answer's text, as gpt-oss names a channel."""
    tokenizer, text = job.speaker.tokenizer, str(given.message["content"]).strip()
    marks = [mark for mark in tokenizer.all_special_tokens if mark not in THOUGHTS]
    if not text or any(mark in text for mark in marks):  # it stands there as it was said
        return False
    try:
        head, found, _ = written_by_template(job, prompt, given).partition(text)
    except Unusable:
        return False
    return bool(found) and any(mark in head for mark in marks)


def written_by_template(job: Answering, prompt: Prompt, given: Given) -> str:
    """What the template writes between the prompt and the end of the turn. Raises Unusable."""
    tokenizer, thinking = job.speaker.tokenizer, job.config.thinking
    messages, tools = list(prompt.messages), prompt.tools
    asked = render_text(tokenizer, messages, thinking, prompt=True, tools=tools)
    whole = render_text(tokenizer, [*messages, given.message], thinking, prompt=False, tools=tools)
    if not whole.startswith(asked):
        raise Unusable("answer that the chat template writes before its prompt ends")
    return whole[len(asked) :]
