"""Writes files and folders atomically, and lines of files, also through kills and power cuts.

A file is written as <name>.partial, synced to disk, and renamed. A folder is written the same way; an older folder is
first renamed to <name>.replaced. A kill between these two renames leaves the complete new folder in <name>.partial.
Readers find it there (`current_folder`), and the next writer renames it.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from draftsmith.recipes.errors import UserError


def partial_path(path: Path) -> Path:
    """The path of a file or folder before it is renamed to `path`."""
    return path.with_name(f"{path.name}.partial")


def atomic_write(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, and makes its folder."""
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path to write to. The file is renamed to `path` after the block, or deleted after an error."""
    path = path.resolve()  # replaces the file behind a link, not the link
    partial = partial_path(path)
    try:
        yield partial
        sync_to_disk(partial)
        os.replace(partial, path)
    except Exception:
        partial.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent, inside=False)


def clear_partial_files(directory: Path) -> None:
    """Removes files that a kill left half-written in a folder. Its writer holds the folder's lock."""
    for pattern in ("*.partial", ".tmp*"):  # of `atomic_path`, of safetensors
        for leftover in directory.glob(pattern):
            if leftover.is_file():
                leftover.unlink()


def sync_to_disk(path: Path, inside: bool = True) -> None:
    """Syncs a file, or a folder and its content, to disk. Call it before the rename."""
    for each in (*(path.rglob("*") if inside else ()), path):
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def atomic_folder(directory: Path, own: Collection[str]) -> Iterator[Path]:
    """An empty folder to write into. It replaces `directory` after the block.

    Raises UserError if a file has the folder's name, or if a kept file and a new one have the same name.

    Args:
        own: names of the writer's files. Everything else in the older folder is the user's and is kept.
    """
    directory = directory.resolve()  # replaces the folder behind a link, not the link
    partial, retired = partial_path(directory), _retired_path(directory)
    for folder in (directory, retired):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; move it away, because a folder of that name is needed")
    if not directory.exists() and retired.exists():
        # Before `partial` changes: `current_folder` must not find half of it.
        os.replace(partial if partial.exists() else retired, directory)
    _empty(retired, directory, own)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    sync_to_disk(partial)
    if directory.exists():
        os.replace(directory, retired)
    os.replace(partial, directory)
    sync_to_disk(directory.parent, inside=False)
    _empty(retired, directory, own)


def current_folder(directory: Path) -> Path:
    """The folder's path: `directory`, or its partial path after a kill between the renames of `atomic_folder`."""
    resolved = directory.resolve()
    partial, retired = partial_path(resolved), _retired_path(resolved)
    return partial if not directory.exists() and retired.exists() and partial.exists() else directory


def _retired_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.replaced")


def _empty(retired: Path, directory: Path, own: Collection[str]) -> None:
    """Moves the user's files from a replaced folder into the new one, then deletes the replaced folder."""
    if not retired.exists():
        return
    kept = [path for path in retired.iterdir() if path.name not in own]
    for path in kept:
        if os.path.lexists(directory / path.name):
            raise UserError(f"{path} and {directory / path.name}: only one can be kept; move one of them away")
    for path in kept:
        os.replace(path, directory / path.name)
    if kept:
        sync_to_disk(directory, inside=False)
    shutil.rmtree(retired, ignore_errors=True)


# Files of lines. No kill and no full disk leaves half a line between two others.


def json_line(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """`value` as a line of JSON with its end. Text stays readable, unless it holds lone surrogates, which UTF-8 lacks.

    Args:
        default: what is written for a value that JSON lacks; None: such a value is a TypeError.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=default).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value, default=default).encode() + b"\n"


def append_line(file: IO[bytes], path: Path, line: bytes) -> None:
    """Writes one line with its end in one call. After a kill during that call, `cut_torn_line` removes the rest.

    Raises UserError, after cutting off a part that was written, if the disk or quota is full.

    Args:
        file: `path`, opened with "ab" and without buffering.
    """
    end, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(line):  # more than once after a signal, or on an almost full disk
            written += file.write(line[written:])
    except OSError as error:
        file.truncate(end)
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); its lines are whole: make room and run the same command "
            "again"
        ) from error


def cut_torn_line(file: IO[bytes], path: Path) -> list[bytes]:
    """Cuts a torn last line off `path` and returns the other lines, without their ends. `file` as for `append_line`."""
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        file.truncate(path.stat().st_size - len(torn))
    return lines
