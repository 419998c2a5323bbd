"""What a run logs: metrics.jsonl has one line for every logged step, exactly once, however often the run is killed.
Experiment trackers, which are accelerate's, get the same lines.

    tensorboard     <output_dir>/tensorboard           tensorboard --logdir runs shows all runs side by side
    wandb, trackio  project draftsmith, a run named after output_dir
    others          comet_ml, mlflow, clearml, dvclive, aim, swanlab: project draftsmith, with their own defaults

A run that is resumed after a kill continues in the same place. TensorBoard hides lines of the killed run after its last
checkpoint. wandb and trackio get the same run name again, and trackio shows the repeated steps twice.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import tracking
from torch.profiler import ProfilerActivity, profile, schedule

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import append_line, atomic_write
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.schema import Recipe

PROJECT = "draftsmith"
WARM_UP_STEPS = 2  # in which kernels are chosen and memory is allocated
TABLE_ROWS = 25
PACKAGES = {"comet_ml": "comet-ml"}  # pip's names, where they differ


class MetricsLog:
    """The file. Only rank 0 may use it."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: dict[str, Any]) -> None:
        """Raises UserError where the disk is full."""
        with self.path.open("ab", buffering=0) as file:
            append_line(file, self.path, (json.dumps(line) + "\n").encode())

    def drop_after(self, step: int) -> None:
        """Removes lines of later steps, which a killed run logged and a resumed one logs again, and damaged lines."""
        lines = self._lines()
        if damaged := [number for number, (_, at, _) in enumerate(lines, start=1) if at is None]:
            print(f"{self.path}: damaged lines dropped: {len(damaged)}, the first is line {damaged[0]}")
        kept = [line for line, at, _ in lines if at is not None and at <= step]
        atomic_write(self.path, b"".join(line + b"\n" for line in kept))

    def values(self, key: str) -> dict[int, float]:
        """The values of this key by step, of the lines that have it."""
        return {at: parsed[key] for _, at, parsed in self._lines() if at is not None and parsed.get(key) is not None}

    def _lines(self) -> list[tuple[bytes, int | None, dict[str, Any]]]:
        """(line, its step or None if it is damaged, its object)."""
        found = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            try:
                parsed = json.loads(line.decode())
                found.append((line, int(parsed["step"]), parsed))
            except (ValueError, LookupError, TypeError, RecursionError):
                found.append((line, None, {}))
        return found


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError if a tracker is unknown or its package is not installed."""
    known = sorted(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()}
    problems = []
    for name in names:
        if name not in known:
            problems.append(f"train.trackers: {name!r} is unknown; known are {', '.join(known)}")
        elif name not in installed:
            package = PACKAGES.get(name, name)
            problems.append(f"train.trackers: {name} is not installed: pip install {package}, or leave it out")
    if problems:
        raise UserError(problems)


class Trackers:
    """The trackers of one run, used by rank 0 only."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self._running: list[tracking.GeneralTracker] = []

    def start(self, first: int, run: str) -> None:
        """`first` steps were done: TensorBoard hides later ones that an earlier process of this run logged."""
        output = Path(self.recipe.output_dir)
        for name in dict.fromkeys(self.recipe.train.trackers):
            kind = tracking.LOGGER_TYPE_TO_CLASS[name]
            label = f"{output.name}-{run}"
            if name == "tensorboard":
                tracker = kind("tensorboard", str(output), purge_step=first + 1)
            elif name == "wandb":
                tracker = kind(PROJECT, name=output.name, id=label, resume="allow", dir=str(output))
            elif name == "trackio":
                tracker = kind(PROJECT, name=label, resume="allow")
            else:
                tracker = kind(PROJECT, *[str(output / name)] * kind.requires_logging_directory)
            tracker.start()
            self._running.append(tracker)
            if name != "tensorboard":
                tracker.store_init_configuration(self.recipe.model_dump())
            elif first == 0:  # accelerate would open a second run for it at every start
                tracker.tracker.add_text("recipe", f"```yaml\n{dump_recipe(self.recipe)}\n```")

    def log(self, line: Mapping[str, Any]) -> None:
        """Logs a line of metrics.jsonl, with one value for each entry of a list, without nulls."""
        flat = {
            f"{key}/{i}" if isinstance(value, list) else key: item
            for key, value in line.items()
            for i, item in enumerate(value if isinstance(value, list) else [value])
            if item is not None and key != "step"
        }
        for tracker in self._running:
            tracker.log(flat, step=line["step"])

    def finish(self) -> None:
        for tracker in self._running:
            tracker.finish()


def tracer(count: int, directory: Path, rank: int, say: Callable[[str], object], first: int, last: int) -> profile:
    """`--profile N`: a context for steps `first` (from 0) to `last` - 1, with a method `step` to be called behind each
    of them. It traces `count` steps after a warm-up, which is shorter if there are too few steps, into a trace for
    https://ui.perfetto.dev, in which the parts of a step have names, and a table of the slowest operators. `say` prints
    on one process."""
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
