"""Reading pictures: every format and mode as upright RGB, every refusal with its kind, damaged files without a hang."""

import base64
import functools
import hashlib
import io
import os
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import strategies as st
from PIL import ExifTags, Image

from draftsmith.recipes.prompts import pictures
from draftsmith.recipes.prompts.pictures import FORMATS, MAX_RATIO, UnusablePicture, read_picture
from tests.strategies import damaged_bytes, for_all
from tests.thinning import EXHAUSTIVE

RED, BLUE, WHITE = (200, 30, 30), (30, 30, 200), (255, 255, 255)


def scene(width: int = 24, height: int = 16) -> Image.Image:
    """Blue, with red in the upper left quarter."""
    image = Image.new("RGB", (width, height), BLUE)
    image.paste(RED, (0, 0, width // 2, height // 2))
    return image


def noise(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    values = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(values)


def saved(image: Image.Image, form: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def read(tmp_path: Path, content: bytes) -> Image.Image:
    (tmp_path / "picture").write_bytes(content)
    return read_picture("picture", tmp_path).image


def refused(tmp_path: Path, content: bytes) -> str:
    """The kind."""
    with pytest.raises(UnusablePicture) as caught:
        read(tmp_path, content)
    return str(caught.value).split(":")[0]


def near(found: Any, expected: tuple[int, int, int], most: int = 12) -> bool:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= most


# What a picture becomes.


@pytest.mark.parametrize(
    "content",
    [
        *(saved(scene(), form) for form in FORMATS),
        saved(scene().quantize(8), "PNG"),
        saved(scene().convert("CMYK"), "JPEG", quality=95),
        *(saved(scene(), form, save_all=True, append_images=[noise(24, 16)]) for form in ("GIF", "WEBP", "PNG")),
    ],
    ids=lambda content: "",
)
def test_every_format_and_mode_is_read_as_rgb(tmp_path: Path, content: bytes) -> None:
    """Of an animation the first frame."""
    image = read(tmp_path, content)
    assert image.mode == "RGB" and image.size == (24, 16)
    assert near(image.getpixel((3, 3)), RED) and near(image.getpixel((20, 12)), BLUE)


def test_gray_of_16_bits(tmp_path: Path) -> None:
    deep = numpy.array([[0, 255, 256], [6500, 40_000, 65_535]], dtype=numpy.uint16)
    found = numpy.asarray(read(tmp_path, saved(Image.fromarray(deep), "PNG")))
    assert (found == (deep >> 8)[:, :, None]).all()


@pytest.mark.parametrize(("form", "settings"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_transparency_is_over_white(tmp_path: Path, form: str, settings: dict[str, Any]) -> None:
    image = scene().convert("RGBA")
    image.paste((*BLUE, 0), (12, 8, 24, 16))
    image.paste((0, 0, 0, 51), (0, 8, 12, 16))  # a fifth of black
    found = read(tmp_path, saved(image, form, **settings))
    assert found.getpixel((20, 12)) == WHITE and found.getpixel((3, 3)) == RED and found.getpixel((3, 12)) == (204,) * 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    """The red quarter of the stored picture moves as the EXIF standard says: row 0 is its top, column 0 its left."""
    content = saved(scene(), "JPEG", exif=turned(orientation), quality=95)
    width, height = size = read(tmp_path, content).size
    assert size == ((24, 16) if orientation < 5 else (16, 24))
    place = (3 if orientation in (1, 4, 5, 8) else width - 4, 3 if orientation in (1, 2, 5, 6) else height - 4)
    assert near(read(tmp_path, content).getpixel(place), RED, 25)


# Where a picture is.


def test_places(tmp_path: Path) -> None:
    content, path = saved(scene(), "PNG"), tmp_path / "a b.png"
    path.write_bytes(content)
    digest, encoded = hashlib.sha256(content).hexdigest(), base64.b64encode(content).decode()
    for place in ("a b.png", str(path), f"file://{tmp_path}/a%20b.png", f"FILE://localhost{tmp_path}/a%20b.png"):
        found = read_picture(place, tmp_path)
        assert (found.path, found.digest) == (path, digest)
    for place in (f"data:image/png;base64,{encoded}", f"DATA:;base64,{encoded.replace('+', '%2B')}"):
        found = read_picture(place, tmp_path)
        assert (found.path, found.digest, found.content) == (None, digest, content)


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *((place, "picture URL") for place in ("http://example.org/a.png", "file://elsewhere/a.png")),
        *((place, "picture missing") for place in ("nowhere.png", "empty/inside.png", "a\0b")),
        *((place, "picture unreadable") for place in ("x" * 5000, "", ".", "pipe")),
        *((f"data:image/png{end}", "picture unreadable") for end in (",abc", ";base64,@@@@")),
        *((place, "not a picture") for place in ("empty", "data:image/png;base64,")),
    ],
)
def test_places_without_a_picture(tmp_path: Path, place: str, kind: str) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(UnusablePicture, match=f"^{kind}: ") as caught:
        read_picture(place, tmp_path)
    assert len(str(caught.value)) < 500


# What is refused.


@pytest.mark.parametrize("form", FORMATS)
def test_other_and_truncated_files(tmp_path: Path, form: str) -> None:
    content = saved(noise(), form)
    assert refused(tmp_path, saved(noise(), "TIFF")) == "not a picture"
    kinds = [refused(tmp_path, content[: int(len(content) * share)]) for share in (0.3, 0.7, 0.95)]
    assert set(kinds) <= {"picture truncated", "picture unreadable", "not a picture"}
    assert form not in ("PNG", "JPEG", "BMP") or kinds[-1] == "picture truncated"


def bomb(form: str) -> bytes:
    """A small file that claims 60,000 x 60,000 pixels."""
    small = bytearray(saved(noise(20, 20), form))
    if form == "WEBP":
        body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (59_999).to_bytes(3, "little") * 2 + bytes(small[12:])
        return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
    places = {"JPEG": (small.find(b"\xff\xc0") + 5, ">HH"), "GIF": (6, "<HH"), "BMP": (18, "<ii"), "PNG": (16, ">II")}
    struct.pack_into(places[form][1], small, places[form][0], 60_000, 60_000)
    if form == "PNG":
        struct.pack_into(">I", small, 29, zlib.crc32(small[12:29]))
    return bytes(small)


@pytest.mark.parametrize("form", FORMATS)
def test_bombs_are_refused_by_their_header(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bomb(form)
    assert refused(tmp_path, content) == "picture too large"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # without Pillow's own limit
    monkeypatch.setattr(Image.Image, "load", None)
    assert refused(tmp_path, content) == "picture too large"


def test_limits_of_pixels_bytes_and_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ((1, 1), (1, MAX_RATIO), (MAX_RATIO, 1), (2, 2 * MAX_RATIO)):
        assert read(tmp_path, saved(scene(*size), "PNG")).size == size
    for size in ((1, MAX_RATIO + 1), (MAX_RATIO + 1, 1), (10, 10 * MAX_RATIO + 1)):
        assert refused(tmp_path, saved(scene(*size), "PNG")) == "picture too narrow"
    monkeypatch.setattr(pictures, "MAX_PIXELS", 24 * 16)
    assert read(tmp_path, saved(scene(24, 16), "PNG")).size == (24, 16)
    assert refused(tmp_path, saved(scene(25, 16), "PNG")) == "picture too large"
    monkeypatch.setattr(pictures, "MAX_BYTES", 500)
    monkeypatch.setattr(Path, "read_bytes", None)  # larger files are not read
    assert refused(tmp_path, b"\x89PNG" + bytes(500)) == "picture too large"
    with pytest.raises(UnusablePicture, match="picture too large: a data URL"):
        read_picture(f"data:;base64,{'A' * 700}", tmp_path)


# Damaged files.


@functools.cache
def good_files() -> list[bytes]:
    small, more = noise(40, 30), {"save_all": True, "append_images": [noise(40, 30, seed) for seed in (1, 2)]}
    return [
        *(saved(small, form, exif=turned(6)) for form in ("PNG", "JPEG", "WEBP")),
        *(saved(small.quantize(16), form) for form in ("PNG", "GIF", "BMP")),
        *(saved(small, form, **more) for form in ("PNG", "WEBP", "GIF")),
    ]


@st.composite
def damaged_pictures(draw: st.DrawFn) -> bytes:
    """Half of the damages hit the header."""
    content = draw(st.sampled_from(good_files()))
    end = draw(st.sampled_from([len(content), 64]))
    return draw(damaged_bytes(content[:end])) + content[end:]


@pytest.mark.parametrize("examples", [100, pytest.param(3000, marks=EXHAUSTIVE)])
def test_damaged_files_are_read_or_refused(tmp_path: Path, examples: int) -> None:
    """Nothing but UnusablePicture is raised."""
    ends = Counter[str]()

    @for_all(examples, content=damaged_pictures())
    def check(content: bytes) -> None:
        try:
            assert read(tmp_path, content).mode == "RGB"
            ends["read"] += 1
        except UnusablePicture as unusable:
            kind, colon, detail = str(unusable).partition(": ")
            assert colon and detail
            ends[kind] += 1

    # The damage is neither harmless nor always fatal, and kinds are told apart.
    assert examples / 10 < ends["read"] < examples * 9 / 10 and len(ends) >= 4, ends
