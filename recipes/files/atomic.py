"""Files and folders that are whole or not there, whatever is killed and when.

A file is written as <name>.partial beside its place, reaches the disk, and is renamed: no power cut leaves a name
without its content. A folder is written likewise. One that stands in its place is renamed to <name>.replaced first. A
kill between the two renames leaves no <name>, and the new folder whole in <name>.partial: readers find it there
(`written`), and the next writer puts it into its place.
"""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.recipes.errors import UserError


def partial_path(path: Path) -> Path:
    """Where a file or folder is written before it is renamed to `path`."""
    return path.with_name(f"{path.name}.partial")


def atomic_write(path: Path, content: str | bytes) -> None:
    """Writes a file; text as UTF-8. The folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path for writers that open files themselves. The file takes its place when the block ends well.

    After an error it is deleted: a full disk has no room for half a file.
    """
    partial = partial_path(path)
    try:
        yield partial
        sync_to_disk(partial)
        os.replace(partial, path)
    except Exception:
        partial.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent, inside=False)


def sync_to_disk(path: Path, inside: bool = True) -> None:
    """Makes a file, or a folder with all inside, outlast a power cut; to be called before a rename makes it count."""
    for each in (*(path.rglob("*") if inside else ()), path):
        if each.is_dir() and os.name == "nt":
            continue  # Windows opens no folders
        handle = os.open(each, os.O_RDONLY if each.is_dir() else os.O_RDWR)  # and syncs no file opened for reading
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Folders.


@contextmanager
def atomic_folder(directory: Path, own: Collection[str]) -> Iterator[Path]:
    """An empty folder to write into. It takes the place of `directory` when the block ends well.

    Args:
        own: names of the files that its writer writes. Everything else in the older folder is the user's and kept.

    Raises:
        UserError: a file has the folder's name, or what is to be kept would hide something of the same name.
    """
    directory = directory.resolve()  # of a link the folder behind it is replaced, not the link
    partial, retired = partial_path(directory), _retired_path(directory)
    for folder in (directory, retired):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; move it away, a folder of that name is to be written")
    if not directory.exists() and retired.exists():
        # Before `partial` is touched: `written` must not find half of it.
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


def written(directory: Path) -> Path:
    """Where the folder lies: in `directory`, but after a kill between the two renames of `atomic_folder`."""
    resolved = directory.resolve()
    partial, retired = partial_path(resolved), _retired_path(resolved)
    return partial if not directory.exists() and retired.exists() and partial.exists() else directory


def _retired_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.replaced")


def _empty(retired: Path, directory: Path, own: Collection[str]) -> None:
    """Moves what is not its writer's from a replaced folder into the new one, then deletes it."""
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
