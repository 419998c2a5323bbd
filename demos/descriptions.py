"""Descriptions of the demo's scenes, and the check of what a description says.

Each kind of statement has several phrasings. `description_of` fills them from a scene. `checked_statements` reads them
back, in any text, and looks whether they hold:

    total      I count three things.                                 nth     The second bar is red and four units high.
    placed     At the top left there is a small red circle.          height  The red bar has a height of four units.
    tally      The number of red things is two.                      most    The tallest bar is red.
    relation   The red sign is above the large blue square.          versus  The red bar is taller than the blue bar.
    blank      The top row is empty.                                 bars    The chart has four bars.

Remarks ("That is all.") and sentences in no such phrasing are not checkable. A statement holds only as a whole: place,
size, colour and shape.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from demos.scenes import CELLS, COLOURS, SHAPES, WORDS, Scene, Thing

REQUESTS = (
    "Describe the picture.",
    "Describe this picture in detail.",
    "What do you see?",
    "What is in the picture?",
    "Write a long description of the picture.",
    "Tell me all that the picture shows.",
)
IMAGINE = ("Imagine a picture and describe it.", "Make up a picture and tell me what it shows.")  # without a picture
_MAX_WORDS = 225  # of a description; punctuation comes on top, 256 tokens are the aim

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ORDINALS = ("first", "second", "third", "fourth", "fifth")
_PLACES = (
    ("at the top left", "in the top left corner"),
    ("at the top centre", "in the middle of the top row"),
    ("at the top right", "in the top right corner"),
    ("at the centre left", "on the left of the middle row"),
    ("in the centre", "in the very middle"),
    ("at the centre right", "on the right of the middle row"),
    ("at the bottom left", "in the bottom left corner"),
    ("at the bottom centre", "in the middle of the bottom row"),
    ("at the bottom right", "in the bottom right corner"),
)
_SIZES = {"small": ("small", "little"), "large": ("large", "big")}
_LINES = {  # cells of a row or column
    **{f"{name} row": range(3 * i, 3 * i + 3) for i, name in enumerate(("top", "middle", "bottom"))},
    **{f"{name} column": range(i, CELLS, 3) for i, name in enumerate(("left", "middle", "right"))},
}
_DIRECTIONS: dict[str, Callable[[Thing, Thing], bool]] = {
    "above": lambda a, b: a.row < b.row,
    "higher up than": lambda a, b: a.row < b.row,
    "below": lambda a, b: a.row > b.row,
    "further down than": lambda a, b: a.row > b.row,
    "to the left of": lambda a, b: a.column < b.column,
    "further left than": lambda a, b: a.column < b.column,
    "to the right of": lambda a, b: a.column > b.column,
    "further right than": lambda a, b: a.column > b.column,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "taller than": lambda a, b: a > b,
    "higher than": lambda a, b: a > b,
    "shorter than": lambda a, b: a < b,
    "lower than": lambda a, b: a < b,
    "as tall as": lambda a, b: a == b,
}
_EXTREMES = {"tallest": max, "highest": max, "shortest": min, "lowest": min}

_PHRASINGS = {
    "total": (
        "I count {things}.",
        "The picture shows {things}.",
        "You can see {things} here.",
        "It is a drawing of {things}.",
    ),
    "placed": (
        "{place} there is {a_thing}.",
        "{place} you can see {a_thing}.",
        "{a_thing} is {place}.",
        "I see {a_thing} {place}.",
    ),
    "tally": ("The number of {kind} is {number}.", "Counting the {kind} gives {number}."),
    "relation": ("{thing} is {direction} {other}.", "{thing} stands {direction} {other}."),
    "blank": ("The {line} is empty.", "Nothing is in the {line}."),
    "bars": ("The chart has {bars}.", "This is a chart with {bars}.", "I count {bars} in this chart."),
    "nth": (
        "The {ordinal} bar is {colour} and {height} high.",
        "As the {ordinal} bar from the left, {colour} reaches {height}.",
    ),
    "height": ("The {colour} bar has a height of {height}.", "{colour} stands at {height}."),
    "most": ("The {extreme} bar is {colour}.", "Of all bars the {extreme} is the {colour} one."),
    "versus": ("The {colour} bar is {comparison} the {other_colour} bar.", "{colour} is {comparison} {other_colour}."),
}
_OPENINGS = ("Here is what I see.", "Let me look at it.", "This is a simple picture.", "I look at the picture closely.")
_DOWNWARDS = ("I go from the top to the bottom.", "I begin at the top.")
_UPWARDS = ("I go from the bottom to the top.", "I begin at the bottom.")
_CLOSINGS = (
    "That is all.",
    "There is nothing more to see.",
    "The rest of the picture is plain.",
    "This is the whole picture.",
)
_REMARKS = {*_OPENINGS, *_DOWNWARDS, *_UPWARDS, *_CLOSINGS}


def _alternatives(words: Sequence[str]) -> str:
    """A pattern of any of `words`, longer ones first: one may begin as another does."""
    return "(?:" + "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) + ")"


_COLOUR, _NUMBER = _alternatives(list(COLOURS)), _alternatives(_NUMBERS)
_SIZE = _alternatives([word for words in _SIZES.values() for word in words])
_PATTERNS = {
    "things": f"{_NUMBER} things?",
    "bars": f"{_NUMBER} bars?",
    "height": f"{_NUMBER} units?",
    "number": _NUMBER,
    "place": _alternatives([phrase for phrases in _PLACES for phrase in phrases]),
    "a_thing": f"(?:an? {_SIZE} {_COLOUR} {_alternatives(SHAPES)}|an? {_COLOUR} sign that says {_alternatives(WORDS)})",
    "thing": f"the (?:{_SIZE} {_COLOUR} {_alternatives(SHAPES)}|{_COLOUR} sign)",
    "kind": f"(?:{_COLOUR} things|{_alternatives([*SHAPES, 'sign'])}e?s)",
    "line": _alternatives(list(_LINES)),
    "ordinal": _alternatives(_ORDINALS),
    "colour": _COLOUR,
    "direction": _alternatives(list(_DIRECTIONS)),
    "comparison": _alternatives(list(_COMPARISONS)),
    "extreme": _alternatives(list(_EXTREMES)),
}
_PATTERNS |= {"other": _PATTERNS["thing"], "other_colour": _PATTERNS["colour"]}


def _reader(phrasing: str) -> re.Pattern[str]:
    """Reads a phrasing back, with a group for each slot."""
    parts = re.split(r"\{(\w+)\}", phrasing.rstrip("."))
    pattern = "".join(f"(?P<{part}>{_PATTERNS[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts))
    return re.compile(pattern, re.IGNORECASE)


_READERS = [(kind, _reader(phrasing)) for kind, phrasings in _PHRASINGS.items() for phrasing in phrasings]


@dataclass(frozen=True)
class Statement:
    """A sentence of a description, and whether it holds."""

    text: str
    kind: str  # a name in the table above, "remark", or "" if no phrasing fits
    holds: bool | None  # None: not checkable


def checked_statements(text: str, scene: Scene) -> list[Statement]:
    """All sentences of `text`, checked against `scene`; an unfinished last one is left out."""
    return [_statement(sentence.strip(), scene) for sentence in text.split(".")[:-1] if sentence.strip()]


def _statement(sentence: str, scene: Scene) -> Statement:
    for kind, reader in _READERS:
        if match := reader.fullmatch(sentence):
            said = {slot: phrase.lower() for slot, phrase in match.groupdict().items()}
            return Statement(sentence, kind, _HOLDS[kind](said, scene))
    return Statement(sentence, "remark" if f"{sentence}." in _REMARKS else "", None)


def _number(phrase: str) -> int:
    return _NUMBERS.index(phrase.split()[0])


def _is(thing: Thing, phrase: str) -> bool:
    """Whether `phrase`, with or without article and word, describes `thing`."""
    _, *words = phrase.split()
    if thing.shape == "sign":
        return words[:2] == [thing.colour, "sign"] and words[2:] in ([], ["that", "says", thing.word.lower()])
    return words[1:] == [thing.colour, thing.shape] and words[0] in _SIZES[thing.size]


def _is_kind(thing: Thing, plural: str) -> bool:
    return plural in (f"{thing.colour} things", _plural(thing.shape))


def _plural(shape: str) -> str:
    return f"{shape}{'es' if shape == 'cross' else 's'}"


def _relation_holds(said: dict[str, str], scene: Scene) -> bool:
    """Each phrase must fit one thing and no other."""
    one, other = ([thing for thing in scene.things if _is(thing, said[slot])] for slot in ("thing", "other"))
    return len(one) == len(other) == 1 and _DIRECTIONS[said["direction"]](one[0], other[0])


def _nth_holds(said: dict[str, str], scene: Scene) -> bool:
    place = _ORDINALS.index(said["ordinal"])
    bars = [(bar.colour, bar.height) for bar in scene.bars]
    return bars[place : place + 1] == [(said["colour"], _number(said["height"]))]


def _height_of(colour: str, scene: Scene) -> int:
    """In units; 0 without such a bar."""
    return next((bar.height for bar in scene.bars if bar.colour == colour), 0)


def _most_holds(said: dict[str, str], scene: Scene) -> bool:
    heights = [bar.height for bar in scene.bars]
    extreme = _EXTREMES[said["extreme"]](heights, default=0)
    return heights.count(extreme) == 1 and _height_of(said["colour"], scene) == extreme


def _versus_holds(said: dict[str, str], scene: Scene) -> bool:
    colours = said["colour"], said["other_colour"]
    one, other = (_height_of(colour, scene) for colour in colours)
    return min(one, other) > 0 and len(set(colours)) == 2 and _COMPARISONS[said["comparison"]](one, other)


_HOLDS: dict[str, Callable[[dict[str, str], Scene], bool]] = {
    "total": lambda said, scene: not scene.bars and _number(said["things"]) == len(scene.things),
    "placed": lambda said, scene: any(
        said["place"] in _PLACES[thing.cell] and _is(thing, said["a_thing"]) for thing in scene.things
    ),
    "tally": lambda said, scene: (
        not scene.bars and _number(said["number"]) == sum(_is_kind(thing, said["kind"]) for thing in scene.things)
    ),
    "relation": _relation_holds,
    "blank": lambda said, scene: not scene.bars and not {t.cell for t in scene.things} & set(_LINES[said["line"]]),
    "bars": lambda said, scene: bool(scene.bars) and _number(said["bars"]) == len(scene.bars),
    "nth": _nth_holds,
    "height": lambda said, scene: 0 < _number(said["height"]) == _height_of(said["colour"], scene),
    "most": _most_holds,
    "versus": _versus_holds,
}


def description_of(scene: Scene, order: random.Random) -> str:
    """A description in which every checkable statement holds; `order` draws phrasings and the order."""
    sentences = [order.choice(_OPENINGS)] if order.random() < 0.5 else []
    if scene.bars:
        first = [_total(scene, order), *(_nth(scene, place, order) for place in range(len(scene.bars)))]
        rest = _comparisons(scene, order)
    else:
        first, rest = _told_things(scene, order), _observations(scene, order)
    closing = [order.choice(_CLOSINGS)] if order.random() < 0.5 else []
    sentences += first
    words = sum(len(sentence.split()) for sentence in sentences + closing)
    for sentence in rest:
        words += len(sentence.split())
        if words > _MAX_WORDS:
            break
        sentences.append(sentence)
    return " ".join(sentences + closing)


def questions_about(scene: Scene, order: random.Random) -> Iterator[tuple[str, str]]:
    """Endless questions about one thing or bar at a time, each with its answer."""
    while True:
        yield _bar_question(scene, order) if scene.bars else _thing_question(scene, order)


def _bar_question(scene: Scene, order: random.Random) -> tuple[str, str]:
    place = order.randrange(len(scene.bars))
    colour, height = scene.bars[place].colour, _units(scene.bars[place].height)
    return order.choice(
        [
            (f"What is the {_ORDINALS[place]} bar?", _nth(scene, place, order)),
            (f"How high is the {colour} bar?", _say("height", order, colour=colour, height=height)),
            ("How many bars are there?", _total(scene, order)),
        ]
    )


def _thing_question(scene: Scene, order: random.Random) -> tuple[str, str]:
    thing = order.choice(scene.things)
    kind = order.choice([f"{thing.colour} things", _plural(thing.shape)])
    what = f"What is {order.choice(_PLACES[thing.cell])}?", _placed(thing, order)
    how_many = [
        (f"How many {kind} are there?", _tally(scene, kind, order)),
        ("How many things are there?", _total(scene, order)),
    ]
    return what if order.random() < 0.6 else order.choice(how_many)


def _say(kind: str, order: random.Random, /, **slots: str) -> str:
    sentence = order.choice(_PHRASINGS[kind]).format(**slots)
    return sentence[0].upper() + sentence[1:]


def _units(height: int) -> str:
    return f"{_NUMBERS[height]} unit{'s' * (height != 1)}"


def _total(scene: Scene, order: random.Random) -> str:
    if scene.bars:
        return _say("bars", order, bars=f"{_NUMBERS[len(scene.bars)]} bars")
    number = len(scene.things)
    return _say("total", order, things=f"{_NUMBERS[number]} thing{'s' * (number != 1)}")


def _placed(thing: Thing, order: random.Random) -> str:
    if thing.shape == "sign":
        phrase = f"{'an' if thing.colour == 'orange' else 'a'} {thing.colour} sign that says {thing.word}"
    else:
        phrase = f"a {order.choice(_SIZES[thing.size])} {thing.colour} {thing.shape}"
    return _say("placed", order, place=order.choice(_PLACES[thing.cell]), a_thing=phrase)


def _tally(scene: Scene, kind: str, order: random.Random) -> str:
    number = sum(_is_kind(thing, kind) for thing in scene.things)
    return _say("tally", order, kind=kind, number=_NUMBERS[number])


def _nth(scene: Scene, place: int, order: random.Random) -> str:
    bar = scene.bars[place]
    return _say("nth", order, ordinal=_ORDINALS[place], colour=bar.colour, height=_units(bar.height))


def _told_things(scene: Scene, order: random.Random) -> list[str]:
    """The total, then every thing with its place, row by row."""
    upwards = order.random() < 0.3
    things = sorted(scene.things, key=lambda thing: (-thing.row if upwards else thing.row, thing.column))
    return [
        _total(scene, order),
        *([order.choice(_UPWARDS)] if upwards else [order.choice(_DOWNWARDS)] * (order.random() < 0.4)),
        *(_placed(thing, order) for thing in things),
    ]


def _observations(scene: Scene, order: random.Random) -> list[str]:
    """Relations, tallies and an empty row or column, shuffled."""
    kinds = [f"{thing.colour} things" for thing in scene.things] + [_plural(thing.shape) for thing in scene.things]
    chosen = order.sample(sorted(set(kinds)), min(len(set(kinds)), 1 + len(scene.things) // 2))
    sentences = [_tally(scene, kind, order) for kind in chosen]
    blank = [line for line, cells in _LINES.items() if not {thing.cell for thing in scene.things} & set(cells)]
    if blank and order.random() < 0.4:
        sentences.append(_say("blank", order, line=order.choice(blank)))
    pairs = [(a, b) for a in scene.things for b in scene.things if a is not b]
    for a, b in order.sample(pairs, min(len(pairs), 2 * len(scene.things) - 2)):
        directions = [phrase for phrase, holds in _DIRECTIONS.items() if holds(a, b)]
        said = {"thing": _the(a, order), "other": _the(b, order), "direction": order.choice(directions)}
        if _relation_holds(said, scene):
            sentences.append(_say("relation", order, **said))
    return order.sample(sentences, len(sentences))


def _the(thing: Thing, order: random.Random) -> str:
    if thing.shape == "sign":
        return f"the {thing.colour} sign"
    return f"the {order.choice(_SIZES[thing.size])} {thing.colour} {thing.shape}"


def _comparisons(scene: Scene, order: random.Random) -> list[str]:
    """Heights, extremes and comparisons of two bars, shuffled."""
    chosen = order.sample(scene.bars, 2)
    sentences = [_say("height", order, colour=bar.colour, height=_units(bar.height)) for bar in chosen]
    extremes = [
        said
        for said in ({"extreme": e, "colour": bar.colour} for e in _EXTREMES for bar in scene.bars)
        if _most_holds(said, scene)
    ]
    if extremes:
        sentences.append(_say("most", order, **order.choice(extremes)))
    pairs = [(a, b) for a in scene.bars for b in scene.bars if a is not b]
    for a, b in order.sample(pairs, len(scene.bars)):
        comparisons = [phrase for phrase, holds in _COMPARISONS.items() if holds(a.height, b.height)]
        said = {"colour": a.colour, "other_colour": b.colour, "comparison": order.choice(comparisons)}
        sentences.append(_say("versus", order, **said))
    return order.sample(sentences, len(sentences))
