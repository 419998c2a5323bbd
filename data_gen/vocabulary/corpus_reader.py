"""Reads and tokenises corpora: text files, records, and datasets of the Hub (docs/prompts-and-answers.md).

Records come from `recipes.prompts.sources`, and `datasets` streams those of the Hub. It does not read local files: in
5.2, one malformed line, or one byte that is not UTF-8, ends a file and loses up to 10 MB before it. Here a bad line
loses itself, and a damaged file what follows the damage.

Plain documents are tokenised without special tokens, while FR-Spec's script (arXiv 2502.14856) counts a BOS for each.
Of conversations only assistant turns with their stop tokens are taken, because prompts are never drafted.
"""

import glob
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.training_rows.rows import turns_of
from draftsmith.models.chat import RenderError, tokenizer_fingerprint
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.reading import DAMAGED, ending, matching, open_text
from draftsmith.recipes.prompts.records import COLUMNS, LIST_COLUMNS, is_regenerated, json_type, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects, is_unicode
from draftsmith.recipes.prompts.sources import HUB_FORMS, hub_parts, records
from draftsmith.recipes.sections.data import RankingSource

ANSWERS = "answers"
TEXT_FIELD = "text"  # the recipe's default
RECORD_TYPES = (".jsonl", ".json", ".parquet")
PIECE_CHARACTERS = 1 << 16  # of a text file; its end cuts about one token in tens of thousands
CHECKED_FIRST = 50  # records; finds a wrong text_field before anything is counted
# Tokenised at once, by the tokenizer's threads.
BATCH_CHARACTERS = 1 << 20
BATCH_ITEMS = 1 << 12


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


def items(section: RankingSource, rejects: Rejects) -> Iterator[Item]:
    """The source's items, up to max_documents documents. What is malformed or damaged goes to `rejects`.

    Raises UserError if a parquet file or a dataset cannot be read to its end.
    """
    begun, files = 0, files_of(section.source)
    for place in [section.source] if files is None else files:
        if files is None or ending(place) in RECORD_TYPES:
            found = (Item(place, row, record) for row, record in records(place, rejects))
        else:
            found = _pieces(place, section.text_field, rejects)
        for item in found:
            begun += item.opens
            if section.max_documents is not None and begun > section.max_documents:
                return
            yield item


def _pieces(path: str, text_field: str, rejects: Rejects) -> Iterator[Item]:
    """A text file in pieces that end with a line, unless a line is longer than a piece."""
    piece, start, opens = "", 1, True
    for line, part in chain(_lines(path, rejects), [(0, "")]):
        if not part or len(piece) + len(part) > PIECE_CHARACTERS:
            if piece.strip():
                yield Item(path, start, {text_field: piece}, opens)
                opens = False
            piece = ""
        start = start if piece else line
        piece += part


def _lines(path: str, rejects: Rejects) -> Iterator[tuple[int, str]]:
    """(number, text) of the lines that are UTF-8; a line longer than a piece comes in parts."""
    line = 1
    with open_text(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        try:
            while part := file.readline(PIECE_CHARACTERS):
                if "\0" in part:
                    reason = "not text: this reads text, .jsonl and .json, also as .gz, and .parquet"
                    rejects.add(path, line, reason, None)
                    return
                if is_unicode(part):
                    yield line, part
                else:
                    raw = part.encode(errors="surrogateescape")
                    rejects.add(path, line, "not UTF-8", raw.decode(errors="replace").rstrip())
                line += part.endswith("\n")
        except DAMAGED as error:
            rejects.add(path, line, f"damaged file: {error}; what follows is lost", None)


def text_of(record: Any, text_field: str) -> str | None:
    """The text of a record, or None for a conversation, which `recipes.prompts` reads.

    A list of messages makes a record a conversation, unless the recipe names a text_field. Without either, columns of a
    question and its answer do. Raises ValueError, "kind: detail", if there is no text.
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


class Tokeniser:
    """Tokenises corpora for a target with a vocabulary of `vocab_size`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def documents(self, section: RankingSource, rejects: Rejects) -> Iterator[tuple[list[int], bool]]:
        """(tokens, whether they begin a document) of each text and each answer. Unusable records go to `rejects`.

        Raises UserError as `items` does.
        """
        characters, batch = 0, list[tuple[Item, str | None]]()
        found = items(section, rejects)
        for item in Bar(found, desc=f"reading {section.source[-40:]}", unit="record", unit_scale=True):
            try:
                text = text_of(item.record, section.text_field)
            except ValueError as error:
                rejects.add(item.place, item.line, str(error), item.record)
                continue
            batch.append((item, text))
            characters += len(text or "")
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_ITEMS:
                yield from self._tokenised(batch, rejects)
                batch, characters = [], 0
        yield from self._tokenised(batch, rejects)

    def _tokenised(self, batch: list[tuple[Item, str | None]], rejects: Rejects) -> Iterator[tuple[list[int], bool]]:
        encoded = self._encoded([text for _, text in batch if text is not None])
        for item, text in batch:
            try:
                parts = [next(encoded)] if text is not None else self._answers(item)
                if (greatest := max(chain.from_iterable(parts), default=0)) >= self.vocab_size:
                    raise ValueError(f"a token the target lacks: {greatest}, it has {self.vocab_size}")
            except (RenderError, ValueError) as error:
                rejects.add(item.place, item.line, str(error), item.record)
                continue
            for number, ids in enumerate(parts):
                yield ids, item.opens and number == 0

    def _encoded(self, texts: list[str]) -> Iterator[list[int]]:
        if self._backend is not None:  # 2.5 times as fast, and more on many cores
            return (encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False))
        return iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])  # type: ignore[arg-type]

    def _answers(self, item: Item) -> list[list[int]]:
        """The tokens of each assistant turn."""
        record, generator = item.record, item.record.get("generator")
        same = isinstance(generator, dict) and generator.get("tokenizer_fingerprint") == self.fingerprint
        if same and is_regenerated(record):
            turns = [turn.get("output_token_ids") if isinstance(turn, dict) else None for turn in record["turns"]]
            outputs = [ids for ids in turns if isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)]
            if len(outputs) < len(turns):
                raise ValueError("wrong type: every turn must have a list of output token ids")
            return outputs
        if "messages" in record:
            record = {key: value for key, value in record.items() if key != "turns"}
        conversation = to_conversation(record, f"{item.place}:{item.line}", item.place, item.line)
        return [turn.output for turn in turns_of(self._tokenizer, conversation)]


# Checks.


def check_sources(sections: list[RankingSource], look: bool = True, key: str = "data.ranking.sources") -> None:
    """Raises UserError with the problems of all sources, each behind its place in the recipe's `key`.

    Args:
        look: read a few records of each. A plan does not, because it does not ask the Hub.
    """
    problems: list[str] = []
    for i, section in enumerate(sections):
        problem = None
        if section.source in [earlier.source for earlier in sections[:i]]:
            problem = f"{section.source} is listed twice; give it one weight"
        elif section.source != ANSWERS:
            problem = _name_problem(section.source) or (_content_problem(section) if look else None)
        elif section.max_documents or section.text_field != TEXT_FIELD:
            problem = f"{ANSWERS} take no max_documents and no text_field: they are counted as training reads them"
        if problem:
            problems.append(f"{key}.{i}: {problem}")
    if problems:
        raise UserError(problems)


def _name_problem(name: str) -> str | None:
    if (files := files_of(name)) is not None:
        forms = f"{HUB_FORMS} for a dataset, `{ANSWERS}` for the target's own answers"
        return None if files else f"{name}: no such file; write {forms}"
    if "[" in name:
        return f"{name}: parts of a split cannot be asked for; the first N are max_documents"
    return None if hub_parts(name) else f"{name}: write {HUB_FORMS}"


def _content_problem(section: RankingSource) -> str | None:
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
