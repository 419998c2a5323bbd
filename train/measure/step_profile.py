"""Where the time of a step goes: `--profile N` of the training scripts.

After a warm-up torch's profiler traces N steps. For every process it writes into <output_dir>/profile a trace for
https://ui.perfetto.dev, in which the parts of a step have names, and a table of the slowest operators.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP_STEPS = 2  # in which kernels are chosen and memory is allocated
TABLE_ROWS = 25


class StepProfile:
    """Records steps. `step` is called at the end of each one.

    Args:
        steps: how many to record.
        say: prints a message on one process.
    """

    def __init__(self, steps: int, directory: Path, rank: int, say: Callable[[str], object] = print):
        self.steps, self.directory, self.rank, self.say = steps, directory, rank, say
        self._profile: Any = None
        self.first = 0
        self.recorded = False

    def start(self, first: int, last: int) -> None:
        """
        Args:
            first: the first step of this run, from 0; last: the step behind its last one. If there are too few steps,
                the warm-up is shorter.
        """
        warm_up = max(0, min(WARM_UP_STEPS, last - first - self.steps))
        self.first = first + warm_up
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of a warm-up without steps
            steps = schedule(wait=0, warmup=warm_up, active=self.steps, repeat=1)
        self._profile = profile(
            activities=activities,
            schedule=steps,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        self._profile.start()

    def step(self) -> None:
        if self._profile is not None:
            self._profile.step()
            if self.recorded:
                self.finish()

    def finish(self) -> None:
        """Stops. Writes the recorded steps if the run ends early."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, recorded: Any) -> None:
        if self.recorded:
            return
        self.recorded = True
        self.directory.mkdir(parents=True, exist_ok=True)
        trace = self.directory / f"rank{self.rank}.trace.json.gz"
        table = trace.with_name(f"rank{self.rank}.txt")
        recorded.export_chrome_trace(str(trace))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table.write_text(recorded.key_averages().table(sort_by=by, row_limit=TABLE_ROWS) + "\n")
        self.say(
            f"profile: {trace}, from step {self.first + 1} on, for https://ui.perfetto.dev; slowest operators: {table}"
        )
