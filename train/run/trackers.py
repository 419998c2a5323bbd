"""Experiment trackers: what metrics.jsonl says, told elsewhere too. The trackers themselves are accelerate's.

    tensorboard     <output_dir>/tensorboard           tensorboard --logdir runs shows all runs side by side
    wandb, trackio  project draftsmith, a run named after output_dir
    others          comet_ml, mlflow, clearml, dvclive, aim, swanlab: project draftsmith, as they set themselves up

A run that goes on after a kill goes on in the same place: TensorBoard hides what the killed run logged behind its last
checkpoint; wandb and trackio are given the run's name of before, and trackio shows the steps behind it twice.
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import tracking

from draftsmith.recipes.errors import UserError

PROJECT = "draftsmith"
PACKAGES = {"comet_ml": "comet-ml"}  # where pip's name is another


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError where a tracker is unknown, or its package not installed."""
    known = sorted(tracking.LOGGER_TYPE_TO_CLASS)
    installed = {str(name) for name in tracking.get_available_trackers()}
    problems = []
    for name in dict.fromkeys(names):
        if name not in known:
            problems.append(f"train.trackers: {name!r} is none of {', '.join(known)}")
        elif name not in installed:
            package = PACKAGES.get(name, name)
            problems.append(f"train.trackers: {name} is not installed: pip install {package}, or leave it out")
    if problems:
        raise UserError(problems)


def new_run() -> str:
    """A name by which a tracker finds this run again."""
    return uuid.uuid4().hex[:8]


class Trackers:
    """Those of one run; of several processes rank 0 has them.

    Args:
        names: checked.
        recipe: as YAML and as nested values, for whoever shows what a run was made with.
    """

    def __init__(self, names: Sequence[str], output_dir: Path, recipe_yaml: str, recipe: Mapping[str, Any]):
        self.names = list(dict.fromkeys(names))
        self.output_dir, self.recipe_yaml, self.recipe = output_dir, recipe_yaml, dict(recipe)
        self._running: list[tracking.GeneralTracker] = []

    def start(self, first: int, run: str) -> None:
        """
        Args:
            first: steps that are done; what an earlier process told of later ones is void.
            run: `new_run` of the first start.
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
            elif first == 0:  # accelerate would open a second run for it, anew at every start
                tracker.tracker.add_text("recipe", f"```yaml\n{self.recipe_yaml}\n```")

    def log(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl; lists become one value an entry, what is null is left out."""
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
