"""Who of several processes is alive, and where: so that a time-out names the one that caused it.

Every process writes what it does into `ranks/` in the run's folder every few seconds, from a thread
of its own: a file that is no longer written belongs to a process that is dead. The first process
watches the others, the second one the first.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from torch.distributed import DistError

from draftsmith.recipes.files import write_text

EVERY = 2.0  # seconds between two signs of life
SILENT = 4 * EVERY  # from then on a process counts as dead
Signs = dict[int, dict[str, Any]]  # what each process wrote last, by its rank


class Pulse:
    """A process's signs of life. With one process nothing is written."""

    def __init__(self, folder: Path, rank: int, ranks: int, *, patience: float) -> None:
        self.folder, self.rank, self.ranks, self.patience = folder, rank, ranks, patience
        self.now: dict[str, Any] = {"doing": "starting", "step": 0, "since": time.time()}
        self.ended = threading.Event()
        self.told: set[tuple[int, int]] = set()  # (rank, step) of what was said
        self.thread = threading.Thread(target=self.beat, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        if self.ranks > 1:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()
            self.path(self.rank).unlink(missing_ok=True)
            with suppress(OSError):  # the others are still there
                self.folder.rmdir()

    def does(self, what: str, step: int) -> None:
        """From now on this process does this."""
        self.now = {"doing": what, "step": step, "since": time.time()}

    def beat(self) -> None:
        """The thread."""
        while not self.ended.is_set():
            self.write()
            late = self.late() if self.rank < 2 else None
            if late is not None:
                print(f"draftsmith: warning: {late}", flush=True)
            self.ended.wait(EVERY)

    def write(self) -> None:
        """One sign of life."""
        sign = {
            **self.now,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "written": time.time(),
        }
        try:
            write_text(self.path(self.rank), json.dumps(sign) + "\n")
        except OSError:
            return  # a full disk is somebody else's to tell

    def path(self, rank: int) -> Path:
        """Where a process writes."""
        return self.folder / f"{rank:05d}.json"

    def others(self) -> Signs:
        """What the other processes wrote last."""
        found: Signs = {}
        for rank in range(self.ranks):
            try:
                if rank != self.rank:
                    found[rank] = json.loads(self.path(rank).read_bytes())
            except (OSError, ValueError):
                continue
        return found

    def late(self) -> str | None:
        """Who keeps this process waiting for long (a tenth of the patience); said once a step."""
        now, limit = time.time(), self.patience / 10
        if self.now["doing"] != "waiting" or now - self.now["since"] < limit:
            return None
        for rank, sign in self.others().items():
            watched = rank == 0 or self.rank == 0
            behind = sign["doing"] != "waiting" or now - sign["written"] > SILENT
            key = rank, int(self.now["step"])
            if watched and behind and key not in self.told:
                self.told.add(key)
                return f"process {self.rank} waits for {describe(rank, sign, now)}"
        return None

    def explain(self, error: Exception) -> str | None:
        """What an error of a collective means, in one line; None for any other error."""
        if self.ranks < 2 or not is_collective(error):
            return None
        now, signs = time.time(), self.others()
        dead = [rank for rank, sign in signs.items() if is_dead(sign, now)]
        behind = [rank for rank, sign in signs.items() if sign["doing"] != "waiting"]
        blamed = dead or behind or list(signs)
        named = "; ".join(describe(rank, signs[rank], now) for rank in blamed)
        lost = sorted(set(range(self.ranks)) - signs.keys() - {self.rank})
        named += "".join(f"; process {rank}, which has ended or never began" for rank in lost)
        reason = str(error).strip().splitlines()[0]
        return (
            f"process {self.rank} lost {named.removeprefix('; ')} at step {self.now['step']}; look "
            f"at what it printed; the same command goes on from the last checkpoint ({reason})"
        )


def is_collective(error: Exception) -> bool:
    """Whether processes could not talk to each other: NCCL's errors have a class, gloo's a word."""
    return isinstance(error, DistError) or "gloo" in str(error).lower()


def is_dead(sign: dict[str, Any], now: float) -> bool:
    """Whether a process is known to be gone: nothing of it on this machine, or long silent."""
    if now - sign["written"] > SILENT:
        return True
    if sign["host"] != socket.gethostname():
        return False
    try:
        state = Path(f"/proc/{sign['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return Path("/proc/self/stat").exists()
    return state in "ZX"


def describe(rank: int, sign: dict[str, Any], now: float) -> str:
    """A process and what it was last known to do."""
    dead = is_dead(sign, now)
    heard = f"dead or stuck, last heard of {now - sign['written']:.0f} s ago" if dead else "alive"
    return (
        f"process {rank} (pid {sign['pid']} on {sign['host']}, {heard}; {sign['doing']} at step "
        f"{sign['step']} for {now - sign['since']:.0f} s)"
    )
