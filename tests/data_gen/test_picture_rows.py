"""Conversations with pictures become training rows, and train."""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.states.store import key_of
from draftsmith.data_gen.training_rows.overlap import EvaluationIndex
from draftsmith.data_gen.training_rows.rows import TrainingRow, training_rows
from draftsmith.models.chat import render_prompt
from draftsmith.models.checkpoint import read_drafter_config, read_weights
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.prompts.picture_files import data_url
from draftsmith.recipes.prompts.prompt_reader import read_conversations
from draftsmith.recipes.prompts.records import to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import VOCAB_SIZE
from tests.replay_cases import write_lines
from tests.thinning import a_few
from tests.tiny_vision import FAMILIES, PLACEHOLDER, picture, save_vision_target
from tests.training_runs import metrics, train

END = 4
BLIND = {"compressed_tokens": 0, "global_vector": False}


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


def tokenizer_of(target: Path) -> PreTrainedTokenizerBase:
    return TargetFiles(TargetSection(model=str(target))).tokenizer


def rows_of_records(home: Path, family: str, *records: dict[str, Any]) -> tuple[list[TrainingRow], Rejects]:
    path, rejects = write_lines(home / "conversations.jsonl", *records), Rejects()
    return list(training_rows(path, tokenizer_of(home / family), 500, rejects)), rejects


def test_questions_are_compared_with_the_pictures_that_they_show(home: Path, tmp_path: Path) -> None:
    """By content, whether a record names a file, holds its bytes, or says its digest alone."""
    content, text = (home / "wide.png").read_bytes(), {"type": "text", "text": "What is it?"}
    url = f"data:image/png;base64,{b64encode(content).decode()}"

    def asks(part: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [part, text]}]}

    records: list[dict[str, Any]] = [
        {"prompt": "<image>\nWhat is it?", "image": str(home / "wide.png")},
        {"prompt": "What is it?", "images": [url]},
        asks({"type": "image_url", "image_url": {"url": url}}),
        asks({"type": "image", "path": "gone.png", "sha256": sha256(content).hexdigest()}),
    ]
    others: list[dict[str, Any]] = [{"prompt": "What is it?"}, asks(shown(home, "tall"))]
    others.append({"prompt": "What is it?", "image": "https://example.com/wide.png"})
    made = [[to_conversation(each, "q", "", 1) for each in each_of] for each_of in (records, others)]
    for i, record in enumerate(records):
        prompts = write_lines(tmp_path / f"{i}.jsonl", record)
        index = EvaluationIndex(read_conversations(str(prompts), Rejects(), store=data_url))
        assert all(map(index.find, made[0])) and not any(map(index.find, made[1])), record


@pytest.mark.parametrize("family", a_few(FAMILIES, "llava_next", "qwen3_vl"))
def test_rows_carry_the_pictures_of_their_messages(family: str, home: Path) -> None:
    messages = conversation(home)
    text = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a mat"}]
    rows, rejects = rows_of_records(home, family, {"messages": messages}, {"messages": text})
    assert len(rows) == 2 and rejects.total == 0
    row, tokenizer = rows[0], tokenizer_of(home / family)
    for turn, (start, end) in enumerate(row.spans):
        asked = render_prompt(tokenizer, messages[: 2 * turn + 1])
        assert row.prompt.until(start) == asked
        assert len(asked.inserts) == turn + 1
        assert PLACEHOLDER not in row.input_ids[start:end] and row.input_ids[end - 1] == END
    assert rows[1].inserts == () and PLACEHOLDER not in rows[1].input_ids
    other = replace(row, inserts=(row.inserts[0], replace(row.inserts[1], content="another")))
    assert key_of(other) != key_of(replace(row))


@pytest.mark.parametrize("family", a_few(FAMILIES, "qwen3_vl"))
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


@pytest.fixture
def recipe_of(home: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe for LLaVA, with conversations about pictures and without, and its draft vocabulary."""

    def write(drafter: dict[str, Any], family: str = "llava", **train: Any) -> Path:
        output = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        text = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
        records = [{"messages": messages} for messages in (conversation(home), text) * 3]
        write_lines(output / "conversations.jsonl", *records)
        DraftVocab.full(VOCAB_SIZE).save(output / "draft_vocab.safetensors", {})
        settings = {"max_steps": 3, "batch_size": 3, "log_every_steps": 1, "validation_conversations": 0}
        target = {"model": str(home / family), "dtype": "float32", "device": "cpu"}
        recipe = {"output_dir": str(output), "target": target, "drafter": drafter, "train": settings | train}
        (output / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return output / "recipe.yaml"

    return write


BASES = ({"kind": "vispec"}, {"kind": "vispec", "base": "eagle3", "compressed_tokens": 3})


@pytest.mark.parametrize(("family", "drafter"), a_few([(f, i) for f in FAMILIES for i in (0, 1)], ("qwen3_vl", 1)))
def test_vispec_trains_packed_as_padded(recipe_of: Callable[..., Path], drafter: int, family: str) -> None:
    how = {"family": family, "feature_noise": 0.0}
    padded, packed = (metrics(train(recipe_of(BASES[drafter], packing=each, **how))) for each in (False, True))
    assert len(padded) == 3 and all(line["loss"] > 0 for line in padded)
    for one, other in zip(padded, packed, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_blind_drafter_learns_nothing_of_its_adaptor(recipe_of: Callable[..., Path]) -> None:
    path = recipe_of({"kind": "vispec", **BLIND})
    drafter = train(path) / "drafter"
    assert read_drafter_config(drafter)[0].to_dict()["global_vector"] is False
    projection = read_weights(drafter)["img_fc.weight"]
    assert not projection[:, 32:].any() and not torch.equal(projection[:, :32], torch.eye(32))


@pytest.mark.slow
def test_the_second_stage_starts_from_text(recipe_of: Callable[..., Path]) -> None:
    first = train(recipe_of({"kind": "eagle"}, max_steps=1)) / "drafter"
    output = train(recipe_of({"kind": "vispec", "init_from": str(first)}, max_steps=1, learning_rate=1e-12))
    before, after = read_weights(first), read_weights(output / "drafter")
    assert set(after) - set(before) == {name for name in after if name.startswith("img_")}
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)
