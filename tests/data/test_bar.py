"""Progress in a log: lines now and then, with a rate and the time left that are true."""

import sys

import pytest

from draftsmith.data import bar
from draftsmith.data.bar import Bar, span


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(bar, "time", clock)
    return clock


def test_a_log_has_a_line_now_and_then_and_one_at_the_end(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Bar("measure", 100, "answers") as work:
        for _ in range(100):
            clock.now += 2
            work.advance()
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == "" and "\r" not in said.err
    assert len(lines) == 200 // 16 + 1
    assert lines[0] == "measure: 8 of 100 answers, 0.5 a second, 3 min left"
    assert lines[-1] == "measure: 100 of 100 answers, 0.5 a second, in 3 min"


def test_what_was_done_before_took_no_time(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Bar("distil", 100, "prompts", done=40)
    work.skip(20)
    clock.now += 20
    work.note("loss 1.5")
    work.reach(70)
    work.close()
    line = "distil: 70 of 100 prompts, 0.5 a second, 60 s left, loss 1.5"
    assert capsys.readouterr().err.splitlines() == [line, line]


def test_nothing_done_promises_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work = Bar("train", 10, "steps", done=10)
    work.close()
    Bar("train", 0, "steps").close()
    assert capsys.readouterr().err == "train: 10 of 10 steps\ntrain: 0 of 0 steps\n"


def test_other_processes_are_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("train", 2, "steps", quiet=True) as work:
        clock.now += 100
        work.reach(2)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_that_lines_do_not_break(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("train", 4, "steps") as work:
        work.skip(1)
        work.note("loss 1.5")
        work.reach(4)
        work.say("a line")
    said = capsys.readouterr()
    assert said.out == "a line\n"
    assert "train: 100%" in said.err and "4/4 steps" in said.err and "loss 1.5" in said.err


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (99, "99 s"), (120, "2 min"), (7200, "2.0 h")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text
