"""Files that take seconds to make, made once for all workers of a test run."""

from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

folder: Path | None = None  # of the run, in which no test writes; conftest.py sets it


def built(name: str, build: Callable[[Path], object]) -> Path:
    """The file of that name, which `build` writes for whoever asks first."""
    assert folder is not None, "the fixture shared_folder comes first"
    path = folder / name
    with FileLock(f"{path}.lock"):
        if not path.exists():
            partial = path.with_suffix(".partial")
            build(partial)
            partial.rename(path)
    return path
