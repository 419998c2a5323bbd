"""The vision demo's pictures: scenes of shapes and signs, and bar charts, drawn from a seed.

    Scene(things=...)   one to five things, each in a cell of its own:      0 1 2
                        shapes of six colours and two sizes, and signs      3 4 5
                        of six colours that bear one of eight words         6 7 8
    Scene(bars=...)     three to five bars of different colours, from left to right, one to six units high

`scene_at(split, index)` is the same on every machine. The splits share no composition, that is what a scene shows
without places and sizes: {red circle, blue square} is either in training scenes or in held-out ones. All pictures are
128 x 128 pixels, which are 256 patches of 8 x 8.
"""

import hashlib
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

SPLITS = ("train", "heldout")
PIXELS = 128  # width and height of a picture
COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (38, 84, 214),
    "yellow": (244, 208, 32),
    "purple": (140, 60, 170),
    "orange": (245, 130, 32),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
WORDS = ("BOX", "BUS", "CAT", "CUP", "DOG", "HAT", "KEY", "SUN")
CELLS = 9
MAX_THINGS = 5
BARS = (3, 5)  # fewest and most
MAX_HEIGHT = 6  # units

_CHART_SHARE = 0.25  # of all pictures
_SIGN_SHARE = 0.2  # of all things
_CELL_PIXELS = PIXELS / 3
_JITTER = 2  # pixels by which a thing may stand off its cell's centre
_RADIUS = {"small": 9, "large": 16}  # pixels
_UNIT = 17  # pixels of a bar's unit of height
_BASELINE = 118  # y of the bars' feet
_GROUND, _INK, _GRID = (250, 250, 250), (20, 20, 20), (205, 205, 205)
# 5 x 7 dots, a row per word: no font file, hence the same pixels everywhere.
_GLYPHS = {
    "A": "01110 10001 10001 11111 10001 10001 10001",
    "B": "11110 10001 10001 11110 10001 10001 11110",
    "C": "01110 10001 10000 10000 10000 10001 01110",
    "D": "11110 10001 10001 10001 10001 10001 11110",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "G": "01110 10001 10000 10111 10001 10001 01110",
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "K": "10001 10010 10100 11000 10100 10010 10001",
    "N": "10001 11001 10101 10101 10011 10001 10001",
    "O": "01110 10001 10001 10001 10001 10001 01110",
    "P": "11110 10001 10001 11110 10000 10000 10000",
    "S": "01111 10000 10000 01110 00001 00001 11110",
    "T": "11111 00100 00100 00100 00100 00100 00100",
    "U": "10001 10001 10001 10001 10001 10001 01110",
    "X": "10001 10001 01010 00100 01010 10001 10001",
    "Y": "10001 10001 01010 00100 00100 00100 00100",
}
_DOT = 2  # pixels


@dataclass(frozen=True)
class Thing:
    """A shape, or a sign (shape "sign") with a word and without a size."""

    cell: int
    colour: str
    shape: str
    size: str = ""
    word: str = ""

    @property
    def row(self) -> int:
        return self.cell // 3

    @property
    def column(self) -> int:
        return self.cell % 3


@dataclass(frozen=True)
class ChartBar:
    colour: str
    height: int  # units, 1 to MAX_HEIGHT


@dataclass(frozen=True)
class Scene:
    """What a picture shows: things, in the order of their cells, or bars."""

    things: tuple[Thing, ...] = ()
    bars: tuple[ChartBar, ...] = ()
    seed: int = 0  # of where in its cell each thing stands

    @property
    def composition(self) -> tuple[tuple[str, ...], ...]:
        """What is shown, without places and sizes, sorted."""
        things = [(thing.colour, thing.shape, thing.word) for thing in self.things]
        return tuple(sorted(things + [(bar.colour, "bar", str(bar.height)) for bar in self.bars]))

    @property
    def split(self) -> str:
        """A hash of the composition holds one in ten out."""
        return "heldout" if hashlib.sha256(repr(self.composition).encode()).digest()[0] % 10 == 0 else "train"


def scene_at(split: str, index: int, seed: int | str = 0) -> Scene:
    """Number `index` of a split's endless series.

    Raises:
        ValueError: an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
    order = random.Random(f"{split}/{seed}/{index}")
    while True:
        scene = _random_scene(order)
        if scene.split == split:
            return scene


def _random_scene(order: random.Random) -> Scene:
    colours = list(COLOURS)
    if order.random() < _CHART_SHARE:
        shown = order.sample(colours, order.randint(*BARS))
        return Scene(bars=tuple(ChartBar(colour, order.randint(1, MAX_HEIGHT)) for colour in shown))
    things = []
    for cell in sorted(order.sample(range(CELLS), order.randint(1, MAX_THINGS))):
        colour = order.choice(colours)
        if order.random() < _SIGN_SHARE:
            things.append(Thing(cell, colour, "sign", word=order.choice(WORDS)))
        else:
            things.append(Thing(cell, colour, order.choice(SHAPES), size=order.choice(SIZES)))
    return Scene(things=tuple(things), seed=order.getrandbits(32))


def draw(scene: Scene) -> Image.Image:
    """The scene as an RGB picture of PIXELS x PIXELS."""
    picture = Image.new("RGB", (PIXELS, PIXELS), _GROUND)
    canvas = ImageDraw.Draw(picture)
    if scene.bars:
        _draw_chart(canvas, scene.bars)
    order = random.Random(scene.seed)
    for thing in scene.things:
        x, y = ((place + 0.5) * _CELL_PIXELS + order.randint(-_JITTER, _JITTER) for place in (thing.column, thing.row))
        _draw_thing(canvas, thing, round(x), round(y))
    return picture


def _draw_chart(canvas: ImageDraw.ImageDraw, bars: tuple[ChartBar, ...]) -> None:
    for height in range(1, MAX_HEIGHT + 1):
        y = _BASELINE - height * _UNIT
        canvas.line([(0, y), (PIXELS, y)], fill=_GRID)
    slot = PIXELS / len(bars)
    for i, bar in enumerate(bars):
        top = _BASELINE - bar.height * _UNIT
        corners = [(round((i + 0.2) * slot), top), (round((i + 0.8) * slot), _BASELINE)]
        canvas.rectangle(corners, fill=COLOURS[bar.colour])
    canvas.line([(0, _BASELINE), (PIXELS, _BASELINE)], fill=_INK, width=2)


def _draw_thing(canvas: ImageDraw.ImageDraw, thing: Thing, x: int, y: int) -> None:
    """`x`, `y`: its centre."""
    fill = COLOURS[thing.colour]
    if thing.shape == "sign":
        letters = _INK if thing.colour in ("yellow", "orange") else _GROUND
        canvas.rectangle([x - 19, y - 10, x + 19, y + 10], fill=fill, outline=_INK)
        for i, letter in enumerate(thing.word):
            for row, dots in enumerate(_GLYPHS[letter].split()):
                for column, dot in enumerate(dots):
                    if dot == "1":
                        left, top = x - 17 + (6 * i + column) * _DOT, y - 7 + row * _DOT
                        canvas.rectangle([left, top, left + _DOT - 1, top + _DOT - 1], fill=letters)
        return
    r = _RADIUS[thing.size]
    if thing.shape == "circle":
        canvas.ellipse([x - r, y - r, x + r, y + r], fill=fill)
    elif thing.shape == "square":
        canvas.rectangle([x - r, y - r, x + r, y + r], fill=fill)
    elif thing.shape == "triangle":
        canvas.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=fill)
    else:
        arm = r // 3
        canvas.rectangle([x - r, y - arm, x + r, y + arm], fill=fill)
        canvas.rectangle([x - arm, y - r, x + arm, y + r], fill=fill)
