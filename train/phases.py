"""Where a step's time and memory go: what it does, phase by phase."""

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import record_function


@dataclass
class Spent:
    """On one phase, in all steps together; `peak` is the most that was held in any of them."""

    seconds: float = 0.0
    peak: int = 0  # bytes: a GPU's allocated memory, else what of the process is resident


@dataclass
class Phases:
    """Off, it does nothing. On, every phase waits for the device before and after."""

    device: torch.device
    on: bool = False
    spent: dict[str, Spent] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step."""
        if not self.on:
            yield
            return
        self.begin()
        began = time.perf_counter()
        with record_function(name):
            yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spent = self.spent.setdefault(name, Spent())
        spent.seconds += time.perf_counter() - began
        spent.peak = max(spent.peak, self.peak())

    def begin(self) -> None:
        """Start the peak anew."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
            reset_peak()

    def peak(self) -> int:
        """Since `begin`, in bytes; 0 where nobody can tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resident("VmHWM") if sys.platform == "linux" else 0


def resident(key: str) -> int:
    """Bytes resident now (VmRSS) or at most so far (VmHWM), on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def reset_peak() -> bool:
    """Start the peak anew; False where the kernel does not let us (the first step then tells)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
