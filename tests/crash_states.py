"""Kills and damage: above all every state of a folder that a kill could leave, from one run that nothing interrupts.

    with watched(output) as states:
        regenerate.main()
    for state in states:
        restore(state, elsewhere)  # as a kill at that moment leaves it; run again there

A state is recorded before each deed of Python code on files (a write, a rename, a deletion, a sync), and for each file
that has grown since, another in which half of the growth is there, as a kill in the middle of a write leaves it.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.thinning import EXHAUSTIVE

EVERY = [17, pytest.param(1, marks=EXHAUSTIVE)]  # a test goes on from each n-th of the states
DEEDS = {"write", "truncate", "fsync", "replace", "rename", "unlink", "remove", "rmdir", "mkdir"}
State = dict[str, bytes | None]  # content of files, None of folders, by path below the watched folder


def state_of(folder: Path) -> State:
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.name.endswith(".lock")
    }


def restore(state: State, folder: Path) -> Path:
    """Makes `folder` what the state says; whatever was there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in state.items():
        if content is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folder


@contextmanager
def watched(folder: Path) -> Iterator[list[State]]:
    """Records the states of `folder` while the block runs, in this thread; each once in a row."""
    states = [state_of(folder)]

    def record() -> None:
        before, after = states[-1], state_of(folder)
        for name, content in after.items():
            old = before.get(name) or b""
            if content is None or content in before.values():  # a folder, or renamed
                continue
            if len(content) > len(old) + 1 and content.startswith(old):
                states.append(before | {name: content[: (len(old) + len(content)) // 2]})
        if after != states[-1]:
            states.append(after)

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in DEEDS:
            sys.setprofile(None)
            record()
            sys.setprofile(look)

    sys.setprofile(look)
    try:
        yield states
    finally:
        sys.setprofile(None)
        record()


@contextmanager
def synced_before_renamed() -> Iterator[None]:
    """Fails where a file gets its name without having been synced, whole: a power cut would leave the name alone."""
    synced: set[tuple[int, int]] = set()  # inode and size
    really_sync, really_replace = os.fsync, os.replace

    def about(status: os.stat_result) -> tuple[int, int]:
        return status.st_ino, status.st_size

    def sync(handle: int) -> None:
        synced.add(about(os.fstat(handle)))
        really_sync(handle)

    def replace(source: Path, target: Path) -> None:
        for path in (Path(source), *Path(source).rglob("*")):
            assert path.is_dir() or about(path.stat()) in synced, f"{path} is not synced before it is renamed"
        really_replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", sync)
        patch.setattr(os, "replace", replace)
        yield


@contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: the writer sees an OSError, as on a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"sha256") + 12 if path.name == "manifest.json" else len(content) // 2
    content[at] ^= 1
    path.write_bytes(content)
