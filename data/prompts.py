"""Prompts: from a file, a data set or the starter set to a list of keyed conversations."""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from draftsmith.data import starter
from draftsmith.data.given import Given, completed, given_answers
from draftsmith.data.overlap import Runs
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import user_path
from draftsmith.recipes.schema import DataConfig

Message = dict[str, Any]  # role, content, and what tool calls and reasoning add
Tool = dict[str, Any]  # a JSON schema of what the target may call
Split = Literal["train", "test"]
# Where the row stands (for messages to the user), and its fields.
Row = tuple[str, Mapping[str, Any]]

_OUTER = re.compile(r"^\W+|\W+$")
FIELDS = ("messages", "conversations", "prompt", "turns")  # what holds the conversation
KEY_FIELDS = ("key", "id", "question_id")
NEAR_WORDS = 8  # of a run by which near duplicates are told, where no other number is given
EVALUATED = "copy of an evaluation prompt"  # why a training prompt is dropped
KEPT = (
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning_content",
    "thinking",
)  # of a message, beside its text
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends where the target should answer. `key` is its name in every file.

    With answers that were given elsewhere, `messages` ends with the last of them.
    """

    key: str
    category: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    later: tuple[tuple[Message, ...], ...] = ()  # what follows each of the target's answers
    given: tuple[Given, ...] = ()  # its answers, where they are not to be made


@dataclass(frozen=True)
class PromptSet:
    """Prompts with unique keys, and why others were left out."""

    prompts: list[Prompt]
    dropped: Counter[str]


class Unusable(ValueError):
    """A row that holds no prompt; the message is the reason it is counted under."""


def load_prompts(
    config: DataConfig, *, split: Split, seed: int, evaluated: Sequence[Prompt] = ()
) -> PromptSet:
    """The recipe's prompts for training or for evaluation; UserError when none is left.

    Those that ask what one of `evaluated` asks are dropped.
    """
    train = split == "train"
    source = config.prompts if train else config.eval_prompts
    rows = _rows_of(source, split=split, part=config.split if train else config.eval_split)
    rules = Rules(evaluated)
    if train and config.grow:
        rows = chain(rows, _numbered("grown", starter.grow(config.grow, seed)))
    if train:
        rules = Rules(
            evaluated,
            config.overlap_words,
            config.near_duplicates,
            every=config.turns == "all",
            given=config.distil.backend == "given",
        )
    found = collect(rows, rules)
    if not found.prompts:
        raise UserError(f"{source}: no prompt is left. Dropped: {listed(found.dropped)}")
    if train and config.mix:
        found = mixed(found, config.mix, config.limit, seed)
    elif train and config.limit is not None:
        found = PromptSet(draw(found.prompts, config.limit, seed), found.dropped)
    return PromptSet(repeat(found.prompts, config.answers), found.dropped) if train else found


def repeat(prompts: Sequence[Prompt], answers: int) -> list[Prompt]:
    """Every prompt so many times: a copy is another key, and so another draw of the answer."""
    copies = [
        replace(prompt, key=f"{prompt.key} (answer {number})")
        for number in range(2, answers + 1)
        for prompt in prompts
    ]
    taken = {prompt.key for prompt in prompts} & {copy.key for copy in copies}
    if taken:
        raise UserError(
            f"data.answers: the key {min(taken)!r} is needed for another answer; rename that prompt"
        )
    return [*prompts, *copies]


@dataclass(frozen=True)
class Rules:
    """What keeps a prompt out, beside being unusable."""

    evaluated: Sequence[Prompt] = ()  # copies of these are dropped
    overlap_words: int = 0  # in a row that make a copy; 0: only the whole question does
    near_duplicates: float | None = None  # share of runs that earlier prompts have
    every: bool = False  # whether every turn of a conversation is asked for, not the last alone
    given: bool = False  # whether the answers are taken from the rows


def collect(rows: Iterable[Row], rules: Rules | None = None) -> PromptSet:
    """Rows of any accepted form as prompts; repeated ones and copies are dropped."""
    rules = rules or Rules()
    sieve = Sieve(rules)
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    for where, row in rows:
        try:
            prompt = _prompt(where, row, rules)
            sieve.take(prompt)
        except Unusable as reason:
            dropped[str(reason)] += 1
        else:
            prompts.append(prompt)
    return PromptSet(prompts, dropped)


class Sieve:
    """Keeps prompts that are new, and no copies of evaluation prompts."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.forbidden = {question(prompt.messages) for prompt in rules.evaluated}
        self.held_out = Runs(rules.overlap_words, user_texts(rules.evaluated))
        near = rules.near_duplicates is not None
        self.earlier = Runs((rules.overlap_words or NEAR_WORDS) if near else 0)
        self.keys: set[str] = set()
        self.contents: set[str] = set()

    def take(self, prompt: Prompt) -> None:
        """Remember a prompt. Raises Unusable where it is not to be kept."""
        content = content_key(whole(prompt), prompt.tools)
        if content in self.contents:
            raise Unusable("duplicate")
        if prompt.key in self.keys:
            raise Unusable("id of another prompt")
        said = user_texts([prompt])
        copied = any(question(asked) in self.forbidden for asked in asked_by(prompt))
        if copied or any(map(self.held_out.touches, said)):
            raise Unusable(EVALUATED)
        text = "\n".join(said)
        if self.earlier.count and self.earlier.share(text) >= (self.rules.near_duplicates or 1.0):
            raise Unusable("near duplicate")
        self.earlier.add(text)
        self.keys.add(prompt.key)
        self.contents.add(content)


def asked_by(prompt: Prompt) -> list[tuple[Message, ...]]:
    """What stands before each of a prompt's answers, as far as that is known."""
    return [prompt.messages[: one.after] for one in prompt.given] or [prompt.messages]


def whole(prompt: Prompt) -> list[Message]:
    """All that a conversation holds without the answers that are asked for."""
    return [*prompt.messages, *chain.from_iterable(prompt.later)]


def user_texts(prompts: Iterable[Prompt]) -> list[str]:
    """What users say in these conversations."""
    return [
        message["content"]
        for prompt in prompts
        for message in whole(prompt)
        if message["role"] == "user"
    ]


def next_turns(
    prompts: Iterable[Prompt], rows: Mapping[str, Mapping[str, Any]], turn: int
) -> list[Prompt]:
    """The conversations that go on to a turn (2 on), with the answers in `rows` (by key).

    Those whose answer is missing or was cut end there.
    """
    found = []
    for prompt in prompts:
        row = rows.get(prompt.key)
        if not prompt.later or row is None or row["finish_reason"] != "stop":
            continue
        base = prompt.key if turn == 2 else prompt.key.removesuffix(f" (turn {turn - 1})")
        answer: Message = {"role": "assistant", "content": row["response"]}
        found.append(
            replace(
                prompt,
                key=f"{base} (turn {turn})",
                messages=(*prompt.messages, answer, *prompt.later[0]),
                later=prompt.later[1:],
            )
        )
    return found


def first_key(key: str) -> str:
    """The key of a prompt's first answer, from the key of any, of whatever turn."""
    return re.sub(r"( \(answer [0-9]+\))?( \(turn [0-9]+\))?$", "", key)


def draw(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` of the prompts, the same ones in whatever order they are given."""
    ranked = sorted(prompts, key=lambda prompt: keyed_number(seed, "limit", prompt.key))
    kept = {prompt.key for prompt in ranked[:count]}
    return [prompt for prompt in prompts if prompt.key in kept]


def mixed(
    found: PromptSet, weights: Mapping[str, float], limit: int | None, seed: int
) -> PromptSet:
    """Prompts whose categories have these weights: at most `limit`, and as many as the category
    that is scarcest for its weight allows. UserError for a category that there is none of.
    """
    by_name: dict[str, list[Prompt]] = {name: [] for name in weights}
    for prompt in found.prompts:
        by_name.get(prompt.category, []).append(prompt)
    there = Counter(prompt.category for prompt in found.prompts)
    absent = [name for name in weights if not there[name]]
    if absent:
        raise UserError(
            f"data.mix: no prompt is of category {', '.join(map(repr, absent))}; there are "
            f"{', '.join(f'{name!r} ({count:,})' for name, count in there.most_common())}"
        )
    whole = sum(weights.values())
    total = min(there[name] * whole / weight for name, weight in weights.items())
    total = min(total, limit) if limit is not None else total
    kept: set[str] = set()
    for name, weight in weights.items():
        share = max(1, int(total * weight / whole + 1e-9))
        kept |= {prompt.key for prompt in draw(by_name[name], share, seed)}
    prompts = [prompt for prompt in found.prompts if prompt.key in kept]
    dropped = found.dropped + Counter({"beyond data.mix": len(found.prompts) - len(prompts)})
    return PromptSet(prompts, dropped)


def keyed_number(seed: int, purpose: str, key: str) -> int:
    """A uniform 64-bit number that depends on nothing else: no order, no count, no other row."""
    digest = hashlib.sha256(f"{seed}\0{purpose}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def content_key(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """A key made of what the prompt says, for rows that bring no id."""
    said = [list(messages), list(tools)] if tools else list(messages)
    text = json.dumps(said, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def question(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    """What is asked, to be compared: who says what, normalised, but for the system."""
    said = [turn for turn in messages if turn["role"] != "system"]
    return tuple((turn["role"], normalised(turn["content"])) for turn in said)


def normalised(text: str) -> str:
    """The text in one of Unicode's spellings, without case, spacing and outer punctuation."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _OUTER.sub("", " ".join(unicodedata.normalize("NFKC", folded).split()))


def _rows_of(source: str, *, split: Split, part: str) -> Iterator[Row]:
    if source == "starter":
        return _numbered("starter", starter.starter_prompts(split))
    path = user_path(source)
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    if path.is_file():
        raise UserError(f"{source}: prompts are read from a .jsonl file, one JSON object a line")
    if path.is_dir() or not source.startswith((".", "/", "~")):
        return _numbered(source, _data_set(source, path, part))
    raise UserError(f"{source}: no such folder. Prompts are {_ALLOWED}")


_ALLOWED = "`starter`, a .jsonl file, a folder of a saved data set, or the id of a Hub data set"


def _numbered(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    return ((f"{name} row {number}", row) for number, row in enumerate(rows, start=1))


def read_jsonl(path: Path) -> Iterator[Row]:
    """The objects of a .jsonl file with `file:line`; blank lines are ignored."""
    empty = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    empty = False
                    yield f"{path}:{number}", _json_object(f"{path}:{number}", line)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if empty:
        raise UserError(f"{path}: the file is empty; it needs one JSON object a line")


def _json_object(where: str, line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        raise UserError(f"{where}: the line is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: the line must hold a JSON object, not {type(row).__name__}")
    return row


def _data_set(source: str, path: Path, part: str) -> Iterable[Mapping[str, Any]]:
    import datasets  # slow to import, and most recipes read a file

    found: Any
    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    try:
        if saved:
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path) if path.is_dir() else source, split=part)
    except Exception as error:  # the Hub's client raises a dozen kinds; all mean the same here
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{source}: split {part!r} cannot be loaded ({reason}). Prompts are {_ALLOWED}"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if part not in found:
            raise UserError(f"{source}: no split {part!r}; it has {', '.join(map(repr, found))}")
        found = found[part]
    rows: Iterable[Mapping[str, Any]] = found
    return rows


def _prompt(where: str, row: Mapping[str, Any], rules: Rules) -> Prompt:
    every, tools = rules.every, _tools(where, row.get("tools"))
    later: tuple[tuple[Message, ...], ...] = ()
    given: tuple[Given, ...] = ()
    if rules.given:
        messages, given = _answered(where, row, every=every)
    elif every:
        messages, later = _turns(_messages(where, row, every=True))
    else:
        messages = _until_answer(_messages(where, row, every=False))
    name = next((row[field] for field in KEY_FIELDS if row.get(field) is not None), None)
    category = row.get("category")
    _check_unicode([name, category, messages, tools, later])
    source = category if isinstance(category, str) else "uncategorised"
    prompt = Prompt("" if name is None else str(name), source, messages, tools, later, given)
    return replace(prompt, key=content_key(whole(prompt), tools)) if name is None else prompt


def _answered(
    where: str, row: Mapping[str, Any], *, every: bool
) -> tuple[tuple[Message, ...], tuple[Given, ...]]:
    """A conversation up to its last answer, and its answers: all, or that one."""
    added = completed(row)
    said = _messages(where, row, every=True) + [_message(where, turn) for turn in added]
    field = next((name for name in FIELDS if row.get(name) is not None), None)
    own = row[field] if field is not None and isinstance(row[field], list) else [None]
    found = given_answers(row, said, [*own, *added], every=every)
    if not found:
        raise Unusable("no assistant turn")
    last = found[-1].after
    _until_answer(said[:last])
    return tuple(said[: last + 1]), found


def _check_unicode(values: object) -> None:
    """Half a surrogate pair: no tokenizer takes it, nor does a file."""
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise Unusable("text that is no Unicode") from error
    except RecursionError as error:  # read with less on the stack than this
        raise Unusable("nested too deep") from error


def _messages(where: str, row: Mapping[str, Any], *, every: bool) -> list[Message]:
    field = next((name for name in FIELDS if row.get(name) is not None), None)
    if field is None and not any(name in row for name in FIELDS):
        raise UserError(
            f"{where}: found {', '.join(map(repr, row)) or 'nothing'}; "
            f"a prompt is in one of {', '.join(map(repr, FIELDS))}"
        )
    value = row[field] if field is not None else []
    if field == "turns" and isinstance(value, list):
        # A list of user turns; only the first one needs no answer before it.
        texts = value[: None if every else 1]
        if texts and all(isinstance(text, str) for text in texts):
            return [{"role": "user", "content": text} for text in texts]
        value = value[0] if value else value
    if isinstance(value, str) and field in ("prompt", "turns"):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        what = "text or a list of turns" if field in ("prompt", "turns") else "a list of turns"
        raise UserError(f"{where}: {field!r} must be {what}, not {type(value).__name__}")
    return [_message(where, turn) for turn in value]


def _tools(where: str, value: object) -> tuple[Tool, ...]:
    """What the target may call: a list of objects, or its JSON text, as Arrow tables need it."""
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        tools = value
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: 'tools' must be a list of JSON objects, not {value!r:.60}")
    return tuple(tools)


def _message(where: str, turn: object) -> Message:
    """A turn as OpenAI or ShareGPT write it, in OpenAI's words."""
    if not isinstance(turn, Mapping):
        raise UserError(
            f"{where}: a turn must be an object with role and content, not {turn!r:.60}"
        )
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise Unusable(f"unknown role {said!r}")
    message: Message = {"role": role, "content": _text(turn.get("content", turn.get("value")))}
    return message | {name: turn[name] for name in KEPT if turn.get(name) is not None}


def _text(content: object) -> str:
    """Text of a content field; null (a tool call says nothing) is empty."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise Unusable("content that is not text")
    return "".join(map(str, texts))


def _until_answer(messages: list[Message]) -> tuple[Message, ...]:
    """The conversation without answers at its end: what is left ends with the question."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end or messages[end - 1]["role"] not in ("user", "tool"):
        raise Unusable("no user turn at the end")
    if not any(
        message["content"].strip() for message in messages[:end] if message["role"] != "system"
    ):
        raise Unusable("empty prompt")
    return tuple(messages[:end])


def _turns(messages: list[Message]) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
    """What stands before the first answer, and what follows each of the answers.

    Answers are left out: the target gives its own. A tool's result belongs to the call that was
    made, so the conversation ends before it; two user turns in a row have an answer between them.
    """
    groups: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            break
        asked = bool(groups[-1]) and groups[-1][-1]["role"] == "user"
        if asked and message["role"] in ("assistant", "user"):
            groups.append([])
        if message["role"] != "assistant":
            groups[-1].append(message)
    groups = [group for group in groups if group and group[-1]["role"] == "user"]
    first = _until_answer(groups[0] if groups else [])
    return first, tuple(map(tuple, groups[1:]))


def listed(dropped: Counter[str]) -> str:
    """Reasons with their counts, the most frequent first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common()) or "none"
