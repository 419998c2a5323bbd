"""How fast a run is and what it takes, between two lines of metrics.jsonl."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

# Of a line, what hangs on the machine and the hour.
CLOCK_KEYS = ("tokens_per_second", "columns_per_second", "data_wait", "memory_gib")


class Clock:
    """Starts with the first step, and again after each reading.

    Args:
        device: whose memory is told; a CPU's is what the process holds.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.start()

    def start(self, tokens: int = 0, columns: int = 0) -> None:
        """
        Args:
            tokens, columns: counted already, by a run that this one goes on with.
        """
        self.began, self.waited = time.perf_counter(), 0.0
        self.tokens, self.columns = tokens, columns

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For what is done while the device has nothing to do: reading and laying out rows."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def read(self, tokens: int, columns: int) -> dict[str, Any]:
        """Of all ranks' tokens and counted columns since the start; data_wait is a share of this rank's time."""
        seconds = time.perf_counter() - self.began
        return {
            "tokens_per_second": round((tokens - self.tokens) / seconds),
            "columns_per_second": round((columns - self.columns) / seconds),
            "data_wait": round(self.waited / seconds, 4),
            "memory_gib": round(self._bytes() / 2**30, 3),
        }

    def _bytes(self) -> int:
        """Most that was allocated on an accelerator so far; what the process holds now on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return psutil.Process().memory_info().rss
