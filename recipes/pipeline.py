"""Do what is still missing of a recipe, from prompts to a measured drafter.

    draftsmith run recipes/demo.yaml
    draftsmith run recipes/demo.yaml output_dir=runs/try data.max_prompts=40 train.max_steps=20 train.warmup_steps=2
    draftsmith run recipes/demo.yaml --plan             # which stages are done, and what the others would do

The stages are `draftsmith regenerate`, `rank-vocab`, `train` and `evaluate` (with `capture` where the recipe names
data.states, and C2T's two where a tree uses the classifier that the recipe trains). Each is a command of its own and
goes on where it was stopped, and so does this one: after Ctrl-C or a kill, the same command continues.

<output_dir>/stages.json remembers what each stage was made from. A stage runs again when the part of the recipe that it
reads has changed, or a file that it reads or wrote. To run one regardless, call it by name.
"""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.recipes.benchmark_prompts import benchmark_of
from draftsmith.recipes.cli import parse_command
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.stages import INSIDE_RUN, stages_of

REMEMBERED = "stages.json"
REWRITTEN = ("train", "evaluate")
"""Stages that write their files anew whenever they end; the others may find that nothing is left to do."""


def main() -> None:
    command = parse_command(__doc__)
    recipe, stages = command.recipe, stages_of(command.recipe)
    _show(recipe, stages)
    words = [command.recipe_path, *command.overrides, *["--plan"] * command.plan]
    ran = False
    for number, stage in enumerate(stages, start=1):
        if is_done(recipe, stage) and not (command.plan and ran):  # a plan takes the stages before it as done
            continue
        ran = True
        print(f"\n[{number}/{len(stages)}] draftsmith {stage} {shlex.join(words)}", flush=True)
        started = time.time_ns()
        if code := _call([stage, *words]):
            sys.exit(code)
        if command.plan:
            continue
        if not _is_written(recipe, stage, started if stage in REWRITTEN else 0):
            print(f"{stage} was stopped before its end; the same command goes on", file=sys.stderr)
            sys.exit(1)
        _remember(recipe, stage)
    if not ran:
        print(
            f"nothing is left to do (report: {recipe.eval_out / 'report.html'}); to run a stage again, call it by name"
        )


def is_done(recipe: Recipe, stage: str) -> bool:
    """Whether a stage ended well, from what the recipe and the files say now."""
    return _remembered(recipe).get(stage) == _state(recipe, stage) and _is_written(recipe, stage)


def _show(recipe: Recipe, stages: list[str]) -> None:
    print(f"{recipe.output_dir}:")
    all_done = True
    for stage in stages:
        all_done = all_done and is_done(recipe, stage)
        files = ", ".join(path.name for path in _writes(recipe, stage))
        print(f"  {'done' if all_done else 'to do':<6} {stage:<12} {files}")


def _call(words: list[str]) -> int:
    """Runs a stage as a process of its own; its exit status. Signals reach it, and it decides how to end."""
    arguments = [sys.executable, "-m", "draftsmith.recipes.console", *words]
    process = subprocess.Popen(arguments, env=os.environ | {INSIDE_RUN: "1"})
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:  # the terminal sends it to the stage, too
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


# What a stage is made from.


def _reads(recipe: Recipe, stage: str) -> list[Path]:
    prompts = _files(recipe.eval.prompts)
    rivals = recipe.eval.also
    drafters = [recipe.eval_drafter_dir, *(Path(rival.drafter) for rival in rivals if rival.drafter)]
    trees = [recipe.eval.tree, *(rival.tree for rival in rivals)]
    classifiers = [Path(tree.c2t.classifier) for tree in trees if tree.c2t.classifier]
    return {
        "regenerate": [*_files(recipe.data.prompts), *prompts],
        "rank-vocab": [recipe.conversations_path, *_files([each.source for each in recipe.data.ranking.sources])],
        "capture": [recipe.conversations_path],
        "train": [recipe.conversations_path, recipe.draft_vocab_path],
        "label-trees": [
            recipe.eval_drafter_dir / "model.safetensors",
            Path(recipe.labels.answers or recipe.conversations_path),
        ],
        "train-c2t": [recipe.labelled_trees_dir / "manifest.json"],
        "evaluate": [
            *(folder / "model.safetensors" for folder in [*drafters, *classifiers]),
            recipe.token_counts_path,
            *prompts,
        ],
    }[stage]


def _writes(recipe: Recipe, stage: str) -> list[Path]:
    return {
        "regenerate": [recipe.conversations_path],
        "rank-vocab": [recipe.draft_vocab_path],
        "capture": [recipe.states_dir / "manifest.json"],
        "train": [recipe.drafter_dir / "model.safetensors"],
        "label-trees": [recipe.labelled_trees_dir / "manifest.json"],
        "train-c2t": [recipe.classifier_dir / "model.safetensors"],
        "evaluate": [
            (recipe.eval_out / "replay" if recipe.eval.mode == "replay" else recipe.eval_out) / "acceptance.json"
        ],
    }[stage]


def _settings(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The sections of the recipe that a stage reads."""
    sections = {
        "regenerate": ("target", "data"),
        "rank-vocab": ("target", "data", "drafter"),
        "capture": ("target", "data", "drafter"),
        "train": ("target", "data", "drafter", "train"),
        "label-trees": ("target", "data", "eval", "labels"),
        "train-c2t": ("classifier",),
        "evaluate": ("target", "data", "eval"),
    }[stage]
    return recipe.model_dump(include=set(sections))


def _state(recipe: Recipe, stage: str) -> str:
    """sha256 over settings, and size and time of the files that a stage reads and writes."""
    target = Path(recipe.target.model)
    model = sorted([*target.glob("*.json"), *target.glob("*.safetensors")]) if target.is_dir() else []
    files = [*model, *_reads(recipe, stage), *_writes(recipe, stage)]
    stats = [(str(file), *_stat(file)) for file in files]
    text = json.dumps([_settings(recipe, stage), stats], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _stat(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _files(sources: str | list[str] | None) -> list[Path]:
    """The local files among prompt sources; folders and patterns count by their names."""
    names = [sources] if isinstance(sources, str) else sources or []
    paths = [(benchmark_of(name) or (None, None))[1] or name for name in names]
    return [Path(path) for path in paths if Path(path).is_file()]


def _is_written(recipe: Recipe, stage: str, since: int = 0) -> bool:
    return all(_stat(file)[1] >= since for file in _writes(recipe, stage))


def _remembered(recipe: Recipe) -> dict[str, str]:
    try:
        found = json.loads((Path(recipe.output_dir) / REMEMBERED).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}  # then every stage runs, and finds for itself what is left to do
    return found if isinstance(found, dict) else {}


def _remember(recipe: Recipe, stage: str) -> None:
    path = Path(recipe.output_dir) / REMEMBERED
    states = _remembered(recipe) | {stage: _state(recipe, stage)}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(states, indent=2) + "\n")
    os.replace(partial, path)
