"""Files and folders that are whole or not there, and locks that end with their process."""

import errno
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import atomic, lock
from draftsmith.recipes.files.atomic import atomic_path, atomic_write
from draftsmith.recipes.files.lock import alone_in
from tests.crash_states import State, restore, state_of, synced_before_renamed, watched


def test_an_error_while_writing_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    atomic_write(tmp_path / "file", "older \u00e9\n")
    with pytest.raises(OSError, match="no space left"), atomic_path(tmp_path / "file") as partial:
        partial.write_text("half")
        raise OSError("no space left")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == "older \u00e9\n".encode()


def test_the_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere/file")
    for content in ("new", "newer"):
        atomic_write(link, content)
        assert link.is_symlink() and (tmp_path / "elsewhere/file").read_text() == content
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["file"]


# Locks.


def holds(folder: Path, held: Any) -> None:
    with alone_in(folder):
        held.set()
        time.sleep(60)


def test_another_process_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=holds, args=(tmp_path, held), daemon=True)
    holder.start()
    assert held.wait(60)
    with pytest.raises(UserError, match="another run is writing there"), alone_in(tmp_path):
        pass
    holder.kill()
    holder.join()
    with alone_in(tmp_path):
        pass


def test_file_systems_that_cannot_lock_are_passed_over_and_other_errors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [*lock.UNSUPPORTED, errno.EACCES]

    def fail(_: object) -> None:
        raise OSError(errors.pop(0), "no")

    monkeypatch.setattr(lock.FileLock, "acquire", fail)
    for _ in lock.UNSUPPORTED:
        with alone_in(tmp_path):
            pass
    with pytest.raises(PermissionError), alone_in(tmp_path):
        pass


# Folders.


def write_version(directory: Path, version: str) -> None:
    with atomic.atomic_folder(directory, ("a", "b")) as partial:
        (partial / "a").write_text(version)
        (partial / "b").write_text(version)


def version_of(directory: Path) -> str:
    folder = atomic.current_folder(directory)
    (version,) = {(folder / name).read_text() for name in ("a", "b")}
    return version


def test_nothing_gets_its_name_before_it_is_on_disk(tmp_path: Path) -> None:
    with synced_before_renamed():
        atomic_write(tmp_path / "file", "x")
        for version in "01":
            write_version(tmp_path / "it", version)


def test_a_folder_is_whole_and_a_stranger_s_files_are_kept_whatever_was_killed(tmp_path: Path) -> None:
    """Two saves in a row, each killed anywhere: the second one begins where the first one left off."""
    place, link, seen = tmp_path / "elsewhere", tmp_path / "it", set()

    def states_of(version: str) -> list[State]:
        """What a kill could leave of one more save."""
        with watched(place) as states:
            write_version(link, version)
        return states

    link.symlink_to(place / "it")
    write_version(link, "0")
    (link / "notes").mkdir()
    (link / "notes/mine.txt").write_text("dear")
    before = state_of(place)
    for number, first in enumerate(states_of("1")):
        restore(first, place)
        found = version_of(link)
        for second in states_of("2")[number % 3 :: 3]:  # each with each third
            restore(second, place)
            then = version_of(link)
            assert then in {found, "2"}
            seen.add((found, then, tuple(sorted(path.name for path in place.iterdir()))))
            write_version(link, "3")
            assert state_of(place) == before | {"it/a": b"3", "it/b": b"3"} and link.is_symlink()
    assert {each[:2] for each in seen} == {("0", "0"), ("0", "2"), ("1", "1"), ("1", "2")}
    assert any(names == ("it.partial", "it.replaced") for *_, names in seen)  # neither stands in its place


def test_a_folder_that_is_all_that_is_left_is_put_back_and_nothing_of_equal_name_is_lost(tmp_path: Path) -> None:
    write_version(tmp_path / "it", "0")
    (tmp_path / "it").rename(tmp_path / "it.replaced")
    with pytest.raises(ZeroDivisionError), atomic.atomic_folder(tmp_path / "it", ("a", "b")):
        print(1 / 0)
    assert version_of(tmp_path / "it") == "0"
    for folder in ("it", "it.replaced"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "notes").write_text(folder)
    with pytest.raises(UserError, match="only one can be kept"):
        write_version(tmp_path / "it", "1")
    assert (tmp_path / "it.replaced/notes").read_text() == "it.replaced"
    (tmp_path / "file").write_text("dear")
    with pytest.raises(UserError, match="is a file; move it away"):
        write_version(tmp_path / "file", "1")
    assert (tmp_path / "file").read_text() == "dear"
