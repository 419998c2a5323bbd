"""Reads corpora, document by document: text files, records, and datasets of the Hub (docs/prompts-and-answers.md).

Records come from `recipes.prompts.sources`, and `datasets` streams those of the Hub. It does not read local files: in
5.2, one malformed line, or one byte that is not UTF-8, ends a file and loses up to 10 MB before it. Here a bad line
loses itself, and a damaged file what follows the damage.
"""

import glob
import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.input_files import DAMAGED, ending, matching, open_text
from draftsmith.recipes.prompts.records import COLUMNS, LIST_COLUMNS, json_type
from draftsmith.recipes.prompts.rejects import Rejects, is_unicode
from draftsmith.recipes.prompts.sources import HUB_FORMS, hub_parts, open_dataset, records
from draftsmith.recipes.sections.data import RankingSource

ANSWERS = "answers"
TEXT_FIELD = "text"  # the recipe's default
RECORD_TYPES = (".jsonl", ".json", ".parquet")
PIECE_CHARACTERS = 1 << 16  # of a text file; its end cuts about one token in tens of thousands
CHECKED_FIRST = 50  # records; finds a wrong text_field before anything is counted


class Item(NamedTuple):
    """A record, or a piece of a text file as a record."""

    place: str  # file or dataset
    line: int  # first line of a file, or row of a table
    record: Any
    opens: bool = True  # begins a document


def files_of(source: str) -> list[str] | None:
    """The files of a path, a pattern or a folder (those directly in it), sorted; None for a dataset."""
    if source.startswith("hf:"):
        return None
    return matching(f"{glob.escape(source)}/*" if Path(source).is_dir() else source)


def bytes_of(source: str) -> int | None:
    """The size of a source's files; None for a dataset."""
    files = files_of(source)
    return None if files is None else sum(Path(path).stat().st_size for path in files)


def items(section: RankingSource, rejects: Rejects, bar: Bar | None = None) -> Iterator[Item]:
    """The source's items, up to max_documents documents. What is malformed or damaged goes to `rejects`.

    Raises UserError if a file cannot be opened, or a dataset cannot be read to its end.

    Args:
        bar: advances by the bytes of each file that was read, or by rows of a dataset; damaged files are then printed.
    """
    begun, files = 0, files_of(section.source)
    found = _rows(section.source, bar) if files is None else _of_files(files, section.text_field, rejects, bar)
    for item in found:
        begun += item.opens
        if section.max_documents is not None and begun > section.max_documents:
            return
        yield item


def _rows(source: str, bar: Bar | None) -> Iterator[Item]:
    line = 0
    try:
        for line, record in records(source, Rejects()):
            yield Item(source, line, record)
            if bar is not None:
                bar.update()
    except UserError as error:
        advice = f"behind row {line:,}; the same command reads it from its beginning" if line else ""
        raise UserError(f"{error.problems[0]}{advice and f' ({advice})'}") from None


def _of_files(files: list[str], text_field: str, rejects: Rejects, bar: Bar | None) -> Iterator[Item]:
    for path in files:
        row, damaged = 0, rejects.counts["damaged file"]
        try:
            if ending(path) in RECORD_TYPES:
                for row, record in records(path, rejects):
                    yield Item(path, row, record)
            else:
                yield from _pieces(path, text_field, rejects)
        except UserError as error:  # parquet
            rejects.add(path, row + 1, f"damaged file: {error.problems[0]}; what follows is lost", None)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
        if bar is not None:
            bar.update(Path(path).stat().st_size)
            if rejects.counts["damaged file"] > damaged:
                print(f"note: {rejects.last}")


def _pieces(path: str, text_field: str, rejects: Rejects) -> Iterator[Item]:
    """A text file in pieces that end with a line, unless a line is longer than a piece."""
    piece, start, line, opens = "", 1, 1, True
    with open_text(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        while True:
            try:
                part = file.readline(PIECE_CHARACTERS)
            except DAMAGED as error:
                rejects.add(path, line, f"damaged file: {error}; what follows is lost", None)
                part = ""
            if opens and "\0" in part:
                reason = "not text: this reads text, .jsonl and .json, also as .gz, and .parquet"
                rejects.add(path, line, reason, None)
                return
            if not (usable := is_unicode(part)):
                raw = part.encode(errors="surrogateescape")
                rejects.add(path, line, "not UTF-8", raw.decode(errors="replace").rstrip())
            if not (part and usable) or len(piece) + len(part) > PIECE_CHARACTERS:
                if piece.strip():
                    yield Item(path, start, {text_field: piece}, opens)
                    opens = False
                piece = ""
            if not part:
                return
            start = start if piece else line
            piece += part if usable else ""
            line += part.endswith("\n")


def text_of(record: Any, text_field: str) -> str | None:
    """The text of a record, or None for a conversation, which `recipes.prompts` reads.

    A list of messages makes a record a conversation, unless the recipe names a text_field. Without either, columns of a
    question and its answer do (`recipes.prompts.reader`). Raises ValueError, "kind: detail", if there is no text.
    """
    if not isinstance(record, dict):
        raise ValueError(f"wrong type: a record must be a JSON object, this is {json_type(record)}")
    value = record.get(text_field)
    listed = any(record.get(column) is not None for column in LIST_COLUMNS)
    asked = any(record.get(column) is not None for column in COLUMNS)
    if (listed and text_field == TEXT_FIELD) or (asked and value is None):
        return None
    if value is None:
        among = ", ".join(map(str, record)) or "no fields"
        raise ValueError(f"no text: no field `{text_field}` and no conversation among {among}")
    if not isinstance(value, str):
        raise ValueError(f"wrong type: `{text_field}` must be text, this is {json_type(value)}")
    if not value.strip():
        raise ValueError("empty text")
    if not is_unicode(value):
        raise ValueError("not Unicode: a lone surrogate in the text")
    return value


def identity(source: str) -> dict[str, str]:
    """Text that differs if the source has changed."""
    if (files := files_of(source)) is not None:
        stamps = [(path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for path in files]
        return {"files": f"{len(files)} files, {hashlib.sha256(json.dumps(stamps).encode()).hexdigest()}"}
    info, parts = open_dataset(source).info, hub_parts(source)
    split = (info.splits or {}).get(parts[2] if parts else None)
    return {"features": str(info.features), "rows": str(split and split.num_examples), "version": str(info.version)}


# Checks.


def check_sources(sections: list[RankingSource], look: bool = True, key: str = "data.ranking.sources") -> None:
    """Raises UserError with all problems of the sources.

    Args:
        look: read a few records of each. A plan does not, because it does not ask the Hub.
        key: of the recipe, for messages.
    """
    problems, names = [], [section.source for section in sections]
    for i, section in enumerate(sections):
        found = [f"{section.source} is listed twice; give it one weight"] if section.source in names[:i] else []
        if section.source != ANSWERS:
            found += [problem] if (problem := _name_problem(section.source) or (look and _look(section))) else []
        elif section.max_documents or section.text_field != TEXT_FIELD:
            found.append(f"{ANSWERS} take no max_documents and no text_field: they are counted as training reads them")
        problems += [f"{key}.{i}: {problem}" for problem in found]
    if problems:
        raise UserError(problems)


def _name_problem(name: str) -> str | None:
    if (files := files_of(name)) is not None:
        forms = f"{HUB_FORMS} for a dataset, `{ANSWERS}` for the target's own answers"
        return None if files else f"{name}: no such file; write {forms}"
    if "[" in name:
        return f"{name}: parts of a split cannot be asked for; the first N are max_documents"
    return None if hub_parts(name) else f"{name}: write {HUB_FORMS}"


def _look(section: RankingSource) -> str | None:
    """A problem if none of the first records is usable."""
    rejects = Rejects()
    try:
        for item in islice(items(section, rejects), CHECKED_FIRST):
            try:
                text_of(item.record, section.text_field)
                return None
            except ValueError as error:
                rejects.add(item.place, item.line, str(error), None)
    except UserError as error:
        return error.problems[0]
    if not rejects.total:
        return f"{section.source}: it holds no records"
    hint = "; name the field that holds the text in text_field" if rejects.counts["no text"] else ""
    return f"{section.source}: none of its first records can be used: {rejects.summary()}{hint}"
