"""How fast a run is and what it takes, between two lines of metrics.jsonl."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from draftsmith.models.costs import PEAK_FLOPS_PER_SECOND, device_here

# Of a line, what hangs on the machine and the hour. mfu is there on GPUs whose peak is known (`models.costs`).
CLOCK_KEYS = ("tokens_per_second", "columns_per_second", "data_wait", "memory_gib", "eta_seconds", "mfu")
COUNTED = ("tokens", "columns", "flops")  # what is told by the second
NOTHING: Mapping[str, float] = dict.fromkeys(COUNTED, 0.0)


def peak_flops_per_second(device: torch.device) -> float | None:
    """Of dense products in bfloat16, as its maker says; None: not known."""
    return device_here(str(device)).peak(PEAK_FLOPS_PER_SECOND) if device.type == "cuda" else None


class Clock:
    """Starts with the first step, and again after each reading.

    Args:
        device: whose memory is told; a CPU's is what the process holds.
        peak: of all processes' devices together, in operations a second; None: no mfu is told.
    """

    def __init__(self, device: torch.device, peak: float | None = None):
        self.device, self.peak = device, peak
        self.start()

    def start(self, counted: Mapping[str, float] = NOTHING) -> None:
        """
        Args:
            counted: already, by a run that this one goes on with, or before a break.
        """
        self.began, self.waited = time.perf_counter(), 0.0
        self.counted, self.steps = counted, 0

    def step(self) -> None:
        self.steps += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For what is done while the device has nothing to do: reading and laying out rows."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def read(self, counted: Mapping[str, float], steps_left: int) -> dict[str, Any]:
        """Of what all ranks counted since the start; data_wait and memory are this rank's. The time that is left is
        that of steps: validation, replay and saving come on top."""
        seconds = time.perf_counter() - self.began
        rate = {key: (counted[key] - self.counted[key]) / seconds for key in COUNTED}
        told = {
            "tokens_per_second": round(rate["tokens"]),
            "columns_per_second": round(rate["columns"]),
            "data_wait": round(self.waited / seconds, 4),
            "memory_gib": round(self._bytes() / 2**30, 3),
            "eta_seconds": round(steps_left * seconds / max(1, self.steps), 1),
        }
        return told if self.peak is None else told | {"mfu": round(rate["flops"] / self.peak, 4)}

    def _bytes(self) -> int:
        """Most that was allocated on an accelerator so far; what the process holds now on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return psutil.Process().memory_info().rss
