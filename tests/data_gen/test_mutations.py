"""Damaged input lines. Nothing but a UserError ends a reading, and every line is accounted for: as a conversation, as a
reject with its place, or as blank.

What can still be read goes on through regeneration's asking side and through the training rows.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st

from draftsmith.data_gen.answers.conversation_log import ConversationLog
from draftsmith.data_gen.answers.generators import GeneratedAnswer
from draftsmith.data_gen.answers.open_conversations import OpenConversations
from draftsmith.data_gen.training_rows.overlap import EvaluationIndex
from draftsmith.data_gen.training_rows.rows import training_rows
from draftsmith.recipes.prompts.prompt_reader import asked_digest, read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from tests.conftest import make_tokenizer
from tests.models.test_tools_and_thoughts import EVERYTHING, QWEN, THOUGHTFUL
from tests.strategies import damaged_lines, damaged_records, for_all
from tests.thinning import EXHAUSTIVE

EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(1000, marks=EXHAUSTIVE)])
FIRST = {"id": "good", "messages": THOUGHTFUL}  # so that a file is no array, and never without a conversation


def kept(path: Path) -> list[dict[str, Any]]:
    """The rejects file; every line of it must be JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.exists() else []


def check_every_line(content: bytes, used: list[int | None], rejected: list[int]) -> None:
    lines = content.removesuffix(b"\n").split(b"\n")
    blank = [n for n, line in enumerate(lines, start=1) if not line.removeprefix(b"\xef\xbb\xbf").strip()]
    assert Counter([*used, *rejected, *blank]) == Counter(range(1, len(lines) + 1))


@EXAMPLES
@pytest.mark.parametrize("template", [EVERYTHING, QWEN], ids=["everything", "qwen3"])
def test_every_line_is_accounted_for(tmp_path: Path, template: str, examples: int) -> None:
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = template
    index = EvaluationIndex([Conversation("e", THOUGHTFUL)])
    path, rejects_path, log_path = (tmp_path / name for name in ("p.jsonl", "rejects.jsonl", "log.jsonl"))
    ends = Counter[str]()

    def fresh() -> Rejects:
        rejects_path.unlink(missing_ok=True)
        return Rejects(rejects_path)

    @for_all(examples, lines=st.lists(damaged_lines(), max_size=10))
    def check(lines: list[bytes]) -> None:
        content = b"\n".join([json.dumps(FIRST).encode(), *lines]) + b"\n"
        path.write_bytes(content)

        rejects = fresh()
        conversations = list(read_conversations(str(path), rejects))
        entries = kept(rejects_path)
        assert len(entries) == rejects.total
        check_every_line(content, [c.line for c in conversations], [entry["line"] for entry in entries])
        assert all(entry["reason"] and entry["source"] == str(path) for entry in entries)
        ends.update(entry["reason"].split(":")[0] for entry in entries)
        ends["read"] += len(conversations)

        log_path.unlink(missing_ok=True)
        rejects, finished = fresh(), []
        with ConversationLog(log_path, {"tokenizer_fingerprint": "f"}) as log:
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
        unasked = [entry["record"]["id"] for entry in kept(rejects_path)]
        assert sorted([*finished, *unasked]) == sorted(conversation.id for conversation in conversations)
        assert asked.rejected == len(unasked) and "good" in finished
        assert [json.loads(line)["id"] for line in log_path.read_text(encoding="utf-8").split("\n")[:-1]] == finished

        seen: list[int | None] = []
        rows = list(training_rows(path, tokenizer, 10**9, fresh(), lambda conversation: seen.append(conversation.line)))
        check_every_line(content, seen, [entry["line"] for entry in kept(rejects_path)])
        assert len(rows) >= len(seen) >= 1
        assert all(min(row.input_ids) >= 0 and row.spans for row in rows)

    # The damage is neither harmless nor always fatal, and kinds are told apart.
    assert ends["read"] > examples and ends.total() - ends["read"] > examples and len(ends) > 5, ends


@EXAMPLES
def test_damaged_arrays(tmp_path: Path, examples: int) -> None:
    """In an array the lines behind malformed JSON cannot be told apart; what was read before them is kept."""
    path, rejects_path = tmp_path / "p.json", tmp_path / "rejects.jsonl"

    @for_all(examples, lines=st.lists(damaged_lines(), max_size=3), end=st.sampled_from([b"]", b"", b"]\n]", b",]"]))
    def check(lines: list[bytes], end: bytes) -> None:
        path.write_bytes(b"[" + b",\n".join([json.dumps(FIRST).encode(), *lines]) + end)
        rejects_path.unlink(missing_ok=True)
        rejects = Rejects(rejects_path)
        assert next(read_conversations(str(path), rejects)).id == "good"
        assert len(kept(rejects_path)) == rejects.total


@EXAMPLES
def test_damaged_tables(tmp_path: Path, examples: int) -> None:
    path, good, ends = tmp_path / "p.parquet", {"id": "good", "prompt": "the cat"}, Counter[str]()

    @for_all(examples, record=damaged_records())
    def check(record: dict[str, Any]) -> None:
        try:
            columns = dict.fromkeys([*record, *good])
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns | record, columns | good]), path)
        except (pyarrow.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
            return  # Arrow holds no such record
        rejects = Rejects()
        found = list(read_conversations(str(path), rejects))
        assert found[-1].id == "good" and len(found) + rejects.total == 2
        ends.update(["rejected", "read"][: len(found)][-1:])

    assert min(ends["read"], ends["rejected"]) > 2, ends
