"""The image demo's pictures: handwritten digits, coloured by a program.

    "a yellow seven on blue"    a digit that a person wrote (scikit-learn's 1,797 scans of 8 x 8), warped at random,
                                in one of six inks on one of six grounds, 32 x 32 pixels

Ink and ground are mottled, each by a smooth random field of its own with cells of 4 x 4 pixels, and every pixel is
noisy. No caption says how, so a model that writes such pictures piece by piece has many pieces to choose from. The
scans of a split are its own: every tenth is held out. A picture depends on its split, its number and its seed alone.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy
from PIL import Image

from draftsmith.recipes.errors import UserError

SPLITS = ("train", "heldout")
PIXELS = 32  # width and height of a picture
CELL = 4  # pixels: side of a piece of texture, and of the square that one code of the autoencoder stands for
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
INKS = {
    "white": (236, 236, 236),
    "yellow": (240, 216, 40),
    "orange": (244, 138, 30),
    "pink": (240, 130, 190),
    "cyan": (70, 214, 226),
    "lime": (140, 226, 60),
}
GROUNDS = {
    "black": (28, 28, 28),
    "blue": (34, 56, 168),
    "purple": (104, 38, 132),
    "brown": (104, 62, 28),
    "green": (18, 92, 52),
    "red": (156, 26, 36),
}

_HELD_OUT = 10  # one scan in so many
_SCAN = 8  # pixels
_MARGIN = 2  # empty pixels around a scan, so that its warped edge is not cut
_MOTTLE = {"ink": 22.0, "ground": 26.0}  # standard deviation of the texture, of 255
_NOISE = 4.0  # standard deviation of a pixel's own noise, of 255


@dataclass(frozen=True)
class Caption:
    """What a picture shows."""

    ink: str
    digit: int
    ground: str

    @property
    def text(self) -> str:
        article = "an" if self.ink[0] in "aeiou" else "a"
        return f"{article} {self.ink} {DIGITS[self.digit]} on {self.ground}"

    @classmethod
    def parse(cls, text: str) -> "Caption":
        """Raises ValueError if `text` is no caption."""
        if text not in _CAPTION_OF:
            raise ValueError(f"no caption of a picture: {text!r}, unlike {cls('yellow', 7, 'blue').text!r}")
        return _CAPTION_OF[text]


CAPTIONS = tuple(Caption(*parts) for parts in itertools.product(INKS, range(10), GROUNDS))
_CAPTION_OF = {caption.text: caption for caption in CAPTIONS}


@cache
def digit_scans(split: str) -> dict[int, numpy.ndarray]:
    """{digit: [N, 8, 8] in 0 to 1} of the scans of a split.

    Raises:
        ValueError: an unknown split.
        UserError: scikit-learn, which has them, is not installed.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: one of {', '.join(SPLITS)}")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the demo's digits are in scikit-learn: pip install scikit-learn") from None
    pixels, shown = load_digits(return_X_y=True)  # [N, 64] in 0 to 16, [N]
    scans = numpy.asarray(pixels).reshape(-1, _SCAN, _SCAN) / 16
    kept = (numpy.arange(len(scans)) % _HELD_OUT == 0) == (split == "heldout")
    return {digit: scans[kept & (numpy.asarray(shown) == digit)] for digit in range(10)}


def picture_at(
    split: str, index: int, seed: int | str = 0, caption: Caption | None = None
) -> tuple[Caption, numpy.ndarray]:
    """Number `index` of a split's endless series: its caption and its pixels [PIXELS, PIXELS, 3], uint8.

    Args:
        caption: what to draw; None: any.
    """
    scans = digit_scans(split)
    order = random.Random(f"{split}/{seed}/{index}")
    drawn = order.choice(CAPTIONS)
    caption = caption or drawn
    choices = scans[caption.digit]
    return caption, _coloured(choices[order.randrange(len(choices))], caption, order)


def _coloured(scan: numpy.ndarray, caption: Caption, order: random.Random) -> numpy.ndarray:
    """[PIXELS, PIXELS, 3]: a scan in the caption's colours, warped, mottled and noisy."""
    draws = numpy.random.default_rng(order.getrandbits(64))
    mask = numpy.clip((_warped(scan, order) - 0.3) / 0.3, 0, 1)[..., None]  # steeper edges than 8 pixels give
    ink = numpy.array(INKS[caption.ink]) + _mottle(draws, _MOTTLE["ink"])
    ground = numpy.array(GROUNDS[caption.ground]) + _mottle(draws, _MOTTLE["ground"])
    picture = mask * ink + (1 - mask) * ground + draws.normal(0, _NOISE, (PIXELS, PIXELS, 3))
    return numpy.clip(picture.round(), 0, 255).astype(numpy.uint8)


def _warped(scan: numpy.ndarray, order: random.Random) -> numpy.ndarray:
    """[PIXELS, PIXELS]: turned, sheared, scaled and moved."""
    angle, shear = numpy.deg2rad(order.uniform(-12, 12)), order.uniform(-0.15, 0.15)
    scale = order.uniform(0.9, 1.15) * PIXELS / (_SCAN + 1)  # pixels of the picture a pixel of the scan
    turn = numpy.array([[numpy.cos(angle), -numpy.sin(angle)], [numpy.sin(angle), numpy.cos(angle)]])
    back = numpy.linalg.inv(turn @ numpy.array([[1, shear], [0, order.uniform(0.9, 1.1)]])) / scale
    centre = PIXELS / 2 + numpy.array([order.uniform(-2, 2), order.uniform(-2, 2)])
    offset = _SCAN / 2 + _MARGIN - back @ centre
    padded = Image.fromarray(numpy.pad(scan, _MARGIN).astype(numpy.float32))
    coefficients = (*back[0], offset[0], *back[1], offset[1])
    return numpy.asarray(
        padded.transform((PIXELS, PIXELS), Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC)
    )


def _mottle(draws: numpy.random.Generator, deviation: float) -> numpy.ndarray:
    """[PIXELS, PIXELS, 1]: light and shade, a smooth field through one random value a cell."""
    cells = draws.normal(0, deviation, (PIXELS // CELL, PIXELS // CELL)).astype(numpy.float32)
    return numpy.asarray(Image.fromarray(cells).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC))[..., None]


def sheet(rows: Sequence[Sequence[numpy.ndarray]], scale: int = 2) -> Image.Image:
    """Pictures in rows, each enlarged `scale` times, with a light gap."""
    gap, side = 2, PIXELS * scale
    width, height = max(map(len, rows)) * (side + gap) + gap, len(rows) * (side + gap) + gap
    whole = Image.new("RGB", (width, height), (250, 250, 250))
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            enlarged = Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST)
            whole.paste(enlarged, (gap + x * (side + gap), gap + y * (side + gap)))
    return whole
