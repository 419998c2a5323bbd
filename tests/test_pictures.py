"""Reading pictures: every format and mode as upright RGB, every refusal with its kind, damaged files without a hang."""

import base64
import hashlib
import io
import os
import random
import signal
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import ExifTags, Image, ImageSequence, PngImagePlugin

from draftsmith.recipes.prompts import pictures
from draftsmith.recipes.prompts.pictures import FORMATS, MAX_RATIO, UnusablePicture, read_picture
from tests.thinning import EXHAUSTIVE

KINDS = {
    *("picture URL", "picture missing", "picture unreadable", "picture truncated", "not a picture"),
    *("picture too large", "picture too narrow"),
}
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


def read(tmp_path: Path, content: bytes) -> Image.Image:
    (tmp_path / "picture").write_bytes(content)
    return read_picture("picture", tmp_path).image


def refused(tmp_path: Path, content: bytes) -> str:
    """Kind and detail."""
    with pytest.raises(UnusablePicture) as caught:
        read(tmp_path, content)
    assert str(caught.value).split(":")[0] in KINDS
    return str(caught.value)


def near(found: Any, expected: tuple[int, int, int], most: int = 12) -> bool:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= most


# What a picture becomes.


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_read_as_rgb(tmp_path: Path, form: str) -> None:
    image = read(tmp_path, saved(scene(), form))
    assert image.mode == "RGB" and image.size == (24, 16)
    assert near(image.getpixel((3, 3)), RED) and near(image.getpixel((20, 12)), BLUE)


def test_palette_cmyk_gray_and_16_bits(tmp_path: Path) -> None:
    assert near(read(tmp_path, saved(scene().quantize(8), "PNG")).getpixel((3, 3)), RED)
    assert near(read(tmp_path, saved(scene().convert("CMYK"), "JPEG", quality=95)).getpixel((3, 3)), RED)
    assert read(tmp_path, saved(scene().convert("1"), "PNG")).mode == "RGB"
    deep = numpy.array([[0, 255, 256], [6500, 40_000, 65_535]], dtype=numpy.uint16)
    found = numpy.asarray(read(tmp_path, saved(Image.fromarray(deep), "PNG")))
    assert (found == (deep >> 8)[:, :, None]).all()


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_transparency_is_over_white(tmp_path: Path, form: str) -> None:
    image = scene().convert("RGBA")
    image.paste((*BLUE, 0), (12, 8, 24, 16))
    image.paste((0, 0, 0, 51), (0, 8, 12, 16))  # a fifth of black
    settings: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    found = read(tmp_path, saved(image, form, **settings))
    assert found.getpixel((20, 12)) == WHITE and found.getpixel((3, 3)) == RED and found.getpixel((3, 12)) == (204,) * 3
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([*RED, *BLUE])
    assert read(tmp_path, saved(palette, "GIF", transparency=1)).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(tmp_path: Path, form: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE, WHITE)]
    content = saved(frames[0], form, save_all=True, append_images=frames[1:])
    assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(content))))) == 3
    assert near(read(tmp_path, content).getpixel((4, 4)), RED)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    """The red quarter of the stored picture moves as the EXIF standard says: row 0 is its top, column 0 its left."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    found = read(tmp_path, saved(scene(), "JPEG", exif=exif, quality=95))
    assert found.size == ((24, 16) if orientation < 5 else (16, 24))
    left = orientation in (1, 4, 5, 8)
    top = orientation in (1, 2, 5, 6)
    width, height = found.size
    place = (3 if left else width - 4, 3 if top else height - 4)
    assert near(found.getpixel(place), RED, 25)


def test_damaged_exif_is_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    content = saved(scene(), "JPEG", exif=exif)
    at = content.index(b"Exif\0\0") + 6
    assert read(tmp_path, content[:at] + b"\xff" * 20 + content[at + 20 :]).size == (24, 16)


# Where a picture is.


def test_places(tmp_path: Path) -> None:
    content = saved(scene(), "PNG")
    (tmp_path / "a b.png").write_bytes(content)
    path, digest = tmp_path / "a b.png", hashlib.sha256(content).hexdigest()
    for place in ("a b.png", str(path), f"file://{tmp_path}/a%20b.png", f"FILE://localhost{tmp_path}/a%20b.png"):
        found = read_picture(place, tmp_path)
        assert (found.path, found.digest) == (path, digest)
    encoded = base64.b64encode(content).decode()
    for place in (f"data:image/png;base64,{encoded}", f"DATA:;base64,{encoded.replace('+', '%2B')}"):
        found = read_picture(place, tmp_path)
        assert (found.path, found.digest, found.content) == (None, digest, content)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("http://example.org/a.png", "picture URL: 'http://example.org/a.png' is never fetched; download it"),
        ("file://elsewhere/a.png", "picture URL: "),
        ("nowhere.png", "picture missing: no such file: "),
        ("empty/inside.png", "picture missing: "),
        ("a\0b", "picture missing: "),
        ("x" * 5000, "picture unreadable: "),
        ("", "picture unreadable: "),
        (".", "picture unreadable: "),
        ("pipe", "picture unreadable: "),
        ("empty", "not a picture: "),
        ("data:image/png,abc", "picture unreadable: "),
        ("data:image/png;base64,@@@@", "picture unreadable: "),
        ("data:image/png;base64,", "not a picture: "),
    ],
)
def test_places_without_a_picture(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(UnusablePicture) as caught:
        read_picture(place, tmp_path)
    assert str(caught.value).startswith(reason) and len(str(caught.value)) < 500


# What is refused.


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *before: bytes) -> bytes:
    """A PNG of gray pixels, of which only the first row is there."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(b"\0" * (min(width, 1000) + 1)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(before) + rows + chunk(b"IEND", b"")


def test_other_contents(tmp_path: Path) -> None:
    assert refused(tmp_path, b"hello").startswith("not a picture: ")
    assert refused(tmp_path, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").startswith("not a picture: ")
    assert refused(tmp_path, saved(scene(), "TIFF")).startswith("not a picture: ")


@pytest.mark.parametrize("form", FORMATS)
def test_truncated_files(tmp_path: Path, form: str) -> None:
    content = saved(noise(), form)
    for share in (0.3, 0.7, 0.95):
        kind = refused(tmp_path, content[: int(len(content) * share)]).split(":")[0]
        assert kind in ("picture truncated", "picture unreadable", "not a picture")
    if form in ("PNG", "JPEG", "BMP"):
        assert kind == "picture truncated"


def bomb(form: str) -> bytes:
    """A small file that claims 60,000 x 60,000 pixels, or as many as its format can."""
    small = bytearray(saved(noise(20, 20), form))
    if form == "PNG":
        return png(60_000, 60_000)
    if form == "JPEG":
        at = small.index(b"\xff\xc0") + 5
        small[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    elif form == "GIF":
        small[6:10] = struct.pack("<HH", 60_000, 60_000)
    elif form == "BMP":
        small[18:26] = struct.pack("<ii", 60_000, 60_000)
    else:
        body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (59_999).to_bytes(3, "little") * 2 + bytes(small[12:])
        return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
    return bytes(small)


@pytest.mark.parametrize("form", FORMATS)
def test_bombs_are_refused_by_their_header(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bomb(form)
    assert refused(tmp_path, content).startswith("picture too large: ")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # without Pillow's own limit
    monkeypatch.setattr(Image.Image, "load", None)
    assert "has 60,000 x 60,000 pixels, the limit is 50,000,000" in refused(tmp_path, content)


def test_the_limit_of_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_PIXELS", 24 * 16)
    assert read(tmp_path, saved(scene(24, 16), "PNG")).size == (24, 16)
    assert refused(tmp_path, saved(scene(25, 16), "PNG")).startswith("picture too large: ")


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 500)
    monkeypatch.setattr(Path, "read_bytes", None)
    assert refused(tmp_path, b"\x89PNG" + bytes(500)).startswith("picture too large: ")
    with pytest.raises(UnusablePicture, match="picture too large: a data URL"):
        read_picture(f"data:;base64,{'A' * 700}", tmp_path)


def test_unpacked_texts_and_scans_are_limited(tmp_path: Path) -> None:
    text = zlib.compress(bytes(100_000_000))
    assert len(text) < 100_000
    for kind in (b"zTXt", b"iTXt"):
        body = b"Comment\0" + (b"\0" if kind == b"zTXt" else b"\1\0\0\0") + text
        assert refused(tmp_path, png(8, 8, chunk(kind, body))).startswith("picture unreadable: ")
    many = PngImagePlugin.PngInfo()
    many.add_text("Comment", "fine", zip=True)
    assert read(tmp_path, saved(scene(), "PNG", pnginfo=many)).size == (24, 16)
    content = saved(noise(), "JPEG", progressive=True)
    start = content.index(b"\xff\xda")
    assert read(tmp_path, content).size == (64, 48)
    assert "scans" in refused(tmp_path, content[:start] + content[start:-2] * 40 + content[-2:])


def test_small_and_narrow_pictures(tmp_path: Path) -> None:
    for size in ((1, 1), (1, MAX_RATIO), (MAX_RATIO, 1), (2, 2 * MAX_RATIO)):
        assert read(tmp_path, saved(scene(*size), "PNG")).size == size
    for size in ((1, MAX_RATIO + 1), (MAX_RATIO + 1, 1), (10, 10 * MAX_RATIO + 1)):
        assert refused(tmp_path, saved(scene(*size), "PNG")).startswith("picture too narrow: ")


# Damaged files.


class HungError(BaseException):
    """Not an Exception, because the reader turns those into refusals."""


def good_files() -> list[bytes]:
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "some words " * 30, zip=True)
    text.add_itxt("Title", "more", zip=True)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.Make] = "maker"
    small = noise(40, 30)
    deep = Image.fromarray((numpy.arange(1200, dtype=numpy.uint16) * 50).reshape(30, 40))
    frames = [noise(20, 20, seed) for seed in range(3)]
    transparent = small.convert("RGBA")
    transparent.putalpha(100)
    return [
        saved(small, "PNG", pnginfo=text, exif=exif),
        saved(small.quantize(16), "PNG", bits=4),
        saved(deep, "PNG"),
        saved(transparent, "PNG"),
        saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        saved(small, "JPEG", exif=exif),
        saved(small, "JPEG", progressive=True),
        saved(small.convert("CMYK"), "JPEG"),
        saved(small, "WEBP", exif=exif),
        saved(transparent, "WEBP", lossless=True),
        saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        saved(small.quantize(64), "GIF", comment=b"words"),
        saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        saved(small, "BMP"),
        saved(small.quantize(16), "BMP"),
    ]


def flip_bytes(content: bytearray, chance: random.Random, end: int) -> None:
    for _ in range(chance.choice([1, 3, 30])):
        content[chance.randrange(end)] = chance.choice([0, 0xFF, 0x7F, chance.randrange(256)])


def cut(content: bytearray, chance: random.Random, end: int) -> None:
    del content[chance.randrange(end) :]


def drop(content: bytearray, chance: random.Random, end: int) -> None:
    at = chance.randrange(end)
    del content[at : at + chance.choice([1, 4, 50])]


def repeat(content: bytearray, chance: random.Random, end: int) -> None:
    at = chance.randrange(end)
    content[at:at] = content[at : at + chance.choice([1, 8, 200])] * chance.choice([1, 20])


def put_length(content: bytearray, chance: random.Random, end: int) -> None:
    at = chance.randrange(end)
    number = chance.choice([0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF])
    content[at : at + 4] = struct.pack(chance.choice(["<I", ">I"]), number)


DAMAGES: list[Callable[[bytearray, random.Random, int], None]] = [flip_bytes, cut, drop, repeat, put_length]


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="time limits need SIGALRM")
@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=EXHAUSTIVE)])
def test_damaged_files_are_read_or_refused(tmp_path: Path, count: int) -> None:
    """Nothing but UnusablePicture is raised, and nothing hangs. Half of the damages hit the header."""

    def stop(*_: object) -> None:
        raise HungError

    chance, files, ends = random.Random(count), good_files(), Counter()
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for number in range(count):
            content = bytearray(files[number % len(files)])
            end = chance.choice([len(content), min(len(content), 64)])
            chance.choice(DAMAGES)(content, chance, end)
            signal.alarm(20)  # a quiet machine takes milliseconds
            try:
                image = read(tmp_path, bytes(content))
                assert image.mode == "RGB"
                ends["read"] += 1
            except UnusablePicture as unusable:
                kind, colon, detail = str(unusable).partition(": ")
                assert kind in KINDS and colon and detail
                ends[kind] += 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    # The damage is neither harmless nor always fatal, and kinds are told apart.
    assert count / 10 < ends["read"] < count * 9 / 10 and len(ends) >= 5
