"""What holds for every test: this checkout's code, no network, and no quiet skips."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the Hub's client

from pathlib import Path

import pytest
import torch

import draftsmith.train

ROOT = Path(__file__).resolve().parent.parent
# An editable install points at the checkout where it was made: a second clone would test the first.
FOUND = Path(str(draftsmith.train.__file__)).resolve().parent.parent
assert FOUND == ROOT, f"the tests of {ROOT} would run the code of {FOUND}; run `make dev` here"

if "PYTEST_XDIST_WORKER" in os.environ:  # one process a core: threads would wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
    torch.set_num_threads(1)

quiet: list[str] = []  # tests that were skipped though nothing but a package was missing


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--no-skips`: the environment is complete, so a skip (but for a missing GPU) is a failure."""
    parser.addoption("--no-skips", action="store_true", help="fail on skips that need no GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device here"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember skipped tests."""
    if report.skipped and "gpu" not in report.keywords and not hasattr(report, "wasxfail"):
        quiet.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Remember skipped modules."""
    if report.skipped:
        quiet.append(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was skipped."""
    if quiet and terminalreporter.config.getoption("--no-skips"):
        terminalreporter.write_line(f"skipped, and --no-skips forbids it: {', '.join(quiet)}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A skip is a failure under `--no-skips`."""
    if quiet and session.config.getoption("--no-skips") and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a tiny random target with a chat template."""
    from tests.tiny import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("target")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
