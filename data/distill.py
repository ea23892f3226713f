"""Distil: the target answers the prompts; its answers are the training data.

The batches are planned once from all prompts, and the randomness of a row comes from its key. A run
that was killed therefore makes the same rows when it is started again: what is on disk is kept, and
a batch with a missing row is run whole, so that every row meets the batch mates (and the rounding)
that it would have met.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.bar import Bar
from draftsmith.data.generate import Answer, Request, answer
from draftsmith.data.prompts import Prompt, keyed_number, listed
from draftsmith.data.render import TemplateRefusal, check_template, render_prompt
from draftsmith.data.rows import ROWS, Row, RowFile, agree_on_manifest, finished_rows
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig, DistilConfig


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
    target: Target, prompts: Sequence[Prompt], config: DataConfig, folder: Path, *, seed: int
) -> DistilSummary:
    """Answer all prompts into `folder`, resuming what is there. Raises UserError."""
    requests, dropped = make_requests(target, prompts, config, seed)
    made, speed = answer_all(target, prompts, requests, config, folder, seed=seed)
    return summarise(folder, dropped, made, speed)


def answer_all(
    target: Target,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    config: DataConfig,
    folder: Path,
    *,
    seed: int,
    title: str = "distil",
) -> tuple[int, float]:
    """Answer prepared requests into `folder`, resuming what is there.

    Returns the rows that this call made and its tokens per second. `title` names the bar.
    """
    agree_on_manifest(folder, manifest(target, requests, config, seed))
    by_key = {prompt.key: prompt for prompt in prompts}
    started, made, tokens, finished = time.perf_counter(), 0, 0, 0
    with RowFile(folder / ROWS) as file, Bar(title, len(requests), "prompts") as bar:
        for batch in plan(requests, config.distil.batch_size):
            finished += len(batch)
            missing = {request.key for request in batch} - file.keys
            if not missing:
                bar.skip(len(batch))
                continue
            answers = answer_within_memory(target, batch, config.distil, bar)
            pairs = zip(batch, answers, strict=True)
            file.append(
                [
                    make_row(target, by_key[request.key], request, reply, config, seed)
                    for request, reply in pairs
                    if request.key in missing
                ]
            )
            made += len(missing)
            fresh = sum(len(reply.ids) for reply in answers)
            tokens += fresh
            bar.count_tokens(fresh)
            bar.reach(finished)
    return made, tokens / (time.perf_counter() - started)


def make_requests(
    target: Target, prompts: Sequence[Prompt], config: DataConfig, seed: int
) -> tuple[list[Request], Counter[str]]:
    """Rendered prompts, and why others were dropped. UserError when none is left."""
    check_template(target.tokenizer, config.thinking, name=target.name)
    requests: list[Request] = []
    dropped: Counter[str] = Counter()
    for prompt in prompts:
        try:
            ids = render_prompt(
                target.tokenizer, prompt.messages, config.thinking, tools=prompt.tools
            )
        except TemplateRefusal as reason:
            dropped[str(reason)] += 1
            continue
        if len(ids) > config.max_prompt_tokens:
            dropped[f"prompt longer than {config.max_prompt_tokens} tokens"] += 1
            continue
        requests.append(make_request(prompt.key, ids, config.distil, seed, purpose="answer"))
    if not requests:
        raise UserError(f"{target.name}: no prompt is left to answer. Dropped: {listed(dropped)}")
    longest = max(len(request.ids) for request in requests)
    knobs = "data.max_prompt_tokens or data.distil.max_new_tokens"
    check_room(target, longest + config.distil.max_new_tokens, knobs)
    return requests, dropped


def make_request(
    key: str, ids: list[int], config: DistilConfig, seed: int, *, purpose: str
) -> Request:
    """A request with random numbers of its own: by key, and by what they are drawn for."""
    own_seed = keyed_number(seed, purpose, key) >> 1  # torch takes 63 bits
    return Request(key, ids, sampling_of(key, config, seed), own_seed)


def check_room(target: Target, needed: int, knobs: str) -> None:
    """UserError when the longest prompt and its answer do not fit the model's positions."""
    positions = target.config.to_dict().get("max_position_embeddings")
    if positions is not None and needed > positions:
        raise UserError(
            f"{target.name} has {positions} positions and the longest prompt with its answer needs "
            f"{needed}; lower {knobs}"
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
    target: Target, requests: Sequence[Request], config: DataConfig, seed: int
) -> dict[str, Any]:
    """Everything that the rows depend on."""
    digest = hashlib.sha256()
    for request in sorted(requests, key=lambda request: request.key):
        digest.update(f"{request.key}\0{request.ids}\n".encode())
    return {
        "distil": config.distil.model_dump(mode="json"),
        "prompts": {"count": len(requests), "sha256": digest.hexdigest()},
        "seed": seed,
        "target": target.fingerprint,
        "thinking": config.thinking,
    }


def answer_within_memory(
    target: Target, batch: Sequence[Request], config: DistilConfig, bar: Bar
) -> list[Answer]:
    """Answer a batch; UserError when the device's memory does not hold it."""
    before = bar.done
    try:
        return answer(target, batch, config.max_new_tokens, lambda part: bar.reach(before + part))
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{target.name}: {config.batch_size} answers at once do not fit the memory of "
            f"{target.device}; lower data.distil.batch_size"
        ) from error


def make_row(
    target: Target, prompt: Prompt, request: Request, reply: Answer, config: DataConfig, seed: int
) -> Row:
    """The row that is written: what was asked, what was said, and how it was drawn."""
    return {
        "key": prompt.key,
        "category": prompt.category,
        "messages": list(prompt.messages),
        "tools": list(prompt.tools),
        "prompt_ids": request.ids,
        "response_ids": reply.ids,
        "response": target.tokenizer.decode(reply.ids, skip_special_tokens=True),
        "finish_reason": reply.finish_reason,
        "temperature": request.sampling.temperature,
        "seed": seed,
        "thinking": config.thinking,
    }


def summarise(folder: Path, dropped: Counter[str], made: int, speed: float) -> DistilSummary:
    """Count what lies in the folder."""
    rows = finished_rows(folder).values()
    return DistilSummary(
        rows=len(rows),
        response_tokens=sum(len(row["response_ids"]) for row in rows),
        cut=sum(row["finish_reason"] == "length" for row in rows),
        dropped=dropped,
        made=made,
        tokens_per_second=speed,
    )
