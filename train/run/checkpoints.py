"""Checkpoint folders of a run: each is whole or not there, and checked again when it is read.

    step-00000030            model.safetensors, optimizer.safetensors (`train.run.engine`), trainer_state.json,
                             manifest.json (size and sha256 of all others)
    step-00000030.partial    is being written; a kill leaves it, the next start removes it
    step-00000030.old        is being removed; likewise
    step-00000030.damaged    was found damaged and set aside; nothing reads it

Files reach the disk before the rename that makes a folder count: no power cut leaves a name without its content.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import sync_to_disk
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.files.json_text import parse_json

MANIFEST = "manifest.json"
_COMPLETE = re.compile(r"step-\d+")


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Those that were completed, oldest first."""
    complete = (path for path in directory.glob("step-*") if _COMPLETE.fullmatch(path.name))
    return sorted(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def best_of(checkpoints: Sequence[Path], values: Mapping[int, float]) -> list[Path]:
    """Those that have a value, by step; the highest first, of equals the later one."""
    measured = [path for path in checkpoints if step_of(path) in values]
    return sorted(measured, key=lambda path: (values[step_of(path)], step_of(path)), reverse=True)


def publish(partial: Path, final: Path) -> None:
    """Seals a folder that holds all its files and gives it its name."""
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
def full_disk_is_told(partial: Path) -> Iterator[None]:
    """Makes a UserError of what writers raise on a full disk; torch's raises a RuntimeError from inline_container."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):
            raise
        raise UserError(
            f"{partial}: cannot be written ({str(error).splitlines()[0]}): make room, if the disk is full, and start "
            "again; what was written before it is whole, and training goes on from there"
        ) from error


def remove(checkpoint: Path) -> None:
    """Deletes a checkpoint; killed midway, no half of it counts as one."""
    retired = checkpoint.with_suffix(".old")
    _delete(retired)
    os.replace(checkpoint, retired)
    _delete(retired)


def keep_last(directory: Path, count: int, also: Collection[Path] = ()) -> None:
    """Removes all but the newest `count` checkpoints, and those named."""
    for old in list_checkpoints(directory)[:-count]:
        if old not in also:
            remove(old)


def _delete(path: Path) -> None:
    """Whatever bears the name, if anything does: a folder, or a file or link that somebody put there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with its files, or None."""
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
    """Before a run goes on: what kills left is removed, damaged checkpoints newer than a whole one are set aside.

    Raises:
        UserError: there are checkpoints, and not one is whole. Nothing was renamed then.
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
                    f"no checkpoint in {directory} can be gone on from: delete the folder to start anew, or choose "
                    "another output_dir",
                ]
            )
    for checkpoint, problem in damaged:
        aside = checkpoint.with_suffix(".damaged")
        _delete(aside)
        os.replace(checkpoint, aside)
        print(f"{checkpoint}: damaged: {problem}; set aside as {aside.name}, going on from the one before")
