"""An engine that serves: any server with OpenAI's streaming API, measured from the outside.

What it decodes with is its own affair. Tokens are those it counts (`usage`), else pieces of its
stream; acceptance comes from its Prometheus metrics where it has them (vLLM, SGLang).
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from draftsmith.drafters.target import Target
from draftsmith.eval.bench import BenchPrompt
from draftsmith.eval.summary import Percentiles, percentiles
from draftsmith.recipes.errors import UserError

TIMEOUT = 600.0  # seconds without a piece
# Counters of drafted and accepted tokens, and of rounds, by engine.
DRAFTED = ("vllm:spec_decode_num_draft_tokens_total",)
ACCEPTED = ("vllm:spec_decode_num_accepted_tokens_total",)
ROUNDS = ("vllm:spec_decode_num_drafts_total",)
LENGTH = ("sglang:spec_accept_length",)  # a gauge: tokens per round
SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>\S+)")


@dataclass(frozen=True)
class Served:
    """One number of requests in flight."""

    url: str
    model: str
    concurrency: int
    requests: int
    tokens: int
    tokens_per_second: float  # all tokens over the wall time of all requests
    decode_tokens_per_second: float | None  # per request, after its first token; the mean
    first_token_ms: Percentiles | None
    token_ms: Percentiles | None  # between pieces of a stream
    request_ms: Percentiles | None
    acceptance: float | None  # drafts accepted over drafts, by its metrics
    tau: float | None  # tokens per round, by its metrics


@dataclass(frozen=True)
class Streamed:
    """One request, timed."""

    first_s: float
    gaps_s: list[float]
    whole_s: float
    tokens: int


def measure_served(
    url: str, target: Target, prompts: Sequence[BenchPrompt], *, batches: Sequence[int], limit: int
) -> list[Served]:
    """Ask for every prompt's greedy answer, with so many requests in flight each time."""
    base = url.rstrip("/")
    model = find_model(base)
    texts = [str(target.tokenizer.decode(prompt.ids)) for prompt in prompts]
    stream(base, model, texts[0], prompts[0].text, limit=min(8, limit))  # warm-up, thrown away
    return [
        measure_flight(base, model, texts, prompts, concurrency=size, limit=limit)
        for size in batches
        if size <= len(prompts)
    ]


def measure_flight(
    base: str,
    model: str,
    texts: Sequence[str],
    prompts: Sequence[BenchPrompt],
    *,
    concurrency: int,
    limit: int,
) -> Served:
    """All prompts, `concurrency` at a time."""
    before, began = metrics(base), time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        done = list(
            pool.map(
                lambda pair: stream(base, model, pair[0], pair[1].text, limit=limit),
                zip(texts, prompts, strict=True),
            )
        )
    seconds, after = time.perf_counter() - began, metrics(base)
    tokens = sum(one.tokens for one in done)
    rates = [(one.tokens - 1) / (one.whole_s - one.first_s) for one in done if one.tokens > 1]
    acceptance, tau = accepted(before, after)
    return Served(
        url=base,
        model=model,
        concurrency=concurrency,
        requests=len(done),
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        decode_tokens_per_second=sum(rates) / len(rates) if rates else None,
        first_token_ms=percentiles([one.first_s for one in done]),
        token_ms=percentiles([gap for one in done for gap in one.gaps_s]),
        request_ms=percentiles([one.whole_s for one in done]),
        acceptance=acceptance,
        tau=tau,
    )


def find_model(base: str) -> str:
    """The first model that the server lists. Raises UserError where there is no such server."""
    with asked(base, f"{base}/models", None) as reply:
        try:
            return str(json.loads(reply.read())["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(f"eval.served: {base}/models lists no model") from error


def stream(base: str, model: str, text: str, turn: str, *, limit: int) -> Streamed:
    """One greedy answer, to the rendered prompt; where a server only chats, to its last turn."""
    knobs = {
        "model": model,
        "max_tokens": limit,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    try:
        with asked(base, f"{base}/completions", {**knobs, "prompt": text}) as reply:
            return timed(reply, began)
    except NoSuchPlace:
        began = time.perf_counter()
        messages = [{"role": "user", "content": turn}]
        with asked(base, f"{base}/chat/completions", {**knobs, "messages": messages}) as reply:
            return timed(reply, began)


def timed(reply: Any, began: float) -> Streamed:
    """The pieces of a stream as they come."""
    times: list[float] = []
    counted = None
    for event in events(reply):
        usage = event.get("usage")
        counted = usage.get("completion_tokens", counted) if isinstance(usage, dict) else counted
        if any(piece_of(choice) for choice in event.get("choices", ())):
            times.append(time.perf_counter())
    ended = time.perf_counter()
    if not times:
        raise UserError("eval.served: the server's stream held no text")
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return Streamed(times[0] - began, gaps, ended - began, int(counted or len(times)))


def piece_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice, of a completion or a chat."""
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


def events(reply: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent stream, up to its end. Raises UserError for others."""
    for line in reply:
        text = line.decode("utf-8", "replace").strip()
        if not text.startswith("data:"):
            continue
        body = text.removeprefix("data:").strip()
        if body == "[DONE]":
            return
        try:
            event = json.loads(body)
        except ValueError as error:
            raise UserError(f"eval.served: the stream holds no JSON: {body[:80]!r}") from error
        if not isinstance(event, dict) or "error" in event:
            raise UserError(f"eval.served: the server answers {body[:200]!r}")
        yield event


class NoSuchPlace(Exception):
    """The server has no such endpoint."""


def asked(base: str, url: str, body: Mapping[str, Any] | None) -> Any:
    """An open reply. Raises UserError, or NoSuchPlace."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code in (404, 405) and body is not None and "prompt" in body:
            raise NoSuchPlace from error
        detail = error.read(200).decode("utf-8", "replace")
        raise UserError(f"eval.served: {url} answers {error.code}: {detail}") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"eval.served: {base} cannot be reached ({error}); give the address of a server with "
            "OpenAI's API, such as http://localhost:8000/v1"
        ) from error


def metrics(base: str) -> dict[str, float]:
    """The server's Prometheus samples, summed over labels; none where it has no such page."""
    parts = urlsplit(base)
    try:
        with urllib.request.urlopen(f"{parts.scheme}://{parts.netloc}/metrics", timeout=10) as page:
            text = page.read().decode("utf-8", "replace")
    except OSError:
        return {}
    found: dict[str, float] = {}
    for sample in filter(None, map(SAMPLE.match, text.splitlines())):
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        found[sample["name"]] = found.get(sample["name"], 0.0) + value
    return found


def accepted(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[float | None, float | None]:
    """Acceptance rate and tokens per round of what came between; counters run since the start."""

    def grown(names: Sequence[str]) -> float | None:
        values = [after[name] - before.get(name, 0.0) for name in names if name in after]
        return values[0] if values else None

    drafted, taken, rounds = grown(DRAFTED), grown(ACCEPTED), grown(ROUNDS)
    rate = taken / drafted if taken is not None and drafted else None
    if taken is not None and rounds:
        return rate, 1 + taken / rounds
    return rate, next((after[name] for name in LENGTH if name in after), None)
