"""Conversations with pictures become training rows, and train."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data_gen.rows.training_rows import TrainingRow, training_rows
from draftsmith.models.chat import load_tokenizer, render_prompt
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import TargetSection
from tests.tiny_vision import FAMILIES, PLACEHOLDER, picture, save_vision_target

END = 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for family in FAMILIES:
        save_vision_target(folder / family, family)
    for name, size in {"wide": (32, 16), "tall": (16, 24)}.items():
        picture(*size, seed=len(name)).save(folder / f"{name}.png")
    return folder


def shown(home: Path, name: str) -> dict[str, Any]:
    return {"type": "image", "path": str(home / f"{name}.png")}


def conversation(home: Path) -> list[dict[str, Any]]:
    """A picture at the start and one in the second question."""
    return [
        {"role": "user", "content": [shown(home, "wide"), {"type": "text", "text": "the cat"}]},
        {"role": "assistant", "content": "a mat"},
        {"role": "user", "content": [{"type": "text", "text": "and"}, shown(home, "tall")]},
        {"role": "assistant", "content": "a dog"},
    ]


def rows_of_records(home: Path, family: str, *records: dict[str, Any]) -> tuple[list[TrainingRow], Rejects]:
    path = home / "conversations.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    rejects = Rejects()
    tokenizer = load_tokenizer(TargetSection(model=str(home / family)))
    return list(training_rows(path, tokenizer, 500, rejects)), rejects


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_carry_the_pictures_of_their_messages(family: str, home: Path) -> None:
    messages = conversation(home)
    text = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a mat"}]
    rows, rejects = rows_of_records(home, family, {"messages": messages}, {"messages": text})
    assert len(rows) == 2 and rejects.total == 0
    row, tokenizer = rows[0], load_tokenizer(TargetSection(model=str(home / family)))
    for turn, (start, end) in enumerate(row.spans):
        asked = render_prompt(tokenizer, messages[: 2 * turn + 1])
        assert row.prompt.until(start) == asked
        assert len(asked.inserts) == turn + 1
        assert PLACEHOLDER not in row.input_ids[start:end] and row.input_ids[end - 1] == END
    assert rows[1].inserts == () and PLACEHOLDER not in rows[1].input_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_a_regenerated_row_gets_its_pictures_back(family: str, home: Path) -> None:
    messages = conversation(home)
    [row], _ = rows_of_records(home, family, {"messages": messages})
    turns = [
        {"prompt_token_ids": row.input_ids[:start], "output_token_ids": row.input_ids[start:end]}
        for start, end in row.spans
    ]
    record = {"id": row.id, "messages": messages, "turns": turns, "generator": {}}
    [stored], rejects = rows_of_records(home, family, record)
    assert rejects.total == 0 and stored == row

    def reason(changed: dict[str, Any]) -> str:
        with_good = ({"messages": messages}, record | changed)  # a file without a usable row is an error
        rows, rejects = rows_of_records(home, family, *with_good)
        assert len(rows) == 1 and rejects.total == 1
        return rejects.summary()

    assert "pictures and placeholders differ" in reason({"messages": [messages[0], *messages[1:2]]})
    gone = [messages[0] | {"content": [{"type": "image", "path": str(home / "gone.png")}]}, *messages[1:]]
    assert "picture missing" in reason({"messages": gone})
    cut = [{**turns[0], "prompt_token_ids": [x for x in turns[0]["prompt_token_ids"] if x != PLACEHOLDER]}]
    cut[0]["prompt_token_ids"].insert(1, PLACEHOLDER)
    assert "pictures and placeholders differ" in reason({"turns": cut})
