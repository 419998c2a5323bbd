"""Run all stages of a recipe that are not done yet, from prompts to a measured drafter.

    draftsmith run recipes/demo.yaml
    draftsmith run recipes/demo.yaml output_dir=runs/try data.max_prompts=40 train.max_steps=20 train.warmup_steps=2
    draftsmith run recipes/demo.yaml --plan             # which stages are done, and what the others would do

The stages are `draftsmith regenerate`, `rank-vocab`, `train` and `evaluate`. A recipe may add others: `reprompt` before
them if it names data.reprompt.sources, `capture` if it names data.states, C2T's two if a tree uses the classifier that
the recipe trains, `build-sam` if a contender looks in the corpus that the recipe sorts, and `export` if it names
export.to. Each stage is also a separate command. After Ctrl-C or a kill, the same command continues.

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
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from draftsmith.recipes.command import console
from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import INSIDE_RUN, stages_of
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.prompts.benchmarks import benchmark_of
from draftsmith.recipes.prompts.sources import file_sources
from draftsmith.recipes.schema import Recipe, as_list

REMEMBERED = "stages.json"
REWRITTEN = ("reprompt", "train", "label-trees", "train-c2t", "build-sam", "evaluate", "export")
"""Stages that rewrite their files on every run; the others may have nothing left to do."""
SECONDS_TO_END = 3.0  # for a stage after Ctrl-C, before it is interrupted again

# Settings that change a stage's speed, reports or servers, but not its result.
_IRRELEVANT = {
    "target": {"device"},
    "data": {"capture", "states", "ranking", "reprompt", "sam"},
    "generator": {
        *("batch_size", "concurrency", "timeout_seconds", "base_urls", "api_key_env", "drafter"),
    },
    "train": {"trackers", "resume", "log_every_steps", "save_every_steps", "keep_checkpoints"},
}


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
        before = {file: _stamp(file) for file in _writes(recipe, stage)} if stage in REWRITTEN else {}
        code = _call([stage, *words])
        if command.plan and code in (0, 2):  # all stages say what cannot work
            refused += [stage] * (code == 2)
            if stage == "reprompt":
                print("\nThe other stages can be planned once it has written the prompts.")
                break
            continue
        if code:
            sys.exit(code)
        if _unwritten(recipe, stage, before):
            print(f"{stage} was stopped before its end; the same command goes on", file=sys.stderr)
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
        files = ", ".join(_name(recipe, path) for path in _writes(recipe, stage))
        words = f"  ({why or after})" if why or after else ""
        print(f"  {'done' if why is after is None else 'to do':<6} {stage:<12} {files}{words}")
        before = before or (stage if why else None)


def _check_prompts_stay(recipe: Recipe, stages: list[str]) -> None:
    """Refuses to add answers after training: neither the drafter's vocabulary nor its training would fit them.

    Raises:
        UserError: there are checkpoints, and the recipe's prompts or answers differ from the recorded ones.
    """
    remembered = _remembered(recipe).get("regenerate")
    trained = recipe.checkpoints_dir.exists() or recipe.drafter_dir.exists()
    if "regenerate" not in stages or remembered is None or not trained:
        return
    files = {_name(recipe, file): file for file in _sources(recipe.data.prompts)}
    # Before reprompt has run again, its file is still the old one.
    others_follow = recipe.reprompts and why_not_done(recipe, "reprompt") not in (None, "not done yet")
    same = not others_follow and all(_is_same(file, remembered["files"].get(name)) for name, file in files.items())
    if not same or remembered["settings"] != _digest(_settings(recipe, "regenerate")):
        raise UserError(
            f"data: these are other prompts, or other answers, than those that {recipe.output_dir} was trained on. "
            "Name another output_dir, or undo the change; to train again here, delete conversations.jsonl, "
            "checkpoints, draft_vocab.safetensors, drafter and stages.json first"
        )


# Stages as processes.


def _call(words: list[str]) -> int:
    """Runs a stage as a process and returns its exit status. Signals are passed on to it.

    On Linux the process is forked off this one, which has imported what all stages need: five seconds for each stage
    otherwise. Nothing has run yet that a fork must not inherit: no thread of OpenMP, no CUDA context.
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
    if sys.platform == "linux":
        _end_with_parent()
    os.environ[INSIDE_RUN] = "1"
    sys.argv = ["draftsmith", *words]
    console.main()


def _end_with_parent() -> None:
    """Asks for SIGTERM when `draftsmith run` is killed, or the stage would run on unseen."""
    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


# Inputs and outputs of a stage.


def _reads(recipe: Recipe, stage: str) -> list[Path]:
    target, evaluated = recipe.target, _sources(recipe.eval.prompts)
    model = [*_model(target.model), *_model(target.adapter), *_files([target.chat_template or ""])]
    trees = [recipe.eval.tree, *(rival.tree for rival in recipe.eval.also)]
    rules = [recipe.eval.acceptance, *(rival.acceptance for rival in recipe.eval.also)]
    measured = [recipe.eval_drafter_dir] if recipe.measures_drafter else []
    drafting = [*measured, *(Path(rival.drafter) for rival in recipe.eval.also if rival.drafter)]
    drafting += [Path(tree.c2t.classifier) for tree in trees if tree.c2t.classifier]
    start = [Path(recipe.drafter.init_from) / "model.safetensors"] if recipe.drafter.init_from else []
    states = [recipe.states_dir / "manifest.json"] if recipe.data.states is not None else []
    replayed = [Path(recipe.eval.answers or recipe.eval_out / "generations.jsonl")] if _replays(recipe) else []
    conversations = recipe.conversations_path
    return (
        model
        + {
            "reprompt": _sources(recipe.data.reprompt.sources),
            "regenerate": [*_sources(recipe.data.prompts), *evaluated],
            "rank-vocab": [conversations, *start, *_files([each.source for each in recipe.data.ranking.sources])],
            "capture": [conversations],
            "train": [conversations, recipe.draft_vocab_path, *states, *start],
            "label-trees": [
                recipe.eval_drafter_dir / "model.safetensors",
                Path(recipe.labels.answers or conversations),
            ],
            "train-c2t": [recipe.classifier_rows_path],
            "build-sam": [
                *([conversations] if "answers" in recipe.data.sam.names else []),
                *_files(recipe.data.sam.names),
            ],
            "evaluate": [
                *recipe.static_sams,
                *(folder / "model.safetensors" for folder in drafting),
                *(file for rival in recipe.eval.also if rival.draft_model for file in _model(rival.draft_model.model)),
                *([recipe.token_counts_path] if any(tree.vocab_size for tree in trees) else []),
                *evaluated,
                *replayed,
                *_files([each.neighbours for each in rules if each] + [recipe.eval.planner.answers or ""]),
            ],
            "export": [*_trained(recipe), recipe.eval_out / "acceptance.json"],
        }[stage]
    )


def _model(place: str | None) -> list[Path]:
    """The files of a model in a local folder, in order; of the Hub's, none."""
    return sorted(file for kind in ("json", "jinja", "safetensors") for file in Path(place or "none").glob(f"*.{kind}"))


def _trained(recipe: Recipe) -> list[Path]:
    return [recipe.drafter_dir / "model.safetensors", recipe.drafter_dir / "config.json"]


def _writes(recipe: Recipe, stage: str) -> list[Path]:
    output, exported = Path(recipe.output_dir), recipe.export_dir(recipe.export.to or "")
    weights = ["drafter.gguf"] if recipe.export.to == "llama.cpp" else ["config.json", "model.safetensors"]
    return {
        "reprompt": [recipe.picture_prompts_path],
        "regenerate": [recipe.conversations_path],
        "rank-vocab": [recipe.draft_vocab_path, output / "token_counts.safetensors"],
        "capture": [recipe.states_dir / "manifest.json"],
        "train": _trained(recipe),
        "label-trees": [recipe.labelled_trees_path],
        "train-c2t": [recipe.classifier_dir / "model.safetensors", recipe.classifier_dir / "config.json"],
        "build-sam": [recipe.sam_path],
        "evaluate": [recipe.eval_out / ("replay" * _replays(recipe)) / "acceptance.json"],
        "export": [exported / name for name in (*weights, "README.md")],
    }[stage]


def _settings(recipe: Recipe, stage: str) -> dict[str, Any]:
    """The part of the recipe that affects a stage's result."""
    sections = {
        "reprompt": (),
        "regenerate": ("target", "data"),
        "rank-vocab": ("target", "data", "drafter"),
        "capture": ("target", "data", "drafter"),
        "train": ("target", "data", "drafter", "train"),
        "label-trees": ("target", "data", "eval", "labels"),
        "train-c2t": ("classifier",),
        "build-sam": ("target",),
        "evaluate": ("target", "eval"),
        "export": ("export",),
    }[stage]
    # Defaults are left out, so a key added by a later version changes nothing.
    found = recipe.model_dump(include=set(sections), exclude_defaults=True)
    data = found.get("data", {})
    for name, keys in _IRRELEVANT.items():
        section = data.get(name, {}) if name == "generator" else found.get(name, {})
        for key in keys & section.keys():
            del section[key]
    data.pop("contamination", None)
    if "data" in sections and recipe.data.contamination == "remove":
        found["left out for asking what is asked in"] = recipe.eval.prompts
    if stage == "reprompt":
        found["reprompt"] = recipe.data.reprompt.model_dump(exclude_defaults=True)
    if stage == "build-sam":
        found["sam"] = recipe.data.sam.model_dump(exclude_defaults=True)
    if stage == "rank-vocab":
        found["ranking"] = recipe.data.ranking.model_dump(exclude_defaults=True)
    if stage == "train" and recipe.train.eval_replay:
        found["replayed with"] = recipe.eval.tree.model_dump(exclude_defaults=True)
    return _without_empty(found)


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    """The values without empty sections."""
    kept = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value != {}}


def _replays(recipe: Recipe) -> bool:
    return recipe.eval.mode == "replay"


def _sources(sources: str | list[str] | None) -> list[Path]:
    """The local files of prompt sources."""
    parts = [part for name in as_list(sources) for part in file_sources(name)]
    return _files([(benchmark_of(part) or (None, None))[1] or part for part in parts])


def _files(names: list[str]) -> list[Path]:
    """The local files among corpora; patterns count by their names."""
    return [Path(name) for name in names if Path(name).is_file()]


def _unwritten(
    recipe: Recipe, stage: str, before: Mapping[Path, tuple[int, ...] | None] = MappingProxyType({})
) -> str | None:
    """The first of a stage's files that is missing or is still the one that was there `before`."""
    for file in _writes(recipe, stage):
        if (stamp := _stamp(file)) is None or stamp == before.get(file):
            return _name(recipe, file)
    return None


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Tells a file from one that replaces it. Never compared with a clock: a file's time is coarser, and may be a
    server's."""
    if not file.exists():
        return None
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


# Remembering it.


def _name(recipe: Recipe, file: Path) -> str:
    """The file's path, relative to output_dir if inside, so the folder can be moved or copied."""
    return str(file.relative_to(recipe.output_dir) if file.is_relative_to(recipe.output_dir) else file)


def _files_of(recipe: Recipe, stage: str) -> dict[str, Path]:
    return {_name(recipe, file): file for file in [*_reads(recipe, stage), *_writes(recipe, stage)] if file.is_file()}


def _is_same(file: Path, remembered: Any) -> bool:
    """Whether a file has the remembered content. Reads it only if its modification time has changed."""
    if not isinstance(remembered, list) or len(remembered) != 3:
        return False
    size, changed, digest = remembered
    stat = file.stat()
    return stat.st_size == size and (stat.st_mtime_ns == changed or file_digest(file) == digest)


def _digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _remembered(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """For each stage the digest of its settings, and size, time and digest of its files."""
    try:
        found = parse_json((Path(recipe.output_dir) / REMEMBERED).read_bytes())
        return {name: {"settings": each["settings"], "files": dict(each["files"])} for name, each in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # every stage then runs and checks what is left to do


def _remember(recipe: Recipe, stage: str) -> None:
    path = Path(recipe.output_dir) / REMEMBERED
    files = _files_of(recipe, stage)
    stats = {name: [(s := file.stat()).st_size, s.st_mtime_ns, file_digest(file)] for name, file in files.items()}
    here = {"settings": _digest(_settings(recipe, stage)), "files": stats}
    atomic_write(path, json.dumps(_remembered(recipe) | {stage: here}, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
