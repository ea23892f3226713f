"""A server that nobody here wrote: `transformers serve` with a tiny model, asked and measured."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draftsmith.data.distill import distil
from draftsmith.data.render import encode
from draftsmith.data.rows import read_rows
from draftsmith.drafters.sampler import Sampling
from draftsmith.drafters.target import Target
from draftsmith.eval.bench import BenchPrompt
from draftsmith.eval.decode import decode
from draftsmith.eval.served import measure_served
from tests.data.asking import ENDS, make_config, make_prompts
from tests.tiny import tiny_target

STARTS = 120.0  # seconds that it may take


def ascii_target() -> Target:
    """A target that says printable ASCII alone when greedy: all other rows of its head are 0."""
    target = tiny_target(spread=0.4, eos=ENDS[:1])
    spoken = [*encode(target.tokenizer, "".join(map(chr, range(32, 127)))), *target.eos_ids]
    silent = torch.ones(target.vocab_size, dtype=torch.bool)
    silent[spoken] = False
    with torch.no_grad():
        target.head_weight[silent] = 0.0
    return target


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def target() -> Target:
    return ascii_target()


@pytest.fixture(scope="module")
def url(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the server is."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    port = free_port()
    program = str(Path(sys.executable).with_name("transformers"))
    command = [program, "serve", str(folder), "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def wait_for(address: str, server: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + STARTS
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail("transformers serve did not start")


def test_it_answers_as_we_do(target: Target, url: str, tmp_path: Path) -> None:
    prompts = make_prompts(6)
    distil(target, prompts, make_config(), tmp_path / "here", seed=0)
    served = make_config(backend="openai", urls=[url])
    distil(target, prompts, served, tmp_path / "there", seed=0)
    here, there = ([r["response_ids"] for r in read_rows(tmp_path / n)] for n in ("here", "there"))
    assert here == there


def test_it_is_measured(target: Target, url: str) -> None:
    ids = [encode(target.tokenizer, f"<|im_start|>user\nturn {n}") for n in range(3)]
    prompts = [BenchPrompt(f"p{n}", "a", one, f"turn {n}") for n, one in enumerate(ids)]
    found = measure_served(url, target, prompts, batches=(1, 2), limit=8)
    answers = [
        decode(target, None, one, sampling=Sampling(), max_new_tokens=8).tokens for one in ids
    ]
    for one in found:
        assert one.tokens == sum(map(len, answers))
        assert one.tokens_per_second > 0 and one.first_token_ms.p50 <= one.request_ms.p50
        assert one.acceptance is None and one.tau is None  # it offers no metrics
