"""Checkpoint folders of a run. Each one is complete or missing, and is checked again when it is read.

    step-00000030            model.safetensors, optimizer.safetensors (`train.run.engine`), trainer_state.json,
                             manifest.json (size and sha256 of all others)
    step-00000030.partial    is being written; a kill leaves it, the next start removes it
    step-00000030.old        is being removed; likewise
    step-00000030.damaged    was found damaged and set aside; nothing reads it

Files are synced to disk before the folder gets its name, so a power cut leaves no name without its content.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from draftsmith.models.checkpoint import differences
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import sync_to_disk
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.files.json_text import parse_json

MANIFEST, STATE = "manifest.json", "trainer_state.json"
_COMPLETE = re.compile(r"step-\d+")


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    complete = (path for path in directory.glob("step-*") if _COMPLETE.fullmatch(path.name))
    return sorted(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def best_of(checkpoints: Sequence[Path], values: Mapping[int, float]) -> list[Path]:
    """The checkpoints that have a value, the highest first; of equal ones the later first.

    Args:
        values: by step.
    """
    measured = [path for path in checkpoints if step_of(path) in values]
    return sorted(measured, key=lambda path: (values[step_of(path)], step_of(path)), reverse=True)


def publish_checkpoint(partial: Path, final: Path) -> None:
    """Writes the manifest of a folder that holds all its files, and renames it."""
    paths = sorted(path for path in partial.rglob("*") if path.is_file())
    files = {
        path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in paths
    }
    (partial / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")
    sync_to_disk(partial)
    if final.exists():
        remove(final)
    os.replace(partial, final)
    sync_to_disk(final.parent, inside=False)


@contextmanager
def disk_errors_as_user_errors(partial: Path) -> Iterator[None]:
    """Turns the errors of a full disk into a UserError. torch raises a RuntimeError from inline_container."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise UserError(
            f"{partial}: cannot be written ({first_line(error)}): make room, if the disk is full, and start "
            "again; what was written before is whole, and training resumes from there"
        ) from error


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint. A kill leaves no half checkpoint that counts as one."""
    retired = checkpoint.with_suffix(".old")
    _delete(retired)
    os.replace(checkpoint, retired)
    _delete(retired)


def keep_last(directory: Path, count: int, also: Collection[Path] = ()) -> None:
    """Removes all checkpoints but the newest `count` and those in `also`."""
    for old in list_checkpoints(directory)[:-count]:
        if old not in also:
            remove(old)


def _delete(path: Path) -> None:
    """Deletes the path if it exists: a folder, or a file or link that somebody put there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damage(checkpoint: Path) -> str | None:
    """The first problem with a checkpoint's files; None: it is whole."""
    try:
        promised = parse_json((checkpoint / MANIFEST).read_bytes())["files"]
        sealed = {name: (entry["bytes"], entry["sha256"]) for name, entry in promised.items()}
    except OSError as error:
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not what was written"
    for name, (size, digest) in sealed.items():
        path = checkpoint / name
        try:
            if (has := path.stat().st_size) != size:
                return f"{name} has {has:,} bytes instead of {size:,}"
            if file_digest(path) != digest:
                return f"{name} is not what was written (its sha256 differs)"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def settle(directory: Path) -> None:
    """Prepares the folder for a run: removes what kills left, and sets aside damaged checkpoints behind the last whole
    one.

    Raises:
        UserError: there are checkpoints, but none is whole. Nothing is renamed then.
    """
    for leftover in (*directory.glob("step-*.partial"), *directory.glob("step-*.old")):
        _delete(leftover)
    damaged: list[tuple[Path, str]] = []
    for checkpoint in reversed(list_checkpoints(directory)):
        problem = damage(checkpoint)
        if problem is None:
            break
        damaged.append((checkpoint, problem))
    else:
        if damaged:
            raise UserError(
                [
                    *(f"{checkpoint}: damaged: {problem}" for checkpoint, problem in damaged),
                    f"no checkpoint in {directory} can be resumed: delete the folder to start again, or choose another "
                    "output_dir",
                ]
            )
    for checkpoint, problem in damaged:
        aside = checkpoint.with_suffix(".damaged")
        _delete(aside)
        os.replace(checkpoint, aside)
        print(f"{checkpoint}: damaged: {problem}; set aside as {aside.name}, the one before is used")


def read_state(checkpoint: Path, identity: Mapping[str, Any], unknown: tuple[str, ...] = ()) -> dict[str, Any]:
    """The checkpoint's trainer_state.json.

    Args:
        identity: of the run that is to be resumed from it (`train.run.run_identity`).
        unknown: beginnings of its keys that are not known yet.

    Raises:
        UserError: another run wrote it, or this process does not see it.
    """
    try:
        state = json.loads((checkpoint / STATE).read_text())
    except FileNotFoundError:
        raise UserError(
            f"{checkpoint}: rank 0 resumes from it, and another process does not see it: output_dir must be one folder "
            "that all of them see"
        ) from None
    here = json.loads(json.dumps(identity))  # as it was written, with lists for tuples
    different = [
        f"{key}: the checkpoint has {theirs!r}, this run has {mine!r}"
        for key, theirs, mine in differences(state["identity"], here)
        if not key.startswith(unknown)
    ]
    if different:
        raise UserError(
            f"{checkpoint} belongs to another run ({'; '.join(different)}); restore these values, or choose another "
            "output_dir to start again"
        )
    return state
