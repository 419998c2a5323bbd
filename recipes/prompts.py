"""One reader for every prompt format: files, the standard library's prompts and `datasets` names -> `Conversation`.

Sources
    path.jsonl, path.json     one JSON object per line, or one JSON array of objects (.jsonl: nothing else in the file)
    path.parquet              one row per conversation
    stdlib:train, :heldout    questions about the interpreter's own library (`stdlib_prompts`)
    hf:org/name[:split]       a dataset of the `datasets` library; the split is `train` unless given

A record is recognised by its columns, the first of these that it has
    messages                  [{"role", "content", ...}]; tool calls, reasoning_content and other keys stay as they are
    conversations             ShareGPT: [{"from", "value"}]; `conversation` and role/content items too
    turns                     MT-bench, Spec-Bench: ["first user turn", "second user turn"]
    prompt                    one user turn as text, or a list of messages
beside which `id` (or `question_id`), `images`, `meta`, `tools` and `category` are read; the last two move into `meta`.

User turns may follow each other (`turns` always do). Whoever generates puts an assistant turn after each user turn that
has none: [user, user] becomes [user, assistant, user, assistant].
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.lines import append_line, cut_torn_line
from draftsmith.recipes.stdlib_prompts import SPLITS, stdlib_conversations

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt")
FILE_TYPES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Conversation:
    id: str  # unique in one reading; `<file name>:<line>` where the record has none
    messages: list[dict[str, Any]]  # {"role": one of ROLES, "content": text or OpenAI content parts, ...}
    images: list[str] = field(default_factory=list)  # paths, as written in the record
    meta: dict[str, Any] = field(default_factory=dict)  # `tools` here are function schemas for the chat template
    # Its place, for rejects; equal conversations may stand at different ones.
    source: str = field(default="", compare=False)  # as named in the recipe
    line: int | None = field(default=None, compare=False)  # from 1: line of a text file, row of a table


class Rejects:
    """Records that could not be used: counted by reason and, where `path` is given, kept as JSON lines.

    A line is {"source", "line", "reason", "record"}. The part of a reason before its first colon is its kind; the
    summary counts kinds. A file that already holds the same line (a resumed run) does not get it again.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = Path(path) if path is not None else None
        self.counts: Counter[str] = Counter()
        self._first = ""  # place and reason of the first one, for a summary without a file
        self._written: set[bytes] = set()
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
            self._written.update(cut_torn_line(self._file, self.path))
        entry = {"source": source, "line": line, "reason": reason, "record": record}
        text = json.dumps(entry, ensure_ascii=False, default=str)
        if not _is_unicode(text):
            text = json.dumps(entry, default=str)  # lone surrogates as \\ud800: the file stays readable
        kept = text.encode()
        if kept not in self._written:
            append_line(self._file, self.path, kept + b"\n")

    def summary(self) -> str:
        """One line for the end of a run."""
        if not self.total:
            return "no record rejected"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
        where = f"kept in {self.path}" if self.path is not None else f"the first at {self._first}"
        return f"{self.total} record{'s' if self.total > 1 else ''} rejected ({kinds}): {where}"


def read_conversations(
    sources: str | Sequence[str], rejects: Rejects, limit: int | None = None
) -> Iterator[Conversation]:
    """The usable conversations of `sources`, in order, at most `limit`; the others go to `rejects`.

    Sources are checked at the call, records are read one by one as they are asked for. Raises UserError at once for
    sources that do not exist or are empty, and at the end, all else read, for sources without one usable record.
    """
    names = [sources] if isinstance(sources, str) else list(sources)
    problems = [problem for name in names if (problem := check_source(name)) is not None]
    if not names:
        problems.append("no prompts: name a file, `stdlib:train` or `hf:org/name`")
    if problems:
        raise UserError(problems)
    return islice(_read(names, rejects), limit)


def questions(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """What stands before each answer: a user turn, system messages before it, tool calls and results behind it.

    Answers are left out; an assistant turn that calls tools is kept, with the results that follow it.
    """
    pending: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role == "assistant" and not message.get("tool_calls"):
            continue
        asked = any(earlier["role"] == "user" for earlier in pending)
        if asked and role not in ("assistant", "tool"):
            yield pending
            pending = []
        pending.append(message)
    if any(message["role"] == "user" for message in pending):
        yield pending


def check_source(name: str) -> str | None:
    """What is wrong with a source before any record is read, or None. Hub datasets are not looked up."""
    if name.startswith("stdlib:"):
        split = name.removeprefix("stdlib:")
        return None if split in SPLITS else f"{name}: write {' or '.join(f'stdlib:{split}' for split in SPLITS)}"
    if name.startswith("hf:"):
        return None if name.removeprefix("hf:").split(":")[0] else f"{name}: write hf:org/name or hf:org/name:split"
    path = Path(name)
    if not path.exists():
        return f"no such file: {name} (a hub dataset is written hf:org/name)"
    if path.suffix.lower() not in FILE_TYPES or path.is_dir():
        return f"{name}: prompts are read from {', '.join(FILE_TYPES)} files"
    try:
        if path.suffix.lower() != ".parquet":
            with path.open("rb") as file:
                if not any(line.strip() for line in file):
                    return f"{name}: the file is empty"
    except OSError as error:
        return f"{name}: cannot be read: {error.strerror}"
    return None


def _read(names: list[str], rejects: Rejects) -> Iterator[Conversation]:
    places: dict[str, str] = {}  # id -> where it was first seen
    barren = []
    for name in names:
        usable, rejected_before = 0, rejects.total
        for line, record in _records(name, rejects):
            try:
                conversation = to_conversation(record, _default_id(name, line, places), name, line)
                if conversation.id in places:
                    raise ValueError(f"duplicate id: '{conversation.id}' is also at {places[conversation.id]}")
            except ValueError as error:
                rejects.add(name, line, str(error), record)
                continue
            places[conversation.id] = f"{name}:{line}"
            usable += 1
            yield conversation
        if not usable:
            rejected = rejects.total - rejected_before
            barren.append(
                f"{name}: no usable conversation ({rejected} rejected: {rejects.summary()})"
                if rejected
                else f"{name}: no record in it"
            )
    if barren:
        raise UserError(barren)


def _default_id(source: str, line: int, places: dict[str, str]) -> str:
    short = f"{Path(source).name if not source.startswith('hf:') else source}:{line}"
    return f"{source}:{line}" if short in places else short  # two files of the same name in different folders


# Sources: (line or row number from 1, record).


def _records(source: str, rejects: Rejects) -> Iterator[tuple[int, Any]]:
    if source.startswith("stdlib:"):
        yield from enumerate(stdlib_conversations(source.removeprefix("stdlib:")), start=1)
    elif source.startswith("hf:"):
        yield from enumerate(map(_without_nulls, _hub_rows(source)), start=1)
    elif Path(source).suffix.lower() == ".parquet":
        yield from enumerate(map(_without_nulls, _parquet_rows(source)), start=1)
    elif _is_array(source):
        yield from _json_array(source, rejects)
    else:
        yield from _json_lines(source, rejects)


def _first_character(path: str) -> bytes:
    with open(path, "rb") as file:
        for line in file:
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if text:
                return text[:1]
    return b""


def _is_array(path: str) -> bool:
    """A .json file is an array if it begins as one. A .jsonl file must be one to its end: a line may just be bad."""
    if _first_character(path) != b"[":
        return False
    if Path(path).suffix.lower() == ".json":
        return True
    trial = Rejects()
    for _ in _json_array(path, trial):
        pass
    return not trial.total


def _json_lines(path: str, rejects: Rejects) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                rejects.add(path, number, f"not UTF-8: byte {error.start + 1}", raw.decode("utf-8", "replace").rstrip())
            except (ValueError, RecursionError) as error:
                rejects.add(path, number, f"malformed JSON: {error}", raw.decode("utf-8").rstrip())
            else:
                yield number, record


def _json_array(path: str, rejects: Rejects, chunk_characters: int = 1 << 20) -> Iterator[tuple[int, Any]]:
    """Elements of a JSON array, read piece by piece: ShareGPT's files are larger than some memories.

    After malformed JSON the rest of the array cannot be told apart; it is rejected as one record.
    """
    decoder = json.JSONDecoder()
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        text, position, line, ended = "", 0, 1, False

        def refill() -> bool:
            """Drop what was used, read on; False at the end of the file."""
            nonlocal text, position, ended
            piece = file.read(max(chunk_characters, len(text) - position))  # doubling: a huge element stays linear
            ended = not piece
            text, position = text[position:] + piece, 0
            return not ended

        def skip(characters: str) -> str:
            """Move past blanks and `characters`; the next character, "" at the end."""
            nonlocal position, line
            while True:
                while position < len(text) and text[position] in characters:
                    line += text[position] == "\n"
                    position += 1
                if position < len(text):
                    return text[position]
                if not refill():
                    return ""

        blanks = " \t\r\n"
        skip(blanks)
        position += 1  # the opening bracket, which _first_character saw
        while True:
            following = skip(blanks)
            if following == "]":
                position += 1
                rest = skip(blanks)
                if rest:
                    rejects.add(path, line, "malformed JSON: text after the array", text[position:])
                return
            try:
                record, end = decoder.raw_decode(text, position)
                if text[end : end + 1] not in (*blanks, ",", "]") and not ended and refill():
                    continue  # a number may go on in the next piece: 1 | .5
            except (ValueError, RecursionError) as error:
                if not isinstance(error, RecursionError) and not ended and refill():
                    continue
                rejects.add(path, line, f"malformed JSON: {error}; the rest of the array is lost", text[position:])
                return
            yield line, record
            line += text.count("\n", position, end)
            position = end
            if skip(blanks) == ",":
                position += 1
            elif text[position : position + 1] != "]":
                rejects.add(path, line, "malformed JSON: expected `,` or `]` after an element", text[position:])
                return


def _parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as parquet: {error}") from None


def _hub_rows(source: str) -> Iterator[Any]:
    import datasets

    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        yield from datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # many kinds: no such name, no access, no network, no such split, a script dataset
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{source}: datasets cannot load it: {type(error).__name__}: {reason}") from None


def _without_nulls(row: Any) -> Any:
    """A table's row without the empty cells that Arrow adds: one tool call in a column gives every message the key."""
    if not isinstance(row, dict):
        return row
    filled = {key: value for key, value in row.items() if value is not None}
    for column in COLUMNS:
        if isinstance(filled.get(column), list):
            filled[column] = [
                {key: value for key, value in item.items() if value is not None or key in ("content", "value")}
                if isinstance(item, dict)
                else item
                for item in filled[column]
            ]
    return filled


# Records.


def to_conversation(record: Any, default_id: str, source: str, line: int) -> Conversation:
    """Recognise and check the record at `line` of `source`. Raises ValueError, "kind: detail", if it cannot be used."""
    if not isinstance(record, dict):
        raise ValueError(f"wrong type: a record must be a JSON object, this is {_json_type(record)}")
    column = next((name for name in COLUMNS if record.get(name) is not None), None)
    if column is None:
        raise ValueError(f"unknown columns: none of {', '.join(COLUMNS)} among {', '.join(map(str, record)) or 'none'}")
    messages = _messages_of(column, record[column])
    _check_messages(messages)
    images = record.get("images") or []
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ValueError("wrong type: `images` must be a list of paths")
    meta = record.get("meta") or {}
    if not isinstance(meta, dict):
        raise ValueError(f"wrong type: `meta` must be an object, this is {_json_type(meta)}")
    meta = meta | {key: record[key] for key in ("category", "tools") if record.get(key) is not None}
    return Conversation(_id_of(record, default_id), messages, images, meta, source, line)


def _id_of(record: dict[str, Any], default_id: str) -> str:
    for key in ("id", "question_id"):
        value = record.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise ValueError(
                f"wrong type: `{key}` must be text or a whole number, not {json.dumps(value, default=str)}"
            )
        return str(value)
    return default_id


def _messages_of(column: str, value: Any) -> list[dict[str, Any]]:
    if column == "prompt" and isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"wrong type: `{column}` must be a list, this is {_json_type(value)}")
    if column == "turns":
        return [{"role": "user", "content": turn} for turn in value]
    messages = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise ValueError(f"wrong type: `{column}[{index}]` must be an object, this is {_json_type(item)}")
        if "from" in item and "role" not in item:
            rest = {key: entry for key, entry in item.items() if key not in ("from", "value")}
            role = item["from"]
            item = {"role": SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role, **rest}
            item["content"] = value[index].get("value")
        messages.append(item)
    return messages


def _check_messages(messages: list[dict[str, Any]]) -> None:
    """Roles, contents and order, as every chat template can be given them."""
    previous = None
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(
                f"unknown role: {json.dumps(role, default=str)} of message {index}, known are {', '.join(ROLES)}"
            )
        # An assistant that only calls tools, or only thinks, has no content.
        silent = role == "assistant" and (message.get("tool_calls") or message.get("reasoning_content"))
        if not (content is None and silent):
            _check_content(content, index)
        if role == "user" and (content == [] or (isinstance(content, str) and not content.strip())):
            raise ValueError(f"empty user turn: message {index}")
        if role == "assistant" and previous == "assistant":
            raise ValueError(f"two assistant turns in a row: messages {index - 1} and {index}")
        if role == "assistant" and all(earlier["role"] != "user" for earlier in messages[:index]):
            raise ValueError(f"no user turn before the first assistant turn: message {index}")
        previous = role
    if all(message["role"] != "user" for message in messages):
        raise ValueError("no user turn")
    if not _is_unicode(json.dumps(messages, ensure_ascii=False, default=str)):
        raise ValueError("not Unicode: a lone surrogate in the text")


def _check_content(content: Any, index: int) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ValueError(f"wrong type: content of message {index} must be text or parts, this is {_json_type(content)}")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f'wrong type: a content part of message {index} must be an object with a "type"')
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise ValueError(f"wrong type: a text part of message {index} has no text")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
