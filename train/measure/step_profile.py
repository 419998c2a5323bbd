"""Where the time of a step goes: `--profile N` of the training scripts.

For every process it writes into <output_dir>/profile a trace for https://ui.perfetto.dev, in which the parts of a step
have names, and a table of the slowest operators.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP_STEPS = 2  # in which kernels are chosen and memory is allocated
TABLE_ROWS = 25


def tracer(count: int, directory: Path, rank: int, say: Callable[[str], object], first: int, last: int) -> profile:
    """A context for steps `first` (from 0) to `last` - 1, with a method `step` to be called behind each of them. It
    traces `count` steps after a warm-up, which is shorter if there are too few steps. `say` prints on one process."""
    warm_up = max(0, min(WARM_UP_STEPS, last - first - count))

    def write(recorded: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        trace = directory / f"rank{rank}.trace.json.gz"
        table = trace.with_name(f"rank{rank}.txt")
        recorded.export_chrome_trace(str(trace))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table.write_text(recorded.key_averages().table(sort_by=by, row_limit=TABLE_ROWS) + "\n")
        say(
            f"profile: {trace}, from step {first + warm_up + 1} on, for https://ui.perfetto.dev; slowest "
            f"operators: {table}"
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of a warm-up without steps
        steps = schedule(wait=0, warmup=warm_up, active=count, repeat=1)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    return profile(activities=activities, schedule=steps, on_trace_ready=write, record_shapes=True, profile_memory=True)
