"""The mask token of a block drafter: a row of the target's embedding that no text has."""

from collections.abc import Collection
from typing import Any

from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError

KNOB = "drafter.mask_token_id"


def check_mask_token(token: int, target: Target, used: Collection[int]) -> int:
    """The token, if it can be the mask. Raises UserError. used: tokens that the data hold."""
    reason = None
    if not 0 <= token < target.vocab_size:
        reason = f"{target.name} has the rows 0 to {target.vocab_size - 1}"
    elif token in special_ids(target):
        reason = "it ends, begins or pads texts"
    elif token in used:
        reason = "the training data hold it, and a mask must be nobody's token"
    if reason is not None:
        raise UserError(f"{KNOB}: {token} cannot be the mask: {reason}; {advice(target, used)}")
    return token


def propose_mask_token(target: Target, used: Collection[int] = ()) -> int:
    """The first row behind the tokenizer's tokens; without one, an added token that neither the
    template nor the data use: one that is called reserved or unused, else the last. Raises
    UserError where there is none.
    """
    token = find_mask_token(target, used)
    if token is None:
        raise UserError(f"{KNOB}: no unused row is found in {target.name}; name one")
    return token


def find_mask_token(target: Target, used: Collection[int]) -> int | None:
    """The proposal, if there is one."""
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        return None
    behind: int = max(tokenizer.get_vocab().values()) + 1
    if behind < target.vocab_size:
        return behind
    template = str(tokenizer.chat_template or "")
    taken = {*special_ids(target), *used}
    added = {
        number: str(token)
        for number, token in tokenizer.added_tokens_decoder.items()
        if number < target.vocab_size and number not in taken and str(token) not in template
    }
    spare = [number for number, text in added.items() if "reserved" in text or "unused" in text]
    return max(spare or added, default=None)


def special_ids(target: Target) -> set[int]:
    """Tokens that end, begin or pad texts."""
    tokenizer: Any = target.tokenizer
    found = {*target.eos_ids}
    if tokenizer is not None:
        found |= {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    return found


def advice(target: Target, used: Collection[int]) -> str:
    """What to give instead."""
    token = find_mask_token(target, used)
    return "give a row that no text uses" if token is None else f"give {token}, or leave it out"
