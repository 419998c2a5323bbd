"""Tool calls and thoughts, from the columns of real data sets to the tokens that are supervised."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from draftsmith.data_gen.answers.generators import GeneratedAnswer
from draftsmith.data_gen.answers.open_conversations import OpenConversations
from draftsmith.data_gen.training_rows.rows import TrainingRow, training_rows
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.recipes.prompts.prompt_reader import read_conversations
from draftsmith.recipes.prompts.rejects import Rejects
from tests.conftest import make_tokenizer
from tests.evaluation_cases import write_lines

# Writes tools, thoughts and calls as current templates do: `tojson`, thoughts of every answer.
EVERYTHING = (
    "{%- if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif -%}"
    "{%- for m in messages -%}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
    "{%- if m.role == 'tool' %}[result]{% endif -%}"
    "{%- if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif -%}"
    "{{ m.content if m.content is string }}"
    "{%- for call in m.tool_calls or [] %}[call {{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{%- endfor -%}"
    "<|end|>{%- endfor -%}{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
# As Qwen3 does it: the thoughts of earlier answers are dropped, the last answer's stand, empty ones too.
QWEN = (
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.role == 'assistant' -%}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\\n') -%}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}"
    "{%- set thought = thought if '</think>' in m.content else '' -%}"
    "{%- set thought = m.reasoning_content if m.reasoning_content is string else thought -%}"
    "{%- if loop.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ content }}"
    "{%- else %}{{ m.content }}{% endif -%}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
# As R1 does it: every thought is dropped, and the prompt opens the next one.
R1 = (
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif -%}"
)
SCHEMA = {
    "name": "search",
    "description": "the rain",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": SCHEMA}]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"q": "rain"}}}
ANSWERED = (
    '<|user|>where is the cat?<|end|><|assistant|>I look.[call search {"q": "rain"}]<|end|>'
    "<|user|>[result]on the mat<|end|>"
)


def read_rows(path: Path, tokenizer: Any) -> tuple[list[TrainingRow], Rejects]:
    rejects = Rejects()
    return list(training_rows(path, tokenizer, 1000, rejects)), rejects


def supervised(tokenizer: Any, row: TrainingRow) -> list[str]:
    return [str(tokenizer.decode(row.input_ids[start:end])) for start, end in row.spans]


def regenerate_with(tokenizer: Any, source: Path, path: Path, *answers: str) -> list[str]:
    """Asks `source`'s only conversation, answers with texts, writes the record; the prompts as they were asked."""
    asked = OpenConversations(list(read_conversations(str(source), Rejects())), tokenizer, 1000, Rejects())
    texts, replies = [], deque(answers)
    for prompt in asked.prompts():
        assert prompt is not None
        key, ids = prompt
        texts.append(str(tokenizer.decode(ids)))
        output = [*tokenizer(replies.popleft(), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        record = asked.take(GeneratedAnswer(key, output, "stop"))
        if record is not None:
            generator = {"tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
            path.write_text(json.dumps(record | {"generator": generator}) + "\n")
    assert not replies
    return texts


# One conversation as data sets write it. Each must be asked and supervised in the same way.
ASK = {"role": "user", "content": "where is the cat?"}
LAST = {"role": "assistant", "content": "on the mat."}
CALLED = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"q": "rain"}'}}
TALK = [
    ASK,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALLED], "function_call": None},
    {"role": "tool", "tool_call_id": "c1", "content": "on the mat"},
    LAST,
]
OLDER = {"role": "assistant", "content": "I look.", "function_call": CALLED["function"]}
SAID = [("human", "where is the cat?"), ("gpt", "I look."), ("function_call", json.dumps(CALLED["function"]))]
SAID += [("observation", "on the mat"), ("gpt", "on the mat.")]
FORMS: dict[str, dict[str, Any]] = {
    "openai": {"messages": TALK, "tools": json.dumps(TOOLS)},
    "older openai": {"messages": [ASK, OLDER, {"role": "function", "name": "search", "content": "on the mat"}, LAST]}
    | {"tools": [SCHEMA]},
    "sharegpt": {
        "conversations": [{"from": who, "value": said} for who, said in SAID],
        "tools": json.dumps([SCHEMA]),
    },
    "as text": {"messages": json.dumps(TALK), "tools": [json.dumps(TOOLS[0])]},
}


@pytest.mark.parametrize(("form", "parquet"), [("openai", 1), ("older openai", 0), ("sharegpt", 0), ("as text", 1)])
def test_tool_calls_are_supervised_as_the_template_writes_them(tmp_path: Path, form: str, parquet: bool) -> None:
    tokenizer, path = make_tokenizer(EVERYTHING), tmp_path / "c.parquet"
    if parquet:  # another record with other keys: Arrow gives both records the keys of both
        others = {"messages": [ASK, {**LAST, "name": "x"}]} if form == "openai" else {}
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([FORMS[form], others]), path)
    else:
        path = write_lines(tmp_path / "c.jsonl", FORMS[form])
    row = read_rows(path, tokenizer)[0][0]
    rendered = str(tokenizer.decode(row.input_ids))
    assert rendered == f"<|system|>{json.dumps(TOOLS)}<|end|>{ANSWERED}<|assistant|>on the mat.<|end|>"
    assert supervised(tokenizer, row) == ['I look.[call search {"q": "rain"}]<|end|>', "on the mat.<|end|>"]


@pytest.mark.parametrize("form", FORMS)
def test_regeneration_keeps_calls_and_results_and_asks_behind_them(tmp_path: Path, form: str) -> None:
    tokenizer = make_tokenizer(EVERYTHING)
    source = write_lines(tmp_path / "p.jsonl", FORMS[form])
    (prompt,) = regenerate_with(tokenizer, source, tmp_path / "r.jsonl", "there.")
    assert prompt == f"<|system|>{json.dumps(TOOLS)}<|end|>" + ANSWERED + "<|assistant|>"
    ((row,), rejects) = read_rows(tmp_path / "r.jsonl", tokenizer)
    assert supervised(tokenizer, row) == ["there.<|end|>"] and not rejects.total
    record = json.loads((tmp_path / "r.jsonl").read_text())
    assert record["messages"][1]["tool_calls"][0]["function"] == CALL["function"]
    assert record["meta"]["tools"] == TOOLS
    # What regenerate wrote is read again as prompts.
    (again,) = read_conversations(str(tmp_path / "r.jsonl"), Rejects())
    assert again.messages[:3] == record["messages"][:3] and again.meta == record["meta"]


def test_reasoning_content_is_supervised_as_the_template_writes_it(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(EVERYTHING)
    thinking = {"role": "assistant", "reasoning_content": "hm"}
    messages = [ASK, {**LAST, "reasoning_content": "the dog ran"}, ASK, thinking]
    ((row,), _) = read_rows(write_lines(tmp_path / "c.jsonl", {"messages": messages}), tokenizer)
    assert supervised(tokenizer, row) == ["<think>the dog ran</think>on the mat.<|end|>", "<think>hm</think><|end|>"]


THOUGHTFUL = [
    ASK,
    {"role": "assistant", "content": "<think>\nthe dog ran\n</think>\n\non the mat."},
    {"role": "user", "content": "and the dog?"},
    {"role": "assistant", "content": "<think>\nafter the cat\n</think>\n\nin the rain."},
]
APART = [
    ASK,
    {"role": "assistant", "reasoning_content": "the dog ran", "content": "on the mat."},
    THOUGHTFUL[2],
    {"role": "assistant", "reasoning_content": "after the cat", "content": "in the rain."},
]


@pytest.mark.parametrize(("template", "opening"), [(QWEN, ""), (R1, "<think>\n")], ids=["qwen3", "r1"])
def test_a_template_that_strips_earlier_thoughts_gives_one_row_per_turn(
    tmp_path: Path, template: str, opening: str
) -> None:
    """Regenerated, or from a plain file, where thoughts may stand apart: what is asked, then the answer."""
    tokenizer = make_tokenizer(template)
    source = write_lines(tmp_path / "p.jsonl", {"id": "c", "turns": ["where is the cat?", "and the dog?"]})
    answers = [str(message["content"]).removeprefix(opening) for message in THOUGHTFUL[1::2]]
    prompts = regenerate_with(tokenizer, source, tmp_path / "r.jsonl", *answers)
    regenerated, rejects = read_rows(tmp_path / "r.jsonl", tokenizer)
    assert not rejects.total
    assert [supervised(tokenizer, row) for row in regenerated] == [[f"{answer}<|end|>"] for answer in answers]
    assert [str(tokenizer.decode(row.input_ids[: row.spans[0][0]])) for row in regenerated] == prompts
    assert "the dog ran" not in prompts[1] and "on the mat." in prompts[1]
    plain, _ = read_rows(write_lines(tmp_path / "c.jsonl", {"messages": THOUGHTFUL}), tokenizer)
    assert [row.input_ids for row in plain] == [row.input_ids for row in regenerated]
    apart, _ = read_rows(write_lines(tmp_path / "c.jsonl", {"messages": APART}), tokenizer)
    assert [supervised(tokenizer, row) for row in apart] == [[f"{answer}<|end|>"] for answer in answers]


def test_an_answer_without_the_thought_that_its_prompt_opens_is_rejected(tmp_path: Path) -> None:
    bare, good = {"messages": [ASK, LAST]}, {"messages": THOUGHTFUL}
    found, rejects = read_rows(write_lines(tmp_path / "c.jsonl", bare, good), make_tokenizer(R1))
    assert len(found) == 2 and rejects.counts == {"no thought": 1}
