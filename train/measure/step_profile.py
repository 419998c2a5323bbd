"""Where the time of a step goes: `--profile N` of the training scripts.

Traces of N steps, made by torch's profiler after a warm-up, in <output_dir>/profile: for every process a trace to look
at in https://ui.perfetto.dev, in which the parts of a step have names, and a table of what took longest.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP = 2  # steps: kernels are chosen, memory is fetched
ROWS = 25  # of the table


class StepProfile:
    """Is told of every step's end.

    Args:
        steps: to record.
        say: prints, on one process.
    """

    def __init__(self, steps: int, directory: Path, rank: int, say: Callable[[str], object] = print):
        self.steps, self.directory, self.rank, self.say = steps, directory, rank, say
        self._profile: Any = None
        self.first = 0
        self.recorded = False

    def start(self, first: int, last: int) -> None:
        """
        Args:
            first, last: steps of this run, from 0; of a run with too few of them the warm-up is shorter.
        """
        warm_up = max(0, min(WARM_UP, last - first - self.steps))
        self.first = first + warm_up
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a warm-up of no steps
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
        """Writes what there is, if the run ends before all is recorded."""
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
        table.write_text(recorded.key_averages().table(sort_by=by, row_limit=ROWS) + "\n")
        self.say(
            f"profile: {trace}, from step {self.first + 1} on, for https://ui.perfetto.dev; what took longest: {table}"
        )
