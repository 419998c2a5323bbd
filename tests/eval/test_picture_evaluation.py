"""Evaluation with pictures: what is asked and answered, what generations.jsonl holds, and what is refused."""

import base64
import io
import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image, ImageChops, ImageStat

from draftsmith.eval.measurement.benchmarks import PLAIN
from draftsmith.eval.report_page.result_files import generations_path
from draftsmith.models.chat import render_prompt
from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.drafters import build_drafter, config_class
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vision import PictureReader
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from tests.evaluation_cases import evaluate, make_recipe, measure, page_of, read_lines, save_untrained, write_lines
from tests.models.test_vision import generated
from tests.thinning import a_few
from tests.tiny_vision import BASIC_FAMILIES, picture, save_vision_target

LENGTH, STOP = 16, 4
SAY = "in the rain"
NAMES = ("a.png", "b.png", "c.png")


@pytest.fixture(scope="module", params=a_few(BASIC_FAMILIES, "qwen2_5_vl"))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision-language target, pictures, prompts of several forms, and a recipe with two kinds of drafter."""
    folder = tmp_path_factory.mktemp(request.param)
    save_vision_target(folder / "target", request.param)
    for seed, name in enumerate(NAMES):
        picture(24, 16, seed).save(folder / name)
    section = TargetSection(model=str(folder / "target"), dtype="float32")
    target = Target(TargetFiles(section).load_model(), (1, 3, 5))
    identity = TargetFiles(section).identity_of(target)
    vocab = DraftVocab.full(target.vocab_size)
    shape = config_class("vispec", "eagle")
    assert shape is not None
    torch.manual_seed(0)
    config = shape.for_target(target.config, target.vocab_size, (7,), vocab.size)
    drafter = build_drafter(config, vocab, target.frozen_head)
    for key, parameter in drafter.named_parameters():
        if key.startswith("img_"):  # at the start, they do not read pictures
            parameter.data += 0.2 * torch.randn_like(parameter)
    save_drafter(folder / "vispec", drafter, identity, "", {})
    save_untrained(folder / "eagle3", folder / "target", (1, 3, 5), draftable=range(target.vocab_size))
    encoded = base64.b64encode((folder / "c.png").read_bytes()).decode()
    turns = [{"role": "user", "content": text} for text in ("<image>\nthe cat", "the dog", "<image> and <image>")]
    part = {"type": "image", "path": "a.png", "sha256": digest(folder / "a.png")}
    write_lines(
        folder / "prompts.jsonl",
        {"id": "part", "messages": [{"role": "user", "content": [part, {"type": "text", "text": SAY}]}]},
        {"id": "column", "prompt": SAY, "image": "b.png"},
        {"id": "url", "prompt": SAY, "image": f"data:image/png;base64,{encoded}"},
        {"id": "turns", "messages": turns, "images": list(NAMES)},
        {"id": "text", "prompt": "the cat and the dog"},
    )
    model, chain = {"model": section.model, "dtype": "float32", "device": "cpu"}, {"policy": "chain", "nodes": 4}
    evaluated = {"prompts": str(folder / "prompts.jsonl"), "drafter": str(folder / "vispec"), "max_new_tokens": LENGTH}
    evaluated |= {"batch_size": 2, "tree": {"nodes": 12, "draft_calls": 3, "top_k": 4}}
    evaluated["also"] = [
        {"name": "eagle3", "drafter": str(folder / "eagle3"), "tree": chain},
        {"name": "itself", "proposer": "causal_lm", "draft_model": model, "tree": chain},
    ]
    content = {"output_dir": str(folder / "run"), "target": model, "eval": evaluated}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def lines_of(path: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """By contender, conversation and turn."""
    return {(line["contender"], line["conversation_id"], line["turn"]): line for line in read_lines(path)}


@pytest.fixture(scope="module")
def lines(place: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The answers of one run, in which the tower reads a picture once for all contenders."""
    read, reading = list[str](), PictureReader._read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PictureReader, "_read", lambda self, it: read.append(it.digest) or reading(self, it))
        measure(place)
    assert len(set(read)) == 3 and len(read) == 6  # by the target and by the drafter that is the same model
    return lines_of(place / "run/eval/generations.jsonl")


def test_answers_are_those_that_the_model_generates(place: Path, lines: dict[Any, dict[str, Any]]) -> None:
    """Token for token, with pixels as input: from plain decoding and every drafter, and in later turns."""
    family, section = place.name.rstrip("0123456789"), TargetSection(model=str(place / "target"), dtype="float32")
    tokenizer = TargetFiles(section).tokenizer

    def told(message: list[dict[str, Any]]) -> list[int]:
        whole = generated(family, render_prompt(tokenizer, message), LENGTH)
        return whole[: whole.index(STOP) + 1] if STOP in whole else whole

    def ask(*parts: str) -> dict[str, Any]:
        """Names of pictures, and texts."""
        pictures = {name: {"type": "image", "path": str(place / name)} for name in NAMES}
        return {"role": "user", "content": [pictures.get(part, {"type": "text", "text": part}) for part in parts]}

    answers = {("text", 1): told([ask("the cat and the dog")])}
    answers |= {(name, 1): told([ask(each, SAY)]) for name, each in zip(("part", "column", "url"), NAMES, strict=True)}
    history: list[dict[str, Any]] = []
    for turn, parts in enumerate([("a.png", "the cat"), ("the dog",), ("b.png", " and ", "c.png")], start=1):
        history.append(ask(*parts))
        answers["turns", turn] = told(history)
        history.append({"role": "assistant", "content": lines[PLAIN, "turns", turn]["text"]})
    assert len({tuple(answers[name, 1]) for name in ("part", "column", "url")}) == 3  # pictures matter
    contenders = {contender for contender, _, _ in lines}
    assert len(contenders) == 4 and len(lines) == 4 * len(answers)
    for contender, name, turn in lines:
        assert lines[contender, name, turn]["token_ids"] == answers[name, turn], (contender, name, turn)
    own = [line["accepted_per_round"] for (contender, *_), line in lines.items() if contender == "itself"]
    assert all(set(accepted[:-1]) == {3} for accepted in own)  # the drafter that is the target sees what it sees
    numbers = json.loads((place / "run/eval/acceptance.json").read_text())["contenders"]
    assert all(row["matches_target"] for name, row in numbers.items() if name != PLAIN)


def test_lines_name_pictures_and_hold_none(place: Path, lines: dict[Any, dict[str, Any]]) -> None:
    a, b, c = ({"path": str(place / name), "sha256": digest(place / name)} for name in NAMES)
    stored = place / f"run/eval/generations.pictures/{digest(place / 'c.png')}.png"
    assert stored.read_bytes() == (place / "c.png").read_bytes()
    wanted = {("part", 1): [a], ("url", 1): [c | {"path": str(stored)}], ("text", 1): None}
    wanted |= {("turns", 1): [a], ("turns", 2): [a], ("turns", 3): [a, b, c]}
    for contender in (PLAIN, "eagle3"):
        assert {key: lines[(contender, *key)].get("pictures") for key in wanted} == wanted
    assert "base64" not in (place / "run/eval/generations.jsonl").read_text()


def test_what_cannot_be_shown_is_rejected_with_its_reason(place: Path, target_dir: Path, tmp_path: Path) -> None:
    records = [
        {"id": "picture missing", "prompt": "the cat", "image": "nowhere.png"},
        {"id": "placeholders", "prompt": "<image> <image>", "image": str(place / "a.png")},
    ]
    prompts = write_lines(tmp_path / "prompts.jsonl", *records, {"id": "text", "prompt": "rain"})
    settings = f"eval.prompts={prompts}", f"eval.out={tmp_path / 'out'}", "eval.also=[]"
    measure(place, *settings)
    assert {name for _, name, _ in lines_of(tmp_path / "out/generations.jsonl")} == {"text"}
    rejects = read_lines(tmp_path / "out/prompts.rejects.jsonl")
    assert len(rejects) == len(records)
    assert all(reject["reason"].startswith(f"{reject['record']['id']}: ") for reject in rejects)
    write_lines(prompts, *(place / "prompts.jsonl").read_text().splitlines()[:4])
    with pytest.raises(UserError, match=re.escape("(4 not text only)")):  # where no other is left
        lookup = "eval.proposer=prompt_lookup", "eval.tree={policy: chain, nodes: 4}", "eval.drafter=null"
        measure(place, *settings, *lookup, f"target.model={target_dir}", "--plan")


def test_replay_reads_the_pictures_of_recorded_answers(
    place: Path, lines: dict[Any, dict[str, Any]], tmp_path: Path
) -> None:
    """The rounds of decoding, by drafters that read pictures and by one that would be wrong without them."""
    measure(place, "eval.mode=replay")
    replayed = lines_of(place / "run/eval/replay/generations.jsonl")
    assert replayed.keys() == lines.keys()
    for key, line in replayed.items():
        for name in ("token_ids", "accepted_per_round", "pictures"):
            assert line.get(name) == lines[key].get(name), (key, name)
    line = lines[PLAIN, "part", 1]
    picture(24, 16, 5).save(tmp_path / "a.png")
    other = line | {"pictures": [line["pictures"][0] | {"path": str(tmp_path / "a.png")}]}
    without = {key: value for key, value in line.items() if key != "pictures"}
    for wrong, reason in ((other, "picture changed"), (without, "pictures and placeholders differ")):
        answers = write_lines(tmp_path / "generations.jsonl", wrong)
        with pytest.raises(UserError, match=re.escape(f"eval.answers: {answers}:1: {reason}: ")):
            measure(place, "eval.mode=replay", f"eval.answers={answers}", f"eval.out={tmp_path}")


def thumbnails(page: str) -> list[Image.Image]:
    found = re.findall(r'<img src="data:image/(?:jpeg|png);base64,([^"]+)" [^>]*loading="lazy"', page)
    return [Image.open(io.BytesIO(base64.b64decode(each))) for each in found]


def test_the_report_shows_each_picture_beside_its_answer(place: Path, lines: dict[Any, dict[str, Any]]) -> None:
    page = (place / "run/eval/report.html").read_text()
    answers = {re.findall(r"· (\w+), turn (\d)", part)[0]: part for part in page.split("<details")[1:8]}
    counts = {"".join(key): part.count("<img ") for key, part in answers.items()}
    assert counts == {"part1": 1, "column1": 1, "url1": 1, "text1": 0, "turns1": 1, "turns2": 1, "turns3": 3}
    (small,) = thumbnails(answers["part", "1"])
    with Image.open(place / "a.png") as whole:
        assert small.size == whole.size
        difference = ImageChops.difference(small.convert("RGB"), whole.convert("RGB"))
        assert sum(ImageStat.Stat(difference).mean) < 45  # JPEG blurs the colours of small squares
    others = [ImageChops.difference(small, each).getbbox() for each in thumbnails(answers["column", "1"])]
    assert all(others)


def test_the_report_makes_pictures_small_and_says_which_are_gone(tmp_path: Path) -> None:
    picture(900, 300).save(tmp_path / "large.png")
    named = {"path": str(tmp_path / "large.png"), "sha256": digest(tmp_path / "large.png")}
    recipe = make_recipe(tmp_path)
    evaluate(recipe, [("a", None, "x", 1)])
    path = generations_path(recipe)
    shown = [named, named | {"sha256": "0" * 64}, {"path": "<b>\u202e\ud800.png"}]
    write_lines(path, *(line | {"pictures": shown} for line in read_lines(path)))
    page = page_of(recipe)
    assert [each.size for each in thumbnails(page)] == [(256, 85)] and "picture changed: " in page
    assert "picture missing: " in page and "&lt;b&gt;" in page and "\u202e" not in page
