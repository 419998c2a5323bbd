"""Appending to files of lines, so that no kill and no full disk leaves half a line between two others."""

import os
from pathlib import Path
from typing import IO

from draftsmith.recipes.errors import UserError


def append_line(file: IO[bytes], path: Path, line: bytes) -> None:
    """Hands one line, its end included, to the operating system in one write.

    What a kill in the middle of that write may leave of it is the file's end: see `cut_torn_line`.

    Args:
        file: `path`, opened with "ab" and without buffering.

    Raises:
        UserError: the line found no room (a full disk, a quota). What was written of it is cut off again.
    """
    end, written = file.seek(0, os.SEEK_END), 0
    try:
        while written < len(line):  # once, but for an interrupting signal or a disk with room for a part
            written += file.write(line[written:])
    except OSError as error:
        file.truncate(end)
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); the lines that stand in it are whole: make room and start "
            "again, it goes on from there"
        ) from error


def cut_torn_line(file: IO[bytes], path: Path) -> list[bytes]:
    """The whole lines of `path`, without their ends; what a kill left of one more is cut off.

    Args:
        file: `path`, opened as for `append_line`.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        file.truncate(path.stat().st_size - len(torn))
    return lines
