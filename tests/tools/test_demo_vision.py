"""The vision demo's pictures, and the check of what is said about them."""

import collections
import random

import pytest

from demos.descriptions import checked_statements, description_of
from demos.scenes import SPLITS, ChartBar, Scene, Thing, scene_at

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


@pytest.mark.parametrize(
    ("scene", "true", "false"),
    [
        (THINGS, "I count four things.", "I count three things."),
        (THINGS, "At the top left there is a little red circle.", "At the top left there is a big red circle."),
        (THINGS, "The number of red things is two.", "The number of red things is one."),
        (THINGS, "The small red circle is above the orange sign.", "The orange sign is above the small red circle."),
        (THINGS, "The bottom row is empty.", "The top row is empty."),
        (BARS, "The second bar is green and five units high.", "The second bar is green and four units high."),
        (BARS, "The yellow bar has a height of one unit.", "The yellow bar has a height of two units."),
        (BARS, "The tallest bar is green.", "The shortest bar is green."),
        (BARS, "The green bar is taller than the red bar.", "The red bar is taller than the green bar."),
        (BARS, "Red is as tall as blue.", "Red is as tall as red."),
    ],
)
def test_planted_falsehoods_are_found(scene: Scene, true: str, false: str):
    for sentence, holds in ((true, True), (false, False)):
        (statement,) = checked_statements(sentence, scene)
        assert statement.kind in KINDS and statement.holds is holds


def test_what_cannot_be_checked():
    text = "That is all. The weather is fine. The first bar is pretty. There is a red. The first bar is red and two"
    assert [(s.kind, s.holds) for s in checked_statements(text, BARS)] == [("remark", None), *[("", None)] * 3]
