"""The step benchmark's workers, small and in this process."""

import io
import json
import sys

import pytest

from draftsmith.train.bench_step import main, summary

SMALL = ["--tokens", "24", "--hidden", "8", "--vocab", "64", "--heads", "2", "--chunk", "4"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("version", ["whole", "chunked"])
def test_a_worker_answers_every_line_with_a_measured_step(
    version: str,
    loss: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("step\nstep\n"))
    main([*SMALL, "--worker", version, loss, dtype])
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers) == 2
    assert all(answer["seconds"] > 0 and answer["peak"] >= 0 for answer in answers)


def test_summary_takes_the_highest_peak_and_forgets_the_warm_up() -> None:
    turns = [
        {"peak": peak, "seconds": seconds, "cpu_seconds": 2 * seconds}
        for peak, seconds in [(9.0, 100.0), (1.0, 2.0), (2.0, 4.0), (3.0, 3.0)]
    ]
    assert summary(turns) == {"peak": 9.0, "seconds": 3.0, "cpu_seconds": 6.0}
