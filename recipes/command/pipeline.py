"""Run all stages of a recipe that are not done yet, from prompts to a measured drafter.

    draftsmith run recipes/demo.yaml
    draftsmith run recipes/demo.yaml output_dir=runs/try data.max_prompts=40 train.max_steps=20 train.warmup_steps=2
    draftsmith run recipes/demo.yaml --plan             # which stages are done, and what the others would do

The stages are `draftsmith regenerate`, `rank-vocab`, `train` and `evaluate`. A recipe may add others: `self-prompt`
before them if data.prompts names `self`, `reprompt` if it names data.reprompt.sources, `capture` if it names
data.states, C2T's two if a tree uses the classifier that the recipe trains, `build-sam` if a contender looks in the
corpus that the recipe sorts, and `export` if it names export.to. Each stage is also a separate command. After Ctrl-C or
a kill, the same command continues.

<output_dir>/stages.json records the inputs of each stage. A stage runs again if a setting that affects its result has
changed, or the content of a file that it reads or wrote. The printed list of stages gives the reason. Hub datasets, and
patterns of data.ranking and data.sam, are compared by name only. To run a stage regardless, call it by its name.
"""

import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.recipes.command import console
from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import INSIDE_RUN, IRRELEVANT, STAGES, files_of_target, local_sources, stages_of
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.schema import Recipe

REMEMBERED = "stages.json"
SECONDS_TO_END = 3.0  # for a stage after Ctrl-C, before it is interrupted again


def main() -> None:
    command = parse_command(__doc__)
    recipe, stages = command.recipe, stages_of(command.recipe)
    _show(recipe, stages)
    _check_prompts_stay(recipe, stages)
    words = [command.recipe_path, *command.overrides, *["--plan"] * command.plan]
    ran, refused = False, list[str]()
    for number, stage in enumerate(stages, start=1):
        if why_not_done(recipe, stage) is None and not (command.plan and ran):  # a plan assumes earlier stages done
            continue
        ran = True
        print(f"\n[{number}/{len(stages)}] draftsmith {stage} {shlex.join(words)}", flush=True)
        before = {file: _stamp(file) for file in STAGES[stage].writes(recipe) if STAGES[stage].rewrites}
        code = _call([stage, *words])
        if command.plan and code in (0, 2):  # all stages say what cannot work
            refused += [stage] * (code == 2)
            if stage in ("reprompt", "self-prompt"):
                print("\nThe other stages can be planned once it has written the prompts.")
                break
            continue
        if code:
            sys.exit(code)
        if _unwritten(recipe, stage, before):
            print(f"{stage} stopped early; run the same command to continue", file=sys.stderr)
            sys.exit(1)
        _remember(recipe, stage)
    if refused:
        print(f"\nerror: cannot work as planned: {', '.join(refused)}", file=sys.stderr)
        sys.exit(2)
    if not ran:
        print("nothing is left to do; to run a stage again, call it by its name")


def why_not_done(recipe: Recipe, stage: str) -> str | None:
    """Why a stage must run, in a few words; None: it is done and its inputs have not changed."""
    remembered = _remembered(recipe).get(stage)
    if remembered is None:
        return "not done yet"
    if missing := _unwritten(recipe, stage):
        return f"{missing} is missing"
    if remembered["settings"] != _digest(_settings(recipe, stage)):
        return "its settings have changed"
    files = _files_of(recipe, stage)
    changed = [name for name, file in files.items() if not _is_same(file, remembered["files"].get(name))]
    changed += sorted(remembered["files"].keys() - files.keys())
    return f"{changed[0]} has changed" if changed else None


def _show(recipe: Recipe, stages: list[str]) -> None:
    print(f"{recipe.output_dir}:")
    before = None  # the first stage to run
    for stage in stages:
        why = why_not_done(recipe, stage)
        after = f"after {before}" if before and why is None else None
        files = ", ".join(_name(recipe, path) for path in STAGES[stage].writes(recipe))
        words = f"  ({why or after})" if why or after else ""
        print(f"  {'done' if why is after is None else 'to do':<6} {stage:<12} {files}{words}")
        before = before or (stage if why else None)


def _check_prompts_stay(recipe: Recipe, stages: list[str]) -> None:
    """Raises UserError if the prompts or answers changed after training, whose vocabulary and data would not fit."""
    remembered = _remembered(recipe).get("regenerate")
    trained = recipe.checkpoints_dir.exists() or recipe.drafter_dir.exists()
    if "regenerate" not in stages or remembered is None or not trained:
        return
    files = {_name(recipe, file): file for file in local_sources(recipe.data.prompts) if file.is_file()}
    # Before the stage that writes them has run again, their file is still the old one.
    writers = {"reprompt", "self-prompt"}.intersection(stages)
    others_follow = any(why_not_done(recipe, stage) not in (None, "not done yet") for stage in writers)
    same = not others_follow and all(_is_same(file, remembered["files"].get(name)) for name, file in files.items())
    if not same or remembered["settings"] != _digest(_settings(recipe, "regenerate")):
        raise UserError(
            f"data: the prompts or answers changed after training in {recipe.output_dir}. "
            "Name another output_dir, or undo the change; to train again here, delete conversations.jsonl, "
            "checkpoints, draft_vocab.safetensors, drafter and stages.json first"
        )


# Stages as processes.


def _call(words: list[str]) -> int:
    """Runs a stage as a process and returns its exit status. Signals are passed on to it.

    On Linux it is forked off this process, which has imported what all stages need, five seconds' worth. Nothing has
    run yet that a fork must not inherit: no thread of OpenMP, no CUDA context.
    """
    if sys.platform == "linux":
        _import_for_stages()
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    process = context.Process(target=_stage, args=(words,), name=f"draftsmith {words[0]}")
    process.start()
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while process.exitcode is None:
            try:
                process.join()
            except KeyboardInterrupt:
                # A terminal interrupts the stage, too. A signal to this process alone does not.
                until = time.monotonic() + SECONDS_TO_END
                with contextlib.suppress(KeyboardInterrupt):
                    # join(timeout) would not return: what it waits for is closed once a stage has become torchrun.
                    while process.exitcode is None and time.monotonic() < until:
                        time.sleep(0.05)
                if process.exitcode is None and process.pid is not None:
                    os.kill(process.pid, signal.SIGINT)
        return process.exitcode if process.exitcode >= 0 else 128 - process.exitcode
    finally:
        signal.signal(signal.SIGTERM, before)


@functools.cache  # once a process
def _import_for_stages() -> None:
    gc.disable()  # nothing of this is ever collected: not looked at while it grows, nor in the stages
    import transformers.modeling_utils
    import transformers.models.auto  # noqa: F401

    gc.freeze()
    gc.enable()


def _stage(words: list[str]) -> None:
    """In the new process: what `draftsmith` does with these words."""
    if sys.platform == "linux":  # SIGTERM when `draftsmith run` is killed, or the stage would run on unseen
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    os.environ[INSIDE_RUN] = "1"
    sys.argv = ["draftsmith", *words]
    console.main()


# Inputs and outputs of a stage.


def _settings(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The part of the recipe that affects a stage's result, without defaults: a new key changes nothing."""
    keys = STAGES[stage].settings(recipe)
    found = recipe.model_dump(include=set(keys), exclude=IRRELEVANT, exclude_defaults=True)
    for section, _, key in (key.partition(".") for key in keys if "." in key):
        values = recipe.model_dump(include={section: {key}}, exclude_defaults=True)
        found[f"{section}.{key}"] = values.get(section, {}).get(key, {})
    return _without_empty(found)


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """The values without empty sections."""
    kept = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value != {}}


def _unwritten(recipe: Recipe, stage: str, before: dict[Path, tuple[int, ...] | None] | None = None) -> str | None:
    """The first of a stage's files that is missing or is still the one that was there `before`."""
    for file in STAGES[stage].writes(recipe):
        if (stamp := _stamp(file)) is None or stamp == (before or {}).get(file):
            return _name(recipe, file)
    return None


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Tells a file from one that replaces it. Never compared with a clock: a file's time may be a server's."""
    if not file.exists():
        return None
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


# Remembering it.


def _name(recipe: Recipe, file: Path) -> str:
    """The file's path, relative to output_dir if inside, so the folder can be moved or copied."""
    return str(file.relative_to(recipe.output_dir) if file.is_relative_to(recipe.output_dir) else file)


def _files_of(recipe: Recipe, stage: str) -> dict[str, Path]:
    files = [*files_of_target(recipe), *STAGES[stage].reads(recipe), *STAGES[stage].writes(recipe)]
    return {_name(recipe, file): file for file in files if file.is_file()}


def _is_same(file: Path, remembered: Any) -> bool:
    """Whether a file has the remembered content. Reads it only if its modification time has changed."""
    if remembered is None:
        return False
    size, changed, digest = remembered
    stat = file.stat()
    return stat.st_size == size and (stat.st_mtime_ns == changed or file_digest(file) == digest)


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _remembered(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """For each stage the digest of its settings, and size, time and digest of its files."""
    try:
        return json.loads((Path(recipe.output_dir) / REMEMBERED).read_bytes())
    except (OSError, ValueError):
        return {}  # every stage then runs and checks what is left to do


def _remember(recipe: Recipe, stage: str) -> None:
    files = _files_of(recipe, stage)
    stats = {name: [(s := file.stat()).st_size, s.st_mtime_ns, file_digest(file)] for name, file in files.items()}
    here = {"settings": _digest(_settings(recipe, stage)), "files": stats}
    text = json.dumps(_remembered(recipe) | {stage: here}, indent=1) + "\n"
    atomic_write(Path(recipe.output_dir) / REMEMBERED, text)


if __name__ == "__main__":
    run(main)
