"""Prompt sources: every format is read, packed too; every bad record is kept with its place and reason.

Benchmarks by name: what the Hub is asked for, and how published rows become conversations.
"""

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.benchmark_prompts import BENCHMARKS, HUMANEVAL_REQUEST
from draftsmith.recipes.prompts.prompt_reader import (
    DUPLICATE,
    check_source,
    questions,
    read_conversations,
    read_training_prompts,
)
from draftsmith.recipes.prompts.records import Conversation, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.data import DataSection
from tests.evaluation_cases import write_lines

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
GOOD = {"id": "good", "messages": [USER, ASSISTANT]}


def read(*sources: str | Path, limit: int | None = None) -> list[Conversation]:
    return list(read_conversations([*map(str, sources)], Rejects(), limit))


def kept_in(rejects: Rejects) -> list[dict[str, Any]]:
    assert rejects.path is not None
    return [json.loads(line) for line in rejects.path.read_text(encoding="utf-8").splitlines()]


def read_all(*paths: Path) -> tuple[list[Conversation], list[dict[str, Any]]]:
    """(conversations, rejects) of files, of which some records are rejected."""
    kept = paths[0].with_name("rejects.jsonl")
    kept.unlink(missing_ok=True)
    rejects = Rejects(kept)
    return list(read_conversations([*map(str, paths)], rejects)), kept_in(rejects)


def contents(found: list[Conversation]) -> list[str]:
    """The first message of each."""
    return [conversation.messages[0]["content"] for conversation in found]


def ids_of(found: Iterable[Conversation]) -> list[str]:
    return [conversation.id for conversation in found]


# Formats.

FUNCTION = {"name": "f", "arguments": {"x": None}}
CALLING = [
    {"role": "system", "content": "Be brief.", "name": "s"},
    {"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "u"}}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "assistant", "reasoning_content": "Hm.", "content": "Three é."},
]
SHAREGPT = [
    {"from": "system", "value": "S"},
    {"from": "human", "value": "Q", "weight": 0},
    {"from": "GPT ", "value": "A"},
    {"role": "prompter", "text": "R", "content": None},
]
AS_MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q", "weight": 0},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": CALLING}, CALLING),
        ({"conversations": SHAREGPT}, AS_MESSAGES),
        ({"conversation": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"turns": ["Hi", "Go on"], "category": "c"}, [USER, {"role": "user", "content": "Go on"}]),
        ({"prompt": "Hi"}, [USER]),
        ({"prompt": [USER], "completion": "no"}, [USER]),
        ({"prompt": "no", "messages": [USER], "conversations": None}, [USER]),
        ({"instruction": "Hi", "output": "Hello", "input": None}, [USER, ASSISTANT]),
    ],
)
def test_forms(tmp_path: Path, record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = {"id": "a", "images": ["x.png"], "meta": {"k": 1}, "tools": tools, "category": "c"}
    bare, whole = read(write_lines(tmp_path / "p.jsonl", record, record | more))
    assert (bare.id, bare.messages) == ("p.jsonl:1", messages)
    meta = {"benchmark": "p", "k": 1, "tools": tools, "category": "c"}
    assert whole == Conversation("a", messages, ["x.png"], meta)


def test_numbers_and_gaps_as_pandas_writes_them(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "p.jsonl",
        *('{"id": 7.0, "instruction": "x", "input": NaN, "system": NaN, "image": NaN},', '{"id": NaN, "prompt": "y"},'),
        *('{"id": "", "prompt": "z"}', '{"id": 7, "prompt": "again"}', '{"id": 0, "prompt": "0"}'),
    )
    found, (entry,) = read_all(tmp_path / "p.jsonl")
    assert ids_of(found) == ["7", "p.jsonl:2", "p.jsonl:3", "0"] and contents(found) == ["x", "y", "z", "0"]
    assert entry["reason"].startswith("duplicate id: '7'") and entry["line"] == 4


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["p.json", "p.jsonl"])
def test_json_array(tmp_path: Path, name: str, indent: int | None) -> None:
    records = [{"prompt": "one"}, {"prompt": 'zwei é"],[{'}, *({"prompt": f"{i} \\"} for i in range(3000))]
    text = json.dumps(records, indent=indent, ensure_ascii=False)
    (tmp_path / name).write_text("\ufeff\n" + text, encoding="utf-8")
    found = read(tmp_path / name)
    assert contents(found) == [record["prompt"] for record in records]
    assert found[0].id == (f"{name}:3" if indent else f"{name}:2")


@pytest.mark.parametrize(
    "end", [',\n {"prompt": oops}, {"prompt": "y"}]', "", '] {"prompt": "y"}', ', {"prompt": "\udce9"}]']
)
def test_a_broken_array_keeps_what_could_be_read(tmp_path: Path, end: str) -> None:
    (tmp_path / "p.json").write_bytes(('[{"prompt": "x"}' + end).encode("utf-8", "surrogateescape"))
    found, (entry,) = read_all(tmp_path / "p.json")
    assert contents(found) == ["x"] and entry["reason"].startswith(("malformed JSON", "not U"))


@pytest.mark.parametrize("first", ['[{"messages": [broken', "[1, 2]", "[]", "[" * 100_000])
def test_a_bad_first_line_does_not_make_an_array(tmp_path: Path, first: str) -> None:
    write_lines(tmp_path / "p.jsonl", first, *({"id": str(number), "prompt": "x"} for number in range(4)))
    found, (entry,) = read_all(tmp_path / "p.jsonl")
    assert ids_of(found) == ["0", "1", "2", "3"] and entry["line"] == 1


def test_lines_with_byte_order_mark_gaps_windows_ends_and_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    for name in ("p.jsonl", "p.json"):
        lines = [b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", b'{"prompt": "x"}', b'{"prompt": "caf\xe9"}', b""]
        (tmp_path / name).write_bytes(b"\r\n".join(lines))
        found, (entry,) = read_all(tmp_path / name)
        assert ids_of(found) == ["good", f"{name}:3"]
        assert (entry["reason"], entry["record"]) == ("not UTF-8: byte 16", '{"prompt": "caf\ufffd"}')


def test_parquet_drops_the_cells_that_arrow_adds(tmp_path: Path) -> None:
    function = {"name": "f", "arguments": {"x": 1}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    rows = [{"id": "a", "messages": [USER, call]}, {"messages": [USER], "tools": None}, {"id": "c", "messages": None}]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found, rejects = read_all(path)
    assert [(c.id, c.messages) for c in found] == [("a", [USER, call]), ("p.parquet:2", [USER])]
    assert rejects[0]["reason"].startswith("unknown columns:") and len(rejects) == 1
    for damaged in (b"PAR1 no", path.read_bytes().replace(b"messages", b"\xb0essages")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"p\.parquet: cannot be read as parquet"):
            read(str(path))


def test_datasets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with split and config, streamed no further than asked."""
    asked, rows = [], []

    def load_dataset(*place: str, split: str, streaming: bool) -> Any:
        asked.append((*place, split, streaming))
        for number in range(10**9):
            rows.append(number)
            yield {"messages": [{**USER, "name": None}]} if number else {"messages": None, "prompt": "x"}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("hf:org/name:test_sft", "hf:org/other", "hf:org/third:main:train", "hf:org/fourth:main:"):
        found = read(source, limit=2)
        assert ids_of(found) == [f"{source}:1", f"{source}:2"] and found[1].messages == [USER]
        assert found[0].meta["benchmark"] == source.split(":")[1]
    configs = [(None, "test_sft"), (None, "train"), ("main", "train"), ("main", "train")]
    assert [place[1:] for place in asked] == [(*each, True) for each in configs] and rows == [0, 1] * 4
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no\nmore")))
    with pytest.raises(UserError, match=r"hf:org/name: datasets cannot .*ConnectionError: no"):
        read("hf:org/name")


@pytest.mark.parametrize("source", ["a,b.csv", "a;b.csv", "a\tb.tsv"])
def test_csv(tmp_path: Path, source: str) -> None:
    """As spreadsheets write it: byte-order mark, the country's delimiter, quotes, Windows line ends, an empty row."""
    delimiter, path = source[1], tmp_path / ("p" + source[3:])
    rows = [
        ["id", " prompt", "response", "messages", ""],
        ["a", '"One, two; or three?\r\n\tSay ""four"""', "five", "", "0"],
        ["", "", "", "", ""],
        ["", "caf\u00e9, s'il vous pla\u00eet".replace(delimiter, ""), "", "", "1"],
        ["c", "", "", '"' + json.dumps([USER, ASSISTANT]).replace('"', '""') + '"', "2"],
    ]
    path.write_bytes("\r\n".join(delimiter.join(row) for row in rows).encode("utf-8-sig"))
    first, second, third = read(path)
    assert (first.id, first.line, second.id, third.line) == ("a", 2, f"{path.name}:5", 6)
    assert [m["content"] for m in first.messages] == ['One, two; or three?\r\n\tSay "four"', "five"]
    assert [len(second.messages), third.messages] == [1, [USER, ASSISTANT]]


def test_bad_rows_of_csv_are_kept_with_their_lines(tmp_path: Path) -> None:
    long = "x" * 200_000  # more than the csv module reads unless told to
    rows = [
        b"id,question", b"1.0,good", b"2,How, exactly?", b"3", b"4,caf\xe9", b'5,"two', b'lines" and more', b"6,",
        b"7," + long.encode(), b'8,"never closed', b"9,gone with it",
    ]  # fmt: skip
    (tmp_path / "p.csv").write_bytes(b"\n".join(rows))
    found, entries = read_all(tmp_path / "p.csv")
    assert [(c.id, c.line) for c in found] == [("1", 2), ("7", 9)]
    kinds = {3: "malformed CSV", 4: "malformed CSV", 5: "not UTF-8", 6: "malformed CSV", 8: "unknown columns"}
    found_kinds = {entry["line"]: entry["reason"].split(":")[0] for entry in entries}
    assert found_kinds == kinds | {10: "malformed CSV"} and len(entries) == 6
    (tmp_path / "p.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(UserError, match=":1: several columns"):
        read(tmp_path / "p.csv")


# Packed files, folders and patterns.


def test_packed_files_are_read_as_what_is_in_them(tmp_path: Path) -> None:
    texts = {
        "a.jsonl": '{"prompt": "x"}\n{"prompt": "y"}\n',
        "b.json": '[{"prompt": "x"},\n{"prompt": "y"},]',
        "c.JSONL": '\ufeff[{"prompt": "x"}, {"prompt": "y"}]',
        "d.csv": "\ufeffprompt;id\nx;\ny;\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.GZ").write_bytes(gzip.compress(text.encode()))
        found = read(tmp_path / f"{name}.GZ")
        assert contents(found) == ["x", "y"], name
        assert found[0].meta == {"benchmark": name[0]} and found[0].id.startswith(f"{name}.GZ:")
    chance = random.Random(0)
    whole = gzip.compress("".join(f'{{"prompt": "{chance.randbytes(4000).hex()}"}}\n' for _ in range(100)).encode(), 1)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    found, (entry,) = read_all(tmp_path / "cut.jsonl.gz")
    assert 10 < len(found) < 100 and entry["line"] == len(found) + 1
    assert entry["reason"].startswith("damaged file: ") and entry["reason"].endswith("is lost")


def test_patterns_and_folders_stand_for_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "parts [1]"
    (folder / "deeper").mkdir(parents=True)
    for number in (2, 10, 1):
        write_lines(folder / f"{number}.jsonl", *({"id": i, "prompt": f"{number} {i}"} for i in range(2)))
    for name in ("README.md", "empty.jsonl", ".hidden.jsonl"):
        (folder / name).write_text("{}" * (name != "empty.jsonl"))
    write_lines(folder / "deeper/3.jsonl", {"prompt": "3 0"})
    other = write_lines(tmp_path / "other.json", {"prompt": "not read"})
    for source in (str(folder), f"{folder}/", f"{tmp_path}/parts*/*", f"{tmp_path}/parts*/*.jsonl"):
        found = read(source, other, limit=6)
        assert contents(found) == ["1 0", "1 1", "10 0", "10 1", "2 0", "2 1"]
        assert ids_of(found) == ["0", "1", "10/0", "10/1", "2/0", "2/1"]
        assert (found[2].source, found[2].line) == (f"{folder}/10.jsonl", 1)
        assert {c.meta["benchmark"] for c in found} == {"parts*" if "*" in source else "parts [1]"}
    assert len(read(f"{tmp_path}/**/*.jsonl")) == 7
    assert ids_of(read(f"mt_bench:{tmp_path}/parts*/2.jsonl")) == ["mt_bench/0", "mt_bench/1"]
    write_lines(folder / "0.jsonl", {"prompt": ""})  # one file without a usable record is no mistake
    assert len(read(folder)) == 6


# Ids, limits, order.


def test_training_prompts_are_asked_once(tmp_path: Path) -> None:
    """The first of those that ask the same, whatever their ids, answers and order of keys; others differ."""
    first = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "Hi"},
        {"id": "own", "messages": [dict(reversed(USER.items())), ASSISTANT]},
        {"prompt": "Hi", "system": "S"},
        {"prompt": "Hi", "tools": [{"name": "f"}]},
        {"prompt": "Hi", "images": ["x.png"]},
        {"turns": ["Hi", "Go on"]},
        {"id": "seen", "prompt": "Hi", "images": ["x.png"]},
    )
    second = write_lines(tmp_path / "b.json", '[{"prompt": "Bye"}, {"prompt": "Bye"}]')  # two on one line
    once = ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4", "a.jsonl:5", "a.jsonl:6", "b.json:1"]
    rejects = Rejects(tmp_path / "rejects.jsonl")
    data = DataSection(prompts=[str(first), str(second)])
    assert ids_of(read_training_prompts(data, rejects, None)) == once
    assert rejects.counts == {DUPLICATE: 3}
    entry, seen, _ = kept_in(rejects)
    assert to_conversation(seen["record"], "", str(first), 7).images == ["x.png"]  # can be asked again as it is kept
    assert (entry["line"], entry["record"]["id"]) == (2, "own") and f"the same as {first}:1;" in entry["reason"]
    assert ids_of(read_training_prompts(data, Rejects(), 2)) == once[:2]
    keep = data.model_copy(update={"duplicates": "keep"})
    assert ids_of(read_training_prompts(keep, Rejects(), 3)) == ["a.jsonl:1", "own", "a.jsonl:3"]
    assert len(read(first)) == 7  # evaluation prompts


def test_equal_ids_of_other_sources_are_told_apart(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "first.jsonl", {"id": 0, "prompt": "a"}, {"id": 1, "prompt": "b"})
    records = [{"id": 0, "prompt": "c"}, {"id": 1, "prompt": "b"}, {"id": 0, "prompt": "d"}]
    second = write_lines(tmp_path / "second.jsonl", *records)
    found, (same, twice) = read_all(first, second)
    assert ids_of(found) == ["0", "1", "second/0"]
    assert same["reason"] == f"duplicate id: '1' is also at {first}:2"
    assert twice["reason"] == f"duplicate id: '0' is also at {second}:1"


@pytest.mark.parametrize(
    ("roles", "expected"),
    {
        "us": "us", "usa": "us", "usau": "us u", "uasu": "u su", "usu": "u su", "suusa": "su us", "usctau": "usct u",
        "uctsau": "ucts u", "uu": "u u", "usausa": "us us",
    }.items(),
)  # fmt: skip
def test_what_stands_before_each_answer(roles: str, expected: str) -> None:
    """u user, s system, a answer, c call of a tool, t its result."""
    names = {"u": "user", "s": "system", "a": "assistant", "c": "assistant", "t": "tool"}
    messages = [
        {"role": names[role], "content": role} | ({"tool_calls": [{}]} if role == "c" else {}) for role in roles
    ]
    assert ["".join(m["content"] for m in question) for question in questions(messages)] == expected.split()


# What cannot be used.

BAD_RECORDS: dict[str, list[Any]] = {
    "malformed JSON": ["{not json", {"messages": "[1"}],
    "nested too deeply": ["[" * 100_000, '{"prompt": "x", "meta": {"a": ' + "[" * 100 + "]" * 100 + "}}"],
    "unknown columns": [{}],
    "ambiguous columns": [
        {"prompt": "x", "question": "y"}, {"question": "x", "context": "y"},
        {"query": "x", "response": "y", "answer": "z"},
        {"messages": [{"role": "system", "content": "a"}, USER], "system": "b"},
    ],
    "not Unicode": [{"prompt": "x", "meta": {"\ud800": 1}}, {"prompt": "x", "id": "\ud800"}],
    "no user turn": [{"messages": []}, {"messages": [{"role": "system", "content": "x"}]}],
    "no user turn before the first assistant turn": [{"messages": [ASSISTANT, USER]}],
    "two assistant turns in a row": [{"messages": [USER, ASSISTANT, ASSISTANT]}],
    "unknown role": [{"messages": [{"role": role, "content": "x"}]} for role in ("robot", ["user"], 0, None)],
    "empty user turn": [{"messages": [{"role": "user", "content": text}]} for text in (" \n", [])],
    "wrong type": [
        [USER], {"instruction": "x", "input": 3}, {"instruction": "x", "history": [["q"]]},
        {"prompt": "x", "system": ["s"]}, {"prompt": "x", "tools": "search, calculator"}, {"prompt": "x", "tools": [3]},
        {"messages": [USER, {"role": "assistant", "tool_calls": 3}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "f(x)"}]},
        {"messages": [USER, {**ASSISTANT, "reasoning_content": ["x"]}]}, {"messages": "x"}, {"messages": ["x"]},
        {"messages": [USER, {"role": "assistant", "content": None}]}, {"turns": "x"}, {"turns": [1]}, {"prompt": 3},
        *({"messages": [{"role": "user", "content": content}]} for content in (3, ["x"], [{"type": "text"}])),
        *({"prompt": "x", "id": name} for name in (1.5, True, [])), {"prompt": "x", "images": "a.png"},
        {"prompt": "x", "meta": ["x"]},
    ],
    "duplicate id": [GOOD],
}  # fmt: skip


def test_every_bad_record_is_kept_and_none_stops_the_run(tmp_path: Path) -> None:
    """Once: a resumed run does not repeat its rejects."""
    bad = [(record, kind) for kind, records in BAD_RECORDS.items() for record in records]
    path = write_lines(tmp_path / "p.jsonl", GOOD, *(record for record, _ in bad), {"id": "last", "prompt": "x"})
    for _ in range(2):
        rejects = Rejects(tmp_path / "deep/rejects.jsonl")
        assert ids_of(read_conversations(str(path), rejects)) == ["good", "last"]
        for number, (entry, (record, kind)) in enumerate(zip(kept_in(rejects), bad, strict=True), start=2):
            assert (entry["source"], entry["line"], entry["record"]) == (str(path), number, record)
            assert entry["reason"].startswith(kind), entry
        assert rejects.total == len(bad) and rejects.summary().endswith(f"kept in {rejects.path}")


def test_sources_without_a_usable_record_are_told_behind_the_others(tmp_path: Path) -> None:
    bad = str(write_lines(tmp_path / "bad.jsonl", "{", {"messages": []}))
    none, good = write_lines(tmp_path / "none.json", "[]"), write_lines(tmp_path / "good.jsonl", GOOD)
    sources = [bad, str(none), str(good)]
    conversations = read_training_prompts(DataSection(prompts=sources), Rejects(), None)
    assert next(conversations).id == "good"
    with pytest.raises(UserError) as caught:
        next(conversations)
    assert [problem.split(":")[1].strip() for problem in caught.value.problems] == sources[:2]


# Benchmarks. Rows as they are published, shortened.
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."], "reference": None}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": '\n\ndef half(x):\n    """ Half of x. """\n',
    "canonical_solution": "    return x / 2\n",
    "test": "def check(candidate):\n    assert candidate(2) == 1\n",
    "entry_point": "half",
}
HALF = '```python\ndef half(x):\n    """ Half of x. """\n```'
GSM8K = {"question": "Ann has 2 cats. How many?", "answer": "She has <<2=2>>2.\n#### 2"}
QA = {"question_id": 321, "category": "qa", "turns": ["who sang it?"], "reference": ["She"]}
# EAGLE's form of HumanEval: the request is in it.
HUMANEVAL_TURNS = {"question_id": 7, "category": "code", "turns": ["Complete the code I provided.\n\ndef f(): ..."]}


def users(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


# The user's copy.


@pytest.mark.parametrize(
    ("row", "id_", "messages", "meta"),
    [
        (MT_BENCH, "mt_bench/81", users("Write a post.", "Rewrite it."), {"category": "writing"}),
        ({"question_id": 0.0, "turns": ["x"]}, "mt_bench/0", users("x"), {}),  # as pandas writes it
        ({"question_id": float("nan"), "turns": ["x"]}, "mt_bench/1", users("x"), {}),
        (HUMANEVAL, "humaneval/0", users(HUMANEVAL_REQUEST + HALF), {}),
        (HUMANEVAL_TURNS, "humaneval/7", users(HUMANEVAL_TURNS["turns"][0]), {"category": "code"}),
        (GSM8K, "gsm8k/1", [*users(GSM8K["question"]), {"role": "assistant", "content": GSM8K["answer"]}], {}),
        (MT_BENCH, "spec_bench/81", users("Write a post.", "Rewrite it."), {"category": "mt_bench"}),
        (QA, "spec_bench/321", users("who sang it?"), {"category": "qa"}),
    ],
)
def test_published_forms(tmp_path: Path, row: dict[str, Any], id_: str, messages: Any, meta: dict[str, str]) -> None:
    name, path = id_.partition("/")[0], write_lines(tmp_path / "copy.jsonl", row)
    (conversation,) = read(f"{name}:{path}")
    assert conversation == Conversation(id_, messages, meta=meta | {"benchmark": name})
    assert (conversation.source, conversation.line) == (f"{name}:{path}", 1)


def test_benchmarks_side_by_side(tmp_path: Path) -> None:
    """A file alone is named by its stem."""
    path = write_lines(tmp_path / "q.jsonl", MT_BENCH)
    other = write_lines(tmp_path / "own.jsonl", {"id": "x", "prompt": "p", "meta": {"benchmark": "mine"}})
    found = read(f"mt_bench:{path}", f"spec_bench:{path}", path, other)
    assert ids_of(found) == ["mt_bench/81", "spec_bench/81", "81", "x"]
    assert [c.meta["benchmark"] for c in found] == ["mt_bench", "spec_bench", "q", "mine"]


# Fetching.


def test_fetched_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a hub that holds the rows above."""
    asked = []
    rows = {
        ("philschmid/mt-bench", None, "train", None): [MT_BENCH],
        ("openai/openai_humaneval", None, "test", None): [HUMANEVAL],
        ("openai/gsm8k", "main", "test", None): [GSM8K],
    }
    for number, task in enumerate(("translation", "summarization", "qa", "math_reasoning", "rag")):
        row = {"question_id": number, "category": task, "turns": ["x"]} | ({"reference": ["y"]} if task == "qa" else {})
        rows["RedHatAI/speculator_benchmarks", None, "train", f"{task}.jsonl"] = [row]
    rows["RedHatAI/speculator_benchmarks", None, "train", "question.jsonl"] = [MT_BENCH]

    def load_dataset(name: str, config: str | None = None, *, split: str, data_files: str | None = None) -> Any:
        asked.append((name, config, split, data_files))
        return datasets.Dataset.from_list(rows[name, config, split, data_files])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert ids_of(read("mt_bench", "humaneval", "gsm8k")) == ["mt_bench/81", "humaneval/0", "gsm8k/1"]
    found = read("spec_bench")
    tasks = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    assert [c.meta["category"] for c in found] == tasks
    assert all(check_source(name) is None for name in BENCHMARKS) and len(asked) == 3 + 6
