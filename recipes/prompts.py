"""One reader for every prompt format: files, benchmarks, the standard library's prompts and `datasets` names.

Sources
    path.jsonl, path.json        one JSON object per line, or one JSON array of objects (.jsonl: nothing else in it)
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

User turns may follow each other (`turns` always do). Whoever generates puts an assistant turn after each user turn that
has none: [user, user] becomes [user, assistant, user, assistant].
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompt_records import Conversation, to_conversation
from draftsmith.recipes.prompt_sources import check_source, records, short_names
from draftsmith.recipes.rejects import Rejects


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


def _read(names: list[str], rejects: Rejects) -> Iterator[Conversation]:
    places: dict[str, str] = {}  # id -> where it was first seen
    benchmarks = short_names(names)
    barren = []
    for name in names:
        usable, rejected_before = 0, rejects.total
        for line, record in records(name, rejects):
            try:
                conversation = to_conversation(record, _default_id(name, line, places), name, line, benchmarks[name])
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
