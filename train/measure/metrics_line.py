"""The numbers of a line of metrics.jsonl: losses from sums over micro-batches and ranks, speed from the clock."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from draftsmith.train.loss.unroll import UnrollSums, simulated_tau

# Keys of a line that depend on the machine and the moment. mfu: on GPUs with a known peak (`models.sizes`).
THROUGHPUT_KEYS = ("tokens_per_second", "columns_per_second", "data_wait", "memory_gib", "eta_seconds", "mfu")
COUNTED = ("tokens", "columns")  # sums that become rates
NOTHING: Mapping[str, float] = dict.fromkeys(COUNTED, 0.0)


@dataclass
class Tally:
    """Sums over micro-batches. They stay on the device until they are read."""

    loss: torch.Tensor
    columns: torch.Tensor
    reached: torch.Tensor
    correct: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def empty(cls, steps: int, device: torch.device) -> "Tally":
        vectors = ("reached", "correct")
        return cls(**{f.name: torch.zeros(steps if f.name in vectors else (), device=device) for f in fields(cls)})

    def add(self, sums: UnrollSums, tokens: int = 0) -> None:
        self.tokens += tokens
        for name in ("loss", "columns", "reached", "correct"):
            getattr(self, name).add_(getattr(sums, name).detach())

    def merge(self, other: "Tally") -> None:
        for f in fields(self):
            getattr(self, f.name).add_(getattr(other, f.name))

    def of_ranks(self) -> list[dict[str, Any]]:
        """Every rank's sums as numbers, from which `restore` restores them exactly."""
        return gather_object([{f.name: getattr(self, f.name).tolist() for f in fields(self)}])

    def restore(self, of_ranks: Sequence[dict[str, Any]], accelerator: Accelerator) -> None:
        """Gives each rank its own sums back: later ones must be added in the same order. If the number of ranks has
        changed, rank 0 takes all."""
        rank = accelerator.process_index
        same = len(of_ranks) == accelerator.num_processes
        for sums in of_ranks[rank : rank + 1] if same else of_ranks if rank == 0 else ():
            for name, value in sums.items():
                sum_ = getattr(self, name)
                sum_ += torch.tensor(value, device=sum_.device)

    def over_ranks(self, accelerator: Accelerator) -> dict[str, Any]:
        """The counted sums over all ranks; if any column counted, also loss per column, accuracy per unroll step and
        simulated tau."""
        reduced: Any = {f.name: accelerator.reduce(getattr(self, f.name), "sum") for f in fields(self)}
        total = {name: value.tolist() for name, value in reduced.items()}
        counts = {key: total[key] for key in COUNTED}
        if not counts["columns"]:  # every step was skipped
            return counts
        accuracy = [c / r if r else 0.0 for c, r in zip(total["correct"], total["reached"], strict=True)]
        return counts | {
            "loss": total["loss"] / total["columns"],
            "accuracy": [round(value, 5) for value in accuracy],
            "simulated_tau": round(simulated_tau(accuracy), 4),
        }


class ThroughputMeter:
    """Measures speed, waiting and memory between two lines. It is started with the first step and after every reading.
    `peak_tokens_per_second` is that of all processes' devices together; None: no mfu."""

    def __init__(self, device: torch.device, peak_tokens_per_second: float | None = None):
        self.device, self.peak_tokens_per_second = device, peak_tokens_per_second
        self.start()

    def start(self, counted: Mapping[str, float] = NOTHING) -> None:
        """`counted`: sums from before this start, by the run that this one resumes or before a break."""
        self.began, self.waited = time.perf_counter(), 0.0
        self.counted, self.steps = counted, 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For work during which the device idles: reading rows and laying them out."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def read(self, counted: Mapping[str, float], steps_left: int) -> dict[str, Any]:
        """The throughput keys of a line, from sums over all ranks. data_wait and memory are this rank's. eta_seconds
        covers steps only, without validation, replay and saving."""
        # On a CPU the process's memory now; on an accelerator the peak of allocated memory so far.
        cuda = self.device.type == "cuda"
        used = torch.cuda.max_memory_allocated(self.device) if cuda else psutil.Process().memory_info().rss
        seconds = time.perf_counter() - self.began
        rate = {key: (counted[key] - self.counted[key]) / seconds for key in COUNTED}
        measured = {
            "tokens_per_second": round(rate["tokens"]),
            "columns_per_second": round(rate["columns"]),
            "data_wait": round(self.waited / seconds, 4),
            "memory_gib": round(used / 2**30, 3),
            "eta_seconds": round(steps_left * seconds / max(1, self.steps), 1),
        }
        peak = self.peak_tokens_per_second
        return measured if peak is None else measured | {"mfu": round(rate["tokens"] / peak, 4)}
