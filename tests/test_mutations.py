"""1,000 damaged input lines, drawn from a seed. Nothing but a UserError ends a reading, nothing hangs, and every line
is accounted for: as a conversation, as a reject with its place, or as blank.

Good records of every form are damaged in their structure, in their JSON and in their bytes. What can still be read goes
on through regeneration's asking side and through the training rows.
"""

import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data_gen.answers.conversation_log import ConversationLog
from draftsmith.data_gen.answers.generators import GeneratedAnswer
from draftsmith.data_gen.answers.open_conversations import OpenConversations
from draftsmith.data_gen.training_rows.overlap import EvaluationIndex
from draftsmith.data_gen.training_rows.rows import training_rows
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.reader import asked_digest, read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from tests.conftest import CHAT_TEMPLATE, make_tokenizer
from tests.test_tools_and_thoughts import EVERYTHING, FORMS, QWEN, THOUGHTFUL

FILES, LINES = 40, 25
SECONDS = 20  # for one file; a quiet machine takes less than one
CUTS = ["", " ", "x", "\x00", "\u2028", "\ufeff", "<|end|>", "{{ 1 }}", "\U0001f600"]
# Values that `json.dumps` cannot write are put into its text afterwards.
RAW = {
    "@huge@": "9" * 4000,
    "@too huge@": "9" * 6000,
    "@infinite@": "1e999",
    "@nan@": "NaN",
    "@deep@": "[" * 90 + "]" * 90,
    "@deeper@": '{"a":' * 300 + "1" + "}" * 300,
    "@deepest@": "[" * 100_000,
    "@surrogate@": '"a\\ud800b"',
    "@nul@": '"\\u0000"',
}
ODD_VALUES: list[Any] = [
    *(None, True, 0, -1, 2**63, 1.5, "", " \n", [], {}, [None], [[]], [{}], {"": None}, "assistant", *RAW)
]

GOOD: list[dict[str, Any]] = [
    *FORMS.values(),
    {"id": "m", "messages": THOUGHTFUL, "images": [], "meta": {"k": {"a": [1, 2]}}, "category": "c"},
    {"id": "p", "messages": [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}, THOUGHTFUL[1]]},
    {"question_id": 81, "category": "writing", "turns": ["the cat", "and the dog"], "reference": ["x"]},
    {"instruction": "say", "input": "the cat", "output": "sat", "history": [["q", "a"]], "system": "in the rain"},
    {"question": "where is the cat?", "answer": "on the mat", "tools": [{"name": "f"}]},
    {"prompt": "the cat", "completion": "sat"},
    {
        "id": "r",
        "messages": THOUGHTFUL[:2],
        "turns": [{"prompt_token_ids": [2, 9, 4, 3], "output_token_ids": [9, 4], "finish_reason": "stop"}],
    },
]


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) within a value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from spots(value[key])


def change_value(record: Any, chance: random.Random) -> None:
    container, key = chance.choice(list(spots(record)))
    container[key] = copied(chance.choice(ODD_VALUES))


def drop_key(record: Any, chance: random.Random) -> None:
    container, key = chance.choice(list(spots(record)))
    del container[key]


def rename_key(record: Any, chance: random.Random) -> None:
    container, key = chance.choice([spot for spot in spots(record) if isinstance(spot[0], dict)])
    names = ["role", "content", "from", "value", "turns", "messages", "prompt", "tool_calls", "function", "\ud800"]
    container[chance.choice([*names, "id"])] = container.pop(key)


def wrap(record: Any, chance: random.Random) -> None:
    container, key = chance.choice(list(spots(record)))
    value = container[key]
    container[key] = copied(chance.choice([[value], {"a": value}, json.dumps(value), [value] * 50, str(value)]))


def swap(record: Any, chance: random.Random) -> None:
    found = list(spots(record))
    (one, a), (other, b) = chance.choice(found), chance.choice(found)
    one[a], other[b] = copied(other[b]), copied(one[a])  # one may lie in the other


def mix(record: Any, chance: random.Random) -> None:
    other = chance.choice(GOOD)
    key = chance.choice(list(other))
    record[key] = copied(other[key])


def cut_text(record: Any, chance: random.Random) -> None:
    texts = [(container, key) for container, key in spots(record) if isinstance(container[key], str)]
    container, key = chance.choice(texts)
    at = chance.randrange(len(container[key]) + 1)
    container[key] = container[key][:at] + chance.choice(CUTS) * chance.choice([1, 1, 5000]) + container[key][at:]


def flip(line: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(line))
    return line[:at] + bytes([chance.randrange(256)]) + line[at + 1 :]


def truncate(line: bytes, chance: random.Random) -> bytes:
    return line[: chance.randrange(len(line))]


def insert(line: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(line) + 1)
    pieces = [b"\n", b"\r", b"\r\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b'"', b"{", b"]", b",", b"\\", b"\xed\xa0\x80"]
    return line[:at] + chance.choice(pieces) + line[at:]


def repeat(line: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(line))
    end = chance.randrange(start, len(line) + 1)
    return line[:end] + line[start:end] * chance.choice([1, 2, 300]) + line[end:]


def two_keys(line: bytes, chance: random.Random) -> bytes:
    return line.replace(b"{", chance.choice([b'{"messages": 3, ', b'{"role": "user", ', b'{"id": [], ']), 1)


def whole(line: bytes, chance: random.Random) -> bytes:
    return chance.choice(
        [b"\xef\xbb\xbf" + line, line + b"\r", b"", b" \t", line.decode("utf-8", "replace").encode("utf-16"), line * 2]
    )


IN_STRUCTURE = [change_value, drop_key, rename_key, wrap, swap, mix, cut_text]
IN_BYTES: list[Callable[[bytes, random.Random], bytes]] = [flip, truncate, insert, repeat, two_keys, whole]


def damaged_record(chance: random.Random) -> Any:
    record = copied(chance.choice(GOOD))
    for _ in range(chance.choice([1, 1, 2, 4])):
        try:
            chance.choice(IN_STRUCTURE)(record, chance)
        except IndexError:  # nothing is left to change
            break
    return record


def damaged_line(chance: random.Random) -> bytes:
    text = json.dumps(damaged_record(chance) if chance.random() < 0.7 else chance.choice(GOOD))
    for placeholder, raw in RAW.items():
        text = text.replace(json.dumps(placeholder), raw)
    line = text.encode()
    for _ in range(chance.choice([0, 0, 1, 2])):
        line = chance.choice(IN_BYTES)(line, chance) if line else line
    return line


@contextmanager
def limited(what: str) -> Iterator[None]:
    """Fails the test where the body takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"{what}: not done after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="time limits need SIGALRM")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """JSON lines. Each file begins with a good one, so that it is no array and never without a conversation."""
    folder = tmp_path_factory.mktemp("damaged")
    found = []
    for number in range(FILES):
        chance = random.Random(number)
        path = folder / f"{number}.jsonl"
        good = {"id": "good", "messages": THOUGHTFUL}
        lines = [json.dumps(good).encode(), *(damaged_line(chance) for _ in range(LINES))]
        path.write_bytes(b"\n".join(lines) + b"\n")
        found.append(path)
    return found


def blank_lines(path: Path) -> list[int]:
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    return [number for number, line in enumerate(lines, start=1) if not line.removeprefix(b"\xef\xbb\xbf").strip()]


def kept(path: Path) -> list[dict[str, Any]]:
    """The rejects file; every line of it must be JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.exists() else []


def check_every_line(path: Path, used: list[int | None], rejected: list[int]) -> None:
    count = len(path.read_bytes().removesuffix(b"\n").split(b"\n"))
    accounted = Counter([*used, *rejected, *blank_lines(path)])
    assert accounted == Counter(range(1, count + 1)), f"{path}: {accounted}"


def test_the_damage_is_of_all_kinds(files: list[Path]) -> None:
    """A harness that damages nothing, or everything beyond recognition, would prove nothing."""
    kinds, usable = Counter[str](), 0
    for path in files:
        rejects = Rejects()
        usable += len(list(read_conversations(str(path), rejects)))
        kinds += rejects.counts
    assert sum(len(path.read_bytes().split(b"\n")) - 2 for path in files) >= 1000
    assert usable > 200 and kinds.total() > 300
    for kind in ("malformed JSON", "not UTF-8", "nested too deeply", "wrong type", "unknown role", "unknown columns"):
        assert kinds[kind] >= 3, kinds
    for kind in ("not Unicode", "ambiguous columns", "empty user turn", "no user turn", "duplicate id"):
        assert kinds[kind] >= 1, kinds


def test_every_line_is_read_or_rejected(files: list[Path], tmp_path: Path) -> None:
    for path in files:
        rejects = Rejects(tmp_path / f"{path.stem}.rejects.jsonl")
        with limited(path.name):
            conversations = list(read_conversations(str(path), rejects))
        entries = kept(tmp_path / f"{path.stem}.rejects.jsonl")
        assert len(entries) == rejects.total
        check_every_line(path, [c.line for c in conversations], [entry["line"] for entry in entries])
        assert all(entry["reason"] and entry["source"] == str(path) for entry in entries)


@pytest.mark.parametrize("template", [EVERYTHING, QWEN], ids=["everything", "qwen3"])
def test_every_conversation_is_asked_or_rejected(files: list[Path], tmp_path: Path, template: str) -> None:
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = template
    index = EvaluationIndex([Conversation("e", THOUGHTFUL)])
    for path in files:
        conversations = list(read_conversations(str(path), Rejects()))
        rejects = Rejects(tmp_path / f"{path.stem}.rejects.jsonl")
        finished = []
        log_path = tmp_path / f"{path.stem}.jsonl"
        with limited(path.name), ConversationLog(log_path, {"tokenizer_fingerprint": "f"}) as log:
            asked = OpenConversations(conversations, tokenizer, 2000, rejects)
            for prompt in asked.prompts():
                assert prompt is not None
                record = asked.take(GeneratedAnswer(prompt[0], [9, 10, tokenizer.eos_token_id], "stop"))
                if record is not None:
                    log.append(record)
                    finished.append(record["id"])
            for conversation in conversations:
                asked_digest(conversation)
                index.find(conversation)
        entries = kept(tmp_path / f"{path.stem}.rejects.jsonl")
        accounted = [*finished, *(entry["record"]["id"] for entry in entries)]
        assert sorted(accounted) == sorted(conversation.id for conversation in conversations)
        assert asked.rejected == len(entries) and "good" in finished
        assert [json.loads(line)["id"] for line in log_path.read_text(encoding="utf-8").split("\n")[:-1]] == finished


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, QWEN], ids=["plain", "qwen3"])
def test_every_line_gives_training_rows_or_is_rejected(files: list[Path], tmp_path: Path, template: str) -> None:
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = template
    index = EvaluationIndex([Conversation("e", THOUGHTFUL)])
    for path in files:
        seen: list[int | None] = []

        def look(conversation: Conversation, seen: list[int | None] = seen) -> None:
            seen.append(conversation.line)
            index.find(conversation)

        rejects = Rejects(tmp_path / f"{path.stem}.rejects.jsonl")
        with limited(path.name):
            rows = list(training_rows(path, tokenizer, 10**9, rejects, look))
        check_every_line(path, seen, [entry["line"] for entry in kept(tmp_path / f"{path.stem}.rejects.jsonl")])
        assert len(rows) >= len(seen) >= 1
        assert all(min(row.input_ids) >= 0 and row.spans for row in rows)


def test_damaged_arrays(tmp_path: Path) -> None:
    """In an array the lines behind malformed JSON cannot be told apart; what was read before them is kept."""
    for number in range(100):
        chance = random.Random(number)
        elements = [
            json.dumps({"id": "good", "messages": THOUGHTFUL}).encode(),
            *(damaged_line(chance) for _ in range(3)),
        ]
        text = b"[" + b",\n".join(elements) + chance.choice([b"]", b"", b"]\n]", b",]"])
        path = tmp_path / f"{number}.json"
        path.write_bytes(text)
        rejects = Rejects(tmp_path / f"{number}.rejects.jsonl")
        with limited(path.name):
            found = list(read_conversations(str(path), rejects))
        assert found[0].id == "good"
        entries = kept(tmp_path / f"{number}.rejects.jsonl")
        assert len(entries) == rejects.total
        if not any(entry["reason"].startswith("malformed JSON") for entry in entries):
            assert len(found) + len(entries) == 4 or b"," in text


def test_damaged_tables(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path, readable, usable = tmp_path / "p.parquet", 0, 0
    good = {"id": "good", "prompt": "the cat"}
    for number in range(300):
        record = damaged_record(random.Random(number))
        try:
            columns = dict.fromkeys([*record, *good])
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns | record, columns | good]), path)
        except (pyarrow.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
            continue  # Arrow holds no such record
        readable += 1
        rejects = Rejects(tmp_path / f"{number}.jsonl")
        with limited(str(number)):
            found = list(read_conversations(str(path), rejects))
        usable += len(found)
        assert found[-1].id == "good"
        assert len(found) + rejects.total == 2
        assert len(kept(tmp_path / f"{number}.jsonl")) == rejects.total
    assert readable > 100 and usable > readable + 20


def test_damaged_table_files(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD[4]] * 20), path)
    whole_file, refused = path.read_bytes(), 0
    for number in range(60):
        chance = random.Random(number)
        damaged = whole_file
        for _ in range(chance.choice([1, 3, 20])):
            damaged = chance.choice([flip, truncate, insert])(damaged, chance) or b"x"
        path.write_bytes(damaged)
        with limited(str(number)):
            try:
                assert all(c.messages for c in read_conversations(str(path), Rejects()))
            except UserError:
                refused += 1
    assert refused > 10
