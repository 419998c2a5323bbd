"""Keeps two processes from writing into one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from draftsmith.recipes.errors import UserError


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Keeps other runs from writing into a folder meanwhile, where the file system can.

    Raises:
        UserError: another run is writing there.
    """
    refusal = (
        f"{directory}: another run is writing there; wait for it, or name another folder. Processes of one run are "
        "started together, by torchrun"
    )
    with locked(directory / ".lock", refusal):
        yield


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Holds the lock file `path`, which stays behind, empty. The lock itself ends with the process, however that ends.

    Raises:
        UserError: `refusal`; another process holds it.
    """
    lock = FileLock(path, timeout=0, fallback_to_soft=False)  # a soft lock would outlast a killed process
    try:
        lock.acquire()
    except Timeout:
        raise UserError(refusal) from None
    except OSError:
        pass  # some network file systems lock nothing
    try:
        yield
    finally:
        lock.release()
