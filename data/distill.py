"""Distil: the target answers the prompts; its answers are the training data.

The batches are planned once from all prompts, and the randomness of a row comes from its key. A run
that was killed therefore makes the same rows when it is started again: what is on disk is kept, and
a batch with a missing row is run whole, so that every row meets the batch mates (and the rounding)
that it would have met.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.answering import Answering
from draftsmith.data.bar import Bar
from draftsmith.data.generate import Answer, Request, answer
from draftsmith.data.given_backend import answer_given, fan_out
from draftsmith.data.prompts import Prompt, keyed_number, listed, next_turns
from draftsmith.data.render import TemplateRefusal, check_template, render_prompt
from draftsmith.data.rows import (
    DROPPED,
    ROWS,
    TURN,
    RowFile,
    agree_on_manifest,
    check_drop,
    dropped_rows,
    finished_rows,
    rounds,
)
from draftsmith.data.served import answer_served
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.speaker import Speaker
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig, DistilConfig
from draftsmith.recipes.stages import SERVED, TRANSPORT, flat


@dataclass(frozen=True)
class DistilSummary:
    """What lies in the folder, and what this call did."""

    rows: int
    response_tokens: int
    cut: int  # answers that ran into max_new_tokens
    dropped: Counter[str]  # prompts, by reason
    made: int  # rows of this call
    tokens_per_second: float  # of this call


def distil(
    speaker: Speaker, prompts: Sequence[Prompt], config: DataConfig, folder: Path, *, seed: int
) -> DistilSummary:
    """Answer all prompts into `folder`, resuming what is there. Raises UserError.

    Later turns of conversations are answered after all earlier ones, each with the target's own
    answers before it, into folders of their own.
    """
    if config.distil.backend == "given":
        prompts = fan_out(prompts)
    requests, dropped = make_requests(speaker, prompts, config, seed)
    made, tokens, started = 0, 0, time.perf_counter()
    whole = config.distil.model_copy(update={"share": (1, 1)})  # later turns are of this share
    known: set[str] = set()
    for turn in count(2):
        check_keys(known, prompts)
        new = answer_all(speaker, prompts, requests, config, folder, seed=seed)
        made, tokens = made + new[0], tokens + new[1]
        prompts = next_turns(prompts, finished_rows(folder), turn)
        config = config.model_copy(update={"distil": whole})
        requests, refused = render_requests(speaker, prompts, config, seed)
        dropped.update(refused)
        if not requests:
            break
        folder = (folder if turn == 2 else folder.parent) / f"{TURN}{turn}"
    first = folder.parent if folder.name.startswith(TURN) else folder
    return summarise(first, dropped, made, tokens / (time.perf_counter() - started))


def check_keys(known: set[str], prompts: Iterable[Prompt]) -> None:
    """Keys of later turns are new ones. Remembers them; UserError for one that is taken."""
    keys = {prompt.key for prompt in prompts}
    if keys & known:
        raise UserError(
            f"data.turns: the key {min(keys & known)!r} is needed for a later turn; rename that "
            "prompt"
        )
    known |= keys


def answer_all(
    speaker: Speaker,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    config: DataConfig,
    folder: Path,
    *,
    seed: int,
    title: str = "distil",
) -> tuple[int, int]:
    """Answer prepared requests into `folder`, resuming what is there.

    Returns the rows that this call made and its tokens. `title` names the bar.
    """
    told = manifest(speaker, requests, config, seed) | origin(prompts, config)
    agree_on_manifest(folder, told)
    first, step = config.distil.share
    batches = plan(requests, config.distil.batch_size)[first - 1 :: step]
    total = sum(map(len, batches))
    with RowFile(folder / ROWS) as file, Bar(title, total, "prompts") as bar:
        by_key = {prompt.key: prompt for prompt in prompts}
        job = Answering(speaker, by_key, config, seed, file, bar)
        BACKENDS[config.distil.backend](job, batches, folder)
        return job.made, job.tokens


def answer_here(job: Answering, batches: Sequence[Sequence[Request]], folder: Path) -> None:
    """The transformers backend: the target answers batch by batch in this process."""
    finished = 0
    for batch in batches:
        finished += len(batch)
        if {request.key for request in batch} <= job.rows.keys:
            job.bar.skip(len(batch))
            continue
        answers = answer_within_memory(job, batch)
        job.keep(list(zip(batch, answers, strict=True)))
        job.bar.reach(finished)


def answer_there(job: Answering, batches: Sequence[Sequence[Request]], folder: Path) -> None:
    """The openai backend: servers answer, every row by itself."""
    with RowFile(folder / DROPPED, check_drop) as dropped:
        known = job.rows.keys | dropped.keys
        left = [one for one in chain.from_iterable(batches) if one.key not in known]
        job.bar.skip(sum(map(len, batches)) - len(left))
        answer_served(job, left, dropped, proven=folder.name.startswith(TURN))


BACKENDS: dict[str, Callable[[Answering, Sequence[Sequence[Request]], Path], None]] = {
    "transformers": answer_here,
    "openai": answer_there,
    "given": answer_given,
}


def make_requests(
    speaker: Speaker, prompts: Sequence[Prompt], config: DataConfig, seed: int
) -> tuple[list[Request], Counter[str]]:
    """Rendered prompts, and why others were dropped. UserError when none is left."""
    check_template(speaker.tokenizer, config.thinking, name=speaker.name)
    requests, dropped = render_requests(speaker, prompts, config, seed)
    if not requests:
        raise UserError(f"{speaker.name}: no prompt is left to answer. Dropped: {listed(dropped)}")
    longest = max(len(request.ids) for request in requests)
    knobs = "data.max_prompt_tokens or data.distil.max_new_tokens"
    check_room(speaker, longest + config.distil.max_new_tokens, knobs)
    return requests, dropped


def render_requests(
    speaker: Speaker, prompts: Iterable[Prompt], config: DataConfig, seed: int
) -> tuple[list[Request], Counter[str]]:
    """Rendered prompts, and why others were dropped."""
    requests: list[Request] = []
    dropped: Counter[str] = Counter()
    for prompt in prompts:
        try:
            ids = render_prompt(
                speaker.tokenizer, prompt.messages, config.thinking, tools=prompt.tools
            )
        except TemplateRefusal as reason:
            dropped[str(reason)] += 1
            continue
        if len(ids) > config.max_prompt_tokens:
            dropped[f"prompt longer than {config.max_prompt_tokens} tokens"] += 1
            continue
        requests.append(make_request(prompt.key, ids, config.distil, seed, purpose="answer"))
    return requests, dropped


def make_request(
    key: str, ids: list[int], config: DistilConfig, seed: int, *, purpose: str
) -> Request:
    """A request with random numbers of its own: by key, and by what they are drawn for."""
    own_seed = keyed_number(seed, purpose, key) >> 1  # torch takes 63 bits
    return Request(key, ids, sampling_of(key, config, seed), own_seed)


def check_room(speaker: Speaker, needed: int, knobs: str) -> None:
    """UserError when the longest prompt and its answer do not fit the model's positions."""
    positions = speaker.config.to_dict().get("max_position_embeddings")
    if positions is not None and needed > positions:
        raise UserError(
            f"{speaker.name} has {positions} positions and the longest prompt with its answer "
            f"needs {needed}; lower {knobs}"
        )


def sampling_of(key: str, config: DistilConfig, seed: int) -> Sampling:
    """How this prompt is answered: by a draw of its own, so that other prompts do not change it."""
    greedy = keyed_number(seed, "greedy", key) < config.greedy_share * 2**64
    if greedy or config.temperature == 0.0:
        return Sampling()
    return Sampling(config.temperature, config.top_k, config.top_p)


def plan(requests: Sequence[Request], batch_size: int) -> list[list[Request]]:
    """Batches of like length, longest first: too little memory shows at once."""
    order = sorted(requests, key=lambda request: (-len(request.ids), request.key))
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def manifest(
    speaker: Speaker, requests: Sequence[Request], config: DataConfig, seed: int
) -> dict[str, Any]:
    """Everything that the rows depend on."""
    return {
        "distil": manner(config.distil),
        "prompts": digest((request.key, request.ids) for request in requests),
        "seed": seed,
        "target": speaker.fingerprint,
        "thinking": config.thinking,
    }


def origin(prompts: Sequence[Prompt], config: DataConfig) -> dict[str, Any]:
    """Where answers come from that were not made here: that the target said them is the word of
    who gives them.
    """
    given = [one for prompt in prompts for one in prompt.given]
    if not given:
        return {}
    said = hashlib.sha256()
    for prompt in sorted(prompts, key=lambda prompt: prompt.key):
        said.update(f"{prompt.key}\0{prompt.given}\n".encode(errors="backslashreplace"))
    return {
        "origin": {
            "answers": "given, not made here; that the target said them is its user's word",
            "source": Path(config.prompts).name,
            "with token ids": sum(one.ids is not None for one in given),
            "with temperature": sum(one.temperature is not None for one in given),
            "sha256": said.hexdigest(),
        }
    }


def digest(asked: Iterable[tuple[str, list[int]]]) -> dict[str, Any]:
    """The number of prompts and what they say, in whatever order they come."""
    found = sorted(asked)
    said = hashlib.sha256()
    for key, ids in found:
        said.update(f"{key}\0{ids}\n".encode())
    return {"count": len(found), "sha256": said.hexdigest()}


def manner(config: DistilConfig) -> dict[str, Any]:
    """The knobs that answers depend on, as dotted keys."""
    here = config.backend == "transformers"
    idle = {*TRANSPORT, *(SERVED if here else ())}
    knobs = flat(config.model_dump(mode="json"))
    return {key: value for key, value in knobs.items() if f"data.distil.{key}" not in idle}


def answer_within_memory(job: Answering, batch: Sequence[Request]) -> list[Answer]:
    """Answer a batch; UserError when the device's memory does not hold it."""
    target, before, knobs = job.speaker, job.bar.done, job.config.distil
    assert isinstance(target, Target), "this backend needs weights"
    try:
        return answer(
            target, batch, knobs.max_new_tokens, lambda part: job.bar.reach(before + part)
        )
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{target.name}: {knobs.batch_size} answers at once do not fit the memory of "
            f"{target.device}; lower data.distil.batch_size"
        ) from error


def summarise(folder: Path, dropped: Counter[str], made: int, speed: float) -> DistilSummary:
    """Count what lies in the folder, later turns included."""
    rows = [row for one in rounds(folder) for row in finished_rows(one).values()]
    lost = [loss["reason"] for one in rounds(folder) for loss in dropped_rows(one).values()]
    return DistilSummary(
        rows=len(rows),
        response_tokens=sum(len(row["response_ids"]) for row in rows),
        cut=sum(row["finish_reason"] == "length" for row in rows),
        dropped=dropped + Counter(lost),
        made=made,
        tokens_per_second=speed,
    )
