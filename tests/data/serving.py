"""A real HTTP server on loopback around a tiny target that answers truly, with faults on demand."""

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from draftsmith.data.generate import Request, answer
from draftsmith.data.render import encode, render_text
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from tests.data.asking import ENDS
from tests.tiny import tiny_target

Fault = Callable[["Server", dict[str, Any]], Any]  # None: answer; else see `Handler.fail`
PLAIN = {"model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed"}


def ascii_target(**knobs: Any) -> Target:
    """A target that says printable ASCII alone, so that its answers survive as text."""
    target = tiny_target(**{"eos": ENDS[:1], "spread": 0.4} | knobs)
    allowed = torch.full((target.vocab_size,), float("-inf"))
    allowed[[*encode(target.tokenizer, "".join(map(chr, range(32, 127)))), *target.eos_ids]] = 0.0
    allowed[list(target.eos_ids)] = 2.0
    project = target.logits
    target.logits = lambda hidden: project(hidden) + allowed  # type: ignore[method-assign]
    return target


class Server(ThreadingHTTPServer):
    """`exact`: vLLM's manners (ids in and out); else text alone, unknown fields refused."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        target: Target,
        *,
        exact: bool = True,
        fault: Fault | None = None,
        key: str | None = None,
        models: tuple[str, ...] = ("tiny",),
        adds_bos: bool = False,
        port: int = 0,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.target, self.exact, self.fault, self.key = target, exact, fault, key
        self.models, self.adds_bos = models, adds_bos
        self.bodies: list[dict[str, Any]] = []  # of requests for answers, probes left out
        self.seen: list[str] = []  # every path
        self.headers: list[dict[str, str]] = []
        self.flying = self.most = 0
        self.counting, self.model = threading.Lock(), threading.Lock()
        self.open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def die(self) -> None:
        """As a killed process: the port is closed, connections are cut."""
        threading.Thread(target=self.shutdown).start()
        self.server_close()
        for one in list(self.open):
            cut(one)

    def handle_error(self, *_: Any) -> None:
        """Connections that are cut on purpose."""

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.die()


def cut(connection: socket.socket) -> None:
    """End a connection at once."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    except OSError:
        pass


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def reply(self, status: int, value: Any, **headers: str) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self) -> bool:
        self.server.seen.append(self.path)
        self.server.headers.append(dict(self.headers))
        key = self.server.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.reply(401, {"error": f"bad key {self.headers.get('Authorization')}"})
        return False

    def do_GET(self) -> None:
        if not self.allowed():
            return
        if self.path == "/health":
            self.reply(200, {})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": name} for name in self.server.models]})
        else:
            self.reply(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        server = self.server
        with server.counting:
            server.flying += 1
            server.most = max(server.most, server.flying)
        try:
            if body["max_tokens"] > 1:
                server.bodies.append(body)
                trouble = server.fault(server, body) if server.fault else None
                if trouble is not None and not self.fail(trouble):
                    return
            self.answer(body)
        finally:
            with server.counting:
                server.flying -= 1

    def fail(self, trouble: Any) -> bool:
        """Whether an answer still follows. A number: that status (a pair: with Retry-After);
        `cut`, `half`: the connection; `die`: the server; a float: seconds to wait first.
        """
        match trouble:
            case float():
                time.sleep(trouble)
                return True
            case "cut":
                cut(self.connection)
            case "half":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.wfile.flush()
                cut(self.connection)
            case "die":
                self.server.die()
            case (status, after):
                self.reply(status, {"error": "later"}, Retry_After=after)
            case int():
                self.reply(trouble, {"error": f"trouble with {self.server.key}"})
            case _:
                self.reply(200, trouble)
        return False

    def answer(self, body: dict[str, Any]) -> None:
        server = self.server
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self.reply(404, {"error": "no such page"})
        if body["model"] not in server.models:
            return self.reply(404, {"error": f"no model {body['model']}"})
        if not server.exact and body.keys() - PLAIN:
            return self.reply(422, {"detail": f"unexpected {body.keys() - PLAIN}"})
        chat = "messages" in body
        prompt = body.get("prompt")
        if chat:
            prompt = render_text(server.target.tokenizer, body["messages"], None, prompt=True)
        if isinstance(prompt, str):
            prompt = encode(server.target.tokenizer, prompt)
            if server.adds_bos and body.get("add_special_tokens", True):
                prompt = [server.target.tokenizer.bos_token_id, *prompt]
        elif not server.exact:
            return self.reply(400, {"detail": "prompt must be a string"})
        sampling = Sampling(
            body["temperature"], max(0, body.get("top_k", 0)), body["top_p"]
        )  # a server may keep greedy filters
        if body["temperature"] == 0:
            sampling = Sampling()
        with server.model:
            (said,) = answer(
                server.target,
                [Request("", prompt, sampling, body["seed"])],
                body["max_tokens"],
                lambda done: None,
            )
        self.reply(200, self.worded(body, prompt, said.ids, said.finish_reason, chat))

    def worded(
        self, body: dict[str, Any], prompt: list[int], ids: list[int], reason: str, chat: bool
    ) -> dict[str, Any]:
        target, exact = self.server.target, self.server.exact
        plain = ids[:-1] if reason == "stop" else ids
        text = target.tokenizer.decode(plain, skip_special_tokens=not exact)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if body.get("logprobs"):
            numbers = [-0.5 * i for i in range(len(ids))]
            content = [{"token": "x", "logprob": number} for number in numbers]
            choice["logprobs"] = {"content": content} if chat else {"token_logprobs": numbers}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"choices": [choice], "usage": usage}
