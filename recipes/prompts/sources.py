"""Reads records from JSON lines, JSON arrays, CSV, parquet, the hub and benchmarks, as prompt_reader.py says.

Records are (line or row number from 1, record). Text that cannot be parsed goes to the rejects.
"""

import csv
import glob
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.hub_fetch import check_dataset
from draftsmith.recipes.files.json_text import TOO_DEEP, check_depth, parse_json
from draftsmith.recipes.files.reading import DAMAGED, ending, is_packed, matching, open_bytes, open_text
from draftsmith.recipes.prompts.benchmark_prompts import BENCHMARKS, benchmark_of, fetch, known_forms
from draftsmith.recipes.prompts.picture_parts import coco_pictures, seems_a_picture
from draftsmith.recipes.prompts.records import COLUMNS, ID_COLUMNS
from draftsmith.recipes.prompts.rejects import Rejects, is_unicode

StorePicture = Callable[[bytes], str]  # writes a picture's bytes to a file and returns its path

TABLE_TYPES = (".csv", ".tsv")
FILE_TYPES = (".jsonl", ".json", *TABLE_TYPES, ".parquet")  # all but the last also packed, .gz
DELIMITERS = ",;\t"  # of .csv files; spreadsheets write ; in countries with a decimal comma
CELL_CHARACTERS = 1 << 24  # limits an unclosed quote; the csv module's own limit is 128 KiB
_BETWEEN = re.compile(r"[\s,]*")  # elements of a JSON array
HUB_FORMS = "hf:org/name, hf:org/name:split or hf:org/name:config:split"


def check_source(name: str) -> str | None:
    """The problem of a source that shows before any record is read, or None. Hub datasets are not looked up."""
    if name.startswith("hf:"):
        if "[" in name:
            return f"{name}: parts of a split cannot be asked for; the first N are data.max_prompts or eval.max_prompts"
        return None if hub_parts(name) else f"{name}: write {HUB_FORMS}"
    named = benchmark_of(name)
    if named is not None and named[1] is None:
        return None
    given = name if named is None else named[1] or ""
    if not given or not (Path(given).exists() or glob.has_magic(given)):
        hint = f"a hub dataset is written hf:org/name, a benchmark by its name: {', '.join(BENCHMARKS)}"
        return f"no such file: {given or name} ({hint})"
    parts = file_sources(name)
    if not parts:
        kinds = f"{', '.join(FILE_TYPES)} file that is not empty"
        if not Path(given).is_dir():
            return f"{name}: no {kinds} matches this pattern"
        return f"{name}: no {kinds} in this folder; for those in its folders write {given.rstrip('/')}/**/*.jsonl"
    problems = (_file_problem(part, part if named is None else part.partition(":")[2]) for part in parts)
    return next(filter(None, problems), None)


def _file_problem(name: str, path: str) -> str | None:
    if not _holds_prompts(path):
        return f"{name}: prompts are read from {', '.join(FILE_TYPES)} files, all but the last also packed as .gz"
    try:
        with open_bytes(path) as file:
            if ending(path) != ".parquet" and not any(line.strip() for line in file):
                return f"{name}: the file is empty"
    except (OSError, *DAMAGED) as error:
        return f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def _holds_prompts(path: str) -> bool:
    return ending(path) in FILE_TYPES and not (is_packed(path) and ending(path) == ".parquet")


def file_sources(source: str) -> list[str]:
    """The sources of one file each that a folder or a pattern stands for, sorted; any other source itself.

    Of a folder, these are the files directly in it. Empty files and those of other types are left out.
    """
    name, path = benchmark_of(source) or (None, source)
    folder = bool(path) and Path(path).is_dir()
    if source.startswith("hf:") or not path or Path(path).is_file() or not (folder or glob.has_magic(path)):
        return [source]
    found = matching(f"{glob.escape(path)}/*" if folder else path)
    before = "" if name is None else f"{name}:"
    return [before + each for each in found if _holds_prompts(each) and Path(each).stat().st_size]


def short_names(sources: Sequence[str]) -> dict[str, str]:
    """{source: its name in reports}; the whole source if short names are equal."""
    names = {source: _short_name(source) for source in sources}
    held = list(names.values())
    return {source: name if held.count(name) == 1 else source for source, name in names.items()}


def _short_name(source: str) -> str:
    named = benchmark_of(source)
    if named is not None:
        return named[0]
    if source.startswith("hf:"):
        return source.removeprefix("hf:").split(":")[0]
    path = Path(source[:-3] if is_packed(source) else source)
    names = (path.stem, *(parent.name for parent in path.parents))  # a pattern may have its own name in a folder's
    return next((name for name in names if any(map(str.isalnum, name))), source)


def records(source: str, rejects: Rejects, store: StorePicture | None = None) -> Iterator[tuple[int, Any]]:
    """(line or row number from 1, record) of every record in `source`, one of `file_sources`, that can be parsed.

    Args:
        store: given to read pictures: stores a picture of a binary column and returns its path. COCO's files of
            captions are then read, too.
    """
    if (named := benchmark_of(source)) is not None:
        name, path = named
        rows = enumerate(map(plain_row, fetch(name)), 1) if path is None else _file_records(path, source, rejects)
        for line, record in rows:
            yield line, known_forms(name, record, line)
    elif source.startswith("hf:"):
        for line, row in enumerate(_hub_rows(source, decode=store is None), start=1):
            yield line, plain_row(row, store)
    else:
        yield from _file_records(source, source, rejects, store)


def _file_records(
    path: str, source: str, rejects: Rejects, store: StorePicture | None = None
) -> Iterator[tuple[int, Any]]:
    line = 0
    try:
        if ending(path) == ".parquet":
            found: Iterator[tuple[int, Any]] = _parquet_rows(path, source, rejects, store)
        elif ending(path) in TABLE_TYPES:
            found = _csv_rows(path, source, rejects)
        elif store is not None and (pictures := coco_pictures(path)) is not None:
            found = enumerate(pictures, start=1)
        elif _is_array(path):
            found = json_array(path, source, rejects)
        else:
            found = json_lines(path, source, rejects)
        for line, record in found:
            yield line, record
    except DAMAGED as error:
        rejects.add(source, line + 1, f"damaged file: {error}; what follows is lost", None)


def _is_array(path: str) -> bool:
    """A .json file is an array if it begins with one. A .jsonl file must be one array to its end."""
    with open_bytes(path) as file:
        lines = (line.removeprefix(b"\xef\xbb\xbf").strip() for line in file)
        if not next(filter(None, lines), b"").startswith(b"["):
            return False
    if ending(path) == ".json":
        return True
    trial = Rejects()
    for _ in json_array(path, path, trial):
        pass
    return not trial.total


def json_lines(path: str | Path, source: str, rejects: Rejects) -> Iterator[tuple[int, Any]]:
    """(line number from 1, value) of a JSON-lines file.

    Any line may begin with a byte-order mark (joined files), or end with the comma of the array that it was cut from.
    """
    with open_bytes(path) as file:
        for number, raw in enumerate(file, start=1):
            if not raw.removeprefix(b"\xef\xbb\xbf").strip():
                continue
            try:
                value = parse_json(raw.rstrip().removesuffix(b","))
            except ValueError as error:
                rejects.add(source, number, str(error), raw.decode("utf-8", "replace").rstrip())
            else:
                yield number, value


def json_array(path: str, source: str, rejects: Rejects, chunk_characters: int = 1 << 20) -> Iterator[tuple[int, Any]]:
    """(line of its beginning, value) of each element of a JSON array, read piece by piece: some exceed the memory.

    After malformed JSON the rest of the array is rejected as one record.
    """
    decoder = json.JSONDecoder()
    with open_text(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        line = 1
        while not (text := file.readline(chunk_characters)).strip():
            line += text.endswith("\n")
        position = text.index("[") + 1
        while True:
            between = _BETWEEN.match(text, position)
            assert between is not None  # it may be empty
            line += between[0].count("\n")
            position, problem, record = between.end(), "", None
            if text.startswith("]", position):
                if rest := (text[position + 1 :] + file.read()).strip():
                    rejects.add(source, line, "malformed JSON: text after the array", rest)
                return
            try:
                record, end = decoder.raw_decode(text, position)
            except RecursionError:
                end, problem = len(text), TOO_DEEP
            except ValueError as error:
                end, problem = len(text), f"malformed JSON: {error}"
            # The next piece may end an element, or continue a number: 1 | .5. Pieces double: linear for a huge element.
            ended = text[end : end + 1] in tuple(" \t\r\n,]")
            if not ended and (piece := file.read(max(chunk_characters, len(text) - position))):
                text, position = text[position:] + piece, 0
                continue
            if problem:
                rejects.add(source, line, f"{problem}; the rest of the array is lost", text[position:] + file.read())
                return
            try:
                check_depth(record, text.count("[", position, end) + text.count("{", position, end))
            except ValueError as error:
                rejects.add(source, line, str(error), text[position:end])
            else:
                yield line, record
            line += text.count("\n", position, end)
            position = end


def _csv_rows(path: str, source: str, rejects: Rejects) -> Iterator[tuple[int, dict[str, str]]]:
    """(number of its first line, {column: text}) of each row of a CSV file, without empty cells and rows.

    Raises UserError if the first row, which names the columns, has no known one, or one name twice.
    """
    csv.field_size_limit(CELL_CHARACTERS)
    with open_text(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header_line, header = next(((number, line) for number, line in enumerate(file, 1) if line.strip()), (1, ""))
        delimiter = "\t" if ending(path) == ".tsv" else max(DELIMITERS, key=header.count)
        columns = [column.strip() for column in next(csv.reader([header], delimiter=delimiter))]
        if set(COLUMNS).isdisjoint(columns):
            raise UserError(
                f"{path}:{header_line}: the first row must name the columns, one of them {', '.join(COLUMNS)}; this is "
                f"{header.strip()[:80].encode('utf-8', 'replace').decode()!r}"
            )
        if twice := {column for column in columns if column and columns.count(column) > 1}:
            raise UserError(f"{path}:{header_line}: several columns are named {', '.join(sorted(twice))}")
        text: list[str] = []  # of the row that is being read

        def lines() -> Iterator[str]:
            for line in file:
                text.append(line)
                yield line

        rows = csv.reader(lines(), delimiter=delimiter, strict=True)
        while True:
            number = header_line + rows.line_num + 1
            text.clear()
            try:
                cells, problem = next(rows), ""
            except StopIteration:
                return
            except csv.Error as error:
                cells, problem = [], f"malformed CSV: {error}"
            if not problem and not any(map(str.strip, cells)):
                continue
            if not is_unicode("".join(cells)):
                problem = "not UTF-8: save the file as CSV in UTF-8"
            elif not problem and len(cells) != len(columns):
                problem = f"malformed CSV: the first row names {len(columns)} columns, this one has {len(cells)}"
            if problem:
                raw = "".join(text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                rejects.add(source, number, problem, raw.rstrip())
                continue
            row = {column: cell for column, cell in zip(columns, cells, strict=True) if column and cell}
            for column in row.keys() & ID_COLUMNS:  # pandas writes whole numbers of a column with gaps as 1.0
                row[column] = re.sub(r"^(\d+)\.0$", r"\1", row[column])
            yield number, row


def _parquet_rows(path: str, source: str, rejects: Rejects, store: StorePicture | None) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in rows_of_batch(batch):
                    number += 1
                    if isinstance(row, Exception):
                        rejects.add(source, number, f"malformed cell: {row}", None)
                    else:
                        yield number, plain_row(row, store)
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # a column's name may be no text
        raise UserError(f"{path}: cannot be read as parquet: {error}") from None


def rows_of_batch(batch: Any) -> list[Any]:
    """The rows of a record batch, with the error in place of each row that Python cannot hold."""
    unusable = (ValueError, OverflowError)  # text that is not UTF-8, a date before the year 1
    try:
        return batch.to_pylist()
    except unusable as error:
        if batch.num_rows == 1:
            return [error]
        return [row for number in range(batch.num_rows) for row in rows_of_batch(batch.slice(number, 1))]


def hub_parts(source: str) -> tuple[str, str | None, str] | None:
    """(name, config, split) of hf:name[:config][:split]; None for any other form."""
    parts = source.removeprefix("hf:").split(":")
    if len(parts) > 3 or not parts[0]:
        return None
    return parts[0], parts[1] or None if len(parts) == 3 else None, (parts[-1] if len(parts) > 1 else "") or "train"


def open_dataset(source: str) -> Any:
    """The rows of a hub dataset, streamed by `datasets`, which downloads only what is read."""
    import datasets

    parts = hub_parts(source)
    if parts is None:
        raise UserError(f"{source}: write {HUB_FORMS}")
    name, config, split = parts
    if not Path(name).exists():
        check_dataset(name)
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # many kinds: no such name, no access, no network, no such split, a script dataset
        raise _not_loaded(source, error) from None


def _hub_rows(source: str, decode: bool = True) -> Iterator[Any]:
    """Rows of a hub dataset; without `decode`, media as {"bytes", "path"}."""
    rows = open_dataset(source)
    try:
        yield from rows if decode else rows.decode(False)
    except Exception as error:  # many kinds, as above
        raise _not_loaded(source, error) from None


def _not_loaded(source: str, error: Exception) -> UserError:
    return UserError(f"{source}: datasets cannot load it: {type(error).__name__}: {first_line(error)}")


def plain_row(row: Any, store: StorePicture | None = None) -> Any:
    """A table's row as JSON, with values such as dates as text.

    Bytes become text if they are UTF-8, else {"bytes": their number}, because a picture is not text. With `store`, a
    picture becomes its path: bytes that begin as one, and the bytes of datasets' {"bytes", "path"}, whatever they are.

    Arrow gives every object of a column all keys of the column: one tool call gives each message `tool_calls`. So nulls
    are dropped, except those in `content` and `value`.
    """
    if isinstance(row, dict):
        kept = {key: value for key, value in row.items() if value is not None or key in ("content", "value")}
        if store is not None and isinstance(bare := kept.get("bytes"), bytes):
            kept["bytes"] = store(bare)
        return {str(key): plain_row(value, store) for key, value in kept.items()}
    if isinstance(row, list | tuple):
        return [plain_row(value, store) for value in row]
    if isinstance(row, bytes) and store is not None and seems_a_picture(row):
        return store(row)
    if isinstance(row, bytes):
        try:
            return row.decode("utf-8-sig")
        except UnicodeDecodeError:
            return {"bytes": len(row)}
    return row if row is None or isinstance(row, str | int | float | bool) else str(row)
