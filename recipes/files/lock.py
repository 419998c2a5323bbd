"""Keeps two processes from writing to one place."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftsmith.recipes.errors import UserError

UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some network file systems cannot lock


@contextmanager
def alone_in(directory: Path, seconds: float = 0, file: str = "") -> Iterator[None]:
    """Makes a folder and locks it, or `file` alone in it, if the file system can lock. The lock ends with the process.

    Raises UserError if another run is writing there for more than `seconds`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (f".{file}.lock" if file else ".lock")
    lock = FileLock(path, timeout=seconds, fallback_to_soft=False)  # a soft lock would outlast a killed process
    try:
        lock.acquire()
    except Timeout:
        place = directory / file
        raise UserError(f"{place}: another run is writing there; wait for it, or name another place") from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    try:
        yield
    finally:
        lock.release()
