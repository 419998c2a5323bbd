"""The file that regenerate appends to: JSON lines that survive a kill at any moment, and say themselves what is done.

A line is handed to the operating system in one write, so a killed process leaves whole lines and at most one torn last
one, which the next start cuts off. The disk is made to follow once a second, for the case of a power cut.

Every line carries a digest of what was asked: an id alone, often a file's name and a line, does not say that this very
conversation is done.
"""

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lines import append_line
from draftsmith.recipes.files.lock import locked
from draftsmith.recipes.prompts.reader import Conversation, asked_digest
from draftsmith.recipes.prompts.rejects import is_unicode

SECONDS_BETWEEN_SYNCS = 1.0
# What a loaded target and a server are told apart by.
LEARNED = ("embedding_digest", "served_model")
# Conversations that a refusal names; there may be thousands.
NAMED_AT_MOST = 5
_START = b'{"id": '  # of every line of ours


class Done(NamedTuple):
    """A conversation that is written."""

    line: int  # from 1
    asked_digest: str


@dataclass
class LogContent:
    """What a conversations file holds."""

    path: Path
    done: dict[str, Done] = field(default_factory=dict)  # by id
    answers: int = 0
    answer_tokens: int = 0
    whole_bytes: int = 0  # length of the file without a torn last line
    torn_bytes: int = 0
    learned: dict[str, set[str]] = field(default_factory=dict)  # what `identify` was told, by its names


def read_log(path: Path, generator: dict[str, Any]) -> LogContent:
    """What is done already.

    Args:
        generator: what makes the answers of this run; the file must have been made by the same.

    Raises:
        UserError: a line that is none of regenerate's, an id twice, or another generator; both sides are printed.
    """
    content = LogContent(path)
    if not path.exists():
        return content
    torn_at = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if torn_at:
                raise _not_ours(path, torn_at)
            record: Any = None
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(raw)
            if record is None and not _may_be_torn(raw, bool(content.done)):
                raise _not_ours(path, number)  # never cut off what somebody else wrote
            try:
                if record is not None:
                    conversation_id, turns, written_by = record["id"], record["turns"], record["generator"]
                    done = Done(number, record["asked_digest"])
                    tokens = sum(len(turn["output_token_ids"]) for turn in turns)
            except (KeyError, TypeError):
                raise _not_ours(path, number) from None
            if record is None or not raw.endswith(b"\n"):
                torn_at, content.torn_bytes = number, len(raw)  # allowed in the last line only
                continue
            _check_generator(path, number, written_by, generator)
            if conversation_id in content.done:
                raise UserError(f"{path}:{number}: conversation {conversation_id!r} is there twice")
            content.done[conversation_id] = done
            content.answers += len(turns)
            content.answer_tokens += tokens
            content.whole_bytes += len(raw)
            for name in LEARNED:
                if name in written_by:
                    content.learned.setdefault(name, set()).add(written_by[name])
    return content


def _may_be_torn(raw: bytes, behind_ours: bool) -> bool:
    """Could a kill or a power cut, which may leave zeros, have left this of a line of ours? It then has no end."""
    if not raw.strip(b"\0\n"):
        return True
    return not raw.endswith(b"\n") and (behind_ours or raw.startswith(_START) or _START.startswith(raw))


def _not_ours(path: Path, line: int) -> UserError:
    return UserError(f"{path}:{line}: not a line of regenerate's; move the file away, or use another output_dir")


def not_done(conversations: list[Conversation], content: LogContent) -> list[Conversation]:
    """The conversations that are still to be asked.

    Raises:
        UserError: a conversation of the same id is done that was asked something else; both places are named.
    """
    todo, others = [], []
    for conversation in conversations:
        done = content.done.get(conversation.id)
        if done is None:
            todo.append(conversation)
        elif (digest := asked_digest(conversation)) != done.asked_digest:
            others.append(
                f"{content.path}:{done.line}: conversation {conversation.id!r} was asked something else there "
                f"(asked_digest {done.asked_digest[:16]}) than {conversation.source}:{conversation.line} asks now "
                f"({digest[:16]})"
            )
    if others:
        more = [f"and {len(others) - NAMED_AT_MOST:,} more"] if len(others) > NAMED_AT_MOST else []
        advice = "these prompts have the ids of others that are done: use another output_dir, or give them other ids"
        raise UserError([*others[:NAMED_AT_MOST], *more, advice])
    return todo


def _check_generator(path: Path, line: int, written_by: dict[str, Any], generator: dict[str, Any]) -> None:
    differences = [
        f"{path}:{line}: written with {key} {written_by.get(key)!r}, this run has {value!r}"
        for key, value in generator.items()
        if written_by.get(key) != value
    ]
    if differences:
        raise UserError(
            [
                *differences,
                "answers of two kinds do not belong in one file: use the same settings, or another output_dir",
            ]
        )


class ConversationLog:
    """Appends records to a conversations file, alone.

    Args:
        generator: goes into every line; the file's lines must have been made by the same.

    Raises:
        UserError: another process is writing the file; or as `read_log`.
    """

    def __init__(self, path: Path, generator: dict[str, Any]):
        self.path, self._generator = path, dict(generator)
        path.parent.mkdir(parents=True, exist_ok=True)
        taken = f"{path}: another process is writing it; wait for it, or use another output_dir"
        with contextlib.ExitStack() as opened:
            opened.enter_context(locked(path.with_name(f".{path.name}.lock"), taken))
            self._file: IO[bytes] = opened.enter_context(path.open("ab", buffering=0))
            self.content = read_log(path, generator)
            self._opened = opened.pop_all()
        if self.content.torn_bytes:
            kept = "" if self.content.done else self._keep_torn()
            self._file.truncate(self.content.whole_bytes)
            print(
                f"{path}: its last line was torn ({self.content.torn_bytes} bytes) and was cut off{kept}; it is made "
                "anew"
            )
        self._synced = time.monotonic()
        self.appended = 0  # lines of this run

    def _keep_torn(self) -> str:
        """No whole line shows that the file is ours: what is cut off it is kept beside it."""
        beside = self.path.with_name(self.path.name + ".torn")
        beside.write_bytes(self.path.read_bytes())
        return f" (kept in {beside})"

    def identify(self, name: str, value: str) -> None:
        """Names the target by what is known only once it is loaded or reached; refuses another one's lines.

        Args:
            name: one of LEARNED.
        """
        others = self.content.learned.get(name, set()) - {value}
        if others:
            raise UserError(
                f"{self.path}: written by {self._generator['target']} with {name} {min(others)[:64]}, what stands "
                f"there now has {value[:64]}: the target was changed; use another output_dir"
            )
        self._generator[name] = value

    def note(self, name: str, value: Any) -> None:
        """Stands in the lines of this run; lines without it, or with another value, may stand beside them."""
        self._generator[name] = value

    def append(self, record: dict[str, Any]) -> None:
        """Writes one line. It is safe from a kill when this returns, from a power cut within about a second."""
        text = json.dumps(record | {"generator": self._generator}, ensure_ascii=False)
        if not is_unicode(text):
            text = json.dumps(record | {"generator": self._generator})  # lone surrogates as \\ud800
        append_line(self._file, self.path, text.encode() + b"\n")
        self.appended += 1  # at once: an interrupt may come before the next line
        if time.monotonic() - self._synced > SECONDS_BETWEEN_SYNCS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def __enter__(self) -> "ConversationLog":
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        if self._file.tell() == 0:
            self.path.unlink()  # nothing was written: leave no file that looks like an empty result
        self._opened.close()
