"""Reads prompts of every format: files, benchmarks and `datasets` names.

Sources
    path.jsonl, path.json        one JSON object per line, or one JSON array of objects (.jsonl: nothing else in it)
    path.csv, path.tsv           one row per conversation, in UTF-8; the first row names the columns. Commas, semicolons
                                 or tabs divide .csv; `messages`, `turns` and `tools` are JSON text
    path.parquet                 one row per conversation
    path.jsonl.gz, .csv.gz, ...  any of these but parquet, packed by gzip
    folder, parts/*.jsonl        the files of these types in a folder or of a pattern (`**`: also in folders below),
                                 sorted by name; empty files are left out
    hf:org/name[:config][:split] a dataset of the `datasets` library, streamed; the split is `train` unless given
    mt_bench, mt_bench:path, ... benchmarks: fetched, or your copy in a published form (benchmark_prompts.py)

A record is recognised by its first column among these
    messages                     [{"role", "content", ...}]; tool calls, reasoning_content and other keys stay
    conversations, conversation  ShareGPT: [{"from", "value"}], function_call and observation turns too; or as messages
    turns                        MT-bench, Spec-Bench: ["first user turn", "second user turn"]
    prompt                       one user turn as text, a list of them, or a list of messages; `completion`, `response`
    instruction                  Alpaca, Dolly: `input` or `context` behind it, a blank line between; `output`,
                                 `response`; `history`, earlier questions and answers, before it
    question                     `answer`, `response`
    query                        `response`, `answer`
    problem                      `solution`
Each of the last five holds one question, and the columns named beside it may hold its answer as text. A record with
two different questions or two different answers is ambiguous and is rejected.

Other columns are `id` (or `question_id`), `images` and `image` (paths), `meta`, `system` (or `system_prompt`: the
system message, unless the messages begin with the same), `tools` (function schemas, also as JSON text) and `category`.
The last two move into `meta`. `recipes.prompts.records` documents tool calls, `recipes.prompts.picture_parts` pictures.
meta["benchmark"] is the source's short name: a benchmark's, a file's without folder and ending, `org/name`. Numbers and
gaps as pandas writes them (1.0, NaN) are read as 1 and null.

Ids are unique in one reading. If two files or data sets give one id to different conversations, the later one gets a
short name as a prefix: `second/0`. A repeated id in one file is rejected, and so is the same conversation with the same
id in another.

User turns may follow each other (`turns` always do). Generation puts an assistant turn after each user turn without
one: [user, user] becomes [user, assistant, user, assistant].
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError, naming_problems
from draftsmith.recipes.prompts.picture_parts import as_picture_record
from draftsmith.recipes.prompts.records import Conversation, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import StorePicture, check_source, file_sources, records, short_names
from draftsmith.recipes.sections.base import as_list
from draftsmith.recipes.sections.data import DataSection

DUPLICATE = "duplicate question"  # kind of reject


def read_conversations(
    sources: str | list[str] | None,
    rejects: Rejects,
    limit: int | None = None,
    before: str = "",
    store: StorePicture | None = None,
) -> Iterator[Conversation]:
    """The usable conversations of `sources`, in order, at most `limit`; the others go to `rejects`.

    Raises UserError at once for missing or empty sources, and at the end for sources without a usable record. Each
    problem begins with `before`, such as "data.prompts: ".

    Args:
        store: given to read pictures (`recipes.prompts.sources.records`): captioned pictures are conversations then.
    """
    names = as_list(sources)
    problems = [problem for name in names if (problem := check_source(name)) is not None]
    if not names:
        problems.append("no source given: name a file or `hf:org/name`")
    if problems:
        raise UserError([before + problem for problem in problems])
    return islice(_read_as(before, names, rejects, store), limit)


def read_training_prompts(data: DataSection, rejects: Rejects, limit: int | None) -> Iterator[Conversation]:
    """The conversations of data.prompts that regeneration asks, at most `limit`. Raises as `read_conversations` does.

    Unless data.duplicates is `keep`, only the first of those that ask the same is kept, whatever their ids and answers.
    """
    conversations = read_conversations(data.prompts, rejects, before="data.prompts: ")
    return islice(conversations if data.duplicates == "keep" else _asked_once(conversations, rejects), limit)


def _asked_once(conversations: Iterator[Conversation], rejects: Rejects) -> Iterator[Conversation]:
    places: dict[bytes, str] = {}  # digest of what is asked -> first place
    for conversation in conversations:
        digest = bytes.fromhex(asked_digest(conversation))
        if digest in places:
            reason = f"{DUPLICATE}: asks the same as {places[digest]}; data.duplicates=keep keeps both"
            rejects.add_conversation(conversation, reason)
        else:
            places[digest] = f"{conversation.source}:{conversation.line}"
            yield conversation


def asked_digest(conversation: Conversation) -> str:
    """sha256 of what the target is asked: messages without answers, tools, pictures."""
    asked: list[Any] = [list(questions(conversation.messages)), conversation.meta.get("tools")]
    asked += [conversation.pictures] if conversation.pictures else []
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def questions(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages before each answer: a user turn, system messages before it, tool calls and results behind it.

    A system message between a question and its answer stays there. Answers are left out.
    """
    pending: list[dict[str, Any]] = []
    behind: list[dict[str, Any]] = []  # system messages behind a question; belong to the next user turn if one follows
    asked = answered = False
    for message in messages:
        role = message["role"]
        if role in ("assistant", "tool"):
            pending, behind = [*pending, *behind], []
            if role == "assistant" and not message.get("tool_calls"):
                answered = asked
            else:
                pending.append(message)
        elif asked and not answered and role != "user":
            behind.append(message)
        elif asked:
            yield pending
            pending, behind = [*behind, message], []
            asked, answered = role == "user", False
        else:
            pending.append(message)
            asked = role == "user"
    if asked:
        yield [*pending, *behind]


def _read_as(before: str, names: list[str], rejects: Rejects, store: StorePicture | None) -> Iterator[Conversation]:
    with naming_problems(before):
        yield from _read(names, rejects, store)


def _read(names: list[str], rejects: Rejects, store: StorePicture | None) -> Iterator[Conversation]:
    places: dict[str, str] = {}  # id -> first place
    contents: dict[str, int] = {}  # id -> hash of the conversation
    benchmarks = short_names(names)
    parts = [(name, part) for name in names for part in file_sources(name)]
    prefixes = short_names([part for _, part in parts])
    usable, rejected = Counter[str](), Counter[str]()
    for name, part in parts:
        rejected_before = rejects.total
        own: dict[str, str] = {}  # as `places`, by ids as this file writes them
        last = nth = 0  # the line before, and its records so far
        for line, record in records(part, rejects, store):
            last, nth = line, nth + 1 if line == last else 1
            try:
                shown = record if store is None else as_picture_record(record)
                conversation = to_conversation(
                    shown, _default_id(part, line, nth, places), part, line, benchmarks[name]
                )
                given = conversation.id
                asked = [conversation.messages, conversation.images, conversation.meta.get("tools")]
                content = hash(json.dumps(asked, default=str))
                if contents.get(given) != content and given not in own and given in places:
                    # Another conversation with another file's id. Files are ordered, so every run renames it alike.
                    free = f"{prefixes[part]}/{given}"
                    while free in places:
                        free = f"{prefixes[part]}/{free}"
                    conversation = replace(conversation, id=free)
                if (taken := own.get(given) or places.get(conversation.id)) is not None:
                    raise ValueError(f"duplicate id: '{given}' is also at {taken}")
            except ValueError as error:
                rejects.add(part, line, str(error), record)
                continue
            places[conversation.id] = own[given] = f"{part}:{line}"
            contents[conversation.id] = content
            usable[name] += 1
            yield conversation
        rejected[name] += rejects.total - rejected_before
    barren = []
    for name in names:
        if not usable[name]:
            why = f"no usable conversation: {rejects.summary()}" if rejected[name] else "no record in it"
            barren.append(f"{name}: {why}")
    if barren:
        raise UserError(barren)


def _default_id(source: str, line: int, nth: int, places: dict[str, str]) -> str:
    place = f"{line}" if nth == 1 else f"{line}.{nth}"  # an array may have many records on one line
    short = f"{Path(source).name if not source.startswith('hf:') else source}:{place}"
    return f"{source}:{place}" if short in places else short  # folders may hold files of the same name
