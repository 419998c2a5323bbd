"""The vision demo's pictures, and the check of what is said about them."""

import collections
import json
import random
from pathlib import Path

import pytest

from demos.descriptions import checked_statements, description_of
from demos.scenes import SPLITS, ChartBar, Scene, Thing, scene_at
from draftsmith.data_gen import regenerate
from tests.training_runs import ROOT, run_main

KINDS = {"total", "placed", "tally", "relation", "blank", "bars", "nth", "height", "most", "versus"}
THINGS = Scene(
    things=(
        Thing(0, "red", "circle", size="small"),
        Thing(2, "blue", "square", size="large"),
        Thing(3, "orange", "sign", word="CAT"),
        Thing(5, "red", "cross", size="large"),
    )
)
BARS = Scene(bars=(ChartBar("red", 2), ChartBar("green", 5), ChartBar("blue", 2), ChartBar("yellow", 1)))


def test_splits_share_no_composition():
    train, heldout = ({scene_at(split, i).composition for i in range(2000)} for split in SPLITS)
    assert len(train) > 1000 and len(heldout) > 500
    assert not train & heldout
    with pytest.raises(ValueError, match="'test': one of train, heldout"):
        scene_at("test", 0)


def test_descriptions_are_true():
    """On the pictures that they describe; about other ones nearly all that they say is false."""
    kinds, about_others, lengths = collections.Counter(), [], []
    series = [scene_at(split, index) for split in SPLITS for index in range(300)]
    for scene, other in zip(series, series[1:] + series[:1], strict=True):
        text = description_of(scene, random.Random(str(scene)))
        statements = checked_statements(text, scene)
        assert [statement.text for statement in statements if statement.holds is False or not statement.kind] == []
        assert ". ".join(statement.text for statement in statements) + "." == text
        kinds.update(statement.kind for statement in statements)
        lengths.append(len(text.split()))
        about_others += [
            statement.holds for statement in checked_statements(text, other) if statement.holds is not None
        ]
    assert set(kinds) == KINDS | {"remark"}
    assert max(lengths) <= 225 and sum(lengths) / len(lengths) > 80
    assert sum(about_others) / len(about_others) < 0.1


# True sentences, and false ones that differ from each in little.
OF_THINGS = {
    "I count four things.": ["I count three things.", "The chart has four bars."],
    "At the top left there is a little red circle.": [
        "At the top right there is a little red circle.",
        "At the top left there is a big red circle.",
        "At the top left there is a little blue circle.",
        "At the top left there is a little red square.",
    ],
    "An orange sign that says CAT is on the left of the middle row.": [
        "An orange sign that says DOG is on the left of the middle row."
    ],
    "The number of red things is two.": ["The number of red things is one."],
    "The small red circle is above the orange sign.": [
        "The small red circle is below the orange sign.",
        "The small red circle is to the left of the orange sign.",
        "The small red circle is above the yellow sign.",
    ],
    "The big red cross stands further right than the orange sign.": [
        "The big red cross stands further left than the orange sign."
    ],
    "The bottom row is empty.": ["The top row is empty."],
}
OF_BARS = {
    "This is a chart with four bars.": ["This is a chart with three bars."],
    "The second bar is green and five units high.": [
        "The first bar is green and five units high.",
        "The second bar is red and five units high.",
        "The second bar is green and four units high.",
        "The fifth bar is green and five units high.",
    ],
    "The yellow bar has a height of one unit.": ["The yellow bar has a height of two units."],
    "The tallest bar is green.": ["The tallest bar is red."],
    "The green bar is taller than the red bar.": [
        "The green bar is shorter than the red bar.",
        "The red bar is taller than the green bar.",
        "The green bar is taller than the purple bar.",
    ],
    "Red is as tall as blue.": ["Red is taller than blue.", "Red is as tall as red."],
}


@pytest.mark.parametrize(
    ("scene", "true", "false"),
    [(scene, *each) for scene, found in ((THINGS, OF_THINGS), (BARS, OF_BARS)) for each in found.items()],
)
def test_planted_falsehoods_are_found(scene: Scene, true: str, false: list[str]):
    (statement,) = checked_statements(true, scene)
    assert statement.kind in KINDS and statement.holds is True
    for sentence in false:
        (statement,) = checked_statements(sentence, scene)
        assert statement.kind in KINDS and statement.holds is False, sentence


@pytest.mark.slow
def test_the_target_tells_what_it_sees(tmp_path: Path) -> None:
    """Of two training pictures, by regeneration as the recipe has it, but greedily."""
    words = [f"output_dir={tmp_path}", f"data.conversations={tmp_path}/conversations.jsonl", "target.device=cpu"]
    run_main(
        regenerate, ROOT / "recipes/demo-vision.yaml", *words, "data.max_prompts=2", "data.generator.temperature=0"
    )
    records = [json.loads(line) for line in (tmp_path / "conversations.jsonl").read_text().splitlines()]
    for record in records:
        scene = scene_at("train", int(record["id"].split("/")[-1]))
        statements = checked_statements(record["messages"][-1]["content"], scene)
        held = [statement.holds for statement in statements if statement.holds is not None]
        assert len(held) >= 2 and sum(held) >= len(held) / 2, (statements, scene)
