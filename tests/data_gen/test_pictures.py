"""Conversations with pictures: answered by the target and by servers, made training rows, and trained on."""

import base64
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen import capture
from draftsmith.data_gen.server_client import generator as server_generator
from draftsmith.data_gen.states.store import key_of
from draftsmith.data_gen.training_rows.overlap import EvaluationIndex
from draftsmith.data_gen.training_rows.rows import TrainingRow, training_rows
from draftsmith.models.chat import render_prompt
from draftsmith.models.checkpoint import read_drafter_config, read_weights
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.prompts.picture_parts import data_url
from draftsmith.recipes.prompts.prompt_reader import read_conversations
from draftsmith.recipes.prompts.records import to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import VOCAB_SIZE
from tests.data_gen.fake_server import STOP, FakeServer, expected
from tests.data_gen.regeneration_place import STOPS, RegenerationPlace
from tests.evaluation_cases import write_lines
from tests.recipes.test_pictures import turned
from tests.store_cases import assert_same_store
from tests.thinning import a_few
from tests.tiny_vision import BASIC_FAMILIES, FAMILIES, PLACEHOLDER, picture, save_vision_target
from tests.training_runs import metrics, run_main, train, write_recipe


class Place(RegenerationPlace):
    """With pictures."""

    def __init__(self, folder: Path, target: Path, capsys: pytest.CaptureFixture):
        super().__init__(folder, target, capsys, {"batch_size": 3, "max_new_tokens": 20, "temperature": 0})
        for seed, name in enumerate(("a.png", "b.png", "c.png")):
            picture(24, 16, seed).save(folder / name)

    def reasons(self) -> dict[str, str]:
        return {line["record"]["id"]: line["reason"] for line in self.records(self.rejects)}

    def part(self, name: str) -> dict[str, str]:
        path = self.folder / name
        return {"type": "image", "path": str(path), "sha256": file_digest(path)}


def say(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    saved = {}
    for family in BASIC_FAMILIES:
        saved[family] = folder = save_vision_target(tmp_path_factory.mktemp(family), family)
        path = folder / "generation_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": STOPS, "temperature": 0.01}))
    return saved


SOME = [BASIC_FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in BASIC_FAMILIES[1:])]


@pytest.fixture(params=SOME)
def place(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> Place:
    return Place(tmp_path, folders[request.param], capsys)


def some_prompts(place: Place) -> list[dict[str, Any]]:
    url = {"type": "image_url", "image_url": {"url": data_url((place.folder / "c.png").read_bytes())}}
    turns = [{"role": "user", "content": text} for text in ("<image>\nthe cat", "the dog", "<image> and <image>")]
    return [
        {"id": "parts", "messages": [user(say("the cat"), {"type": "image", "path": "a.png"}, say("at length"))]},
        {"id": "other", "messages": [user(say("the cat"), {"type": "image", "path": "b.png"}, say("at length"))]},
        {"id": "turns", "messages": turns, "images": ["a.png", "b.png", "c.png"]},
        {"id": "column", "prompt": "the mat", "image": "b.png"},
        {"id": "url", "messages": [user(url, say("the rain"))]},
        {"id": "text", "prompt": "the cat and the dog"},
    ]


def test_lines_name_their_pictures_and_hold_what_was_asked(place: Place) -> None:
    place.write_prompts(*some_prompts(place))
    place.run()
    records, tokenizer = place.by_id(), place.tokenizer
    assert set(records) == {"parts", "other", "turns", "column", "url", "text"}
    a, b, c = (place.part(name) for name in ("a.png", "b.png", "c.png"))
    first = {key: record["messages"][0]["content"] for key, record in records.items()}
    assert first["parts"] == [say("the cat"), a, say("at length")] and first["column"] == [b, say("the mat")]
    assert first["turns"] == [a, say("the cat")] and first["text"] == "the cat and the dog"
    stored = first["url"][0]
    assert stored["sha256"] == c["sha256"] == file_digest(Path(stored["path"]))
    assert "base64" not in place.path.read_text() and not any("images" in record for record in records.values())
    for record in records.values():
        for number, turn in enumerate(record["turns"]):
            prompt = render_prompt(tokenizer, record["messages"][: 2 * number + 1])
            assert turn["prompt_token_ids"] == list(prompt)
            assert turn["prompt_token_ids"].count(PLACEHOLDER) == sum(insert.length for insert in prompt.inserts)
    turns = [records[key]["turns"][0] for key in ("parts", "other")]
    assert turns[0]["prompt_token_ids"] == turns[1]["prompt_token_ids"]
    assert turns[0]["output_token_ids"] != turns[1]["output_token_ids"]  # the target looked


def test_a_stopped_run_goes_on_and_other_pictures_are_other_prompts(place: Place) -> None:
    place.write_prompts(*some_prompts(place))
    place.run()
    whole = place.path.read_bytes().splitlines(keepends=True)
    place.path.write_bytes(b"".join(whole[:2]) + whole[2][:100])
    place.run()
    assert sorted(place.path.read_bytes().splitlines(keepends=True)) == sorted(whole)
    place.write_prompts({"id": "parts", "messages": [user(say("the cat"), place.part("b.png"), say("at length"))]})
    with pytest.raises(UserError, match="was asked something else"):
        place.run()
    place.write_prompts(some_prompts(place)[3])  # its path is relative
    picture(24, 16, seed=9).save(place.folder / "b.png")
    with pytest.raises(UserError, match="was asked something else"):
        place.run()


def test_unusable_pictures_are_rejected(place: Place) -> None:
    bad: dict[str, tuple[str, dict[str, Any]]] = {
        "gone": ("picture missing", {"prompt": "the mat", "image": "gone.png"}),
        "changed": ("picture changed", {"messages": [user(place.part("a.png") | {"sha256": "0" * 64}, say("x"))]}),
        "film": ("not text or a picture", {"messages": [user({"type": "video", "path": "a.mp4"}, say("x"))]}),
        "later": ("picture missing", {"messages": [user(say("x")), user({"type": "image", "path": "gone.png"})]}),
    }
    good = {"id": "good", "prompt": "the mat", "image": "b.png"}
    place.write_prompts(good, *({"id": key} | record for key, (_, record) in bad.items()))
    place.run()
    assert set(place.by_id()) == {"good"}
    assert {key: reason.split(":")[0] for key, reason in place.reasons().items()} == {k: v[0] for k, v in bad.items()}


def test_answers_are_sampled_unless_the_recipe_says_otherwise(place: Place) -> None:
    """The target's own temperature, 0.01, is not used."""
    place.write_prompts(some_prompts(place)[0])
    place.run("data.generator.temperature=null")
    assert place.by_id()["parts"]["generator"]["temperature"] == 1.0


@pytest.mark.parametrize(
    "drafter", ["{kind: vispec, compressed_tokens: 2}", pytest.param("{kind: eagle}", marks=pytest.mark.slow)]
)
def test_states_are_stored_with_the_answers(place: Place, drafter: str) -> None:
    place.write_prompts(*some_prompts(place))
    arguments = [f"drafter={drafter}", "data.capture.dtype=float32"]
    place.run(*arguments, f"data.states={place.folder / 'states'}")
    run_main(capture, place.recipe, *arguments, f"data.states={place.folder / 'captured'}")
    assert_same_store(place.folder / "states", place.folder / "captured")


# Servers.


@pytest.fixture
def served(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """With a target that has no weights, and one stop token."""
    without_weights = shutil.ignore_patterns("*.safetensors")
    place.target = shutil.copytree(place.target, place.folder / "target", ignore=without_weights)
    (place.target / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}))
    for name, value in {"FIRST_PAUSE_SECONDS": 0.01, "FIRST_LOOK_SECONDS": 0.05, "TRIES": 3}.items():
        monkeypatch.setattr(server_generator, name, value)
    place.write_recipe()
    return place


def openai(server: FakeServer, **more: Any) -> list[str]:
    words = {"kind": "openai", "base_urls": [server.url]} | more
    return [f"data.generator.{key}={json.dumps(value)}" for key, value in words.items()]


def images_of(body: dict[str, Any]) -> list[Image.Image]:
    parts = [part for message in body["messages"] if message["role"] == "user" for part in message["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


@pytest.mark.parametrize(
    "ids", ["token_ids", "text", *(pytest.param(i, marks=pytest.mark.slow) for i in ("logprobs", "content"))]
)
def test_servers_get_pictures_as_messages(served: Place, ids: str) -> None:
    served.write_prompts(*some_prompts(served))
    with FakeServer(served.tokenizer, ids=ids) as server:
        served.run(*openai(server))
        served.run(*openai(server))  # asks nothing again
        assert max(server.asked.values()) <= 2  # two prompts differ in their pictures alone
        for body in server.bodies:
            assert "messages" in body or body["prompt"].count(PLACEHOLDER) == 0
            for image in images_of(body) if "messages" in body else ():
                assert image.tobytes() in [picture(24, 16, seed).tobytes() for seed in range(3)]
    records, tokenizer = served.by_id(), server.tokenizer
    assert set(records) == {"parts", "other", "turns", "column", "url", "text"}
    assert "base64" not in served.path.read_text()
    for record in records.values():
        for number, turn in enumerate(record["turns"]):
            prompt = list(render_prompt(tokenizer, record["messages"][: 2 * number + 1]))
            assert turn["prompt_token_ids"] == prompt
            # A character of several tokens has no ids in llama.cpp's logprobs.
            assert turn["output_token_ids"] == expected(tokenizer, prompt, 20)[0]
            assert turn.get("retokenised", False) == (ids == "text") or ids == "content"


@pytest.mark.parametrize(("shown", "believed"), [(1000, True), (None, False)])
def test_ids_of_pictures_may_be_a_server_s_own_and_no_others(served: Place, shown: int | None, believed: bool) -> None:
    served.write_prompts(*some_prompts(served)[:1])

    def other_ids(reply: dict[str, Any]) -> None:
        asked = reply["choices"][0]["prompt_token_ids"]
        own = [shown if token == PLACEHOLDER else token for token in asked]
        reply["choices"][0]["prompt_token_ids"] = own if shown else [*asked[1:], asked[0]]

    with FakeServer(served.tokenizer, lie=other_ids) as server:
        if believed:
            served.run(*openai(server))
        else:
            with pytest.raises(UserError, match="another prompt"):
                served.run(*openai(server))
    assert set(served.by_id()) == ({"parts"} if believed else set())


def test_what_servers_cannot_read_alike_is_sent_as_png(served: Place) -> None:
    """Turned by EXIF data, or transparent."""
    picture(24, 16).save(served.folder / "turned.jpg", exif=turned(6), quality=100)
    picture(24, 16).convert("RGBA").save(served.folder / "clear.png")
    picture(24, 16).save(served.folder / "plain.jpg")
    forms = {"turned.jpg": ("PNG", (16, 24)), "clear.png": ("PNG", (24, 16)), "plain.jpg": ("JPEG", (24, 16))}
    served.write_prompts(*({"id": name, "prompt": "the mat", "image": name} for name in forms))
    with FakeServer(served.tokenizer) as server:
        served.run(*openai(server, concurrency=1))
    images = [images_of(body)[0] for body in server.bodies]
    assert [(image.format, image.size) for image in images] == list(forms.values())
    assert {image.mode for image in images} == {"RGB"}


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
        user(shown(home, "wide"), say("the cat")),
        {"role": "assistant", "content": "a mat"},
        user(say("and"), shown(home, "tall")),
        {"role": "assistant", "content": "a dog"},
    ]


def tokenizer_of(target: Path) -> PreTrainedTokenizerBase:
    return TargetFiles(TargetSection(model=str(target))).tokenizer


def rows_of_records(home: Path, family: str, *records: dict[str, Any]) -> tuple[list[TrainingRow], Rejects]:
    path, rejects = write_lines(home / "conversations.jsonl", *records), Rejects()
    return list(training_rows(path, tokenizer_of(home / family), 500, rejects)), rejects


def test_questions_are_compared_with_the_pictures_that_they_show(home: Path, tmp_path: Path) -> None:
    """By content, whether a record names a file, holds its bytes, or says its digest alone."""
    url = data_url((home / "wide.png").read_bytes())

    def asks(part: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [user(part, say("What is it?"))]}

    records = [
        {"prompt": "<image>\nWhat is it?", "image": str(home / "wide.png")},
        asks({"type": "image_url", "image_url": {"url": url}}),
        asks({"type": "image", "path": "gone.png", "sha256": file_digest(home / "wide.png")}),
    ]
    others = [{"prompt": "What is it?"}, asks(shown(home, "tall"))]
    made = [[to_conversation(each, "q", "", 1) for each in each_of] for each_of in (records, others)]
    for i, record in enumerate(records):
        prompts = write_lines(tmp_path / f"{i}.jsonl", record)
        index = EvaluationIndex(read_conversations(str(prompts), Rejects(), store=data_url))
        assert all(map(index.find, made[0])) and not any(map(index.find, made[1])), record


@pytest.mark.parametrize("family", a_few(FAMILIES, "llava_next", "qwen3_vl"))
def test_rows_carry_the_pictures_of_their_messages(family: str, home: Path) -> None:
    messages = conversation(home)
    text = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a mat"}]
    rows, _ = rows_of_records(home, family, {"messages": messages}, {"messages": text})
    assert len(rows) == 2
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
    [stored], rejects = rows_of_records(home, family, record, record | {"messages": messages[:2]})
    assert stored == row and rejects.counts == {"pictures and placeholders differ": 1}


@pytest.fixture
def recipe_of(home: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe for LLaVA, with conversations about pictures and without, and its draft vocabulary."""

    def write(drafter: dict[str, Any], family: str = "llava", **train: Any) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        text = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
        records = [{"messages": messages} for messages in (conversation(home), text) * 3]
        write_lines(folder / "run/conversations.jsonl", *records)
        DraftVocab.full(VOCAB_SIZE).save(folder / "run/draft_vocab.safetensors", {})
        settings = {"max_steps": 3, "batch_size": 3, "log_every_steps": 1, "validation_conversations": 0}
        return write_recipe(folder, home / family, drafter=drafter, train=settings | train)

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
