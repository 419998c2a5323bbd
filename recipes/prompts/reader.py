"""One reader for every prompt format: files, benchmarks, the standard library's prompts and `datasets` names.

Sources
    path.jsonl, path.json        one JSON object per line, or one JSON array of objects (.jsonl: nothing else in it)
    path.csv, path.tsv           one row per conversation, in UTF-8; the first row names the columns. Commas, semicolons
                                 or tabs divide .csv; `messages`, `turns` and `tools` are JSON text
    path.parquet                 one row per conversation
    stdlib:train, :heldout       questions about the interpreter's own library (`stdlib_prompts`)
    hf:org/name[:split]          a dataset of the `datasets` library, streamed; the split is `train` unless given
    hf:org/name:config:split     a configuration of it, for example hf:openai/gsm8k:main:train
    mt_bench, humaneval, gsm8k, spec_bench, each also as mt_bench:path
                                 benchmarks: fetched, or your copy in the form they are published in
                                 (`benchmark_prompts`)

A record is recognised by its columns, the first of these that it has
    messages                     [{"role", "content", ...}]; tool calls, reasoning_content and other keys stay
    conversations, conversation  ShareGPT: [{"from", "value"}], function_call and observation turns too; or as messages
    turns                        MT-bench, Spec-Bench: ["first user turn", "second user turn"]
    prompt                       one user turn as text, a list of them, or a list of messages; `completion`, `response`
    instruction                  Alpaca, Dolly: `input` or `context` behind it, a blank line between; `output`,
                                 `response`; `history`, earlier questions and answers, before it
    question                     `answer`, `response`
    query                        `response`, `answer`
    problem                      `solution`
The last five hold one question and, in the columns named beside it, its answer where that is text. A record in which
two of them ask different things, or two columns hold different answers, is ambiguous and is rejected.

Beside them are read `id` (or `question_id`), `images`, `meta`, `system` (or `system_prompt`: the system message, unless
the messages begin with the same), `tools` (function schemas, also as JSON text) and `category`; the last two move into
`meta`. `prompt_records` says how tool calls are written. meta["benchmark"] is the source's short name: a benchmark's, a
file's without folder and ending, `org/name`, `stdlib:train`.

Ids are unique in one reading. Where two sources give different conversations one id, the later source's short name goes
before it: `second/0`. An id that occurs twice in one source is rejected the second time, as is the same conversation
with the same id in another source.

Training prompts are asked once (`read_training_prompts`): of conversations that ask the same, only the first is kept,
whatever their ids and answers; data.duplicates=keep keeps all. Evaluation prompts are never dropped for that.

User turns may follow each other (`turns` always do). Whoever generates puts an assistant turn after each user turn that
has none: [user, user] becomes [user, assistant, user, assistant].
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.records import Conversation, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import check_source, records, short_names
from draftsmith.recipes.schema import DataSection

DUPLICATE = "duplicate question"  # kind of reject


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


def read_training_prompts(data: DataSection, rejects: Rejects, limit: int | None) -> Iterator[Conversation]:
    """The conversations of data.prompts, at most `limit`: what regeneration asks.

    Unless data.duplicates is `keep`, a conversation that asks the same as an earlier one goes to `rejects`, whatever
    its id, and does not count towards `limit`. Raises as `read_conversations` does.
    """
    conversations = read_conversations(data.prompts or [], rejects)
    return islice(conversations if data.duplicates == "keep" else _asked_once(conversations, rejects), limit)


def _asked_once(conversations: Iterator[Conversation], rejects: Rejects) -> Iterator[Conversation]:
    places: dict[bytes, str] = {}  # digest of what is asked -> where it was first seen
    for conversation in conversations:
        digest = bytes.fromhex(asked_digest(conversation))
        if (first := places.get(digest)) is None:
            places[digest] = f"{conversation.source}:{conversation.line}"
            yield conversation
            continue
        record = {"id": conversation.id, "messages": conversation.messages, "meta": conversation.meta}
        reason = f"{DUPLICATE}: asks the same as {first}; data.duplicates=keep keeps both"
        rejects.add(conversation.source, conversation.line, reason, record)


def asked_digest(conversation: Conversation) -> str:
    """sha256 of what the target is asked: the messages without their answers, the tools and what the pictures show."""
    asked: list[Any] = [list(questions(conversation.messages)), conversation.meta.get("tools")]
    asked += [conversation.pictures] if conversation.pictures else []
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def questions(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """What stands before each answer: a user turn, system messages before it, tool calls and results behind it.

    A system message between a question and its answer stays there. Answers are left out; an assistant turn that calls
    tools is kept, with the results that follow it.
    """
    pending: list[dict[str, Any]] = []
    behind: list[dict[str, Any]] = []  # system messages behind a question: of it, unless another user turn comes first
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


def _read(names: list[str], rejects: Rejects) -> Iterator[Conversation]:
    places: dict[str, str] = {}  # id -> where it was first seen
    contents: dict[str, int] = {}  # id -> hash of what it holds
    benchmarks = short_names(names)
    barren = []
    for name in names:
        usable, rejected_before = 0, rejects.total
        own: dict[str, str] = {}  # as `places`, ids as this source writes them
        for line, record in records(name, rejects):
            try:
                conversation = to_conversation(record, _default_id(name, line, places), name, line, benchmarks[name])
                given = conversation.id
                asked = [conversation.messages, conversation.images, conversation.meta.get("tools")]
                content = hash(json.dumps(asked, default=str))
                if contents.get(given) != content and given not in own and given in places:
                    # Another source's number, and another conversation. The same in every run: sources are ordered.
                    free = f"{benchmarks[name]}/{given}"
                    while free in places:
                        free = f"{benchmarks[name]}/{free}"
                    conversation = replace(conversation, id=free)
                if (taken := own.get(given) or places.get(conversation.id)) is not None:
                    raise ValueError(f"duplicate id: '{given}' is also at {taken}")
            except ValueError as error:
                rejects.add(name, line, str(error), record)
                continue
            places[conversation.id] = own[given] = f"{name}:{line}"
            contents[conversation.id] = content
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
