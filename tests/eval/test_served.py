"""An engine that serves, as a real little HTTP server plays it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from draftsmith.eval.bench import BenchPrompt
from draftsmith.eval.served import accepted, measure_served
from draftsmith.recipes.errors import UserError
from tests.tiny import tiny_target

PROMPTS = [BenchPrompt(f"p{n}", "a", [60 + n, 61], f"turn {n}") for n in range(4)]


class Engine(BaseHTTPRequestHandler):
    """Five tokens in three pieces for everyone; counts what a round accepts."""

    chats_only, broken = False, False
    bodies: ClassVar[list[dict]] = []

    def log_message(self, *args) -> None:
        """Say nothing."""

    def reply(self, text: str, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self.reply(json.dumps({"data": [{"id": "tiny"}]}))
        rounds = len(self.bodies)
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total rounds",
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {2 * rounds}',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {8 * rounds}',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {3 * rounds}',
        ]
        return self.reply("\n".join(lines))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path.endswith("chat/completions")
        if self.chats_only and not chat:
            return self.reply("no", 404)
        self.bodies.append(body)
        if self.broken:
            return self.reply('data: {"error": "out of memory"}\n\n')
        piece = {"delta": {"content": "ab"}} if chat else {"text": "ab"}
        lines = [json.dumps({"choices": [piece]})] * 3
        lines.append(json.dumps({"choices": [], "usage": {"completion_tokens": 5}}))
        return self.reply("".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]))


@pytest.fixture
def engine() -> Iterator[tuple[type[Engine], str]]:
    """The class that serves, and where."""
    kind = type("Mine", (Engine,), {"bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield kind, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("chats_only", [False, True])
def test_tokens_latency_and_acceptance_are_read_from_a_server(engine, chats_only: bool) -> None:
    kind, url = engine
    kind.chats_only = chats_only
    found = measure_served(url, tiny_target(), PROMPTS, batches=(1, 2, 8), limit=5)
    assert [one.concurrency for one in found] == [1, 2]
    for one in found:
        assert (one.model, one.requests, one.tokens) == ("tiny", 4, 20)
        assert one.tokens_per_second > 0 and one.decode_tokens_per_second > 0
        assert one.first_token_ms.p50 <= one.request_ms.p50
        assert one.acceptance == 3 / 8 and one.tau == 1 + 3 / 2
    assert len(kind.bodies) == 1 + 8 and all(body["temperature"] == 0 for body in kind.bodies)
    asked = kind.bodies[1]
    assert asked["messages"][0]["content"] == "turn 0" if chats_only else asked["prompt"]


def test_servers_that_fail_are_one_clear_line(engine) -> None:
    kind, url = engine
    kind.broken = True
    with pytest.raises(UserError, match="out of memory"):
        measure_served(url, tiny_target(), PROMPTS, batches=(1,), limit=5)
    with pytest.raises(UserError, match="cannot be reached"):
        measure_served("http://127.0.0.1:9/v1", tiny_target(), PROMPTS, batches=(1,), limit=5)
    with pytest.raises(UserError, match="cannot be reached"):
        measure_served("nowhere", tiny_target(), PROMPTS, batches=(1,), limit=5)


def test_counters_of_a_server_run_since_its_start() -> None:
    before = {"vllm:spec_decode_num_drafts_total": 100.0}
    after = {"vllm:spec_decode_num_drafts_total": 110.0}
    assert accepted(before, after) == (None, None)
    more = {"vllm:spec_decode_num_accepted_tokens_total": 20.0}
    assert accepted(before, {**after, **more}) == (None, 3.0)
    assert accepted({}, {"sglang:spec_accept_length": 2.5}) == (None, 2.5)
    assert accepted({}, {}) == (None, None)
