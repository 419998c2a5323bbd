"""Files that are whole or not there, and locks that end with their process."""

import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.recipes.errors import UserError
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
