"""Keeps two processes from writing to one place."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftsmith.recipes.errors import UserError

UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some network file systems cannot lock


@contextmanager
def alone_in(directory: Path, seconds: float = 0) -> Iterator[None]:
    """Makes and locks a folder. Raises UserError if another run is writing there for more than `seconds`."""
    directory.mkdir(parents=True, exist_ok=True)
    refusal = f"{directory}: another run is writing there; wait for it, or name another folder"
    with locked(directory / ".lock", refusal, seconds):
        yield


@contextmanager
def locked(path: Path, refusal: str, seconds: float = 0) -> Iterator[None]:
    """Holds the lock file `path`, if the file system can lock. The file remains; the lock ends with the process.

    Raises UserError(refusal) if another process holds it for more than `seconds`.
    """
    lock = FileLock(path, timeout=seconds, fallback_to_soft=False)  # a soft lock would outlast a killed process
    try:
        lock.acquire()
    except Timeout:
        raise UserError(refusal) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    try:
        yield
    finally:
        lock.release()
