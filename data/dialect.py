"""The words of servers with OpenAI's API: what is sent, and how replies become answers.

Servers differ. vLLM and SGLang take prompts as token ids and give ids back; others take text and
give text, which is tokenised again and dropped where that is not certainly what was generated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.data.generate import Answer, Request, until_end
from draftsmith.data.prompts import Prompt, Unusable
from draftsmith.data.render import encode, render_text
from draftsmith.drafters.speaker import Speaker
from draftsmith.recipes.schema import DataConfig

Json = dict[str, Any]
STOPPED = ("stop", "eos_token", "stop_sequence", "tool_calls", "function_call")
MARK = "The-words-of-the-answer"  # stands for them when the template is asked
SEED_BITS = 31  # the fewest that a server takes


class Garbled(ValueError):
    """A reply that is not in the API's form: asking again may help."""


@dataclass(frozen=True)
class Dialect:
    """What a server understands. `strip` is what it adds in front of a text prompt by itself."""

    ids: bool  # the prompt as token ids
    extras: bool  # knobs of vLLM and SGLang beyond OpenAI's
    strip: str = ""


# From the most exact one on.
COMPLETIONS = tuple(Dialect(ids, extras) for extras in (True, False) for ids in (True, False))
CHAT = tuple(Dialect(False, extras) for extras in (True, False))


def path_of(config: DataConfig) -> str:
    """Where requests are sent, below the address."""
    return {"completions": "/completions", "chat": "/chat/completions"}[config.distil.server.api]


def body_of(
    request: Request, prompt: Prompt, speaker: Speaker, config: DataConfig, dialect: Dialect
) -> Json:
    """A request without the model's name."""
    sampling, chat = request.sampling, config.distil.server.api == "chat"
    body: Json = {
        "max_tokens": config.distil.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.seed % 2**SEED_BITS,
    }
    if chat:
        body |= {"messages": list(prompt.messages)}
        body |= {"tools": list(prompt.tools)} if prompt.tools else {}
        if config.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": config.thinking}
    elif dialect.ids:
        body["prompt"] = request.ids
    else:
        body["prompt"] = text_asked(request, prompt, speaker, config).removeprefix(dialect.strip)
    return body | (extras_of(request, chat) if dialect.extras else {})


def text_asked(request: Request, prompt: Prompt, speaker: Speaker, config: DataConfig) -> str:
    """The prompt as text. A self-written one has no messages, and its opening is special tokens."""
    if not prompt.messages:
        return str(speaker.tokenizer.decode(request.ids, clean_up_tokenization_spaces=False))
    asked, tools = prompt.messages, prompt.tools
    return render_text(speaker.tokenizer, asked, config.thinking, prompt=True, tools=tools)


def extras_of(request: Request, chat: bool) -> Json:
    """Exact ids, log-probabilities, and no sampling defaults of the server's own.

    A server that ignores what it does not know (TGI) ignores top_k too.
    """
    found: Json = {
        "top_k": request.sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "logprobs": True if chat else 1,
    }
    return found if chat else found | {"add_special_tokens": False}


def find_end(speaker: Speaker, thinking: bool | None) -> int:
    """The token that ends an answer by the chat template, among those that generation stops at."""
    asked = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": MARK}]
    text = render_text(speaker.tokenizer, asked, thinking, prompt=False)
    follows = encode(speaker.tokenizer, text.rpartition(MARK)[2].lstrip())[:1]
    usual = [*follows, speaker.tokenizer.eos_token_id, *speaker.eos_ids]
    return int(next(token for token in usual if token in speaker.eos_ids))


@dataclass(frozen=True)
class Reader:
    """Reads replies. Raises Garbled for what may be asked again, Unusable for what may not."""

    speaker: Speaker
    end: int  # what is added where a server keeps the end token to itself
    most: int  # tokens that were asked for

    def read(self, reply: Any, request: Request) -> Answer:
        """The answer in a reply."""
        choice = first_choice(reply)
        usage = reply.get("usage") or {}
        self.check_prompt(choice.get("prompt_token_ids") or reply.get("prompt_token_ids"), request)
        if told(usage, "prompt_tokens") not in (None, len(request.ids)):
            raise Unusable("prompt of another length at the server")
        reason = choice.get("finish_reason")
        if reason not in (*STOPPED, "length"):
            raise Unusable(f"finish reason {reason!r}")
        given: Any = choice.get("token_ids")
        ids = self.ended(given if is_ids(given) else self.tokenise(choice), choice, reason)
        if not is_ids(given):
            self.check_count(ids, reason, told(usage, "completion_tokens"))
        if not ids or len(ids) > self.most + 1 or max(ids) >= self.speaker.vocab_size:
            raise Unusable("token ids that the target does not have, or more than asked for")
        answer = until_end(ids, self.speaker.eos_ids)
        return Answer(answer.ids, answer.finish_reason, logprobs_of(choice, len(answer.ids)))

    def check_prompt(self, ids: Any, request: Request) -> None:
        """The server must have read the very prompt that the row will hold."""
        if is_ids(ids) and ids != request.ids:
            raise Unusable("prompt rendered otherwise by the server")

    def ended(self, ids: list[int], choice: Json, reason: str) -> list[int]:
        """The ids with the end token that some servers leave out."""
        if reason == "length" or (ids and ids[-1] in self.speaker.eos_ids):
            return ids
        stop = choice.get("stop_reason")  # vLLM's: which end token, where it was not the usual one
        return [*ids, stop if stop in self.speaker.eos_ids else self.end]

    def tokenise(self, choice: Json) -> list[int]:
        """The ids of a reply's text, if they are certain."""
        text = text_of(choice)
        if "\ufffd" in text:
            raise Unusable("text cut inside a character")
        if not survives(self.speaker, text):
            raise Unusable("text that does not survive tokenising")
        return encode(self.speaker.tokenizer, text)

    def check_count(self, ids: list[int], reason: str, count: int | None) -> None:
        """As many tokens as the server counted; not all of them count the end token."""
        allowed = (None, len(ids)) if reason == "length" else (None, len(ids), len(ids) - 1)
        if count not in allowed:
            raise Unusable("text that tokenises to another number of tokens")


def survives(speaker: Speaker, text: str) -> bool:
    """Whether a text's ids give it back."""
    back = speaker.tokenizer.decode(
        encode(speaker.tokenizer, text),
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return bool(back == text)


def first_choice(reply: Any) -> Json:
    """A reply's only choice, a message's fields among its own."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise Garbled("no choices in the reply")
    usage, message = reply.get("usage"), choice.get("message")
    if not isinstance(usage, dict | None) or not isinstance(message, dict | None):
        raise Garbled("usage or message is no object")
    return {**choice, **(message or {})}


def text_of(choice: Json) -> str:
    """All that was generated, as text."""
    for name in ("reasoning_content", "reasoning"):
        if choice.get(name):
            raise Unusable("reasoning apart from the answer; use distil.server.api: completions")
    if choice.get("tool_calls"):
        raise Unusable("tool calls apart from the answer; use distil.server.api: completions")
    text = choice.get("text", choice.get("content"))
    if text is None and "message" in choice:
        return ""
    if not isinstance(text, str):
        raise Garbled("no text in the reply")
    return text


def logprobs_of(choice: Json, count: int) -> list[float] | None:
    """Log-probabilities of the ids, where there is one for each."""
    given = choice.get("logprobs")
    if not isinstance(given, Mapping):
        return None
    found: Any = given.get("token_logprobs")
    if isinstance(given.get("content"), list):
        found = [one.get("logprob") if isinstance(one, dict) else None for one in given["content"]]
    if not isinstance(found, list) or len(found) < count:
        return None
    if not all(isinstance(one, int | float) for one in found[:count]):
        return None
    return [round(float(one), 5) for one in found[:count]]


def is_ids(value: Any) -> bool:
    """Whether this is a list of token ids."""
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def told(usage: Mapping[str, Any], name: str) -> int | None:
    """A count of the reply, where there is one."""
    count = usage.get(name)
    return count if type(count) is int else None


def added_in_front(usage: Mapping[str, Any], ids: Sequence[int], speaker: Speaker) -> str:
    """What a server adds to a prompt of text that has it already: a second BOS."""
    bos = speaker.tokenizer.bos_token_id
    doubled = told(usage, "prompt_tokens") == len(ids) + 1 and bos is not None and ids[0] == bos
    return str(speaker.tokenizer.bos_token) if doubled else ""
