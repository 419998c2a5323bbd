"""One form for the pictures of records: each is a content part {"type": "image", "path": place, "sha256": if given}.

Forms of a picture in a record
    a content part               {"type": "image", "path" | "url" | "image": place} (transformers),
                                 {"type": "image_url", "image_url": {"url": place}} (OpenAI)
    a placeholder                `<image>` in a user turn's text (LLaVA), or a content part {"type": "image"} without a
                                 place; the columns `image` and `images` name the pictures of all placeholders in order
    no placeholder               the pictures of the columns stand before the first user turn

Placeholders and pictures must match in number. Columns may repeat the pictures that the parts name.

A record without a question (COCO, `file_name` beside a caption) is a user turn that holds its pictures and no text.

Pillow is not imported here, because every command imports this file.
"""

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from draftsmith.recipes.files.atomic import partial_path
from draftsmith.recipes.files.reading import open_bytes
from draftsmith.recipes.prompts.records import COLUMNS, PATH_KEYS, Conversation, json_type, parts_of

PLACEHOLDER = "<image>"
PICTURE_TYPES = ("image", "image_url", "input_image")
_ENDINGS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}  # by first bytes
_HEAD = 1 << 16  # bytes of a file within which COCO's `images` begins


def as_picture_record(record: Any) -> Any:
    """A record as `to_conversation` reads it: bytes of pictures as their path, `file_name` as `image`.

    A record with pictures and without a question becomes a user turn of placeholders. Other records stay as they are.
    """
    if not isinstance(record, dict):
        return record
    record = dict(record)
    if "image" not in record and isinstance(record.get("file_name"), str):
        record["image"] = record["file_name"]
    for column in ("image", "images"):
        if value := record.get(column):
            record[column] = [_cell(each) for each in value] if isinstance(value, list) else _cell(value)
    if all(record.get(column) is None for column in COLUMNS) and (shown := record.get("images") or record.get("image")):
        count = len(shown) if isinstance(shown, list) else 1
        record["messages"] = [{"role": "user", "content": PLACEHOLDER * count}]
    return record


def _cell(value: Any) -> Any:
    """The place in {"url"} of OpenAI's parts, or in a table's {"bytes", "path"} after `plain_row` stored the bytes."""
    if not isinstance(value, dict):
        return value
    return next((value[key] for key in ("bytes", "path", "url") if isinstance(value.get(key), str)), value)


def with_picture_parts(conversation: Conversation) -> list[dict[str, Any]]:
    """The conversation's messages, with every picture as a part and the contents of user turns as lists of parts.

    Raises ValueError, "kind: detail", if pictures and placeholders do not match, or for parts of other kinds.
    """
    messages, open_parts, named = [], [], []
    for index, message in enumerate(conversation.messages):
        role, content, parts = message["role"], message.get("content"), []
        if role != "user":
            # Answers are dropped, system messages and results of tools are not.
            shown = _split(content) if role != "assistant" and isinstance(content, str | list) else []
            if any(part["type"] != "text" for part in shown):
                raise ValueError(f"placeholders: a picture outside the user turns, in the {role} message {index}")
            messages.append(message)
            continue
        for part in _split(content):
            if part["type"] in PICTURE_TYPES:
                given, digest = places_of(part), part.get("sha256")
                if any(not isinstance(place, str) or place != given[0] for place in given):
                    kind = json_type(given[0])
                    raise ValueError(f"wrong type: the picture of message {index} must be one path, this is {kind}")
                if not isinstance(digest, str | None):
                    kind = json_type(digest)
                    raise ValueError(f"wrong type: sha256 of a picture of message {index} must be text, this is {kind}")
                part = {"type": "image"} | ({"path": given[0]} if given else {})
                part |= {} if digest is None else {"sha256": digest}
                (named if given else open_parts).append(part)
            elif part["type"] != "text":
                raise ValueError(f"not text or a picture: {part['type']} in message {index}")
            parts.append(part)
        messages.append(message | {"content": parts})
    images = conversation.images
    if images and not open_parts and not named:
        first = next(message for message in messages if message["role"] == "user")
        first["content"][:0] = [{"type": "image", "path": image} for image in images]
        return messages
    if images == [part["path"] for part in named]:
        images = []
    if len(images) != len(open_parts):
        beside = f", beside {len(named)} that the messages name" if named else ""
        raise ValueError(f"placeholders: {len(open_parts)} of them for pictures: {len(images)}{beside}")
    for part, image in zip(open_parts, images, strict=True):
        part["path"] = image
    return messages


def _split(content: Any) -> list[dict[str, Any]]:
    """A user turn's content as parts, each `<image>` as a part without a place, texts without its line breaks."""
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] != "text" or PLACEHOLDER not in part["text"]:
            parts.append(part)
            continue
        for number, text in enumerate(part["text"].split(PLACEHOLDER)):
            parts += [{"type": "image"}] * (number > 0)
            parts += [{"type": "text", "text": text.strip("\n")}] * bool(text.strip())
    return parts


def pictures_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts that are pictures, in order."""
    return [part for part in parts_of(messages) if part.get("type") in PICTURE_TYPES]


def places_of(part: dict[str, Any]) -> list[Any]:
    """What a picture's part names, key by key; nothing for a placeholder."""
    return [_cell(part[key]) for key in PATH_KEYS if part.get(key) is not None]


# Pictures as data sets pack them: bytes in a binary column, COCO's file of captions.


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
