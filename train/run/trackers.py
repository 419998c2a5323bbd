"""Experiment trackers get every line of metrics.jsonl. The trackers themselves are accelerate's.

    tensorboard     <output_dir>/tensorboard           tensorboard --logdir runs shows all runs side by side
    wandb, trackio  project draftsmith, a run named after output_dir
    others          comet_ml, mlflow, clearml, dvclive, aim, swanlab: project draftsmith, with their own defaults

A run that is resumed after a kill continues in the same place. TensorBoard hides lines of the killed run after its last
checkpoint. wandb and trackio get the same run name again, and trackio shows the repeated steps twice.
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import tracking

from draftsmith.recipes.errors import UserError

PROJECT = "draftsmith"
PACKAGES = {"comet_ml": "comet-ml"}  # pip's names, where they differ


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError if a tracker is unknown or its package is not installed."""
    known = sorted(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()}
    problems = []
    for name in dict.fromkeys(names):
        if name not in known:
            problems.append(f"train.trackers: {name!r} is unknown; known are {', '.join(known)}")
        elif name not in installed:
            package = PACKAGES.get(name, name)
            problems.append(f"train.trackers: {name} is not installed: pip install {package}, or leave it out")
    if problems:
        raise UserError(problems)


def new_run() -> str:
    """A random name by which trackers find a run again."""
    return uuid.uuid4().hex[:8]


class Trackers:
    """The trackers of one run, used by rank 0 only.

    Args:
        names: as `check_trackers` passes them.
        recipe_yaml, recipe: the run's settings, as YAML and as nested values, which trackers show.
    """

    def __init__(self, names: Sequence[str], output_dir: Path, recipe_yaml: str, recipe: Mapping[str, Any]):
        self.names = list(dict.fromkeys(names))
        self.output_dir, self.recipe_yaml, self.recipe = output_dir, recipe_yaml, dict(recipe)
        self._running: list[tracking.GeneralTracker] = []

    def start(self, first: int, run: str) -> None:
        """
        Args:
            first: number of steps done. TensorBoard hides later steps that an earlier process logged.
            run: the run's name, from `new_run`.
        """
        for name in self.names:
            kind = tracking.LOGGER_TYPE_TO_CLASS[name]
            label = f"{self.output_dir.name}-{run}"
            if name == "tensorboard":
                tracker = kind("tensorboard", str(self.output_dir), purge_step=first + 1)
            elif name == "wandb":
                tracker = kind(PROJECT, name=self.output_dir.name, id=label, resume="allow", dir=str(self.output_dir))
            elif name == "trackio":
                tracker = kind(PROJECT, name=label, resume="allow")
            elif kind.requires_logging_directory:
                tracker = kind(PROJECT, str(self.output_dir / name))
            else:
                tracker = kind(PROJECT)
            tracker.start()
            self._running.append(tracker)
            if name != "tensorboard":
                tracker.store_init_configuration(self.recipe)
            elif first == 0:  # accelerate would open a second run for it at every start
                tracker.tracker.add_text("recipe", f"```yaml\n{self.recipe_yaml}\n```")

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
        self._running.clear()
