"""Files and folders that are whole or not there, and locks that end with their process."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import atomic
from draftsmith.recipes.files.atomic import atomic_path, atomic_write
from draftsmith.recipes.files.lock import alone_in

HOLDER = """
import sys
from pathlib import Path
from draftsmith.recipes.files.lock import alone_in
with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


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


def test_a_place_that_cannot_be_locked_for_another_reason_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), alone_in(tmp_path / "file"):
        pass


def test_another_process_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another run is writing there"), alone_in(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with alone_in(tmp_path):
        pass


# Folders.


class Killed(BaseException):
    """In a kill's place: nothing of ours catches it."""


@contextmanager
def killed_at(number: int) -> Iterator[None]:
    """Whoever writes dies before its `number`-th (from 1) deed among renames, deletions, new folders and new files."""
    deeds = 0

    def counted(deed: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any, **settings: Any) -> Any:
            nonlocal deeds
            deeds += 1
            if deeds == number:
                raise Killed
            return deed(*arguments, **settings)

        return do

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic.os, "replace", counted(os.replace))
        patch.setattr(atomic.shutil, "rmtree", counted(shutil.rmtree))
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(Path, "write_text", counted(Path.write_text))
        yield


def write_version(directory: Path, version: str) -> None:
    with atomic.atomic_folder(directory, ("a", "b")) as partial:
        (partial / "a").write_text(version)
        (partial / "b").write_text(version)


def version_of(directory: Path) -> str:
    folder = atomic.written(directory)
    (version,) = {(folder / name).read_text() for name in ("a", "b")}
    return version


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_is_whole_and_a_stranger_s_files_are_kept_whatever_was_killed(link: bool, tmp_path: Path) -> None:
    """Two saves in a row, each killed at every deed: the second one begins where the first one left off."""
    seen, states = set(), set()
    for first in range(1, 30):
        for second in range(1, 30):
            root = tmp_path / f"{first} {second}"
            directory = real = root / "it"
            if link:
                (root / "elsewhere").mkdir(parents=True)
                real = root / "elsewhere/it"
                directory.symlink_to(real)
            write_version(directory, "0")
            (real / "notes").mkdir()
            (real / "notes/mine.txt").write_text("dear")
            (real / "left.txt").write_text("self")

            def kill(number: int, version: str, directory: Path = directory) -> bool:
                try:
                    with killed_at(number):
                        write_version(directory, version)
                except Killed:
                    return True
                return False

            one = kill(first, "1")
            states.add(tuple(sorted(path.name for path in real.parent.iterdir() if path != directory or not link)))
            found = version_of(directory)
            assert found in "01"
            two = kill(second, "2")
            assert version_of(directory) in {found, "2"}
            seen.add((found, version_of(directory)))
            write_version(directory, "3")
            assert version_of(directory) == "3"
            assert {path.name for path in real.iterdir()} == {"a", "b", "notes", "left.txt"}
            assert (real / "notes/mine.txt").read_text() == "dear"
            assert [path for path in real.parent.iterdir() if path != directory] == ([real] if link else [])
            assert directory.is_symlink() == link
            if not two:
                break
        if not one:
            break
    assert seen == {("0", "0"), ("0", "2"), ("1", "1"), ("1", "2")}
    assert ("it.partial", "it.replaced") in states  # neither stands in its place


def test_a_folder_that_is_all_that_is_left_is_put_back_and_nothing_of_equal_name_is_lost(tmp_path: Path) -> None:
    write_version(tmp_path / "it", "0")
    (tmp_path / "it").rename(tmp_path / "it.replaced")
    with pytest.raises(Killed), killed_at(2):  # the first deed puts it back
        write_version(tmp_path / "it", "1")
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
