"""Appends to files of lines. No kill and no full disk leaves half a line between two others."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from draftsmith.recipes.errors import UserError


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
