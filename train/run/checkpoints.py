"""Checkpoint folders of a run. Each one is complete or missing, and is checked again when it is read.

    step-00000030            model.safetensors, optimizer.safetensors (`train.run.engine`), trainer_state.json,
                             manifest.json (size and sha256 of all others)
    step-00000030.partial    is being written; a kill leaves it, the next start removes it
    step-00000030.old        is being removed; likewise
    step-00000030.damaged    was found damaged and set aside; nothing reads it

Files are synced to disk before the folder gets its name, so a power cut leaves no name without its content.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.checkpoint import current_folder, differences
from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.target_files import TargetFiles, longest_row
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import sync_to_disk
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.files.reading import file_digest, file_entry, file_problem
from draftsmith.recipes.schema import Recipe

MANIFEST, STATE = "manifest.json", "trainer_state.json"
# Keys of the train section that may change when a run is resumed: they change neither the steps nor their order.
# Instead of gradient_accumulation_steps "micro-batches a step" is compared.
MAY_CHANGE = {
    "max_steps", "epochs", "save_every_steps", "keep_checkpoints", "log_every_steps", "validate_every_steps",
    "eval_replay", "keep_best", "trackers", "gradient_checkpointing", "gradient_accumulation_steps",
    "zero_stage", "offload_optimizer", "shard_target", "max_skipped_steps", "packing",
}  # fmt: skip


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((path for path in directory.glob("step-*") if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def best_of(directory: Path, values: Mapping[int, float]) -> tuple[Path, float] | None:
    """The whole checkpoint with the highest of `values` by step, and that value; of equal ones the last. Damaged ones
    are named."""
    measured = [path for path in list_checkpoints(directory) if step_of(path) in values]
    for checkpoint in sorted(measured, key=lambda path: (values[step_of(path)], step_of(path)), reverse=True):
        if (problem := damage(checkpoint)) is None:
            return checkpoint, values[step_of(checkpoint)]
        print(f"{problem}; {checkpoint.name} is skipped")
    return None


def publish_checkpoint(partial: Path, state: Mapping[str, Any]) -> None:
    """Writes the state and the manifest beside the tensors, and gives the folder its name."""
    (partial / STATE).write_text(json.dumps(state, indent=2) + "\n")
    files = {path.name: file_entry(path) for path in partial.iterdir()}
    (partial / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")
    sync_to_disk(partial)
    final = partial.with_suffix("")
    if final.exists():
        remove(final)
    os.replace(partial, final)
    sync_to_disk(final.parent, inside=False)


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint. A kill leaves no half checkpoint that counts as one."""
    retired = checkpoint.with_suffix(".old")
    os.replace(checkpoint, retired)
    shutil.rmtree(retired)


def keep_last(directory: Path, count: int, also: Path | None) -> None:
    """Removes all checkpoints but the newest `count` and `also`."""
    for old in list_checkpoints(directory)[:-count]:
        if old != also:
            remove(old)


def damage(checkpoint: Path) -> str | None:
    """The first problem with a checkpoint's files; None: it is whole."""
    try:
        promised = parse_json((checkpoint / MANIFEST).read_bytes())["files"]
        problems = (file_problem(checkpoint / name, entry, digest=True) for name, entry in promised.items())
        return next(filter(None, problems), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{checkpoint / MANIFEST}: damaged: not what was written"


def settle(directory: Path) -> None:
    """Removes what kills left, and sets aside damaged checkpoints after the last whole one. Raises UserError, and
    renames nothing, if there are checkpoints, but none is whole."""
    for leftover in (*directory.glob("step-*.partial"), *directory.glob("step-*.old")):
        shutil.rmtree(leftover)
    checkpoints, damaged = list_checkpoints(directory), dict[Path, str]()
    while checkpoints and (problem := damage(checkpoints[-1])):
        damaged[checkpoints.pop()] = problem
    if damaged and not checkpoints:
        remedy = "delete the folder to start again, or choose another output_dir"
        raise UserError([*damaged.values(), f"no checkpoint in {directory} can be resumed: {remedy}"])
    for checkpoint, problem in damaged.items():
        aside = checkpoint.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(checkpoint, aside)
        print(f"{problem}; {checkpoint.name} is set aside as {aside.name}, the one before is used")


def read_state(checkpoint: Path, identity: Mapping[str, Any], unknown: tuple[str, ...] = ()) -> dict[str, Any]:
    """The checkpoint's trainer_state.json. Raises UserError if the run that wrote it has another `run_identity`, or
    this process does not see it. Keys that begin as one of `unknown` are not compared."""
    if not checkpoint.exists():
        raise UserError(f"{checkpoint}: rank 0 sees it, another process does not: all must see one output_dir")
    state = json.loads((checkpoint / STATE).read_text())
    here = json.loads(json.dumps(identity))  # as it was written, with lists for tuples
    different = [
        f"{key}: the checkpoint has {theirs!r}, this run has {mine!r}"
        for key, theirs, mine in differences(state["identity"], here)
        if not key.startswith(unknown)
    ]
    if different:
        remedy = "restore these values, or choose another output_dir to start again"
        raise UserError(f"{checkpoint} belongs to another run ({'; '.join(different)}); {remedy}")
    return state


# What a resumed run must share with the run that wrote its checkpoint.


def rows_digest(rows: Sequence[TrainingRow]) -> str:
    """Identifies rows and their order: their number, and the sha256 of their ids, lengths and inserts."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, len(row.input_ids)]).encode() + row.prompt.inserts_digest + b"\n")
    return f"{len(rows)} rows, sha256 {digest.hexdigest()}"


def digests_of(rows: Sequence[TrainingRow], validation_rows: Sequence[TrainingRow]) -> dict[str, str]:
    return {"training rows": rows_digest(rows), "validation rows": rows_digest(validation_rows)}


def run_identity(
    recipe: Recipe,
    files: TargetFiles,
    drafter: DrafterConfig,
    target: dict[str, Any],
    processes: int,
    digests: dict[str, str],
    states: dict[str, Any] | None,
) -> dict[str, Any]:
    """Data, order, settings, drafter and target of a run. `digests` are of the rows that are left after all checks: the
    contents of eval.prompts decide which, and may have changed since the checkpoint. `states`: `store_identity`."""
    start = recipe.drafter.init_from
    settings = {f"train.{key}": value for key, value in recipe.train.model_dump().items() if key not in MAY_CHANGE}
    return {
        "target": {key: value for key, value in target.items() if key not in ("model", "revision")},
        "drafter": drafter.to_dict(),
        "drafter.init_head": recipe.drafter.init_head,
        "drafter.init_from": None if start is None else file_digest(current_folder(Path(start)) / "model.safetensors"),
        "drafter.lora": None if recipe.drafter.lora is None else recipe.drafter.lora.model_dump(),
        "draft_vocab_sha256": file_digest(recipe.draft_vocab_path),
        "conversations_sha256": file_digest(recipe.conversations_path),
        "data.states": states,
        "data.max_length": longest_row(recipe, files),
        "left out for asking what is asked in": recipe.eval.prompts if recipe.data.contamination == "remove" else None,
        "micro-batches a step": processes * recipe.train.gradient_accumulation_steps,
    } | (digests | settings)
