"""Experiment trackers get every line of metrics.jsonl. The trackers themselves are accelerate's.

    tensorboard     <output_dir>/tensorboard           tensorboard --logdir runs shows all runs side by side
    wandb, trackio  project draftsmith, a run named after output_dir
    others          comet_ml, mlflow, clearml, dvclive, aim, swanlab: project draftsmith, with their own defaults

A run that is resumed after a kill continues in the same place. TensorBoard hides lines of the killed run after its last
checkpoint. wandb and trackio get the same run name again, and trackio shows the repeated steps twice.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import tracking

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.schema import Recipe

PROJECT = "draftsmith"
PACKAGES = {"comet_ml": "comet-ml"}  # pip's names, where they differ


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
        """
        Args:
            first: number of steps done. TensorBoard hides later steps that an earlier process logged.
            run: names the run, in all its processes.
        """
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
