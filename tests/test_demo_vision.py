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
        "In the centre there is a little red circle.",
        "At the top left there is a big red circle.",
        "At the top left there is a little blue circle.",
        "At the top left there is a little red square.",
        "At the top left there is a red sign that says CAT.",
    ],
    "An orange sign that says CAT is on the left of the middle row.": [
        "An orange sign that says DOG is on the left of the middle row.",
        "A yellow sign that says CAT is on the left of the middle row.",
        "An orange sign that says CAT is on the right of the middle row.",
    ],
    "The number of red things is two.": ["The number of red things is one."],
    "Counting the crosses gives one.": ["Counting the crosses gives zero.", "Counting the circles gives two."],
    "The number of green things is zero.": ["The number of triangles is one."],
    "The small red circle is above the orange sign.": [
        "The small red circle is below the orange sign.",
        "The orange sign is above the small red circle.",
        "The small red circle is to the left of the orange sign.",
        "The small red circle is above the yellow sign.",
        "The small green circle is above the orange sign.",
        "The small red circle is above the large blue square.",
    ],
    "The big red cross stands further right than the orange sign.": [
        "The big red cross stands further left than the orange sign."
    ],
    "The bottom row is empty.": ["The top row is empty.", "Nothing is in the left column."],
    "Nothing is in the middle column.": ["Nothing is in the middle row."],
}
OF_BARS = {
    "This is a chart with four bars.": ["This is a chart with three bars.", "The picture shows four things."],
    "The second bar is green and five units high.": [
        "The first bar is green and five units high.",
        "The second bar is red and five units high.",
        "The second bar is green and four units high.",
        "The fifth bar is green and five units high.",
    ],
    "The yellow bar has a height of one unit.": ["The yellow bar has a height of two units."],
    "Red stands at two units.": ["Purple stands at two units.", "Purple stands at zero units."],
    "The tallest bar is green.": ["The tallest bar is red.", "The shortest bar is green."],
    "Of all bars the lowest is the yellow one.": ["Of all bars the lowest is the purple one."],
    "The green bar is taller than the red bar.": [
        "The green bar is shorter than the red bar.",
        "The red bar is taller than the green bar.",
        "The green bar is taller than the purple bar.",
        "The green bar is as tall as the red bar.",
    ],
    "Red is as tall as blue.": ["Red is taller than blue.", "Red is as tall as red.", "Red is lower than blue."],
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


def test_twins_are_not_related():
    """ "The small red circle" is neither of two."""
    twins = Scene(
        things=(Thing(0, "red", "circle", size="small"), *THINGS.things[1:3], Thing(6, "red", "circle", "small"))
    )
    text = (
        "The small red circle is above the orange sign. The small red circle is to the left of the large blue square."
    )
    assert [statement.holds for statement in checked_statements(text, twins)] == [False, False]


def test_what_cannot_be_checked():
    text = "That is all. The weather is fine. The first bar is pretty. There is a red. The first bar is red and two"
    assert [(s.kind, s.holds) for s in checked_statements(text, BARS)] == [
        ("remark", None),
        ("", None),
        ("", None),
        ("", None),
    ]
    assert checked_statements("", BARS) == checked_statements("no end", BARS) == []


@pytest.mark.parametrize("direction", ["above", "below", "to the left of", "to the right of"])
def test_things_side_by_side_are_neither_above_nor_below(direction: str) -> None:
    cells = (3, 5) if direction in ("above", "below") else (1, 7)  # one row, or one column
    scene = Scene(things=(Thing(cells[0], "red", "circle", "small"), Thing(cells[1], "blue", "square", "large")))
    for one, other in (("small red circle", "large blue square"), ("large blue square", "small red circle")):
        [statement] = checked_statements(f"The {one} is {direction} the {other}.", scene)
        assert statement.kind == "relation" and statement.holds is False


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
