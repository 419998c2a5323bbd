"""The conversations file that regenerate appends to. A run that is killed resumes from it.

A kill leaves whole lines and at most one torn last line, which the next start cuts off. The file is synced once a
second, in case of a power cut. Each line carries a digest of what was asked, because an id (often a file name and a
line number) does not show that this exact conversation is done.
"""

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import append_line, json_line
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.prompts.prompt_reader import Conversation, asked_digest

SECONDS_BETWEEN_SYNCS = 1.0
LEARNED = ("embedding_digest", "vision_digest", "served_model")  # identify the target once it is loaded or reached
NAMED_AT_MOST = 5  # conversations that an error lists
_START = b'{"id": '  # of every line that regenerate writes


@dataclass
class LogContent:
    """What a conversations file holds."""

    path: Path
    done: dict[str, tuple[int, str]] = field(default_factory=dict)  # by id: its line, from 1, and asked_digest
    answers: int = 0
    answer_tokens: int = 0
    whole_bytes: int = 0  # length of the file without a torn last line
    torn_bytes: int = 0
    learned: dict[str, set[str]] = field(default_factory=lambda: {name: set() for name in LEARNED})  # values of lines


def read_log(path: Path, generator: dict[str, Any]) -> LogContent:
    """Reads what is done already.

    Raises UserError for a foreign line, a repeated id, or a line whose generator is not `generator`.
    """
    content = LogContent(path)
    if not path.exists():
        return content
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if content.torn_bytes:  # allowed in the last line only
                raise _not_ours(path, number - 1)
            try:
                record = json.loads(raw)
                conversation_id, turns, written_by = record["id"], record["turns"], record["generator"]
                done = number, record["asked_digest"]
                tokens = sum(len(turn["output_token_ids"]) for turn in turns)
            except (KeyError, TypeError):
                raise _not_ours(path, number) from None
            except (ValueError, RecursionError):
                if not _may_be_torn(raw, bool(content.done)):  # never cut off foreign text
                    raise _not_ours(path, number) from None
                content.torn_bytes = len(raw)
                continue
            if not raw.endswith(b"\n"):
                content.torn_bytes = len(raw)
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
                    content.learned[name].add(written_by[name])
    return content


def _may_be_torn(raw: bytes, after_ours: bool) -> bool:
    """Whether a kill could have left this: a line without its end, or the zeros that a power cut leaves."""
    if not raw.strip(b"\0\n"):
        return True
    return not raw.endswith(b"\n") and (after_ours or raw.startswith(_START) or _START.startswith(raw))


def _not_ours(path: Path, line: int) -> UserError:
    return UserError(f"{path}:{line}: not a line of regenerate's; move the file away, or use another output_dir")


def _check_generator(path: Path, line: int, written_by: dict[str, Any], generator: dict[str, Any]) -> None:
    differences = [
        f"{path}:{line}: written with {key} {written_by.get(key)!r}, this run has {value!r}"
        for key, value in generator.items()
        if written_by.get(key) != value
    ]
    if differences:
        advice = "answers of two kinds do not belong in one file: use the same settings, or another output_dir"
        raise UserError([*differences, advice])


def not_done(conversations: list[Conversation], content: LogContent) -> list[Conversation]:
    """The conversations that are still to be asked. Raises UserError if a finished id was asked something else."""
    todo, others = [], []
    for conversation in conversations:
        if conversation.id not in content.done:
            todo.append(conversation)
            continue
        line, digest = content.done[conversation.id]
        if digest != asked_digest(conversation):
            others.append(
                f"{content.path}:{line}: conversation {conversation.id!r} was asked something else there than "
                f"{conversation.source}:{conversation.line} asks now"
            )
    if others:
        advice = "have the ids of others that are done: use another output_dir, or give them other ids"
        raise UserError([*others[:NAMED_AT_MOST], f"{len(others):,} prompts {advice}"])
    return todo


class ConversationLog:
    """Appends records to a conversations file under a lock.

    Raises UserError if another run is writing the file, or as `read_log` does.

    Attributes:
        generator: is written into every line. The file's lines must have the one that the log was opened with.
        appended: lines of this run.
    """

    def __init__(self, path: Path, generator: dict[str, Any]):
        self.path, self.generator, self.appended = path, dict(generator), 0
        with contextlib.ExitStack() as opened:
            opened.enter_context(alone_in(path.parent, file=path.name))
            self._file: IO[bytes] = opened.enter_context(path.open("ab", buffering=0))
            self.content = read_log(path, generator)
            self._opened = opened.pop_all()
        if self.content.torn_bytes:
            self._file.truncate(self.content.whole_bytes)
            print(f"{path}: its last line was torn ({self.content.torn_bytes} bytes) and was cut off; it is made again")
        self._synced = time.monotonic()

    def identify(self, name: str, value: str) -> None:
        """Adds one of LEARNED to the generator. Raises UserError if the file holds lines of another target."""
        if others := self.content.learned[name] - {value}:
            raise UserError(
                f"{self.path}: written by {self.generator['target']} with {name} {min(others)[:64]}, the model "
                f"there now has {value[:64]}: the target was changed; use another output_dir"
            )
        self.generator[name] = value

    def append(self, record: dict[str, Any]) -> None:
        """Writes one line. It survives a kill at once, and a power cut after about a second."""
        append_line(self._file, self.path, json_line(record | {"generator": self.generator}))
        self.appended += 1  # at once: an interrupt may come before the next line
        if time.monotonic() - self._synced > SECONDS_BETWEEN_SYNCS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def __enter__(self) -> "ConversationLog":
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file.fileno())
        if self.path.stat().st_size == 0:
            self.path.unlink()  # an empty file would look like a result
        self._opened.close()
