"""Self-written prompts: the target writes user turns, from the bare opening of a conversation.

Magpie (Xu et al., 2406.08464): an instruction-tuned model that is fed the chat template up to where
the user would speak goes on as a user. A turn is made like an answer, by the machinery of distil:
it is the answer to a conversation without messages. Turns that are no usable prompt are dropped.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.distill import answer_all, check_room, make_request
from draftsmith.data.overlap import WORD, Runs
from draftsmith.data.prompts import EVALUATED, Prompt, PromptSet, Unusable, normalised, user_texts
from draftsmith.data.render import encode, render_text
from draftsmith.data.rows import Row, read_rows
from draftsmith.drafters.speaker import Speaker
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig

CATEGORY = "self-written"
MARK = "The-words-of-the-user"  # stands for them when the template is asked
FEWEST_WORDS, FEWEST_CHARACTERS = 3, 12
SHARED_WORDS = 8  # that many in a row make a copy of an evaluation prompt


@dataclass(frozen=True)
class Opening:
    """What stands before the user's words, and the token that ends them."""

    ids: list[int]
    end: int


def find_opening(target: Speaker, thinking: bool | None) -> Opening:
    """The opening of a conversation by the target's template. Raises UserError where it has none.

    The end token must be one that generation stops at, or no turn would end.
    """
    message = {"role": "user", "content": MARK}
    text = render_text(target.tokenizer, [message], thinking, prompt=True)
    before, _, after = text.partition(MARK)
    # A space before the first word is a part of that word's token.
    ids = encode(target.tokenizer, before.rstrip(" "))
    if text.count(MARK) != 1 or not ids:
        raise UserError(
            f"{target.name}: its chat template does not write the user's words once, as they are, "
            "after an opening, so the target cannot be asked to write them; set "
            "data.self_written.count=0"
        )
    end = encode(target.tokenizer, after.lstrip())[:1]
    if not set(end) & set(target.eos_ids):
        raise UserError(
            f"{target.name}: in its chat template {target.tokenizer.decode(end)!r} follows the "
            "user's words, and generation does not stop there (it stops at "
            f"{', '.join(repr(target.tokenizer.decode([i])) for i in target.eos_ids)}): a turn "
            "that the target writes would not end. Set data.self_written.count=0, or add the token "
            "to eos_token_id in the model's generation_config.json if it is an end token"
        )
    return Opening(ids, end[0])


def write_turns(
    target: Speaker, opening: Opening, config: DataConfig, folder: Path, *, seed: int
) -> list[Row]:
    """Sample the user turns into `folder`, resuming what is there; all of them, by key."""
    written = config.self_written
    check_room(
        target, len(opening.ids) + written.max_new_tokens, "data.self_written.max_new_tokens"
    )
    knobs = {name: getattr(written, name) for name in ("max_new_tokens", "temperature", "top_p")}
    manner = config.distil.model_copy(update={**knobs, "top_k": 0, "greedy_share": 0.0})
    turns = [Prompt(f"self-{i:06d}", CATEGORY, ()) for i in range(1, written.count + 1)]
    # Not the random numbers of the answer: it must be drawn independently of its prompt.
    requests = [
        make_request(turn.key, opening.ids, manner, seed, purpose="user turn") for turn in turns
    ]
    config = config.model_copy(update={"distil": manner})
    answer_all(target, turns, requests, config, folder, seed=seed, title=CATEGORY)
    return read_rows(folder)


class Sieve:
    """Keeps the turns that are usable, new, and no copy of an evaluation prompt."""

    def __init__(
        self, tokenizer: Any, end: int, training: Sequence[Prompt], evaluation: Sequence[Prompt]
    ) -> None:
        self.tokenizer, self.end = tokenizer, end
        # Some tokenizers add runs of spaces, which are text.
        added = tokenizer.added_tokens_decoder.items()
        self.special = {token for token, text in added if text.content.strip()}
        self.keys = {prompt.key for prompt in training}  # a user's own may look like these
        self.known = set(map(normalised, user_texts(training)))
        self.held_out = set(map(normalised, user_texts(evaluation)))
        self.held_out_runs = Runs(SHARED_WORDS, user_texts(evaluation))

    def sift(self, rows: Iterable[Row]) -> PromptSet:
        """The turns as prompts, and why others were dropped."""
        prompts: list[Prompt] = []
        dropped: Counter[str] = Counter()
        for row in rows:
            try:
                text = self.text_of(row)
                check_wording(text)
                self.check_new(row["key"], text)
            except Unusable as reason:
                dropped[str(reason)] += 1
                continue
            self.known.add(normalised(text))
            prompts.append(Prompt(row["key"], CATEGORY, ({"role": "user", "content": text},)))
        return PromptSet(prompts, dropped)

    def text_of(self, row: Row) -> str:
        """What the turn says. Raises Unusable where it did not end, or is more than text."""
        *said, last = row["response_ids"]
        if last != self.end:
            raise Unusable("no end of the turn")
        text: str = self.tokenizer.decode(said, skip_special_tokens=False)
        # Plain tokens may spell a special one too: as a prompt it would be read as that.
        if self.special & {*said, *encode(self.tokenizer, text)}:
            raise Unusable("special tokens inside")
        return text.strip()

    def check_new(self, key: str, text: str) -> None:
        """Raises Unusable for what is known, or held out for evaluation."""
        plain = normalised(text)
        if plain in self.held_out or self.held_out_runs.touches(text):
            raise Unusable(EVALUATED)
        if plain in self.known:
            raise Unusable("duplicate")
        if key in self.keys:
            raise Unusable("id of another prompt")


def check_wording(text: str) -> None:
    """Raises Unusable for what is no request in words."""
    if "\ufffd" in text:
        raise Unusable("undecodable text")
    if len(text) < FEWEST_CHARACTERS or len(WORD.findall(text)) < FEWEST_WORDS:
        raise Unusable(f"fewer than {FEWEST_WORDS} words or {FEWEST_CHARACTERS} characters")
    kinds = [" " if one.isspace() else unicodedata.category(one) for one in text]
    if {"Cc", "Cn", "Co"} & set(kinds):
        raise Unusable("unprintable characters")
    # Marks (M) are the vowels of many scripts.
    if sum(kind[0] in "LM " for kind in kinds) < 0.5 * len(kinds):
        raise Unusable("mostly no letters")
