"""Reads files: named by a pattern, packed by gzip, known again by their size and sha256."""

import glob
import gzip
import hashlib
import io
import zlib
from pathlib import Path
from typing import IO, Any

DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading a damaged packed file raises."""


def matching(source: str) -> list[str]:
    """The file `source`, or the files that match it as a pattern, sorted; each once, under the first of its paths."""
    found = [source] if Path(source).exists() else glob.glob(source, recursive=True)
    by_place: dict[Path, str] = {}  # a pattern may find one file under several paths
    for path in sorted(path for path in found if not Path(path).is_dir()):
        by_place.setdefault(Path(path).resolve(), path)
    return list(by_place.values())


def is_packed(path: str | Path) -> bool:
    return str(path).lower().endswith(".gz")


def ending(path: str | Path) -> str:
    """The file type, in lower case: `.jsonl`, also of a.jsonl.gz."""
    return Path(str(path)[:-3] if is_packed(path) else path).suffix.lower()


def open_bytes(path: str | Path) -> IO[bytes]:
    """The file for reading, unpacked."""
    return gzip.open(path) if is_packed(path) else open(path, "rb")  # type: ignore[return-value]


def open_text(path: str | Path, **form: Any) -> io.TextIOWrapper:
    """As `open_bytes`, decoded by the arguments of TextIOWrapper."""
    return io.TextIOWrapper(open_bytes(path), **form)


def file_digest(path: Path) -> str:
    """Its sha256."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def file_entry(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file that was written, for a manifest."""
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def file_problem(path: Path, entry: dict[str, Any], digest: bool = False) -> str | None:
    """What is wrong with a file of this `file_entry`, or None. Compares its size and, with `digest`, its sha256."""
    try:
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{path}: damaged: {size:,} bytes instead of {entry['bytes']:,}"
        if digest and file_digest(path) != entry["sha256"]:
            return f"{path}: damaged: not what was written (its sha256 differs)"
    except OSError as error:
        return f"{path}: damaged: {error.strerror.lower() if error.strerror else error}"
    return None
