"""Prompt sources: every format is read, every bad record is kept with its place and reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.reader import DUPLICATE, questions, read_conversations, read_training_prompts
from draftsmith.recipes.prompts.records import Conversation, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import json_array
from draftsmith.recipes.schema import DataSection

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
GOOD = {"id": "good", "messages": [USER, ASSISTANT]}


def write_lines(path: Path, *records: Any) -> str:
    """JSON lines; text is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def read(source: str | list[str], rejects: Rejects | None = None, limit: int | None = None) -> list[Conversation]:
    return list(read_conversations(source, Rejects() if rejects is None else rejects, limit))


def kept(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Formats.


def test_our_own_lines(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    record = {"id": "a", "messages": [USER, ASSISTANT], "images": ["x.png"], "meta": {"k": 1}, "tools": tools}
    (conversation,) = read(write_lines(tmp_path / "p.jsonl", record))
    assert conversation == Conversation("a", [USER, ASSISTANT], ["x.png"], {"benchmark": "p", "k": 1, "tools": tools})


def test_messages_pass_untouched(tmp_path: Path):
    messages = [
        {"role": "system", "content": "Be brief.", "name": "s"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": None}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Three é."},
    ]
    (conversation,) = read(write_lines(tmp_path / "p.jsonl", {"id": "a", "messages": messages}))
    assert conversation.messages == messages


def test_sharegpt(tmp_path: Path):
    turns = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "Q", "weight": 0},
        {"from": "gpt", "value": "A"},
    ]
    (conversation,) = read(write_lines(tmp_path / "p.jsonl", {"id": 7, "conversations": turns}))
    assert conversation.id == "7"
    assert conversation.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q", "weight": 0},
        {"role": "assistant", "content": "A"},
    ]


def test_conversation_column_with_roles(tmp_path: Path):
    (conversation,) = read(write_lines(tmp_path / "p.jsonl", {"id": "a", "conversation": [USER, ASSISTANT]}))
    assert conversation.messages == [USER, ASSISTANT]


def test_roles_and_keys_as_people_write_them(tmp_path: Path):
    turns = [("User", "Q"), ("GPT ", "A"), ("prompter", "R"), ("AI", "B"), ("human", "S")]
    for role, content, other in (("role", "value", {}), ("from", "content", {}), ("role", "text", {"content": None})):
        messages = [{role: who, content: text} | other for who, text in turns]
        (conversation,) = read(write_lines(tmp_path / "p.jsonl", {"conversations": messages}))
        assert conversation.messages == [
            {"role": "user" if text in "QRS" else "assistant", "content": text} for _, text in turns
        ]
    messages = [
        {"from": "human", "value": "Q", "content": "-", "role": None},
        {"role": "assistant", "content": "A", "value": "-"},
    ]
    (conversation,) = read(write_lines(tmp_path / "p.jsonl", {"messages": messages}))
    assert [message["content"] for message in conversation.messages] == ["Q", "A"]


def test_numbers_and_gaps_as_pandas_writes_them(tmp_path: Path):
    lines = [
        '{"id": 7.0, "instruction": "x", "input": NaN, "system": NaN, "image": NaN},',
        '{"id": NaN, "instruction": "y"},',
        '{"id": "", "prompt": "z"}',
        '{"id": 7, "prompt": "again"}',
    ]
    rejects = Rejects(tmp_path / "rejects")
    found = read(write_lines(tmp_path / "p.jsonl", *lines), rejects)
    assert [(c.id, c.messages[0]["content"]) for c in found] == [("7", "x"), ("p.jsonl:2", "y"), ("p.jsonl:3", "z")]
    (entry,) = kept(tmp_path / "rejects")
    assert entry["reason"].startswith("duplicate id: '7' is also at ") and entry["line"] == 4
    questions = write_lines(
        tmp_path / "q.jsonl", '{"question_id": 81.0, "turns": ["x"]}', '{"question_id": NaN, "turns": ["y"]}'
    )
    assert [c.id for c in read(f"mt_bench:{questions}")] == ["mt_bench/81", "mt_bench/2"]


def test_mt_bench_turns_are_user_turns(tmp_path: Path):
    record = {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": ["x"]}
    (conversation,) = read(write_lines(tmp_path / "p.jsonl", record))
    assert conversation == Conversation(
        "81",
        [{"role": "user", "content": "Write."}, {"role": "user", "content": "Rewrite."}],
        meta={"benchmark": "p", "category": "writing"},
    )


def test_bare_prompts(tmp_path: Path):
    path = write_lines(tmp_path / "p.jsonl", {"prompt": "Hi"}, {"prompt": [USER], "completion": "no"})
    assert [(c.id, c.messages) for c in read(path)] == [("p.jsonl:1", [USER]), ("p.jsonl:2", [USER])]


def test_messages_win_over_other_columns(tmp_path: Path):
    (conversation,) = read(
        write_lines(tmp_path / "p.jsonl", {"prompt": "no", "messages": [USER], "conversations": None})
    )
    assert conversation.messages == [USER]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["p.json", "p.jsonl"])
def test_json_array(tmp_path: Path, name: str, indent: int | None):
    path = tmp_path / name
    path.write_text("\n" + json.dumps([{"prompt": "one"}, {"prompt": "zwei é"}], indent=indent, ensure_ascii=False))
    assert [c.messages[0]["content"] for c in read(str(path))] == ["one", "zwei é"]
    assert next(c.id for c in read(str(path))) == (f"{name}:3" if indent else f"{name}:2")


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
def test_json_array_is_the_same_in_any_pieces(tmp_path: Path, chunk: int):
    values = [1234567, {"a": [1, {"b": '"],['}]}, "x\\", -1.5e10, None, True, [], "é" * 100]
    for indent in (None, 1):
        text = json.dumps(values, indent=indent, ensure_ascii=False)
        (tmp_path / "a.json").write_text("\ufeff " + text, encoding="utf-8")
        found = list(json_array(str(tmp_path / "a.json"), "a", Rejects(), chunk_characters=chunk))
        assert [value for _, value in found] == values
        starts = [2, 3, 11, 12, 13, 14, 15, 16] if indent else [1] * 8
        assert [line for line, _ in found] == starts


def test_json_lines_in_a_json_file(tmp_path: Path):
    assert [c.id for c in read(write_lines(tmp_path / "p.json", GOOD, "", {"id": "b", "prompt": "x"}))] == ["good", "b"]


@pytest.mark.parametrize("first", ['[{"messages": [broken', "[1, 2]", "[]", "[" * 100_000])
def test_a_bad_first_line_does_not_make_an_array(tmp_path: Path, first: str):
    good = [{"id": str(number), "prompt": "x"} for number in range(4)]
    rejects = Rejects(tmp_path / "rejects.jsonl")
    assert [c.id for c in read(write_lines(tmp_path / "p.jsonl", first, *good), rejects)] == ["0", "1", "2", "3"]
    assert [entry["line"] for entry in kept(tmp_path / "rejects.jsonl")] == [1]


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b'\r\n{"prompt": "x"}\r\n')
    assert [c.id for c in read(str(path))] == ["good", "p.jsonl:2"]


def test_parquet_drops_the_cells_that_arrow_adds(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    function = {"name": "f", "arguments": {"x": 1}}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    rows = [{"id": "a", "messages": [USER, call]}, {"messages": [USER], "tools": None}, {"id": "c", "messages": None}]
    path = str(tmp_path / "p.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    rejects = Rejects()
    conversations = read(path, rejects)
    assert [(c.id, c.messages) for c in conversations] == [("a", [USER, call]), ("p.parquet:2", [USER])]
    assert rejects.counts == {"unknown columns": 1}


def test_broken_parquet(tmp_path: Path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match=r"p\.parquet: cannot be read as parquet"):
        read(str(tmp_path / "p.parquet"))


def test_datasets_name(monkeypatch: pytest.MonkeyPatch):
    import datasets

    calls = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool):
        calls.append((name, config, split, streaming))
        return iter([{"messages": [{**USER, "name": None}]}, {"messages": None, "prompt": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = read(["hf:org/name:test_sft", "hf:org/other", "hf:org/third:main:train", "hf:org/fourth:main:"])
    assert calls == [
        ("org/name", None, "test_sft", True),
        ("org/other", None, "train", True),
        ("org/third", "main", "train", True),
        ("org/fourth", "main", "train", True),
    ]
    assert [c.id for c in found][:2] == ["hf:org/name:test_sft:1", "hf:org/name:test_sft:2"]
    assert found[0].messages == [USER]
    assert [c.meta["benchmark"] for c in found[::2]] == ["org/name", "org/other", "org/third", "org/fourth"]

    def fail(*args: Any, **kwargs: Any):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(UserError, match=r"hf:org/name: datasets cannot load it: ConnectionError: no route$"):
        read("hf:org/name")


def test_a_streamed_dataset_is_read_no_further_than_asked(monkeypatch: pytest.MonkeyPatch):
    import datasets

    rows = []

    def endless():
        for number in range(10**9):
            rows.append(number)
            yield {"prompt": f"question {number}"}

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: endless())
    assert len(read("hf:org/large", limit=3)) == 3
    assert rows == [0, 1, 2]


@pytest.mark.parametrize("name", ["hf:", "hf::train", "hf:a:b:c:d", "hf:org/name:train[:100]"])
def test_dataset_names_that_cannot_be(name: str):
    with pytest.raises(UserError, match=r"write hf:org/name|data\.max_prompts"):
        read_conversations(name, Rejects())


@pytest.mark.parametrize("source", ["a,b.csv", "a;b.csv", "a\tb.csv", "a\tb.tsv"])
def test_csv(tmp_path: Path, source: str):
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
    first, second, third = read(str(path))
    assert (first.id, first.line, second.id, third.line) == ("a", 2, f"{path.name}:5", 6)
    assert [m["content"] for m in first.messages] == ['One, two; or three?\r\n\tSay "four"', "five"]
    assert [len(second.messages), third.messages] == [1, [USER, ASSISTANT]]


def test_bad_rows_of_csv_are_kept_with_their_lines(tmp_path: Path):
    long = "x" * 200_000  # more than the csv module reads unless told to
    rows = [
        b"id,question", b"1.0,good", b"2,How, exactly?", b"3", b"4,caf\xe9", b'5,"two', b'lines" and more', b"6,",
        b"7," + long.encode(), b'8,"never closed', b"9,gone with it",
    ]  # fmt: skip
    (tmp_path / "p.csv").write_bytes(b"\n".join(rows))
    rejects = Rejects(tmp_path / "rejects.jsonl")
    assert [(c.id, c.line) for c in read(str(tmp_path / "p.csv"), rejects)] == [("1", 2), ("7", 9)]
    entries = kept(tmp_path / "rejects.jsonl")
    assert [entry["line"] for entry in entries] == [3, 4, 5, 6, 8, 10]
    kinds = ["malformed CSV", "malformed CSV", "not UTF-8", "malformed CSV", "unknown columns", "malformed CSV"]
    assert [entry["reason"].split(":")[0] for entry in entries] == kinds
    assert "names 2 columns, this one has 3" in entries[0]["reason"]
    assert (entries[2]["record"], entries[3]["record"]) == ("4,caf\ufffd", '5,"two\nlines" and more')
    (tmp_path / "twice.csv").write_text("prompt,prompt\na,b\n")
    with pytest.raises(UserError, match=r"twice\.csv:1: several columns are named prompt"):
        read(str(tmp_path / "twice.csv"))
    (tmp_path / "bare.csv").write_text("\nWho, exactly?\nWhy?\n")
    with pytest.raises(UserError, match=r"bare\.csv:2: the first row must name .* prompt, .* this is 'Who, exactly\?'"):
        read(str(tmp_path / "bare.csv"))


# Ids, limits, order.


def test_training_prompts_are_asked_once(tmp_path: Path):
    """The first of those that ask the same, whatever their ids, answers and order of keys; others differ."""
    turned = {"content": "Hi", "role": "user"}
    first = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "Hi"},
        {"id": "own", "messages": [turned, ASSISTANT]},
        {"prompt": "Hi", "system": "S"},
        {"prompt": "Hi", "tools": [{"name": "f"}]},
        {"prompt": "Hi", "images": ["x.png"]},
        {"turns": ["Hi", "Go on"]},
        {"id": "seen", "prompt": "Hi", "images": ["x.png"]},
    )
    second = str(tmp_path / "b.json")  # two on one line
    Path(second).write_text('[{"prompt": "Bye"}, {"prompt": "Bye"}]')
    once = ["a.jsonl:1", "a.jsonl:3", "a.jsonl:4", "a.jsonl:5", "a.jsonl:6", "b.json:1"]
    rejects = Rejects(tmp_path / "rejects.jsonl")
    data = DataSection(prompts=[first, second])
    assert [c.id for c in read_training_prompts(data, rejects, None)] == once
    assert rejects.counts == {DUPLICATE: 3}
    entry, seen, _ = kept(tmp_path / "rejects.jsonl")
    assert to_conversation(seen["record"], "", first, 7).images == ["x.png"]  # can be asked again as it is kept
    assert (entry["line"], entry["record"]["id"]) == (2, "own") and f"the same as {first}:1;" in entry["reason"]
    assert [c.id for c in read_training_prompts(data, Rejects(), 2)] == once[:2]
    keep = data.model_copy(update={"duplicates": "keep"})
    assert [c.id for c in read_training_prompts(keep, Rejects(), 3)] == ["a.jsonl:1", "own", "a.jsonl:3"]
    assert len(read(first)) == 7  # evaluation prompts


def test_generated_ids_of_equal_file_names_differ(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [write_lines(tmp_path / folder / "p.jsonl", {"prompt": "x"}) for folder in "ab"]
    assert [c.id for c in read(paths)] == ["p.jsonl:1", f"{paths[1]}:1"]


def test_an_id_is_qualified_until_it_is_free(tmp_path: Path):
    for name, ids in {"a": ["0", "b/0"], "b": ["0"]}.items():
        lines = [json.dumps({"id": i, "prompt": f"{name} asks {i}"}) for i in ids]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    assert [c.id for c in read([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])] == ["0", "b/0", "b/b/0"]


def test_records_on_one_line_have_ids_of_their_own(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.json").write_text(json.dumps([{"prompt": f"{name} asks {i}"} for i in range(3)]))
    places = [str(tmp_path / name / "p.json") for name in ("a", "b")]
    ids = ["p.json:1", "p.json:1.2", "p.json:1.3"]
    assert [c.id for c in read(places)] == [*ids, *(f"{places[1]}:1{end}" for end in ("", ".2", ".3"))]


def test_equal_ids_of_other_sources_are_told_apart(tmp_path: Path):
    first = write_lines(tmp_path / "first.jsonl", {"id": 0, "prompt": "a"}, {"id": 1, "prompt": "b"})
    second = write_lines(
        tmp_path / "second.jsonl", {"id": 0, "prompt": "c"}, {"id": 1, "prompt": "b"}, {"id": 0, "prompt": "d"}
    )
    rejects = Rejects(tmp_path / "rejects.jsonl")
    for limit, ids in ((None, ["0", "1", "second/0"]), (3, ["0", "1", "second/0"])):
        assert [c.id for c in read([first, second], rejects if limit is None else None, limit)] == ids
    same, twice = kept(tmp_path / "rejects.jsonl")
    assert same["reason"] == f"duplicate id: '1' is also at {first}:2"  # the same conversation
    assert twice["reason"] == f"duplicate id: '0' is also at {second}:1" and twice["line"] == 3


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("us", ["us"]),
        ("usa", ["us"]),
        ("usau", ["us", "u"]),
        ("uasu", ["u", "su"]),
        ("usu", ["u", "su"]),
        ("suusa", ["su", "us"]),
        ("usctau", ["usct", "u"]),
        ("uctsau", ["ucts", "u"]),
        ("uu", ["u", "u"]),
        ("usausa", ["us", "us"]),
    ],
)
def test_what_stands_before_each_answer(roles: str, expected: list[str]):
    """u user, s system, a answer, c call of a tool, t its result."""
    names = {"u": "user", "s": "system", "a": "assistant", "c": "assistant", "t": "tool"}
    messages = [
        {"role": names[role], "content": role} | ({"tool_calls": [{}]} if role == "c" else {}) for role in roles
    ]
    assert ["".join(m["content"] for m in question) for question in questions(messages)] == expected


def test_limit_and_laziness(tmp_path: Path):
    path = write_lines(tmp_path / "p.jsonl", GOOD, "{bad", {"prompt": "x"}, "{worse")
    rejects = Rejects()
    conversations = read_conversations(path, rejects, limit=2)
    assert next(conversations).id == "good"
    assert rejects.total == 0
    assert next(conversations).id == "p.jsonl:3"
    assert next(conversations, None) is None
    assert rejects.total == 1


# What cannot be used.

BAD_RECORDS = [
    ("{not json", "malformed JSON: "),
    ("[" * 100_000, "nested too deeply: "),
    ([USER], "wrong type: a record must be a JSON object, this is a list"),
    ({}, "unknown columns: none of messages, conversations"),
    ({"messages": "[1"}, "malformed JSON: "),
    ({"prompt": "x", "question": "y"}, "ambiguous columns: `prompt` and `question` both ask something"),
    ({"question": "x", "context": "y"}, "ambiguous columns: `context` beside `question`"),
    ({"query": "x", "response": "y", "answer": "z"}, "ambiguous columns: `response` and `answer` hold different"),
    ({"instruction": "x", "input": 3}, "wrong type: `input` must be text, this is a number"),
    ({"instruction": "x", "history": [["q"]]}, "wrong type: `history[0]` must be"),
    ({"instruction": "x", "history": [["q", None]]}, "wrong type: content of message 1"),
    ({"prompt": "x", "system": ["s"]}, "wrong type: `system` must be text, this is a list"),
    ({"messages": [{"role": "system", "content": "a"}, USER], "system": "b"}, "ambiguous columns: `system` and the"),
    ({"prompt": "x", "tools": "search, calculator"}, "wrong type: `tools` hold text that is not JSON"),
    ({"prompt": "x", "tools": [3]}, "wrong type: `tools` must be a list of objects, in it is a number"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": 3}]}, "wrong type: the tool calls of message 1 must be"),
    ({"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "f(x)"}]}, "wrong type: "),
    ({"conversations": [{"from": "human", "value": "x"}, {"from": "function_call"}]}, "wrong type: "),
    ({"messages": [USER, {**ASSISTANT, "reasoning_content": ["x"]}]}, "wrong type: reasoning_content of message 1"),
    ({"prompt": "x", "meta": {"\ud800": 1}}, "not Unicode: "),
    ({"prompt": "x", "id": "\ud800"}, "not Unicode: "),
    ('{"prompt": "x", "meta": {"a": ' + "[" * 100 + "]" * 100 + "}}", "nested too deeply: "),
    ({"messages": "x"}, "wrong type: `messages` must be a list, this is text"),
    ({"messages": []}, "no user turn"),
    ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
    ({"messages": ["x"]}, "wrong type: `messages[0]` must be an object, this is text"),
    ({"messages": [ASSISTANT, USER]}, "no user turn before the first assistant turn: message 0"),
    ({"messages": [USER, ASSISTANT, ASSISTANT]}, "two assistant turns in a row: messages 1 and 2"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 'unknown role: "robot" of message 0'),
    ({"messages": [{"content": "x"}]}, "unknown role: null"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, 'unknown role: ["user"]'),
    ({"conversations": [{"from": "alien", "value": "x"}]}, 'unknown role: "alien"'),
    ({"conversations": [{"from": ["human"], "value": "x"}]}, 'unknown role: ["human"]'),
    ({"conversations": [{"from": "human"}]}, "wrong type: content of message 0 must be text or parts, this is null"),
    ({"messages": [{"role": "user", "content": 3}]}, "wrong type: content of message 0"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "wrong type: content of message 1"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]}, "empty user turn: message 0"),
    ({"messages": [{"role": 0, "content": "x"}]}, "unknown role: 0 of message 0"),
    ({"messages": [{"role": "user", "content": " \n"}]}, "empty user turn: message 0"),
    ({"messages": [{"role": "user", "content": []}]}, "empty user turn: message 0"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "wrong type: a content part of message 0"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "wrong type: a text part of message 0 has no"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "not Unicode: "),
    ({"turns": "x"}, "wrong type: `turns` must be a list"),
    ({"turns": [1]}, "wrong type: content of message 0"),
    ({"prompt": 3}, "wrong type: `prompt` must be text, this is a number"),
    ({"prompt": "x", "id": 1.5}, "wrong type: `id` must be text or a whole number, not 1.5"),
    ({"prompt": "x", "id": True}, "wrong type: `id`"),
    ({"prompt": "x", "id": []}, "wrong type: `id`"),
    ({"prompt": "x", "images": "a.png"}, "wrong type: `images` must be a list of paths"),
    ({"prompt": "x", "images": [{"bytes": "x"}]}, "wrong type: `images` must be a list of paths"),
    ({"prompt": "x", "meta": ["x"]}, "wrong type: `meta` must be an object, this is a list"),
    (GOOD, "duplicate id: "),
]


def test_every_bad_record_is_kept_and_none_stops_the_run(tmp_path: Path):
    last = {"id": "last", "prompt": "x"}
    path = write_lines(tmp_path / "p.jsonl", GOOD, *[record for record, _ in BAD_RECORDS], last)
    rejects = Rejects(tmp_path / "deep" / "rejects.jsonl")
    assert [c.id for c in read(path, rejects)] == ["good", "last"]
    entries = kept(tmp_path / "deep" / "rejects.jsonl")
    for number, (entry, (record, reason)) in enumerate(zip(entries, BAD_RECORDS, strict=True), start=2):
        assert (entry["source"], entry["line"], entry["record"]) == (path, number, record)
        assert entry["reason"].startswith(reason), entry
    assert rejects.total == len(BAD_RECORDS)
    assert rejects.summary().startswith(f"{len(BAD_RECORDS)} records rejected (27 wrong type, ")
    assert rejects.summary().endswith(f"kept in {rejects.path}")


def test_bytes_that_are_not_utf8(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "caf\xe9"}\n' + json.dumps(GOOD).encode() + b"\n")
    rejects = Rejects(tmp_path / "rejects.jsonl")
    assert [c.id for c in read(str(path), rejects)] == ["good"]
    (entry,) = kept(tmp_path / "rejects.jsonl")
    assert entry["reason"] == "not UTF-8: byte 16"
    assert entry["record"] == '{"prompt": "caf\ufffd"}'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"prompt": "x"},\n {"prompt": oops}, {"prompt": "y"}]', "malformed JSON: "),
        ('[{"prompt": "x"}', "malformed JSON: Expecting value"),
        ('[{"prompt": "x"}] {"prompt": "y"}', "malformed JSON: text after the array"),
        ('[{"prompt": "x"}, {"prompt": "y', "malformed JSON: "),
        ('[{"prompt": "x"}, {"prompt": "\udce9"}]', "not Unicode: "),
    ],
)
def test_broken_array_keeps_what_could_be_read(tmp_path: Path, text: str, reason: str):
    path = tmp_path / "p.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    rejects = Rejects(tmp_path / "rejects.jsonl")
    assert [c.id for c in read(str(path), rejects)] == ["p.json:1"]
    (entry,) = kept(tmp_path / "rejects.jsonl")
    assert entry["reason"].startswith(reason)
    assert entry["line"] == 1 + ("\n" in text)


def test_sources_are_checked_before_anything_is_read(tmp_path: Path):
    good = write_lines(tmp_path / "good.jsonl", GOOD)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "p.txt").write_text("x")
    names = [str(tmp_path / name) for name in ("empty.jsonl", "p.txt", "none.jsonl")]
    with pytest.raises(UserError) as caught:
        read_conversations([good, *names, "hf:"], Rejects())  # at the call, not at the first record
    reasons = [
        "the file is empty",
        "prompts are read from",
        "no such file",
        "hf:org/name",
    ]
    assert len(caught.value.problems) == len(reasons)
    for problem, name, reason in zip(caught.value.problems, [*names, "hf:"], reasons, strict=True):
        assert name in problem
        assert reason in problem
    with pytest.raises(UserError, match="no source given"):
        read_conversations([], Rejects())


def test_problems_of_training_prompts_name_their_key(tmp_path: Path):
    with pytest.raises(UserError, match=r"^data\.prompts: no source given"):
        read_training_prompts(DataSection(prompts=[]), Rejects(), None)
    bad = write_lines(tmp_path / "bad.jsonl", "{")
    with pytest.raises(UserError, match=rf"^data\.prompts: {bad}: no usable conversation: 1 record rejected"):
        list(read_training_prompts(DataSection(prompts=bad), Rejects(), None))


def test_source_without_a_usable_record_is_an_error_after_the_others_were_read(tmp_path: Path):
    bad = write_lines(tmp_path / "bad.jsonl", "{", {"messages": []})
    good = write_lines(tmp_path / "good.jsonl", GOOD)
    (tmp_path / "none.json").write_text("[]")
    found = []
    with pytest.raises(UserError) as caught:
        for conversation in read_conversations([bad, str(tmp_path / "none.json"), good], Rejects()):
            found.append(conversation.id)
    assert found == ["good"]
    assert [problem.split(":")[0] for problem in caught.value.problems] == [bad, str(tmp_path / "none.json")]
    assert "no usable conversation: 2 records rejected (1 malformed JSON, 1 no user turn)" in caught.value.problems[0]


# The rejects file.


def test_a_resumed_run_does_not_repeat_its_rejects(tmp_path: Path):
    path = write_lines(tmp_path / "p.jsonl", GOOD, "{", {"prompt": "\ud800"})
    for _ in range(2):
        rejects = Rejects(tmp_path / "rejects.jsonl")
        read(path, rejects)
        assert rejects.total == 2
    assert len(kept(tmp_path / "rejects.jsonl")) == 2


def test_summary(tmp_path: Path):
    rejects = Rejects()
    assert rejects.summary() == "no record rejected"
    rejects.add("p.jsonl", 3, "too long: 90 tokens", {})
    assert rejects.summary() == "1 record rejected (1 too long): the first at p.jsonl:3: too long: 90 tokens"
    assert not list(tmp_path.iterdir())
