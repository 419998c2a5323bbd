"""Prompts for long answers: every form of captioned pictures, the parts of a prompt, what becomes of bad records."""

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from draftsmith.data_gen import regenerate, reprompt
from draftsmith.data_gen.answers import generators
from draftsmith.data_gen.reprompting import long_answers
from draftsmith.data_gen.reprompting.long_answers import INSTRUCTIONS, REQUESTS, reprompted
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.picture_parts import with_picture_parts
from draftsmith.recipes.prompts.reader import read_conversations
from draftsmith.recipes.prompts.records import Conversation, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import plain_row
from draftsmith.recipes.schema import RepromptSection
from tests.training_runs import run_main

ROOT = Path(__file__).parent.parent
COLOURS = ("red", "green", "blue", "white")
P = {"type": "image"}  # a placeholder


def picture_bytes(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), colour).save(file, "PNG")
    return file.getvalue()


class Workspace:
    """A folder with pictures, a recipe, and calls of the script in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture):
        self.folder, self.recipe, self.out, self._capsys = folder, folder / "r.yaml", folder / "out", capsys
        target = {"model": str(ROOT / "recipes/demo_target"), "dtype": "float32", "device": "cpu"}
        self.recipe.write_text(yaml.safe_dump({"output_dir": str(self.out), "target": target}))
        for colour in COLOURS:
            (folder / f"{colour}.png").write_bytes(picture_bytes(colour))

    def write(self, name: str, content: Any) -> Path:
        """JSON lines of a list in a .jsonl file, else JSON."""
        lines = [json.dumps(each) for each in content] if name.endswith(".jsonl") else [json.dumps(content, indent=1)]
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines))
        return path

    def run(self, *sources: Path, **settings: Any) -> str:
        plan = ["--plan"] * settings.pop("plan", False)
        values = {"sources": [str(source) for source in sources]} | settings
        words = [f"data.reprompt.{key}={json.dumps(value)}" for key, value in values.items()]
        run_main(reprompt, self.recipe, *words, *plan)
        return self._capsys.readouterr().out

    def prompts(self) -> dict[str, list[dict[str, Any]]]:
        lines = (self.out / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return {record["id"]: record["messages"] for record in map(json.loads, lines)}

    def rejects(self) -> Counter[str]:
        lines = (self.out / "prompts.rejects.jsonl").read_text(encoding="utf-8").splitlines()
        return Counter(json.loads(line)["reason"].split(":")[0] for line in lines)


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture) -> Workspace:
    return Workspace(tmp_path, capsys)


def shown(place: Workspace, name: str) -> dict[str, str]:
    path = place.folder / f"{name}.png"
    return {"type": "image", "path": str(path), "sha256": file_digest(path)}


def llava(number: int, colour: str, instruction: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": instruction}, {"from": "gpt", "value": "a caption"}]
    return {"id": f"l{number}", "image": f"{colour}.png", "conversations": turns}


# Forms.


def test_every_form_of_captioned_pictures(place: Workspace) -> None:
    encoded = base64.b64encode(picture_bytes("blue")).decode()
    write = place.write
    sources = [
        write("llava.json", [llava(0, "red", "<image>\nWhat is it?"), llava(1, "green", "Say it.\n<image>")]),
        write(
            "coco.json",
            {
                "info": {},
                "images": [{"id": 7, "file_name": "red.png"}, {"id": 8, "file_name": "green.png"}],
                "annotations": [{"image_id": 7, "id": 1, "caption": "c"}, {"image_id": 7, "id": 2, "caption": "d"}],
            },
        ),
        write("folder.jsonl", [{"file_name": "blue.png", "text": "a caption", "id": "f"}]),
        write(
            "messages.jsonl",
            [
                {"id": "u", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url":
                 f"data:image/png;base64,{encoded}"}}, {"type": "text", "text": "Why?"}]}]},
                {"id": "p", "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}, P]}],
                 "images": ["green.png"]},
                {"id": "q", "question": "How?", "answer": "so", "image": f"file://{place.folder}/red.png"},
            ],
        ),
    ]  # fmt: skip
    table = {
        "id": ["t0", "t1"],
        "image": [{"bytes": picture_bytes("blue"), "path": "x.png"}, {"bytes": None, "path": "red.png"}],
        "prompt": ["Where?", "When?"],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), place.folder / "table.parquet")
    raw = {"id": ["b"], "image": [picture_bytes("blue")], "prompt": ["Else?"]}
    pyarrow.parquet.write_table(pyarrow.table(raw), place.folder / "raw.parquet")
    said = place.run(*sources, place.folder / "table.parquet", place.folder / "raw.parquet")
    assert "11 prompts of 11 records; no record rejected" in said
    found = {key: messages[0]["content"] for key, messages in place.prompts().items()}
    asked = {"l0": "What is it?", "l1": "Say it.", "u": "Why?", "p": "Who?", "q": "How?", "t0": "Where?", "t1": "When?"}
    for key, colour in {"l0": "red", "l1": "green", "7": "red", "8": "green", "f": "blue", "p": "green", "q": "red"} \
            .items():  # fmt: skip
        assert found[key][1] == shown(place, colour)
    for key, (instruction, picture, request) in found.items():
        assert [instruction["type"], picture["type"], request["type"]] == ["text", "image", "text"]
        assert instruction["text"] == asked.get(key, instruction["text"]) and "1,000" in request["text"]
        assert file_digest(Path(picture["path"])) == picture["sha256"]
    assert all(found[key][0]["text"] in INSTRUCTIONS for key in ("7", "8", "f"))
    # The three without a file of their own share one, because their bytes are the same.
    (stored,) = (place.out / "prompts.pictures").iterdir()
    assert {found[key][1]["path"] for key in ("u", "t0", "b")} == {str(stored)}
    assert stored.read_bytes() == picture_bytes("blue")


def test_prompts_can_be_read_again(place: Workspace) -> None:
    place.run(place.write("llava.json", [llava(i, COLOURS[i], "<image>\nWhat?") for i in range(3)]))
    again = list(read_conversations(str(place.out / "prompts.jsonl"), Rejects()))
    assert {c.id: c.messages for c in again} == place.prompts()
    assert [with_picture_parts(c) for c in again] == [c.messages for c in again]


def test_relative_paths_start_at_the_source_or_at_the_folder(place: Workspace) -> None:
    (place.folder / "deep").mkdir()
    (place.folder / "deep" / "red.png").write_bytes(picture_bytes("white"))
    source = place.write("deep/x.jsonl", [{"image": "red.png"}])
    place.run(source)
    assert place.prompts()["x.jsonl:1"][0]["content"][1]["path"] == str(place.folder / "deep" / "red.png")
    place.run(source, folder=str(place.folder))
    assert place.prompts()["x.jsonl:1"][0]["content"][1] == shown(place, "red")


def conversation(*contents: Any, images: list[str] | None = None) -> Conversation:
    return Conversation("c", [{"role": "user", "content": content} for content in contents], images or [])


def places(conversation: Conversation) -> list[list[str]]:
    return [
        [part.get("path") or part["text"] for part in message["content"]]
        for message in with_picture_parts(conversation)
    ]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("contents", "images", "expected"),
    [
        (["<image>\nWhat?"], ["a"], [["a", "What?"]]),
        (["one <image> two <image>"], ["a", "b"], [["one ", "a", " two ", "b"]]),
        ([[text("one"), P, text("<image>")]], ["a", "b"], [["one", "a", "b"]]),
        (["first", "second"], ["a", "b"], [["a", "b", "first"], ["second"]]),
        (["<image>first", [P]], ["a", "b"], [["a", "first"], ["b"]]),
        ([[{"type": "image", "url": "a"}, text("x")]], [], [["a", "x"]]),
        ([[{"type": "image_url", "image_url": "a"}, {"type": "image", "image": "b"}]], ["a", "b"], [["a", "b"]]),
        (["no picture"], [], [["no picture"]]),
    ],
)
def test_placeholders(contents: list[Any], images: list[str], expected: list[list[str]]) -> None:
    assert places(conversation(*contents, images=images)) == expected


@pytest.mark.parametrize(
    ("messages", "images", "reason"),
    [
        (["<image> <image>"], ["a"], "placeholders: 2 of them for pictures: 1"),
        (["<image>"], ["a", "b"], "placeholders: 1 of them for pictures: 2"),
        ([[P]], [], "placeholders: 1 of them for pictures: 0"),
        ([[{"type": "image", "path": "a"}, P]], [], "placeholders: 1 of them for pictures: 0, beside 1 that"),
        ([[{"type": "image", "path": "a"}]], ["b"], "placeholders: 0 of them for pictures: 1, beside 1 that"),
        ([[{"type": "image", "path": 3}]], [], "wrong type: the picture of message 0 must be one path, this is a n"),
        ([[{"type": "image", "path": "a", "url": "b"}]], [], "wrong type: the picture of message 0 must be one path"),
        ([[{"type": "video", "path": "a"}]], [], "not text or a picture: video in message 0"),
        ([{"role": "system", "content": "<image>"}, "x"], ["a"], "placeholders: a picture outside the user turns, in"),
    ],
)
def test_placeholders_that_do_not_match(messages: list[Any], images: list[str], reason: str) -> None:
    asked = [each if isinstance(each, dict) else {"role": "user", "content": each} for each in messages]
    with pytest.raises(ValueError, match=f"^{reason}"):
        with_picture_parts(Conversation("c", asked, images))


def test_the_columns_of_pictures() -> None:
    def images(**columns: Any) -> list[str]:
        return to_conversation({"prompt": "x", **columns}, "c", "s", 1).images

    assert images(image="a") == images(images=["a"]) == images(image=["a"], images=["a"]) == ["a"]
    assert images(image=None) == images(image="") == images(images=[]) == []
    for wrong, reason in (({"image": 3}, "wrong type"), ({"image": "a", "images": ["b"]}, "ambiguous columns")):
        with pytest.raises(ValueError, match=reason):
            images(**wrong)


def test_bytes_stay_a_number_for_readers_of_text(place: Workspace) -> None:
    row = {"image": {"bytes": b"\x89PNG", "path": "a.png"}, "text": b"words"}
    assert plain_row(row) == {"image": {"bytes": {"bytes": 4}, "path": "a.png"}, "text": "words"}
    assert plain_row(row, lambda content: "stored")["image"] == {"bytes": "stored", "path": "a.png"}
    coco = place.write("coco.json", {"images": [{"id": 1, "file_name": "red.png"}], "annotations": []})
    with pytest.raises(UserError, match="no usable conversation"):
        list(read_conversations(str(coco), Rejects()))


# Prompts.


def turns(*messages: Any, section: RepromptSection | None = None, key: str = "c") -> list[dict[str, Any]]:
    return reprompted(key, list(messages), section or RepromptSection())


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def test_a_prompt_is_instruction_picture_request_whatever_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "INSTRUCTIONS", ["I"])
    monkeypatch.setattr(long_answers, "REQUESTS", ["R {words}"])
    a, b = {"type": "image", "path": "a"}, {"type": "image", "path": "b"}
    assert turns(user(a, "What?")) == turns(user("What?", a)) == [user("What?", a, "R 1,000")]
    assert turns(user("One", a, "two ")) == [user("One\ntwo", a, "R 1,000")]
    assert turns(user(a)) == [user("I", a, "R 1,000")]
    assert turns(user(a, b, "Compare")) == [user("Compare", a, b, "R 1,000")]
    assert turns(user("From", a, "to", b)) == [user("From", a, "to", b, "R 1,000")]
    system = {"role": "system", "content": "Be kind."}
    dropped = {"role": "assistant", "content": "caption"}
    assert turns(system, user(a, "x"), dropped, user("more"), dropped) == [
        system,
        user("x", a, "R 1,000"),
        user("more", "R 1,000"),
    ]
    with pytest.raises(ValueError, match=r"^no picture: "):
        turns(user("x"))


def test_phrasings_are_drawn_by_id_and_seed() -> None:
    picture = {"type": "image", "path": "a"}

    def drawn(seed: int) -> list[tuple[str, str]]:
        section = RepromptSection(seed=seed, min_words=300)
        found = [turns(user(picture), section=section, key=f"c{i}")[0]["content"] for i in range(200)]
        return [(parts[0]["text"], parts[2]["text"]) for parts in found]

    assert drawn(0) == drawn(0) != drawn(1)
    for phrasings, found in zip((INSTRUCTIONS, REQUESTS), zip(*drawn(0), strict=True), strict=True):
        counts = Counter(found)
        assert set(counts) == {phrasing.replace("{words}", "300") for phrasing in phrasings}
        assert min(counts.values()) > 200 / len(phrasings) / 2


# The script.


def test_order_and_number_do_not_depend_on_the_order_of_records(place: Workspace) -> None:
    records = [llava(i, COLOURS[i % 4], "<image>\nWhat?") for i in range(30)]
    records[3]["image"] = "nowhere.png"
    first = place.write("llava.json", records)
    place.run(first)
    everything = list(place.prompts().items())
    assert len(everything) == 29 and [key for key, _ in everything] != sorted(key for key, _ in everything)
    place.write("llava.json", records[::-1])
    place.run(first, max_prompts=12)
    assert list(place.prompts().items()) == everything[:12]
    before = (place.out / "prompts.jsonl").read_bytes()
    place.run(first, max_prompts=12)
    assert (place.out / "prompts.jsonl").read_bytes() == before
    place.run(first, max_prompts=12, seed=1)
    assert list(place.prompts().items()) != everything[:12]
    assert "asks for 40, and there are no more" in place.run(first, max_prompts=40)


def test_bad_records_are_kept_with_their_reason(place: Workspace) -> None:
    (place.folder / "torn.png").write_bytes(picture_bytes("red")[:50])
    source = place.write(
        "x.jsonl",
        [
            {"prompt": "fine", "image": "red.png"},
            {"prompt": "x", "image": "nowhere.png"},
            {"prompt": "x", "image": "torn.png"},
            {"prompt": "x", "image": "x.jsonl"},
            {"prompt": "x", "image": "https://example.org/a.png"},
            {"prompt": "<image> <image>", "image": "red.png"},
            {"prompt": "x"},
            {"prompt": "x", "image": ["red.png", "nowhere.png"]},
            {"caption": "without a picture"},
            [],
        ],
    )
    said = place.run(source)
    assert "1 prompts of 10 records; 9 records rejected" in said
    expected = {"picture missing": 2, "picture truncated": 1, "not a picture": 1, "picture URL": 1, "placeholders": 1}
    assert place.rejects() == expected | {"no picture": 1, "unknown columns": 1, "wrong type": 1}
    place.run(source)
    assert place.rejects().total() == 9  # none twice
    before = (place.out / "prompts.jsonl").read_bytes()
    bad = place.write("bad.jsonl", [{"prompt": "x", "image": "nowhere.png"}])
    with pytest.raises(UserError, match=r"none of 1 records gave a prompt; 1 record rejected \(1 picture missing\)"):
        place.run(bad)
    assert (place.out / "prompts.jsonl").read_bytes() == before
    assert not list(place.out.glob("*.partial"))


def test_a_plan_reads_a_sample_and_writes_nothing(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "PLANNED", 3)
    table = {"image": [{"bytes": picture_bytes(colour), "path": "x"} for colour in COLOURS], "prompt": ["What?"] * 4}
    pyarrow.parquet.write_table(pyarrow.table(table), place.folder / "t.parquet")
    said = place.run(place.folder / "t.parquet", plan=True)
    assert "3 records give 3 prompts" in said and "1,000 words" in said
    assert not place.out.exists()
    bad = place.write("bad.jsonl", [{"prompt": "x", "image": "nowhere.png"}])
    with pytest.raises(UserError, match="none of 1 records gives a prompt"):
        place.run(bad, plan=True)


def test_mistakes(place: Workspace) -> None:
    with pytest.raises(UserError, match=r"data\.reprompt\.sources: not given"):
        run_main(reprompt, place.recipe)
    with pytest.raises(UserError, match=r"data\.reprompt\.sources: no such file: .*nowhere"):
        place.run(place.folder / "nowhere.json")
    source = place.write("x.jsonl", [{"image": "red.png"}])
    with pytest.raises(UserError, match="would be replaced"):
        place.run(source, out=str(place.folder / "." / "x.jsonl"))
    with pytest.raises(UserError, match=r"data\.reprompt\.out.* is a folder; name a file"):
        load_recipe(place.recipe, [f"data.reprompt.out={place.folder}"])


def test_regeneration_refuses_prompts_with_pictures(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.run(place.write("x.jsonl", [{"image": "red.png"}, {"image": "blue.png"}]))
    monkeypatch.setattr(generators, "LoadedModels", None)  # nothing is loaded for it
    for arguments in ([], ["--plan"]):
        with pytest.raises(UserError, match=r"^data\.prompts: .* all 2 prompts have pictures: name prompts of text"):
            run_main(regenerate, place.recipe, f"data.prompts={place.out}/prompts.jsonl", *arguments)
    assert not (place.out / "conversations.jsonl").exists()
