"""The openai backend of distillation: servers answer, several requests at a time.

Every server has as many workers as it may have requests in flight, and they all draw from one
queue: a fast server gets more, a slow answer holds up nobody, and a server that fails rests and is
asked for its health before it works again. What failed goes back into the queue, where another
server may take it.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import httpx

from draftsmith.data.answering import Answering
from draftsmith.data.dialect import (
    CHAT,
    COMPLETIONS,
    Dialect,
    Garbled,
    Json,
    Reader,
    added_in_front,
    body_of,
    find_end,
    path_of,
)
from draftsmith.data.generate import Answer, Request
from draftsmith.data.prompts import Unusable
from draftsmith.data.replica import Failed, Refused, Replica, backoff, key_headers
from draftsmith.data.rows import Row, RowFile
from draftsmith.recipes.errors import UserError

FLUSH_EVERY = 1.0  # seconds until an answer is on disk at the latest
FLUSH_ROWS = 64
HOPELESS = 16  # answers without a usable one among them


@dataclass
class Item:
    """A request, and what became of it so far."""

    request: Request
    tries: int = 0  # failures that it may be to blame for
    due: float = 0.0  # on time.monotonic's clock, as
    failed: float = 0.0  # when it last did


def answer_served(
    job: Answering, requests: Iterable[Request], dropped: RowFile, *, proven: bool
) -> None:
    """Let the servers answer. Raises UserError for what no waiting would change.

    proven: whether they have given usable answers before.
    """
    asyncio.run(Asking(job, requests, dropped, proven).run())


class Asking:
    """The requests that are left, the servers, and what is not on disk yet."""

    def __init__(
        self, job: Answering, requests: Iterable[Request], dropped: RowFile, proven: bool
    ) -> None:
        self.job, self.dropped = job, dropped
        self.config, self.knobs = job.config, job.config.distil.server
        known = job.rows.keys | dropped.keys
        self.new = (Item(request) for request in requests if request.key not in known)
        self.again: deque[Item] = deque()
        self.flying = 0
        self.drained = False  # whether no new request is left
        self.pairs: list[tuple[Request, Answer]] = []
        self.losses: list[Row] = []
        self.reader = Reader(
            job.speaker,
            find_end(job.speaker, job.config.thinking),
            job.config.distil.max_new_tokens,
        )
        self.usable = proven or bool(job.rows.keys)
        self.heard = time.monotonic()  # when a server last answered

    # --- the whole ---

    async def run(self) -> None:
        """Answer everything that is left."""
        self.again.extend(islice(self.new, 1))
        if not self.again:
            return
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            headers=key_headers(self.knobs.key_variable),
            timeout=httpx.Timeout(None, connect=10.0),  # an answer has its own
            limits=limits,
        ) as client:
            urls = dict.fromkeys(self.config.distil.urls)
            self.replicas = [Replica(url, client, self.config.distil) for url in urls]
            try:
                await self.work_all()
            finally:
                self.flush()
        self.check_usable(least=1)

    async def work_all(self) -> None:
        """All workers of all servers, until nothing is left."""
        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self.flush_often())
                workers = [
                    group.create_task(self.work(replica))
                    for replica in self.replicas
                    for _ in range(self.knobs.concurrency)
                ]
                await asyncio.wait(workers)
                writer.cancel()
        except BaseExceptionGroup as group_of:
            raise first_of(group_of) from None

    async def work(self, replica: Replica) -> None:
        """One request after the other at one server."""
        while (item := await self.take(replica)) is not None:
            try:
                await self.ask(replica, item)
            finally:
                self.flying -= 1

    async def take(self, replica: Replica) -> Item | None:
        """The next request that this server may have; None when all are done."""
        while self.flying or self.again or not self.drained:
            if not await replica.ready():
                self.check_patience()
            elif (item := self.next_item()) is not None:
                self.flying += 1
                return item
            else:
                await asyncio.sleep(0.05)
        return None

    def next_item(self) -> Item | None:
        """What failed and has waited long enough, else a new one."""
        now = time.monotonic()
        for _ in range(len(self.again)):
            item = self.again.popleft()
            if item.due <= now:
                return item
            self.again.append(item)
        fresh = next(self.new, None)
        self.drained = fresh is None
        return fresh

    # --- one request ---

    async def ask(self, replica: Replica, item: Item) -> None:
        """Ask once, and keep the answer, or put the request back, or drop it."""
        request = item.request
        try:
            await self.meet(replica, request)
            reply = await self.post(replica, request, {})
            self.heard = time.monotonic()
            self.take_answer(request, self.reader.read(reply, request))
        except Unusable as reason:
            self.drop(request, str(reason))
        except Refused as refusal:
            self.heard = time.monotonic()
            self.drop(request, "refused by the server", str(refusal))
        except (Failed, Garbled) as failure:
            self.blame(item, failure)
            if item.tries >= self.knobs.tries:
                self.drop(request, f"{item.tries} failures of the server", str(failure))
            else:
                item.due = time.monotonic() + (backoff(item.tries) if item.tries else 0.0)
                self.again.append(item)

    def blame(self, item: Item, failure: Failed | Garbled) -> None:
        """Count a failure, unless the servers have been down ever since the one before."""
        well = max(replica.well for replica in self.replicas) > item.failed
        guilty = not isinstance(failure, Failed) or failure.blames
        if guilty and (well or not item.tries):
            item.tries += 1
        item.failed = time.monotonic()

    async def post(self, replica: Replica, request: Request, knobs: Json) -> Any:
        """A server's reply to a request in its dialect, with some knobs replaced."""
        job, dialect = self.job, replica.dialect
        assert dialect is not None, "meet it first"
        prompt = job.prompts[request.key]
        body = body_of(request, prompt, job.speaker, job.config, dialect)
        return await replica.post(path_of(job.config), {"model": replica.model, **body, **knobs})

    def take_answer(self, request: Request, answer: Answer) -> None:
        """Keep an answer."""
        self.usable = True
        self.pairs.append((request, answer))
        self.job.bar.advance()
        if len(self.pairs) >= FLUSH_ROWS:
            self.flush()

    def drop(self, request: Request, reason: str, detail: str = "") -> None:
        """Leave a prompt out for good. UserError when all have been unusable so far."""
        loss = {"key": request.key, "category": self.job.prompts[request.key].category}
        asked = {"prompt_ids": request.ids}
        self.losses.append({**loss, "reason": reason, "detail": detail, **asked})
        self.job.bar.advance()
        self.check_usable(least=HOPELESS)

    def check_usable(self, *, least: int) -> None:
        """UserError when of at least so many answers none was usable."""
        if not self.usable and len(self.losses) >= least:
            reasons = Counter(loss["reason"] for loss in self.losses).most_common(1)
            details = next((f": {loss['detail']}" for loss in self.losses if loss["detail"]), "")
            count = len(self.losses)
            self.losses.clear()  # it is the server's fault, and they shall be asked again
            raise UserError(
                f"{' and '.join(self.config.distil.urls)}: of {count} answers none is usable "
                f"({reasons[0][0]}{details}); is {self.replicas[0].model} there the target of this "
                "recipe, with its tokenizer and chat template?"
            )

    def flush(self) -> None:
        """Write what is not on disk yet; losses, once something was usable."""
        pairs, self.pairs = self.pairs, []
        if pairs:
            self.job.keep(pairs)
        if self.losses and self.usable:
            losses, self.losses = self.losses, []
            self.dropped.append(losses)

    async def flush_often(self) -> None:
        """A killed process loses the answers of a second."""
        while True:
            await asyncio.sleep(FLUSH_EVERY)
            self.flush()

    # --- before the first request ---

    def check_patience(self) -> None:
        """UserError when no server has answered for long."""
        silent = time.monotonic() - self.heard
        idle = not self.flying and all(replica.resting for replica in self.replicas)
        if idle and silent > self.knobs.patience:
            troubles = "; ".join(replica.trouble for replica in self.replicas)
            raise UserError(
                f"no server has answered for {silent:.0f} s ({troubles}); what was answered is "
                "kept: start the servers and run the same command again"
            )

    async def meet(self, replica: Replica, request: Request) -> None:
        """Learn a server's ways before its first request."""
        async with replica.meeting:
            if replica.model is None:
                replica.model = await self.find_model(replica)
            if replica.dialect is None:
                replica.dialect = await self.find_dialect(replica, request)

    async def find_model(self, replica: Replica) -> str:
        """The target's name there. UserError when it is not what is served."""
        wanted = self.knobs.model or self.job.speaker.name
        served = await replica.models()
        if not served or wanted in served:
            return wanted
        if self.knobs.model is None and len(served) == 1:
            self.job.bar.say(f"{replica.url} calls the target {served[0]}")
            return served[0]
        raise UserError(
            f"data.distil.server.model: {wanted} is not among the models that {replica.url} serves "
            f"({', '.join(served[:8])}); name the target as its server does"
        )

    async def find_dialect(self, replica: Replica, request: Request) -> Dialect:
        """The most exact dialect that a server takes, found with a request of one token."""
        known = CHAT if self.knobs.api == "chat" else COMPLETIONS
        refusal = ""
        for dialect in known:
            if replica.doubts[dialect] >= self.knobs.tries:
                continue
            replica.dialect = dialect
            try:
                reply = await self.post(replica, request, {"max_tokens": 1})
            except Refused as error:
                refusal = str(error)
                continue
            except Failed as failure:  # of the server, or its way to say no to the dialect
                replica.doubts[dialect] += failure.blames
                raise
            finally:
                replica.dialect = None
            self.heard = time.monotonic()
            self.check_filters(dialect)
            return replace(dialect, strip=self.added(reply, request, dialect))
        raise UserError(
            f"{replica.url}: the server takes no request ({refusal or replica.trouble}); see "
            "data.distil.server for how it is asked"
        )

    def added(self, reply: Any, request: Request, dialect: Dialect) -> str:
        """What the server adds to a prompt of text."""
        usage = reply.get("usage") if isinstance(reply, dict) else None
        if dialect.ids or self.knobs.api == "chat" or not isinstance(usage, dict):
            return ""
        return added_in_front(usage, request.ids, self.job.speaker)

    def check_filters(self, dialect: Dialect) -> None:
        """UserError for a knob that these servers do not know."""
        if self.config.distil.top_k and not dialect.extras:
            raise UserError(
                f"data.distil.top_k: {self.config.distil.urls[0]} knows no top_k; set it to 0"
            )


def first_of(group: BaseException) -> BaseException:
    """The error that ended a group of tasks."""
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group
