"""Corpora to count tokens in: files and datasets, read piece by piece, from wherever a killed run had come.

    path or pattern      files/*.txt, data/**/*.jsonl.gz, ...; in the order of their names
        .jsonl           a record per line
        .parquet         a record per row
        all others       text: each file is one document, read in pieces that end with a line
        .gz              behind any of these but .parquet
    hf:org/name[:config]:split
                         a dataset of the `datasets` library, streamed; a record per row; the split is `train` unless
                         given, and `org/name` may be a local folder

Nothing is parsed here that can be parsed by whoever counts: lines are passed on as they stand. Where a run goes on,
files are opened at the byte or row group that was reached; a packed file is unpacked again up to there, and a dataset
takes up the state of its stream. A damaged file is read up to the damage; of a table, the other row groups, too.
"""

import glob
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from draftsmith.data_gen.corpus.gzip_reader import GzipReader
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.prompts.records import COLUMNS, LIST_COLUMNS, json_type
from draftsmith.recipes.prompts.sources import check_source, hub_parts, plain_row, rows_of_batch
from draftsmith.recipes.schema import RankingSource

ANSWERS = "answers"
TEXT_FIELD = "text"  # where the recipe names none
# A piece of a text file. Tokens that would reach over its end are cut there: one in tens of thousands.
PIECE_BYTES = 1 << 16
# What is handed to a process at a time: large enough that handing it over costs nothing.
BATCH_CHARACTERS = 1 << 20
LOOKED_AT_FIRST = 50  # records, to tell a wrong text_field before anything is counted
ROWS_AT_ONCE = 256

Position = dict[str, Any]  # JSON


class Item(NamedTuple):
    """A document, or a piece of one, as it stood."""

    kind: str  # text, piece (bytes of a text file), line (bytes of a .jsonl), row, or bad: `content` is the reason
    place: str  # its file, or the dataset
    line: int  # where it begins: line of a file, row of a table
    content: Any
    opens: bool = True  # a document begins here


class Batch(NamedTuple):
    items: list[Item]
    documents: int  # that begin in it
    position: Position  # behind it
    done: int  # bytes of all files, or rows, up to there


def content_of(record: Any, text_field: str) -> str | None:
    """The text of a record; None where it is a conversation, for the project's reader.

    Conversations are told by a list of messages. A `text_field` that the recipe names goes before it; where there is
    neither, the columns of one question and its answer count (`recipes.prompts.reader`).

    Raises:
        ValueError: "kind: detail" where there is none of these.
    """
    if not isinstance(record, dict):
        raise ValueError(f"wrong type: a record must be a JSON object, this is {json_type(record)}")
    value = record.get(text_field)
    listed = any(record.get(column) is not None for column in LIST_COLUMNS)
    if listed and (text_field == TEXT_FIELD or value is None):
        return None
    if value is None:
        if any(record.get(column) is not None for column in COLUMNS):
            return None
        raise ValueError(
            f"no text: no field `{text_field}` and no conversation among {', '.join(map(str, record)) or 'no fields'}"
        )
    if not isinstance(value, str):
        raise ValueError(f"wrong type: `{text_field}` must be text, this is {json_type(value)}")
    return value


class Corpus:
    """One source of a ranking. `items` goes on behind a position, `position` tells the one behind the last item."""

    unit = "B"

    def __init__(self, section: RankingSource):
        self.section, self.name = section, section.source

    def problems(self) -> list[str]:
        """What is wrong with it, before anything is counted. Reads a few records."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """JSON by which a changed corpus is told from the one that was counted."""
        raise NotImplementedError

    @property
    def total(self) -> int | None:
        """Bytes of all its files; None where nobody knows."""
        return None

    def items(self, start: Position) -> Iterator[Item]:
        raise NotImplementedError

    def position(self) -> Position:
        raise NotImplementedError

    def done(self) -> int:
        raise NotImplementedError

    def batches(self, start: Position, documents: int) -> Iterator[Batch]:
        """All that stands behind `start`, where `documents` had begun; no more documents than the recipe wants."""
        most = self.section.max_documents
        items: list[Item] = []
        begun = characters = 0
        end: Position = {}
        if start.get("end"):
            return
        for item in self.items(start):
            if item.opens and most is not None and documents + begun == most:
                end = {"end": True}  # the position is now behind this item, which is no more wanted
                break
            items.append(item)
            begun += item.opens
            characters += len(item.content) if isinstance(item.content, str | bytes) else len(str(item.content))
            if characters >= BATCH_CHARACTERS:
                yield Batch(items, begun, self.position(), self.done())
                documents, items, begun, characters = documents + begun, [], 0, 0
        if items:
            yield Batch(items, begun, self.position() | end, self.done())

    def _no_text(self, where: str) -> list[str]:
        """A problem, if none of the first records can be used."""
        reason = ""
        for number, item in enumerate(self.items({})):
            if number == LOOKED_AT_FIRST:
                break
            try:
                if item.kind in ("text", "piece"):
                    return []
                if item.kind != "bad":
                    content_of(parse_json(item.content.decode()) if item.kind == "line" else item.content, self._field)
                    return []
                reason = reason or f"{item.place}:{item.line}: {item.content}"
            except ValueError as error:
                reason = reason or f"{item.place}:{item.line}: {error}"
        if not reason:
            return [f"{where}: there is no record in it"]
        hint = ""
        if "no text" in reason:
            hint = "; name the field that holds the text in text_field"
        elif "damaged file" in reason:
            hint = "; fetch it anew, or leave it out"
        return [f"{where}: none of its first records can be used: {reason}{hint}"]

    @property
    def _field(self) -> str:
        return self.section.text_field


# Files.


class FileCorpus(Corpus):
    def __init__(self, section: RankingSource):
        super().__init__(section)
        found = [section.source] if Path(section.source).exists() else glob.glob(section.source, recursive=True)
        by_place: dict[Path, str] = {}  # a pattern may find a file on several ways
        for path in sorted(path for path in found if not Path(path).is_dir()):
            by_place.setdefault(Path(path).resolve(), path)
        self.files, self.places = list(by_place.values()), set(by_place)
        self._sizes = [Path(path).stat().st_size for path in self.files]
        self._at = (0, 0, 0)  # file, and in it the byte (unpacked) or row, and lines before it
        self._done = 0

    def problems(self) -> list[str]:
        name = self.name
        if Path(name).is_dir():
            return [f"{name}: is a folder; name its files by a pattern, for example {name.rstrip('/')}/*.txt"]
        if not self.files:
            return [f"{name}: no such file (a dataset is written hf:org/name:split, the target's answers `{ANSWERS}`)"]
        wrong = [f"{path}: {problem}" for path in self.files if (problem := _wrong_file(path))]
        if wrong:
            more = f" (and {len(wrong) - 3:,} more files)" if len(wrong) > 3 else ""
            return [*wrong[:2], f"{wrong[2]}{more}"] if len(wrong) > 2 else wrong
        if not any(self._sizes):
            return [f"{name}: empty"]
        try:
            return self._no_text(name)
        except UserError as error:
            return error.problems

    def identity(self) -> dict[str, Any]:
        changed = [Path(path).stat().st_mtime_ns for path in self.files]
        digest = hashlib.sha256(json.dumps([self.files, self._sizes, changed]).encode()).hexdigest()
        return {"files": f"{len(self.files)} files, {digest}"}

    @property
    def total(self) -> int | None:
        return sum(self._sizes)

    def items(self, start: Position) -> Iterator[Item]:
        first, offset, line = start.get("file", 0), start.get("offset", 0), start.get("line", 0)
        for index in range(first, len(self.files)):
            self._at = (index, offset, line)
            yield from self._items_of(self.files[index], index, offset, line)
            offset = line = 0

    def position(self) -> Position:
        return dict(zip(("file", "offset", "line"), self._at, strict=True))

    def done(self) -> int:
        return self._done

    def _items_of(self, path: str, index: int, offset: int, line: int) -> Iterator[Item]:
        before = sum(self._sizes[:index])
        if _ending(path) == ".parquet":
            for item, row, rows in _table_rows(path, offset, self._field):
                self._at = (index, row, row)
                self._done = before + self._sizes[index] * row // max(1, rows)
                yield item
            return
        with open(path, "rb") as raw:
            packed = GzipReader(raw) if path.endswith(".gz") else None
            file: IO[bytes] = raw if packed is None else io.BufferedReader(packed, PIECE_BYTES)
            _skip(file, offset)
            kind = "line" if _ending(path) == ".jsonl" else "piece"
            for content in file if kind == "line" else _pieces(file):
                if kind == "line" and packed and packed.damage and not content.endswith(b"\n"):
                    break  # torn by the damage, which is told once
                opens, place = kind == "line" or offset == 0, line + 1
                offset += len(content)
                line += content.count(b"\n") if kind == "piece" else 1
                self._at, self._done = (index, offset, line), before + raw.tell()
                if kind == "piece" or content.removeprefix(b"\xef\xbb\xbf").strip():
                    yield Item(kind, path, place, content, opens)
            if packed and packed.damage:
                self._at, self._done = (index + 1, 0, 0), before + self._sizes[index]
                reason = f"damaged file: {packed.damage}; what follows is lost"
                yield Item("bad", path, line + 1, reason, opens=False)


def _skip(file: IO[bytes], offset: int) -> None:
    if file.seekable():
        file.seek(offset)
        return
    while offset and (passed := len(file.read(min(offset, BATCH_CHARACTERS)))):
        offset -= passed


def _ending(path: str) -> str:
    return Path(path.removesuffix(".gz")).suffix.lower()


def _wrong_file(path: str) -> str | None:
    if _ending(path) == ".json":
        return "a .json array cannot be read piece by piece; write its records one a line, as .jsonl"
    try:
        if _ending(path) == ".parquet":
            if path.endswith(".gz"):
                return "parquet is packed already; unpack it"
            import pyarrow.parquet

            pyarrow.parquet.ParquetFile(path).close()
            return None
        with open(path, "rb") as raw:
            packed = GzipReader(raw) if path.endswith(".gz") else None
            file: IO[bytes] = raw if packed is None else io.BufferedReader(packed)
            beginning = file.read(1 << 12)
            if packed and packed.damage and not beginning:
                return f"cannot be read as gzip: {packed.damage}; fetch it anew, or leave it out"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except Exception as error:  # pyarrow's, which is imported only where it is needed
        return f"cannot be read as parquet: {str(error).splitlines()[0]}; fetch it anew, or leave it out"
    if b"\0" in beginning:
        return "is no text; known are text, .jsonl and .parquet, and .gz of the first two"
    return None


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """The file in pieces of `PIECE_BYTES` at most: cut behind a line, else before a blank, else between characters.

    Where a piece ends follows from where it begins: a run that goes on cuts as the one that was killed. What is left
    at the end of the file is not cut.
    """
    rest = b""
    while block := file.read(PIECE_BYTES - len(rest)):
        text = rest + block
        cut = len(text)
        if cut == PIECE_BYTES:
            cut = text.rfind(b"\n") + 1 or max(text.rfind(b" "), 0) or _whole_characters(text) or cut
        yield text[:cut]
        rest = text[cut:]
    if rest:
        yield rest


def _whole_characters(text: bytes) -> int:
    """Bytes before a UTF-8 character that begins in the last three and ends beyond; all where there is none."""
    for behind in range(1, min(3, len(text)) + 1):
        byte = text[-behind]
        if byte < 0x80:
            break
        if byte >= 0xC0:  # the first one of a character
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - behind if behind < length else len(text)
    return len(text)


def _table_rows(path: str, start: int, field: str) -> Iterator[tuple[Item, int, int]]:
    """(row, its number from 1, how many there are) behind the first `start` rows of a parquet file.

    What is damaged of a row group is lost, the other groups are not.
    """
    import pyarrow
    import pyarrow.parquet

    unreadable = (pyarrow.ArrowException, OSError)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows, names, end = file.metadata.num_rows, file.schema_arrow.names, 0
            only_text = field in names and (field != TEXT_FIELD or not set(names) & set(LIST_COLUMNS))
            columns = [field] if only_text else None
            for group in range(file.num_row_groups):
                number, end = end, end + file.metadata.row_group(group).num_rows
                if end <= start:
                    continue
                try:
                    for batch in file.iter_batches(ROWS_AT_ONCE, [group], columns):
                        if number + batch.num_rows <= start:
                            number += batch.num_rows
                            continue
                        for row in rows_of_batch(batch):
                            number += 1
                            if number > start:
                                yield _row_item(path, number, row, field), number, rows
                except unreadable as error:
                    if isinstance(error, OSError) and error.errno is not None:
                        raise  # the disk, not what stands on it
                    reason = f"damaged file: {_said(error)}; rows {number + 1:,} to {end:,} are lost"
                    yield Item("bad", path, number + 1, reason, opens=False), end, rows
    except unreadable as error:
        raise UserError(f"{path}: cannot be read as parquet: {_said(error)}") from None


def _row_item(place: str, number: int, row: Any, field: str) -> Item:
    """A row of a table, or the error in its place. Texts may be stored as bytes; dates and numbers are none."""
    if isinstance(row, Exception):
        return Item("bad", place, number, f"malformed cell: {row}")
    if isinstance(row, dict) and isinstance(value := row.get(field), bytes):
        try:
            row = row | {field: value.decode("utf-8-sig")}
        except UnicodeDecodeError as error:
            return Item("bad", place, number, f"not UTF-8: byte {error.start + 1} of `{field}`")
    try:
        text = content_of(row, field)
    except ValueError as error:
        if isinstance(row, dict) and isinstance(plain_row(row.get(field)), str):  # no text but for `plain_row`
            return Item("bad", place, number, str(error))
        text = None
    return Item("row", place, number, plain_row(row)) if text is None else Item("text", place, number, text)


# Datasets.


@dataclass
class _Stream:
    """A dataset as it streams."""

    rows: Iterable[Any]
    facts: dict[str, Any]


class HubCorpus(Corpus):
    unit = "doc"

    def __init__(self, section: RankingSource):
        super().__init__(section)
        self._stream: _Stream | None = None
        self._number = 0

    def problems(self) -> list[str]:
        if problem := self.wrong_name():
            return [problem]
        try:
            return self._no_text(self.name)
        except UserError as error:
            return error.problems

    def wrong_name(self) -> str | None:
        """What can be told without the hub."""
        if "[" in self.name:
            return f"{self.name}: parts of a split cannot be asked for; the first N are max_documents"
        return check_source(self.name)

    def identity(self) -> dict[str, Any]:
        return self._open().facts

    def items(self, start: Position) -> Iterator[Item]:
        self._number = start.get("row", 0)
        stream = self._open(anew=True).rows
        skipped = self._number
        if (state := start.get("stream")) is not None and hasattr(stream, "load_state_dict"):
            stream.load_state_dict(state)  # type: ignore[attr-defined]
            skipped = 0
        try:
            for number, row in enumerate(stream):
                if number < skipped:
                    continue
                self._number += 1
                yield _row_item(self.name, self._number, row, self._field)
        except UserError:
            raise
        except Exception as error:  # the network, a shard that is none, ...
            raise UserError(
                f"{self.name}: datasets cannot read on behind row {self._number:,}: {_said(error)}; started again, the "
                "counting goes on from there"
            ) from None

    def position(self) -> Position:
        rows = self._open().rows
        state = rows.state_dict() if hasattr(rows, "state_dict") else None  # type: ignore[attr-defined]
        return {"row": self._number, "stream": state}

    def done(self) -> int:
        return self._number

    def _open(self, anew: bool = False) -> _Stream:
        if self._stream is not None and not anew:
            return self._stream
        import datasets

        parts = hub_parts(self.name)
        assert parts is not None, "problems() has checked it"
        name, config, split = parts
        try:
            rows = datasets.load_dataset(name, config, split=split, streaming=True)
        except Exception as error:  # many kinds: no such name, no access, no network, no such split, a script dataset
            raise UserError(f"{self.name}: datasets cannot load it: {_said(error)}") from None
        info = getattr(rows, "info", None)
        split_info = (getattr(info, "splits", None) or {}).get(split)
        facts = {
            "features": str(getattr(rows, "features", None)),
            "rows": getattr(split_info, "num_examples", None),
            "version": str(getattr(info, "version", None)),
        }
        self._stream = _Stream(rows, facts)
        return self._stream


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def corpus_of(section: RankingSource) -> Corpus:
    """How a source that is not the target's own answers is read."""
    return HubCorpus(section) if section.source.startswith("hf:") else FileCorpus(section)


def check_corpora(sections: list[RankingSource], look: bool = True) -> list[Corpus]:
    """The corpora among the sources, `answers` left out.

    Args:
        look: read a few records of each. A plan does not: it does not ask the hub.

    Raises:
        UserError: whatever is wrong with any of them, all at once.
    """
    problems, corpora = [], []
    names = [section.source for section in sections]
    for i, section in enumerate(sections):
        place = f"data.ranking.sources.{i}"
        if names.index(section.source) < i:
            problems.append(f"{place}: {section.source} stands there twice; give it one weight")
        if section.source == ANSWERS:
            unused = [key for key in ("max_documents", "text_field") if key in _meant(section)]
            if unused:
                problems.append(
                    f"{place}: {' and '.join(unused)}: the target's own answers are counted as training reads them"
                )
            continue
        corpus = corpus_of(section)
        corpora.append(corpus)
        if isinstance(corpus, HubCorpus) and not look:
            found = [problem] if (problem := corpus.wrong_name()) else []
        else:
            found = corpus.problems()
        problems += [f"{place}: {problem}" for problem in found]
    if problems:
        raise UserError(problems)
    return corpora


def overlaps(corpora: list[Corpus]) -> list[str]:
    """A note for every two corpora that have files in common, whatever they call them."""
    notes = []
    files = [corpus for corpus in corpora if isinstance(corpus, FileCorpus)]
    for i, second in enumerate(files):
        for first in files[:i]:
            if both := first.places & second.places:
                n = f"{len(both):,} file{'s' if len(both) > 1 else ''}"
                notes.append(
                    f"note: data.ranking.sources: {n} of {second.name} also belong{'' if len(both) > 1 else 's'} to "
                    f"{first.name} ({min(both)}), and count with both weights"
                )
    return notes


def _meant(section: RankingSource) -> set[str]:
    """Keys that say something else than the default."""
    return {key for key, field in type(section).model_fields.items() if getattr(section, key) != field.default}
