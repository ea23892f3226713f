"""One server of several: whether it answers, and when it is asked again after it did not."""

import asyncio
import os
import random
import time
from collections import Counter
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from draftsmith.data.dialect import Dialect
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DistilConfig

FEW = 3  # failures in a row that take a server out
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds, doubled from failure to failure
LONGEST_ORDER = 600.0  # seconds that a server may tell us to wait
BUSY = (408, 409, 425, 429, 503)


class Failed(Exception):
    """An attempt that may be made again; `blames`: whether the request may be at fault."""

    def __init__(self, reason: str, *, blames: bool) -> None:
        super().__init__(reason)
        self.blames = blames


class Refused(Exception):
    """A request that this server will not take, however often it is asked."""


def backoff(failures: int) -> float:
    """Seconds to wait: doubled with every failure, and never the same for two that wait."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)


def key_headers(variable: str) -> dict[str, str]:
    """The header with the API key, which is nowhere but in the environment."""
    key = os.environ.get(variable, "").strip()
    if not key:
        return {}
    if not key.isascii() or not key.isprintable():
        raise UserError(f"{variable}: the API key in it is not printable ASCII; set it again")
    return {"Authorization": f"Bearer {key}"}


class Replica:
    """A server's address and its state."""

    def __init__(self, url: str, client: httpx.AsyncClient, config: DistilConfig) -> None:
        self.url, self.client, self.config = url.rstrip("/"), client, config
        if not self.url.removeprefix("https://").removeprefix("http://").count("/"):
            self.url += "/v1"
        self.failures = 0  # in a row
        self.rests_until = 0.0  # on time.monotonic's clock
        self.suspect = False  # whether its health is asked for before it gets work
        self.checking = asyncio.Lock()
        self.trouble = f"{self.url} was not asked yet"  # the last failure, in words
        self.well = 0.0  # when it last was, on the same clock
        self.meeting = asyncio.Lock()
        self.model: str | None = None  # the target's name there, once it was asked
        self.dialect: Dialect | None = None
        self.doubts: Counter[Dialect] = Counter()  # failures at requests in a dialect

    @property
    def resting(self) -> bool:
        """Whether it gets no work now."""
        return self.suspect or time.monotonic() < self.rests_until

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """A reply's JSON. Raises Failed, Refused, or UserError for what no request would change."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.config.server.timeout):
                response = await self.client.post(self.url + path, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self.cut(error, started) from error
        if response.status_code in BUSY:
            self.rest(started, wanted(response))
            raise Failed(self.blame(f"is busy ({response.status_code})"), blames=False)
        if response.status_code >= 500:
            self.fail(started)
            raise Failed(self.blame(f"answers {response.status_code}"), blames=True)
        self.check_access(response)
        if response.status_code >= 300:
            raise Refused(f"{response.status_code}: {self.excerpt(response)}")
        self.failures, self.well = 0, time.monotonic()
        try:
            return response.json()
        except ValueError as error:
            raise Failed(self.blame("answers something else than JSON"), blames=True) from error

    def cut(self, error: Exception, started: float) -> Failed:
        """A connection that was not made, or not kept."""
        self.fail(started)
        made = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        self.suspect = self.suspect or not made
        return Failed(self.blame(f"fails ({type(error).__name__})"), blames=made)

    def blame(self, what: str) -> str:
        """Keep and return what is wrong."""
        self.trouble = f"{self.url} {what}"
        return self.trouble

    def fail(self, started: float) -> None:
        """Count a failure; requests that were on their way when it rested are no new one."""
        self.rest(started, None)
        self.suspect = self.suspect or self.failures >= FEW

    def rest(self, started: float, seconds: float | None) -> None:
        """No work for so long: as told, or ever longer."""
        if started >= self.rests_until:
            self.failures += 1
        wait = backoff(self.failures) if seconds is None else seconds
        self.rests_until = max(self.rests_until, time.monotonic() + wait)

    def check_access(self, response: httpx.Response) -> None:
        """UserError for what is wrong with the address or the key."""
        status, variable = response.status_code, self.config.server.key_variable
        if status in (401, 403):
            there = "" if os.environ.get(variable) else " and is not set"
            raise UserError(
                f"{self.url}: the server refuses access ({status}); put its API key into the "
                f"environment variable {variable}, which distil.server.key_variable names{there}"
            )
        if status == 404:
            raise UserError(
                f"{self.url}: nothing there for {response.request.url.path} (404: "
                f"{self.excerpt(response)}); give data.distil.urls with the path of the API, such "
                "as http://localhost:8000/v1, and the model's name there in distil.server.model"
            )
        if 300 <= status < 400 or status == 405:
            raise UserError(
                f"{self.url}: answers {status}, so the API is not at this address; correct "
                "data.distil.urls"
            )

    def excerpt(self, response: httpx.Response) -> str:
        """What the server says, on one line and without the key, should it be repeated there."""
        text = " ".join(response.text.split())
        key = os.environ.get(self.config.server.key_variable, "").strip()
        return (text.replace(key, "[key]") if key else text)[:200]

    async def ready(self) -> bool:
        """Wait for the end of a rest (a little at a time); whether it may be asked."""
        if (left := self.rests_until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.2))
            return False
        if not self.suspect:
            return True
        async with self.checking:
            if self.suspect and not time.monotonic() < self.rests_until:
                self.suspect = not await self.healthy()
        return not self.resting

    async def healthy(self) -> bool:
        """Whether the server says that it is well; it rests longer when not."""
        started = time.monotonic()
        try:
            response = await self.client.get(self.url.removesuffix("/v1") + "/health", timeout=10)
            if response.status_code in (404, 405):  # it has no such page
                response = await self.client.get(self.url + "/models", timeout=10)
        except httpx.HTTPError as error:
            self.cut(error, started)
            return False
        if response.is_success:
            self.well = time.monotonic()
            return True
        self.check_access(response)
        self.blame(f"says that it is not well ({response.status_code})")
        self.rest(started, None)
        return False

    async def models(self) -> list[str]:
        """The names of the models that are served; empty where the server does not tell."""
        started = time.monotonic()
        try:
            response = await self.client.get(self.url + "/models", timeout=30)
        except httpx.HTTPError as error:
            raise self.cut(error, started) from error
        if response.status_code >= 500 or response.status_code in BUSY:
            self.rest(started, wanted(response))
            raise Failed(self.blame(f"answers {response.status_code}"), blames=False)
        self.check_access(response)
        try:
            return [str(one["id"]) for one in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return []


def wanted(response: httpx.Response) -> float | None:
    """Seconds that a server asks to be left alone (Retry-After, a number or a date)."""
    given = response.headers.get("retry-after", "")
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(given).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), LONGEST_ORDER)
