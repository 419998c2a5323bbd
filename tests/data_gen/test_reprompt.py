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
from PIL import Image

from draftsmith.data_gen import reprompt
from draftsmith.data_gen.reprompting import long_answers
from draftsmith.data_gen.reprompting.long_answers import INSTRUCTIONS, REQUESTS, reprompted
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.prompts.picture_parts import with_picture_parts
from draftsmith.recipes.prompts.prompt_reader import read_conversations
from draftsmith.recipes.prompts.records import Conversation, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.data import RepromptSection
from tests.training_runs import run_main, write_recipe

P = {"type": "image"}  # a placeholder


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def picture_bytes(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), colour).save(file, "PNG")
    return file.getvalue()


class Workspace:
    """A folder with pictures, a recipe, and calls of the script in this process."""

    def __init__(self, folder: Path, target: Path, capsys: pytest.CaptureFixture):
        self.folder, self.out, self._capsys = folder, folder / "run", capsys
        self.recipe = write_recipe(folder, target)
        for colour in ("red", "green", "blue"):
            (folder / f"{colour}.png").write_bytes(picture_bytes(colour))

    def write(self, name: str, content: Any) -> Path:
        """JSON lines of a list in a .jsonl file, else JSON."""
        lines = [json.dumps(each) for each in content] if name.endswith(".jsonl") else [json.dumps(content, indent=1)]
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines))
        return path

    def run(self, *sources: Path, **settings: Any) -> str:
        values = {"sources": list(map(str, sources))} | settings
        words = [f"data.reprompt.{key}={json.dumps(value)}" for key, value in values.items()]
        run_main(reprompt, self.recipe, *words)
        return self._capsys.readouterr().out

    def prompts(self) -> dict[str, list[dict[str, Any]]]:
        lines = (self.out / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        return {record["id"]: record["messages"] for record in map(json.loads, lines)}

    def rejects(self) -> Counter[str]:
        lines = (self.out / "prompts.rejects.jsonl").read_text(encoding="utf-8").splitlines()
        return Counter(json.loads(line)["reason"].split(":")[0] for line in lines)


@pytest.fixture
def place(tmp_path: Path, target_dir: Path, capsys: pytest.CaptureFixture) -> Workspace:
    return Workspace(tmp_path, target_dir, capsys)


def llava(number: int, colour: str, instruction: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": instruction}, {"from": "gpt", "value": "a caption"}]
    return {"id": f"l{number}", "image": f"{colour}.png", "conversations": turns}


# Forms.


def test_every_form_of_captioned_pictures(place: Workspace) -> None:
    encoded = base64.b64encode(picture_bytes("blue")).decode()
    coco = {
        "images": [{"id": 7, "file_name": "red.png"}, {"id": 8, "file_name": "green.png"}],
        "annotations": [{"image_id": 7, "id": 1, "caption": "c"}, {"image_id": 7, "id": 2, "caption": "d"}],
    }
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    lines = [
        {"id": "u", "messages": [{"role": "user", "content": [url, text("Why?")]}]},
        {"id": "p", "messages": [{"role": "user", "content": [text("Who?"), P]}], "images": ["green.png"]},
        {"id": "q", "question": "How?", "answer": "so", "image": f"file://{place.folder}/red.png"},
        {"file_name": "blue.png", "text": "a caption", "id": "f"},
    ]
    sources = [
        place.write("llava.json", [llava(0, "red", "<image>\nWhat is it?"), llava(1, "green", "Say it.\n<image>")]),
        place.write("coco.json", coco),
        place.write("lines.jsonl", lines),
    ]
    blue = picture_bytes("blue")
    in_cells = [{"bytes": blue, "path": "x.png"}, {"bytes": None, "path": "red.png"}]
    for name, pictures in (("t", in_cells), ("b", [blue])):
        ids = [f"{name}{number}" for number in range(len(pictures))]
        table = pyarrow.table({"id": ids, "image": pictures, "prompt": ["Where?"] * len(ids)})
        pyarrow.parquet.write_table(table, place.folder / f"{name}.parquet")
        sources.append(place.folder / f"{name}.parquet")
    assert "11 prompts of 11 records; no record rejected" in place.run(*sources)
    found = {key: messages[0]["content"] for key, messages in place.prompts().items()}
    asked = {"l0": "What is it?", "l1": "Say it.", "u": "Why?", "p": "Who?", "q": "How?"}
    asked |= dict.fromkeys(("t0", "t1", "b0"), "Where?")
    for key, (instruction, picture, request) in found.items():
        assert [instruction["type"], picture["type"], request["type"]] == ["text", "image", "text"]
        assert instruction["text"] == asked[key] if key in asked else instruction["text"] in INSTRUCTIONS
        assert "1,000" in request["text"] and file_digest(Path(picture["path"])) == picture["sha256"]
    colours = {"l0": "red", "l1": "green", "7": "red", "8": "green", "f": "blue", "p": "green", "q": "red", "t1": "red"}
    assert {key: found[key][1]["path"] for key in colours} == {
        key: str(place.folder / f"{colour}.png") for key, colour in colours.items()
    }
    # The three without a file of their own share one, because their bytes are the same.
    (stored,) = (place.out / "prompts.pictures").iterdir()
    assert {found[key][1]["path"] for key in ("u", "t0", "b0")} == {str(stored)} and stored.read_bytes() == blue
    again = list(read_conversations(str(place.out / "prompts.jsonl"), Rejects()))
    assert {c.id: with_picture_parts(c) for c in again} == place.prompts()


def parted(contents: list[Any], images: list[str]) -> list[dict[str, Any]]:
    """A user turn for each content that is no message."""
    asked = [each if isinstance(each, dict) else {"role": "user", "content": each} for each in contents]
    return with_picture_parts(Conversation("c", asked, images))


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
    found = [message["content"] for message in parted(contents, images)]
    assert [[part.get("path") or part["text"] for part in parts] for parts in found] == expected


@pytest.mark.parametrize(
    ("contents", "images", "reason"),
    [
        (["<image> <image>"], ["a"], "placeholders"),
        (["<image>"], ["a", "b"], "placeholders"),
        ([[{"type": "image", "path": "a"}, P]], [], "placeholders"),
        ([[{"type": "image", "path": "a"}]], ["b"], "placeholders"),
        ([{"role": "system", "content": "<image>"}, "x"], ["a"], "placeholders: a picture outside the user turns"),
        ([[{"type": "image", "path": 3}]], [], "wrong type"),
        ([[{"type": "image", "path": "a", "url": "b"}]], [], "wrong type"),
        ([[{"type": "video", "path": "a"}]], [], "not text or a picture"),
    ],
)
def test_placeholders_that_do_not_match(contents: list[Any], images: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        parted(contents, images)


def test_the_columns_of_pictures() -> None:
    def images(**columns: Any) -> list[str]:
        return to_conversation({"prompt": "x", **columns}, "c", "s", 1).images

    assert images(image="a") == images(images=["a"]) == images(image=["a"], images=["a"]) == ["a"]
    assert images(image=None) == images(image="") == images(images=[]) == []
    for wrong, reason in (({"image": 3}, "wrong type"), ({"image": "a", "images": ["b"]}, "ambiguous columns")):
        with pytest.raises(ValueError, match=reason):
            images(**wrong)


# Prompts.


def turns(*messages: Any) -> list[dict[str, Any]]:
    return reprompted("c", list(messages), RepromptSection())


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
    later = [user("x", a, "R 1,000"), user("more", "R 1,000")]
    assert turns(system, user(a, "x"), dropped, user("more"), dropped) == [system, *later]
    with pytest.raises(ValueError, match=r"^no picture: "):
        turns(user("x"))


def test_phrasings_are_drawn_by_id_and_seed() -> None:
    def drawn(seed: int) -> list[tuple[str, str]]:
        section = RepromptSection(seed=seed, min_words=300)
        found = [reprompted(f"c{i}", [user(P)], section)[0]["content"] for i in range(200)]
        return [(parts[0]["text"], parts[2]["text"]) for parts in found]

    assert drawn(0) == drawn(0) != drawn(1)
    instructions, requests = map(set, zip(*drawn(0), strict=True))
    assert instructions == {*INSTRUCTIONS} and requests == {each.replace("{words}", "300") for each in REQUESTS}


# The script.


def test_order_and_number_do_not_depend_on_the_order_of_records(place: Workspace) -> None:
    records = [llava(i, "red", "<image>\nWhat?") for i in range(30)]
    records[3]["image"] = "nowhere.png"
    first = place.write("llava.json", records)
    place.run(first)
    everything = list(place.prompts().items())
    assert len(everything) == 29 and [key for key, _ in everything] != sorted(key for key, _ in everything)
    place.write("llava.json", records[::-1])
    place.run(first, max_prompts=12)
    assert list(place.prompts().items()) == everything[:12]
    place.run(first, max_prompts=12, seed=1)
    assert list(place.prompts()) != [key for key, _ in everything[:12]]


def test_bad_records_are_kept_with_their_reason(place: Workspace) -> None:
    """Once; and where nothing is left, the older prompts stay."""
    (place.folder / "torn.png").write_bytes(picture_bytes("red")[:50])
    missing = {"prompt": "x", "image": "nowhere.png"}
    records: list[Any] = [
        {"prompt": "fine", "image": "red.png"}, missing, {"prompt": "x", "image": "torn.png"},
        {"prompt": "<image> <image>", "image": "red.png"}, {"prompt": "x"}, {"caption": "without a picture"}, [],
    ]  # fmt: skip
    kinds = ["picture missing", "picture truncated", "placeholders", "no picture", "unknown columns", "wrong type"]
    for _ in range(2):
        assert "1 prompts of 7 records; 6 records rejected" in place.run(place.write("x.jsonl", records))
        assert place.rejects() == dict.fromkeys(kinds, 1)
    before = (place.out / "prompts.jsonl").read_bytes()
    bad = place.write("bad.jsonl", [missing])
    with pytest.raises(UserError, match="none of 1 records g"):
        place.run(bad)
    assert (place.out / "prompts.jsonl").read_bytes() == before
