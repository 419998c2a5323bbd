"""Reads corpora for counting: files and datasets, piece by piece, from any position (docs/vocabulary.md).

A text file is one document, read in pieces that end with a line; .jsonl files and tables have a document per record.
The counting processes parse the lines. A resumed run opens files at the byte or row group of its position, unpacks a
packed file again up to there, and restores a dataset's stream.

Files are not read by `datasets`: in 5.2 a resumed file is read again from its beginning, and one malformed line ends
the corpus. Here a damaged file ends at the damage, as one rejected record; a parquet file loses only the damaged row
groups.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.input_files import DAMAGED, ending, is_packed, matching, open_bytes
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.prompts.records import COLUMNS, LIST_COLUMNS, json_type
from draftsmith.recipes.prompts.sources import check_source, hub_parts, open_dataset, plain_row, rows_of_batch
from draftsmith.recipes.schema import RankingSource

ANSWERS = "answers"
TEXT_FIELD = "text"  # the recipe's default
PIECE_BYTES = 1 << 16  # of a text file; its end cuts about one token in tens of thousands
CHUNK_CHARACTERS = 1 << 20  # given to a process at once; large enough to hide the cost of the transfer
CHECKED_FIRST = 50  # records; finds a wrong text_field before anything is counted
ROWS_AT_ONCE = 256
# The end of a UTF-8 text that stops inside a character.
_TORN_CHARACTER = re.compile(rb"(?:[\xc0-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xff][\x80-\xbf]{0,2})?\Z")

Position = dict[str, Any]  # JSON


class Item(NamedTuple):
    """A document or a piece of one, not yet parsed."""

    kind: str  # text, piece (bytes of a text file), line (bytes of a .jsonl), row, or bad (`content` is the reason)
    place: str  # file or dataset
    line: int  # first line of a file, or row of a table
    content: Any
    opens: bool = True  # begins a document


class Chunk(NamedTuple):
    """Items that are counted together."""

    items: list[Item]
    documents: int  # number that begin here
    position: Position  # behind the chunk


def content_of(record: Any, text_field: str) -> str | None:
    """The text of a record, or None for a conversation, which `recipes.prompts` reads.

    A list of messages makes a record a conversation, unless the recipe names a text_field. Without either, columns of a
    question and its answer do (`recipes.prompts.reader`). Raises ValueError, "kind: detail", if there are none.
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
    """One source of a ranking. `items` starts at a position; `position` is the one behind the last item."""

    unit = "B"
    total: int | None = None  # in units; None: unknown

    def __init__(self, section: RankingSource):
        self.section, self.name = section, section.source

    def name_problems(self) -> list[str]:
        """Problems that show before anything is read."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """JSON that differs if the corpus has changed."""
        raise NotImplementedError

    def items(self, start: Position) -> Iterator[Item]:
        raise NotImplementedError

    def position(self) -> Position:
        raise NotImplementedError

    def units_before(self, position: Position) -> int:
        raise NotImplementedError

    def chunks(self, start: Position, documents: int) -> Iterator[Chunk]:
        """The chunks behind `start`, up to max_documents in all. `documents` of them begin before `start`."""
        most = self.section.max_documents
        items: list[Item] = []
        begun = characters = 0
        end: Position = {}
        if start.get("end"):
            return
        for item in self.items(start):
            if item.opens and most is not None and documents + begun == most:
                end = {"end": True}  # the position is behind an item that is not wanted
                break
            items.append(item)
            begun += item.opens
            characters += len(item.content) if isinstance(item.content, str | bytes) else len(str(item.content))
            if characters >= CHUNK_CHARACTERS:
                yield Chunk(items, begun, self.position())
                documents, items, begun, characters = documents + begun, [], 0, 0
        if items:
            yield Chunk(items, begun, self.position() | end)

    def record_problems(self) -> list[str]:
        """One problem if none of the first records is usable, else none."""
        reason = ""
        try:
            for item in islice(self.items({}), CHECKED_FIRST):
                try:
                    if item.kind == "bad":
                        raise ValueError(item.content)
                    if item.kind in ("line", "row"):
                        record = parse_json(item.content) if item.kind == "line" else item.content
                        content_of(record, self.section.text_field)
                    return []
                except ValueError as error:
                    reason = reason or f"{item.place}:{item.line}: {error}"
        except UserError as error:
            return error.problems
        if not reason:
            return [f"{self.name}: it holds no records"]
        hint = ""
        if "no text" in reason:
            hint = "; name the field that holds the text in text_field"
        elif "damaged file" in reason:
            hint = "; fetch it again, or leave it out"
        return [f"{self.name}: none of its first records can be used: {reason}{hint}"]


# Files.


class FileCorpus(Corpus):
    def __init__(self, section: RankingSource):
        super().__init__(section)
        self.files = matching(section.source)
        self._sizes = [Path(path).stat().st_size for path in self.files]
        self.total = sum(self._sizes)
        self._at = (0, 0, 0)  # file, byte (unpacked) or row in it, lines before that

    def name_problems(self) -> list[str]:
        name = self.name
        if Path(name).is_dir():
            return [f"{name}: is a folder; name its files by a pattern, for example {name.rstrip('/')}/*.txt"]
        if not self.files:
            return [f"{name}: no such file (a dataset is written hf:org/name:split, the target's answers `{ANSWERS}`)"]
        if arrays := [path for path in self.files if ending(path) == ".json"]:
            return [f"{arrays[0]}: a .json array cannot be read piece by piece; write one record a line, as .jsonl"]
        return [] if self.total else [f"{name}: empty"]

    def identity(self) -> dict[str, Any]:
        changed = [Path(path).stat().st_mtime_ns for path in self.files]
        digest = hashlib.sha256(json.dumps([self.files, self._sizes, changed]).encode()).hexdigest()
        return {"files": f"{len(self.files)} files, {digest}"}

    def items(self, start: Position) -> Iterator[Item]:
        first, offset, line = start.get("file", 0), start.get("offset", 0), start.get("line", 0)
        for index, path in islice(enumerate(self.files), first, None):
            self._at = (index, offset, line)
            try:
                if ending(path) == ".parquet":
                    yield from self._rows(path)
                else:
                    yield from self._lines_or_pieces(path)
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
            offset = line = 0

    def position(self) -> Position:
        return dict(zip(("file", "offset", "line"), self._at, strict=True))

    def units_before(self, position: Position) -> int:
        """Bytes of the files before the position, plus the bytes before it in its own file if that is not packed."""
        index = position.get("file", 0)
        path = self.files[index] if index < len(self.files) else None
        packed = path is None or ending(path) == ".parquet" or is_packed(path)
        return sum(self._sizes[:index]) + (0 if packed else position.get("offset", 0))

    def _lines_or_pieces(self, path: str) -> Iterator[Item]:
        index, offset, line = self._at
        kind = "line" if ending(path) == ".jsonl" else "piece"
        with open_bytes(path) as file:
            try:
                file.seek(offset)
                for content in file if kind == "line" else _pieces(file):
                    opens, place = kind == "line" or offset == 0, line + 1
                    if kind == "piece" and opens and b"\0" in content:
                        reason = "is not text; this reads text, .jsonl and .parquet, and .gz of the first two"
                        yield Item("bad", path, place, reason)
                        return
                    offset += len(content)
                    line += content.count(b"\n") if kind == "piece" else 1
                    self._at = (index, offset, line)
                    if kind == "piece" or content.removeprefix(b"\xef\xbb\xbf").strip():
                        yield Item(kind, path, place, content, opens)
            except DAMAGED as error:
                self._at = (index + 1, 0, 0)
                yield Item("bad", path, line + 1, f"damaged file: {error}; what follows is lost", opens=False)

    def _rows(self, path: str) -> Iterator[Item]:
        """Rows of a parquet file. A damaged row group loses its remaining rows."""
        import pyarrow
        import pyarrow.parquet

        index, start, _ = self._at
        field, end = self.section.text_field, 0
        try:
            file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            yield Item("bad", path, 1, f"damaged file: cannot be read as parquet: {first_line(error)}", opens=False)
            return
        with file:
            names = file.schema_arrow.names
            only_text = field in names and (field != TEXT_FIELD or not set(names) & set(LIST_COLUMNS))
            for group in range(file.num_row_groups):
                number, end = end, end + file.metadata.row_group(group).num_rows
                if end <= start:
                    continue
                try:
                    for batch in file.iter_batches(ROWS_AT_ONCE, [group], [field] if only_text else None):
                        for row in rows_of_batch(batch):
                            number += 1
                            if number > start:
                                self._at = (index, number, number)
                                yield _row_item(path, number, row, field)
                except (pyarrow.ArrowException, OSError) as error:
                    if isinstance(error, OSError) and error.errno is not None:
                        raise  # the disk failed, not the file's content
                    self._at = (index, end, end)
                    reason = f"damaged file: {first_line(error)}; rows {number + 1:,} to {end:,} are lost"
                    yield Item("bad", path, number + 1, reason, opens=False)


def _pieces(file: Any) -> Iterator[bytes]:
    """The file in pieces of at most `PIECE_BYTES`, cut behind a line, else before a blank, else between characters.

    A piece's start determines its end, so a resumed run cuts at the same places. The rest before the end of the file,
    or before damage, is not cut.
    """
    text = b""
    while True:
        try:
            block = file.read1(PIECE_BYTES - len(text))
        except DAMAGED:
            if text:
                yield text
            raise
        text += block
        if not block:
            break
        if len(text) == PIECE_BYTES:
            cut = text.rfind(b"\n") + 1 or max(text.rfind(b" "), 0)
            if not cut and (torn := _TORN_CHARACTER.search(text)):
                cut = torn.start()
            yield text[: cut or len(text)]
            text = text[cut or len(text) :]
    if text:
        yield text


def _row_item(place: str, number: int, row: Any, field: str) -> Item:
    """The item of a table's row, or of the error in its place. Text may be stored as bytes, not as dates or numbers."""
    if isinstance(row, Exception):
        return Item("bad", place, number, f"malformed cell: {row}")
    plain = plain_row(row)
    value = row.get(field) if isinstance(row, dict) else None
    if isinstance(value, bytes) and not isinstance(plain[field], str):
        return Item("bad", place, number, f"not UTF-8: {len(value)} bytes in `{field}`")
    if isinstance(plain, dict) and isinstance(plain.get(field), str) and not isinstance(value, str | bytes):
        return Item("bad", place, number, f"wrong type: `{field}` must be text, this is {json_type(value)}")
    try:
        text = content_of(plain, field)
    except ValueError:
        text = None
    return Item("row", place, number, plain) if text is None else Item("text", place, number, text)


# Datasets.


class HubCorpus(Corpus):
    unit = "doc"

    def __init__(self, section: RankingSource):
        super().__init__(section)
        self._rows: Any = None
        self._number = 0
        self.total = section.max_documents

    def name_problems(self) -> list[str]:
        if "[" in self.name:
            return [f"{self.name}: parts of a split cannot be asked for; the first N are max_documents"]
        return [problem] if (problem := check_source(self.name)) else []

    def identity(self) -> dict[str, Any]:
        if self._rows is None:
            self._rows = open_dataset(self.name)
        info, parts = getattr(self._rows, "info", None), hub_parts(self.name)
        split_info = (getattr(info, "splits", None) or {}).get(parts[2] if parts else None)
        return {
            "features": str(getattr(self._rows, "features", None)),
            "rows": getattr(split_info, "num_examples", None),
            "version": str(getattr(info, "version", None)),
        }

    def items(self, start: Position) -> Iterator[Item]:
        self._number = start.get("row", 0)
        self._rows = open_dataset(self.name)
        if "stream" in start:
            self._rows.load_state_dict(start["stream"])
        try:
            for row in self._rows:
                self._number += 1
                yield _row_item(self.name, self._number, row, self.section.text_field)
        except Exception as error:  # the network, a shard that is none, ...
            raise UserError(
                f"{self.name}: datasets cannot read on behind row {self._number:,}: {type(error).__name__}: "
                f"{first_line(error)}; the same command resumes the counting there"
            ) from None

    def position(self) -> Position:
        return {"row": self._number, "stream": self._rows.state_dict()}

    def units_before(self, position: Position) -> int:
        return position.get("row", 0)


def corpus_of(section: RankingSource) -> Corpus:
    return HubCorpus(section) if section.source.startswith("hf:") else FileCorpus(section)


def check_corpora(sections: list[RankingSource], look: bool = True, key: str = "data.ranking.sources") -> list[Corpus]:
    """The corpora among the sources, without `answers`. Raises UserError with all problems.

    Args:
        look: read a few records of each. A plan does not, because it does not ask the hub.
        key: of the recipe, for messages.
    """
    problems, corpora = [], []
    names = [section.source for section in sections]
    for i, section in enumerate(sections):
        found = [f"{section.source} is listed twice; give it one weight"] if section.source in names[:i] else []
        if section.source == ANSWERS:
            if section.max_documents or section.text_field != TEXT_FIELD:
                found.append(
                    f"{ANSWERS} take no max_documents and no text_field: they are counted as training reads them"
                )
        else:
            corpus = corpus_of(section)
            corpora.append(corpus)
            found += corpus.name_problems() or (corpus.record_problems() if look else [])
        problems += [f"{key}.{i}: {problem}" for problem in found]
    if problems:
        raise UserError(problems)
    return corpora
