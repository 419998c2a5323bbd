"""Keeps unusable records with their place and reason. They never stop a run."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from draftsmith.recipes.files.atomic import append_line, cut_torn_line, json_line

if TYPE_CHECKING:
    from draftsmith.recipes.prompts.records import Conversation


class Rejects:
    """Counts unusable records by the kind of reason and, if `path` is given, appends them to it as JSON lines.

    The kind is the part of a reason before its first colon. A resumed run does not repeat a record that the file holds
    with the same kind of reason: servers put numbers of requests into their reasons.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = Path(path) if path is not None else None
        self.counts: Counter[str] = Counter()
        self._first = self.last = ""  # place and reason
        self._written: set[bytes] = set()  # digests of the file's earlier lines
        self._file: IO[bytes] | None = None

    @property
    def total(self) -> int:
        return self.counts.total()

    def add(self, source: str, line: int | None, reason: str, record: Any) -> None:
        """`line` counts from 1, also a table's rows; `record` is its content, text if unparsed."""
        self.counts[reason.split(":")[0]] += 1
        self.last = f"{source}:{line}: {reason}"
        self._first = self._first or self.last
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._written.update(map(_identity, cut_torn_line(self._file, self.path)))
        kept = json_line({"source": source, "line": line, "reason": reason, "record": record}, default=str)
        if _identity(kept) not in self._written:
            append_line(self._file, self.path, kept)

    def add_conversation(self, conversation: "Conversation", reason: str) -> None:
        """Keeps the conversation as data.prompts reads one, so that it can be asked once it is mended."""
        record = {"id": conversation.id, "messages": conversation.messages, "images": conversation.images}
        self.add(conversation.source, conversation.line, reason, record | {"meta": conversation.meta})

    def summary(self) -> str:
        """One line for the end of a run."""
        if not self.total:
            return "no record rejected"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
        where = f"kept in {self.path}" if self.path is not None else f"the first at {self._first}"
        return f"{self.total} record{'s' if self.total > 1 else ''} rejected ({kinds}): {where}"


def _identity(line: bytes) -> bytes:
    """Digest of a line with its reason cut to the kind."""
    try:
        entry = json.loads(line)
        entry["reason"] = entry["reason"].split(":")[0]
        line = json.dumps(entry, sort_keys=True).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # a foreign line
        pass
    return hashlib.sha256(line).digest()


def is_unicode(text: str) -> bool:
    """False if the text holds lone surrogates, which files and tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
