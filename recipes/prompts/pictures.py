"""Reads and checks the picture that a prompt names.

A picture is named by a path (relative ones start at the folder of the file that names them), a file:// URL or a data
URL. Pictures are never fetched: http:// and all other URLs are refused. The formats are PNG, JPEG, WebP, GIF and BMP,
told by their content; Pillow's other readers stay off, because some of them start programs (EPS) or read no pixels.

A `Picture` is upright RGB with 8 bits a channel, whatever the file holds:

    EXIF orientation     applied; a damaged one is ignored
    animation            the first frame
    transparency         over white. Pillow's and transformers' own conversion would uncover what the file hides there
    16 bits, gray        the upper 8 bits
    palette, CMYK        as Pillow converts them, without colour profiles

Every refusal is an `UnusablePicture`; docs/pictures.md lists their kinds.
"""

import base64
import binascii
import hashlib
import io
import re
import stat
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from PIL import ExifTags, Image, ImageOps

from draftsmith.recipes.errors import quoted
from draftsmith.recipes.prompts.picture_parts import with_picture_parts
from draftsmith.recipes.prompts.records import Conversation, folder_of
from draftsmith.recipes.prompts.sources import StorePicture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 50_000_000  # a phone's picture of 48 megapixels passes; decoded, it takes 150 MB
MAX_BYTES = 1 << 26  # of a file
MAX_RATIO = 200  # Qwen's processor refuses more


class UnusablePicture(ValueError):
    """Why a picture cannot be used: "kind: detail"."""


@dataclass(frozen=True)
class Picture:
    image: Image.Image  # RGB, upright
    digest: str  # sha256 of the file's bytes, in hexadecimal
    path: Path | None  # absolute; None if a data URL holds the picture
    content: bytes  # the file's bytes


def read_picture(place: str, folder: Path, digest: str | None = None) -> Picture:
    """The picture at `place`, decoded whole; with `digest`, the sha256 that it must have. Raises UnusablePicture."""
    path = _path_of(place, folder)
    content = _data_of(place) if path is None else _bytes_of(path)
    name, found = "a data URL" if path is None else str(path), hashlib.sha256(content).hexdigest()
    if digest is not None and digest != found:
        raise UnusablePicture(
            f"picture changed: {name} has sha256 {found[:16]}, its prompt was made with {digest[:16]}"
        )
    return Picture(decoded_picture(content, name), found, path, content)


def with_named_pictures(conversation: Conversation, store: StorePicture, folder: str | None = None) -> Conversation:
    """The conversation with each picture as a part {"type": "image", "path": absolute, "sha256": of the file's bytes}.

    Raises ValueError, "kind: detail", if a picture cannot be used, or if pictures and placeholders do not match.

    Args:
        store: stores the bytes of a data URL and returns their path.
        folder: where relative paths start. Default: the folder of the conversation's source.
    """
    messages = with_picture_parts(conversation)
    start = folder_of(conversation.source) if folder is None else Path(folder)
    shown = [part for message in messages if message["role"] == "user" for part in message["content"]]
    named = [part for part in shown if part["type"] == "image"]
    for part in named:
        picture = read_picture(part["path"], start, part.get("sha256"))
        path = store(picture.content) if picture.path is None else str(picture.path)
        part |= {"path": path, "sha256": picture.digest}
    return replace(conversation, messages=messages, images=[]) if named else conversation


def _path_of(place: str, folder: Path) -> Path | None:
    """The absolute path; None for a data URL. Links stay, so moving their targets does not change prompts."""
    if place[:5].lower() == "data:":
        return None
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", place):
        url = urlsplit(place) if place[:7].lower() == "file://" else None
        if url is None or url.netloc not in ("", "localhost"):
            raise UnusablePicture(f"picture URL: {quoted(place)} is never fetched; download it and name the file")
        place = unquote(url.path)
    return (folder / place).absolute()


def _data_of(url: str) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UnusablePicture(f"picture unreadable: {quoted(url, 60)} is not a data URL in base64")
    if len(text) * 3 // 4 > MAX_BYTES:
        raise UnusablePicture(f"picture too large: a data URL of {len(text):,} characters")
    try:
        return base64.b64decode(unquote(text), validate=True)
    except (binascii.Error, ValueError):
        raise UnusablePicture(f"picture unreadable: {quoted(url, 60)} is not base64") from None


def _bytes_of(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a folder, or a pipe that may never end
            raise UnusablePicture(f"picture unreadable: {path} is not a file")
        if status.st_size > MAX_BYTES:
            raise UnusablePicture(
                f"picture too large: {path} has {status.st_size / 1e6:,.0f} MB, the limit is {MAX_BYTES / 1e6:,.0f}"
            )
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UnusablePicture(f"picture missing: no such file: {path}") from None
    except OSError as error:
        raise UnusablePicture(f"picture unreadable: {quoted(str(path))}: {error.strerror}") from None
    except UnusablePicture:
        raise
    except ValueError as error:  # a path with a null character
        raise UnusablePicture(f"picture missing: {quoted(str(path))}: {error}") from None


def decoded_picture(content: bytes, name: str) -> Image.Image:
    """The picture in a file's bytes, as `Picture.image` is. Raises UnusablePicture, which names it `name`."""
    if not content:
        raise UnusablePicture(f"not a picture: {name} is empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes, which are checked here, and about harmless damage
        try:
            _check_size(_webp_canvas(content), name)
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                _check_size(image.size, name)
                image.load()
                return upright_rgb(image)
        except Image.UnidentifiedImageError:
            raise UnusablePicture(f"not a picture: {name} does not begin as {', '.join(FORMATS)} files do") from None
        except Image.DecompressionBombError as error:
            raise UnusablePicture(f"picture too large: {name}: {error}") from None
        except UnusablePicture:
            raise
        except Exception as error:  # Pillow's readers raise a dozen kinds for malformed files
            said = str(error) or type(error).__name__
            kind = "picture truncated" if re.search("truncat|unexpected end", said, re.IGNORECASE) else ""
            raise UnusablePicture(f"{kind or 'picture unreadable'}: {name}: {said.splitlines()[0][:200]}") from None


def _webp_canvas(content: bytes) -> tuple[int, int]:
    """(width, height) of an extended WebP's canvas, which Pillow allocates when it opens the file; (1, 1) of others."""
    if content[:4] != b"RIFF" or content[8:16] != b"WEBPVP8X" or len(content) < 30:
        return 1, 1
    return 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")


def _check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if width * height > MAX_PIXELS:
        raise UnusablePicture(
            f"picture too large: {name} has {width:,} x {height:,} pixels, the limit is {MAX_PIXELS:,}"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UnusablePicture(
            f"picture too narrow: {name} has {width:,} x {height:,} pixels; one side may be {MAX_RATIO} times the other"
        )


def upright_rgb(image: Image.Image) -> Image.Image:
    """The first frame in RGB, turned as its EXIF data says, transparent parts over white."""
    if _orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, or 16 within 32
        import numpy

        values: Any = numpy.asarray(image)
        image = Image.fromarray((values.clip(0, 0xFFFF) >> 8).astype("uint8"))
    if image.has_transparency_data:
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # as many kinds as above, for a part of the file that the pixels do not need
        return 1


def plain_bytes(picture: Picture) -> bytes:
    """A file in which every reader sees `picture.image`: its own, or a PNG of what is shown here."""
    if picture.content.startswith((b"\x89PNG", b"\xff\xd8\xff")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(picture.content), formats=("PNG", "JPEG")) as file:
                # Not an animated PNG, or the several pictures of an MPO.
                plain = file.mode == "RGB" and not file.has_transparency_data and getattr(file, "n_frames", 1) == 1
                if plain and _orientation(file) == 1:
                    return picture.content
    shown = io.BytesIO()
    picture.image.save(shown, "PNG")
    return shown.getvalue()
