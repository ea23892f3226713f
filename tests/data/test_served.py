"""Answers from servers: true, complete, each once, whatever the servers do."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from draftsmith.data import replica
from draftsmith.data.distill import BACKENDS, distil, manifest
from draftsmith.data.prompts import Prompt
from draftsmith.data.rows import check_complete, dropped_rows, read_rows
from draftsmith.drafters.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DataConfig, DistilConfig
from tests.data.asking import MIXED, make_config, make_prompts
from tests.data.serving import Server, ascii_target
from tests.tiny import CHATML, tiny_target

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def teller() -> Target:
    return ascii_target()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(replica, "LONGEST_WAIT", 0.3)
    monkeypatch.delenv("DRAFTSMITH_API_KEY", raising=False)


def served(*servers: Server | str, knobs: dict[str, Any] | None = None, **rest: Any) -> DataConfig:
    """A config that asks these servers."""
    urls = tuple(one if isinstance(one, str) else one.url for one in servers)
    asked = {"concurrency": 4, "patience": 20.0} | (knobs or {})
    return make_config(backend="openai", urls=urls, server=asked, **rest)


def keys(server: Server) -> Counter[str]:
    """How often every prompt was asked for."""
    return Counter(json.dumps(body.get("prompt", body.get("messages"))) for body in server.bodies)


def test_greedy_rows_are_those_of_the_transformers_backend(target: Target, tmp_path: Path) -> None:
    distil(target, make_prompts(20), make_config(), tmp_path / "here", seed=0)
    with Server(target) as server:
        made = distil(target, make_prompts(20), served(server), tmp_path / "there", seed=0)
        assert server.most <= 4
    assert made.made == made.rows == 20 and not made.dropped
    rows = read_rows(tmp_path / "there")
    for row in rows:
        assert row.pop("logprobs") == [-0.5 * i for i in range(len(row["response_ids"]))]
    assert rows == read_rows(tmp_path / "here")


def test_text_is_tokenised_again_to_the_same_ids(teller: Target, tmp_path: Path) -> None:
    distil(teller, make_prompts(20), make_config(), tmp_path / "here", seed=0)
    with Server(teller, exact=False) as server:
        distil(teller, make_prompts(20), served(server), tmp_path / "there", seed=0)
        assert all(isinstance(body["prompt"], str) for body in server.bodies)
    rows = read_rows(tmp_path / "there")
    assert rows == read_rows(tmp_path / "here")
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


@pytest.mark.parametrize("exact", [True, False])
def test_chat_gives_the_same_rows(teller: Target, tmp_path: Path, exact: bool) -> None:
    distil(teller, make_prompts(12), make_config(), tmp_path / "here", seed=0)
    with Server(teller, exact=exact) as server:
        config = served(server, knobs={"api": "chat"})
        distil(teller, make_prompts(12), config, tmp_path / "there", seed=0)
    rows = read_rows(tmp_path / "there")
    assert [row.pop("logprobs", None) is not None for row in rows] == [exact] * 12
    assert rows == read_rows(tmp_path / "here")


def test_every_row_has_its_own_manner_and_seed(teller: Target, tmp_path: Path) -> None:
    config = {"temperature": 1.0, "greedy_share": 0.5, "top_p": 0.9, "top_k": 40}
    with Server(teller) as server:
        distil(teller, make_prompts(30), served(server, **config), tmp_path / "a", seed=0)
        sampled = [body for body in server.bodies if body["temperature"] == 1.0]
        greedy = [body for body in server.bodies if body["temperature"] == 0.0]
        distil(teller, make_prompts(30), served(server, **config), tmp_path / "b", seed=0)
    assert len(sampled) + len(greedy) == 30 and len(sampled) > 5 and len(greedy) > 5
    assert len({body["seed"] for body in sampled}) == len(sampled)
    assert all(0 <= body["seed"] < 2**31 for body in sampled)
    assert {(body["top_p"], body["top_k"]) for body in sampled} == {(0.9, 40)}
    assert {(body["top_p"], body["top_k"]) for body in greedy} == {(1.0, -1)}
    assert read_rows(tmp_path / "a") == read_rows(tmp_path / "b")
    assert {row["temperature"] for row in read_rows(tmp_path / "a")} == {0.0, 1.0}


def test_what_does_not_survive_as_text_is_dropped_and_counted(tmp_path: Path) -> None:
    """Random bytes are seldom Unicode, and some ids have no text."""
    target = tiny_target()
    distil(target, make_prompts(40), make_config(max_new_tokens=3), tmp_path / "here", seed=0)
    true = {row["key"]: row["response_ids"] for row in read_rows(tmp_path / "here")}
    with Server(target, exact=False) as server:
        config = served(server, max_new_tokens=3)
        made = distil(target, make_prompts(40), config, tmp_path / "there", seed=0)
        asked = len(server.bodies)
        again = distil(target, make_prompts(40), config, tmp_path / "there", seed=0)
        assert len(server.bodies) == asked == 40 and again.made == 0
    rows, dropped = read_rows(tmp_path / "there"), dropped_rows(tmp_path / "there")
    assert 0 < len(rows) < 40 and len(rows) + len(dropped) == 40
    assert all(row["response_ids"] == true[row["key"]] for row in rows)
    assert made.dropped.total() == again.dropped.total() == len(dropped)
    assert "text cut inside a character" in made.dropped
    check_complete(tmp_path / "there")


FAULTS = {
    "500": lambda n: 500 if n % 3 == 0 else None,
    "502 and 503": lambda n: (502, 503, None)[n % 3],
    "cut": lambda n: "cut" if n % 4 == 1 else None,
    "half a reply": lambda n: "half" if n % 4 == 1 else None,
    "429": lambda n: (429, "0.1") if n % 5 == 2 else None,
    "429 with a date": lambda n: (429, "Wed, 21 Oct 2015 07:28:00 GMT") if n % 5 == 2 else None,
    "429 without": lambda n: 429 if n % 5 == 2 else None,
    "no JSON": lambda n: "nonsense" if n % 4 == 1 else None,
    "no choices": lambda n: {"choices": []} if n % 4 == 1 else None,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_trouble_that_passes_costs_no_row(teller: Target, tmp_path: Path, fault: Any) -> None:
    distil(teller, make_prompts(24), make_config(max_new_tokens=8), tmp_path / "here", seed=0)
    count = iter(range(10_000))
    with Server(teller, exact=False, fault=lambda server, body: fault(next(count))) as server:
        config = served(server, knobs={"tries": 20}, max_new_tokens=8)
        made = distil(teller, make_prompts(24), config, tmp_path / "there", seed=0)
    assert made.made == 24 and not made.dropped
    assert read_rows(tmp_path / "there") == read_rows(tmp_path / "here")
    assert (tmp_path / "there" / "rows.jsonl").read_bytes().count(b"\n") == 24


def test_a_server_that_wants_to_be_left_alone_is(teller: Target, tmp_path: Path) -> None:
    times: list[float] = []

    def fault(server: Server, body: dict[str, Any]) -> Any:
        times.append(time.monotonic())
        return (429, "0.7") if len(times) == 3 else None

    with Server(teller, fault=fault) as server:
        config = served(server, knobs={"concurrency": 1})
        distil(teller, make_prompts(6), config, tmp_path, seed=0)
    assert len(times) == 7 and times[3] - times[2] >= 0.69


def test_a_row_that_always_fails_is_dropped_with_its_reason(teller: Target, tmp_path: Path) -> None:
    bad = [None]

    def fault(server: Server, body: dict[str, Any]) -> Any:
        bad[0] = bad[0] or body["seed"]
        return 500 if body["seed"] == bad[0] else None

    with Server(teller, fault=fault) as server:
        config = served(server, knobs={"tries": 3})
        made = distil(teller, make_prompts(20), config, tmp_path, seed=0)
        assert max(keys(server).values()) == 3
    assert made.rows == 19 and made.dropped == {"3 failures of the server": 1}
    (loss,) = dropped_rows(tmp_path).values()
    assert loss["category"] == "c" and "answers 500" in loss["detail"]


def test_a_slow_answer_holds_up_nobody(teller: Target, tmp_path: Path) -> None:
    done: list[float] = []
    lock = threading.Lock()

    def fault(server: Server, body: dict[str, Any]) -> Any:
        with lock:
            done.append(time.monotonic())
            return 5.0 if len(done) == 1 else None

    with Server(teller, fault=fault) as server:
        config = served(server, knobs={"concurrency": 2}, max_new_tokens=4)
        distil(teller, make_prompts(20), config, tmp_path, seed=0)
    assert len(done) == 20 and done[-1] - done[0] < 4.5


def test_an_answer_that_takes_too_long_is_asked_for_again(teller: Target, tmp_path: Path) -> None:
    slow = iter([8.0])
    with Server(teller, fault=lambda server, body: next(slow, None)) as server:
        config = served(server, knobs={"timeout": 3.0}, max_new_tokens=4)
        made = distil(teller, make_prompts(8), config, tmp_path, seed=0)
        assert len(server.bodies) == 9
    assert made.rows == 8


def test_a_dying_replica_is_left_out_and_used_again_when_it_is_back(
    teller: Target, tmp_path: Path
) -> None:
    count, died = iter(range(10_000)), threading.Event()

    def dies(server: Server, body: dict[str, Any]) -> Any:
        if next(count) != 5:
            return 0.02
        died.set()
        return "die"

    back: list[Server] = []
    # The other one is quicker while it is away.
    with Server(teller, fault=lambda *_: 0.5 if back else 0.05) as steady:
        dying = Server(teller, fault=dies)
        port = dying.server_port

        def revive() -> None:
            died.wait()
            time.sleep(0.5)
            back.append(Server(teller, port=port))

        reviver = threading.Thread(target=revive, daemon=True)
        reviver.start()
        config = served(steady, dying, max_new_tokens=4)
        made = distil(teller, make_prompts(150), config, tmp_path, seed=0)
        reviver.join()
        assert made.rows == 150 and not made.dropped
        assert len(steady.bodies) > 10 and len(dying.bodies) >= 6 and len(back[0].bodies) > 5
        back[0].die()
    assert len({row["key"] for row in read_rows(tmp_path)}) == 150


def test_a_replica_that_is_down_from_the_start_is_left_out(teller: Target, tmp_path: Path) -> None:
    with Server(teller) as server, Server(teller) as other:
        other.die()
        made = distil(teller, make_prompts(10), served(other, server), tmp_path, seed=0)
    assert made.rows == 10


def test_without_any_server_the_rows_are_kept_and_the_command_ends(
    teller: Target, tmp_path: Path
) -> None:
    count = iter(range(10_000))
    server = Server(teller, fault=lambda server, body: "die" if next(count) == 10 else None)
    knobs = {"concurrency": 1, "patience": 0.5}
    with pytest.raises(UserError, match=r"no server has answered .* fails \(ConnectError\)"):
        distil(teller, make_prompts(20), served(server, knobs=knobs), tmp_path, seed=0)
    assert len(read_rows(tmp_path)) == 10
    with Server(teller) as server:  # another address: the rows do not depend on it
        made = distil(teller, make_prompts(20), served(server), tmp_path, seed=0)
        assert len(server.bodies) == 10
    assert made.made == 10 and made.rows == 20


def test_the_key_is_sent_and_stands_nowhere(
    teller: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    secret = "sk-very-secret-1234"
    bad = [None]

    def fault(server: Server, body: dict[str, Any]) -> Any:  # the server repeats it
        bad[0] = bad[0] or body["seed"]
        return 400 if body["seed"] == bad[0] else None

    with Server(teller, key=secret, fault=fault) as server:
        with pytest.raises(UserError, match=r"DRAFTSMITH_API_KEY.* and is not set"):
            distil(teller, make_prompts(4), served(server), tmp_path, seed=0)
        monkeypatch.setenv("DRAFTSMITH_API_KEY", "sk-wrong-5678")
        with pytest.raises(UserError, match=r"refuses access \(401\)") as error:
            distil(teller, make_prompts(4), served(server), tmp_path, seed=0)
        assert "5678" not in str(error.value)
        monkeypatch.setenv("DRAFTSMITH_API_KEY", secret + "\n")
        made = distil(teller, make_prompts(4), served(server), tmp_path, seed=0)
    assert made.rows == 3 and made.dropped == {"refused by the server": 1}
    assert "trouble with [key]" in (tmp_path / "dropped.jsonl").read_text()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    said = capfd.readouterr()
    for text in (written.decode(), said.out, said.err):
        assert "secret" not in text and "5678" not in text


@pytest.mark.parametrize(
    "url", ["http://me:pw@host/v1", "http://host/v1?key=x", "host:80", "ftp://a"]
)
def test_addresses_with_secrets_or_without_sense_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="urls: "):
        served(url)


def test_servers_are_named_where_they_are_asked_and_only_there() -> None:
    for knobs in ({"backend": "openai"}, {"urls": ("http://a/v1",)}):
        with pytest.raises(ValueError, match="urls: give them with backend: openai"):
            make_config(**knobs)


def test_a_wrong_address_is_one_clear_line(teller: Target, tmp_path: Path) -> None:
    with Server(teller) as server:
        config = served(server.url + "/nowhere")
        with pytest.raises(UserError, match=r"nothing there for .* correct|nothing there for"):
            distil(teller, make_prompts(2), config, tmp_path, seed=0)


def test_the_target_is_called_as_the_server_calls_it(teller: Target, tmp_path: Path) -> None:
    with Server(teller, models=("org/one",)) as server:
        distil(teller, make_prompts(2), served(server), tmp_path / "only", seed=0)
        assert {body["model"] for body in server.bodies} == {"org/one"}
    with Server(teller, models=("a", "b")) as server:
        with pytest.raises(UserError, match=r"tiny is not among .*\(a, b\)"):
            distil(teller, make_prompts(2), served(server), tmp_path / "two", seed=0)
        config = served(server, knobs={"model": "b"})
        assert distil(teller, make_prompts(2), config, tmp_path / "named", seed=0).rows == 2


def test_a_server_s_own_beginning_token_is_not_doubled(tmp_path: Path) -> None:
    """A prompt of text has one, and most servers add one (A12)."""
    template = "{{ bos_token }}" + CHATML
    teller = ascii_target()
    doubled = tiny_target(template=template)
    tokenizer = doubled.tokenizer
    tokenizer.bos_token = "<s>"
    teller.tokenizer = tokenizer
    with Server(teller, exact=False, adds_bos=True) as server:
        made = distil(teller, make_prompts(6), served(server), tmp_path, seed=0)
        assert not any(body["prompt"].startswith("<s>") for body in server.bodies)
    assert made.rows == 6 and not made.dropped
    assert all(row["prompt_ids"].count(tokenizer.bos_token_id) == 1 for row in read_rows(tmp_path))


def test_a_server_that_renders_otherwise_is_found_out(teller: Target, tmp_path: Path) -> None:
    other = ascii_target(template=CHATML.replace("Be kind.", "Be rude and short."))
    for exact in (True, False):
        with Server(other, exact=exact) as server:
            config = served(server, knobs={"api": "chat"})
            with pytest.raises(UserError, match=r"of 16 answers none is usable .*prompt"):
                distil(teller, make_prompts(40), config, tmp_path, seed=0)
            assert len(server.bodies) < 30
    assert not dropped_rows(tmp_path)  # they are asked again once the server is right


def test_prompts_that_the_server_refuses_are_counted(teller: Target, tmp_path: Path) -> None:
    prompts = [*make_prompts(5), Prompt("long", "d", ({"role": "user", "content": "x" * 300},))]

    def fault(server: Server, body: dict[str, Any]) -> Any:
        return 400 if len(body["prompt"]) > 300 else None

    with Server(teller, fault=fault) as server:
        made = distil(teller, prompts, served(server), tmp_path, seed=0)
    assert made.dropped == {"refused by the server": 1}
    assert dropped_rows(tmp_path)["long"]["category"] == "d"


def test_top_k_needs_a_server_that_knows_it(teller: Target, tmp_path: Path) -> None:
    with (
        Server(teller, exact=False) as server,
        pytest.raises(UserError, match=r"data\.distil\.top_k: .* knows no top_k"),
    ):
        distil(teller, make_prompts(4), served(server, **MIXED), tmp_path, seed=0)


def test_the_manifest_names_the_backend_and_not_the_addresses(teller: Target) -> None:
    here = manifest(teller, [], make_config(), 0)["distil"]
    there = manifest(teller, [], served("http://a/v1"), 0)["distil"]
    assert "backend" not in here and there["backend"] == "openai"
    assert there["server.api"] == "completions"
    assert there == manifest(teller, [], served("http://b/v1", "http://c"), 0)["distil"]
    assert "http" not in json.dumps(there)


def test_an_interrupted_run_keeps_its_answers(teller: Target, tmp_path: Path) -> None:
    count = iter(range(10_000))

    def fault(server: Server, body: dict[str, Any]) -> Any:
        number = next(count)
        if number == 12:
            os.kill(os.getpid(), signal.SIGINT)
        return 3.0 if number >= 12 else None

    # Shells start what runs in the background with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Server(teller, fault=fault) as server, pytest.raises(KeyboardInterrupt):
            config = served(server, max_new_tokens=4)
            distil(teller, make_prompts(30), config, tmp_path, seed=0)
    finally:
        signal.signal(signal.SIGINT, before)
    there = len(read_rows(tmp_path))
    assert 9 <= there <= 12
    with Server(teller) as server:
        config = served(server, max_new_tokens=4)
        assert distil(teller, make_prompts(30), config, tmp_path, seed=0).made == 30 - there


def test_every_backend_of_the_schema_is_there() -> None:
    annotation = DistilConfig.model_fields["backend"].annotation
    assert set(get_args(annotation)) == set(BACKENDS)


KILLED = """
import sys
from pathlib import Path
import torch
from tests.data.asking import make_prompts
from tests.data.test_served import served
from tests.data.serving import ascii_target
from draftsmith.data.distill import distil

torch.set_num_threads(1)
config = served(sys.argv[2], temperature=1.0, max_new_tokens=6)
distil(ascii_target(), make_prompts(30), config, Path(sys.argv[1]), seed=0)
"""


def test_a_killed_run_goes_on_without_duplicates(teller: Target, tmp_path: Path) -> None:
    with Server(teller) as server:
        config = served(server, temperature=1.0, max_new_tokens=6)
        distil(teller, make_prompts(30), config, tmp_path / "undisturbed", seed=0)
    folder, count = tmp_path / "killed", iter(range(10_000))
    with Server(teller, fault=lambda server, body: 0.01 if next(count) < 20 else 30.0) as server:
        paths = [str(ROOT), *sys.path]
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), server.url],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stderr=subprocess.PIPE,
        )
        deadline, path = time.monotonic() + 120, folder / "rows.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < 10:
            assert process.poll() is None, process.stderr and process.stderr.read().decode()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        if process.stderr:
            process.stderr.close()
    there = path.read_bytes().count(b"\n")
    assert 10 <= there < 30
    with Server(teller) as server:
        config = served(server, temperature=1.0, max_new_tokens=6)
        assert distil(teller, make_prompts(30), config, folder, seed=0).made == 30 - there
        assert len(server.bodies) == 30 - there
    assert path.read_bytes().count(b"\n") == 30
    assert read_rows(folder) == read_rows(tmp_path / "undisturbed")
