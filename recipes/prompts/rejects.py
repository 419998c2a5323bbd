"""Records that could not be used: each kept with its place and reason, none lost, none stops a run."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import IO, Any

from draftsmith.recipes.files.lines import append_line, cut_torn_line


class Rejects:
    """Records that could not be used: counted by reason and, where `path` is given, kept as JSON lines.

    A line is {"source", "line", "reason", "record"}. The part of a reason before its first colon is its kind; the
    summary counts kinds. A file that already holds the same record, rejected for the same kind of reason (a resumed
    run), does not get it again: servers put numbers of requests into their reasons.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = Path(path) if path is not None else None
        self.counts: Counter[str] = Counter()
        self._first = ""  # place and reason of the first one, for a summary without a file
        self._written: set[bytes] = set()  # digests of what stood in the file before
        self._file: IO[bytes] | None = None

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, source: str, line: int | None, reason: str, record: Any) -> None:
        """`line` is the 1-based line of a text file or row of a table; `record` what stood there, text if unparsed."""
        self.counts[reason.split(":")[0]] += 1
        self._first = self._first or f"{source}:{line}: {reason}"
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._written.update(map(_identity, cut_torn_line(self._file, self.path)))
        entry = {"source": source, "line": line, "reason": reason, "record": record}
        text = json.dumps(entry, ensure_ascii=False, default=str)
        if not is_unicode(text):
            text = json.dumps(entry, default=str)  # lone surrogates as \\ud800: the file stays readable
        kept = text.encode()
        if _identity(kept) not in self._written:
            append_line(self._file, self.path, kept + b"\n")

    def summary(self) -> str:
        """One line for the end of a run."""
        if not self.total:
            return "no record rejected"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
        where = f"kept in {self.path}" if self.path is not None else f"the first at {self._first}"
        return f"{self.total} record{'s' if self.total > 1 else ''} rejected ({kinds}): {where}"


def _identity(line: bytes) -> bytes:
    """A digest of a line of the file, in which the kind stands for the whole reason."""
    try:
        entry = json.loads(line)
        entry["reason"] = entry["reason"].split(":")[0]
        line = json.dumps(entry, sort_keys=True).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # not a line of ours
        pass
    return hashlib.sha256(line).digest()


def is_unicode(text: str) -> bool:
    """False where the text holds lone surrogates, which no file and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
