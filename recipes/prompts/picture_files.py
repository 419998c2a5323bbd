"""Pictures as data sets pack them: bytes in a binary column, COCO's file of captions.

Pillow is not imported here, because every command imports this file.
"""

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from draftsmith.recipes.files.atomic import partial_path
from draftsmith.recipes.files.input_files import open_bytes

_ENDINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}  # by first bytes
_HEAD = 1 << 16  # bytes of a file within which COCO's `images` begins


def seems_a_picture(content: bytes) -> bool:
    """Whether a value of a binary column begins as a picture does."""
    return content.startswith(tuple(_ENDINGS))


def _ending(content: bytes, unknown: str) -> str:
    return next((ending for begin, ending in _ENDINGS.items() if content.startswith(begin)), unknown)


def store_picture(content: bytes, folder: Path) -> str:
    """Writes a picture into `folder`, once, named by the sha256 of its content, and returns its absolute path."""
    path = (folder / f"{hashlib.sha256(content).hexdigest()}.{_ending(content, 'bin')}").absolute()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = partial_path(path)  # renamed without a sync: a power cut leaves a file that `read_picture` refuses
        partial.write_bytes(content)
        os.replace(partial, path)
    return str(path)


def data_url(content: bytes) -> str:
    """A picture's bytes as a data URL. The content is not checked."""
    kind = _ending(content, "octet-stream").replace("jpg", "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def coco_pictures(path: str | Path) -> list[dict[str, Any]] | None:
    """[{"id", "file_name"}] of the pictures of a COCO file of captions; None for other files.

    The file is one object with the lists `images` and `annotations` (captions, which no prompt needs).
    """
    with open_bytes(path) as file:
        head = file.read(_HEAD)
        if b'"images"' not in head:
            return None
        try:
            whole = json.loads(head + file.read())
        except (ValueError, RecursionError):
            return None  # JSON lines, or damaged: the ordinary reader says where
    images = whole.get("images") if isinstance(whole, dict) and "annotations" in whole else None
    if not isinstance(images, list) or not all(isinstance(image, dict) for image in images):
        return None
    return [{key: image[key] for key in ("id", "file_name") if key in image} for image in images]
