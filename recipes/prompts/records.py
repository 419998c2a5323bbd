"""Makes a `Conversation` from a record of any known form. prompt_reader.py lists the columns of each form.

Messages and their other keys stay as they are, except where data sets differ and chat templates need one form:

    roles          ShareGPT's and OpenAI's older names become system, developer, user, assistant, tool, whatever their
                   case
    keys           `from` becomes `role`; `value` or `text` becomes `content` (`value` beside `from` even if both stand)
    empty keys     null keys of a message are left out, except `content`, because templates test whether a key exists
    tool calls     {"type": "function", "function": {"name", "arguments"}}, with arguments as an object, not as JSON
                   text (transformers' convention); also from `function_call` keys and from ShareGPT's function_call
                   turns, which join the assistant turn before them
    tools          a list of {"type": "function", "function": schema}, also from JSON text or bare schemas

`recipes.prompts.picture_parts` makes one form of the pictures.
"""

import json
from base64 import b64decode
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from draftsmith.recipes.files.json_text import parse_json, whole_number
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.prompts.benchmark_prompts import benchmark_of
from draftsmith.recipes.prompts.rejects import is_unicode

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "function"), "tool"),
}
CALL_ROLES = ("function_call", "tool_call")

LIST_COLUMNS = ("messages", "conversations", "conversation", "turns")
# Column of a question -> columns of its answer.
TEXT_COLUMNS = {
    "prompt": ("completion", "response"),
    "instruction": ("output", "response"),
    "question": ("answer", "response"),
    "query": ("response", "answer"),
    "problem": ("solution",),
}
COLUMNS = (*LIST_COLUMNS, *TEXT_COLUMNS)
SYSTEM_COLUMNS = ("system", "system_prompt")
ID_COLUMNS = ("id", "question_id")
# Columns of Alpaca and Dolly; their meaning beside other columns is unknown.
BESIDE_INSTRUCTION = ("input", "context")
# Keys of a content part that may hold a path: {"type": "image", "path": ...}, {"image_url": {"url": ...}}.
PATH_KEYS = ("path", "url", "image", "image_url", "video", "video_url", "audio", "audio_url")


@dataclass(frozen=True)
class Conversation:
    id: str  # unique in one reading; default `<file name>:<line>`
    messages: list[dict[str, Any]]  # {"role": one of ROLES, "content": text or OpenAI content parts, ...}
    images: list[str] = field(default_factory=list)  # paths, as written in the record
    # The record's own, with `benchmark` (the source's short name), `category` and `tools` (function schemas).
    meta: dict[str, Any] = field(default_factory=dict)
    # Place, for rejects; not compared.
    source: str = field(default="", compare=False)  # as named in the recipe
    line: int | None = field(default=None, compare=False)  # from 1: line of a text file, row of a table

    @property
    def other_parts(self) -> list[dict[str, Any]]:
        """The content parts that are not text."""
        return [part for part in parts_of(self.messages) if part.get("type") != "text"]

    @cached_property
    def pictures(self) -> list[str]:
        """sha256 of each picture's bytes, or its place if that is no local file; a malformed record's parts."""
        from draftsmith.recipes.prompts.picture_parts import pictures_of, with_picture_parts  # it imports this module

        if not (self.images or self.other_parts):
            return []
        try:
            parts = pictures_of(with_picture_parts(self))  # type: ignore[arg-type]  # seen under two paths
            return [part.get("sha256") or picture_digest(part["path"], folder_of(self.source)) for part in parts]
        except (ValueError, KeyError, TypeError, AttributeError):
            return [json.dumps([self.images, self.other_parts], sort_keys=True, default=str)]


def parts_of(messages: list[Any]) -> list[dict[str, Any]]:
    """The content parts of all messages, in order."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def folder_of(source: str) -> Path:
    """Where relative paths of a source's pictures start."""
    if source.startswith("hf:"):
        return Path()
    return Path((benchmark_of(source) or (None, None))[1] or source).parent


def picture_digest(place: str, folder: Path) -> str:
    """sha256 of a file, in `folder` or in the working directory, or of a data URL's bytes; of all else the place."""
    head, _, text = place.partition(",")
    try:
        if head[:5].lower() == "data:" and head.lower().endswith(";base64"):
            return sha256(b64decode(unquote(text), validate=True)).hexdigest()
        return next((file_digest(path) for path in (folder / place, Path(place)) if path.is_file()), place)
    except (OSError, ValueError):  # neither a path nor base64
        return place


def to_conversation(record: Any, default_id: str, source: str, line: int, benchmark: str = "") -> Conversation:
    """Recognises and checks the record at `line` of `source`. Raises ValueError, "kind: detail", if it is unusable."""
    if not isinstance(record, dict):
        raise ValueError(f"wrong type: a record must be a JSON object, this is {json_type(record)}")
    record = {key: value for key, value in record.items() if value == value}  # without NaN: pandas' empty cells
    messages = _with_system(record, _messages_of(record))
    _check_messages(messages)
    images = _images_of(record)
    meta = record.get("meta") or {}
    if not isinstance(meta, dict):
        raise ValueError(f"wrong type: `meta` must be an object, this is {json_type(meta)}")
    meta = ({"benchmark": benchmark} if benchmark else {}) | meta
    if record.get("category") is not None:
        meta["category"] = record["category"]
    tools = _tools(record["tools"] if record.get("tools") is not None else meta.pop("tools", None))
    if tools:
        meta["tools"] = tools
    conversation = Conversation(_id_of(record, default_id), messages, images, meta, source, line)
    everything = [conversation.id, messages, images, meta]
    if not is_unicode(json.dumps(everything, ensure_ascii=False, default=str)):
        raise ValueError("not Unicode: a lone surrogate in the text")
    return conversation


def stored_conversation(record: Any, path: Path, line: int) -> Conversation:
    """As `to_conversation`, but messages that regenerate wrote are taken as they are."""
    if not is_regenerated(record):
        return to_conversation(record, f"{path.name}:{line}", str(path), line)
    conversation_id, messages = record.get("id"), record.get("messages")
    if not isinstance(conversation_id, str) or not isinstance(messages, list):
        raise ValueError("wrong type: a regenerated conversation has an `id`, text, and `messages`, a list")
    return Conversation(conversation_id, messages, _images_of(record), {}, str(path), line)


def _images_of(record: dict[str, Any]) -> list[str]:
    """Places of the pictures in the columns `images` and `image`, as written."""
    images = record.get("images") or []
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ValueError("wrong type: `images` must be a list of paths")
    if (image := record.get("image")) in (None, "", []):
        return images
    alone = image if isinstance(image, list) else [image]
    if not all(isinstance(each, str) for each in alone):
        raise ValueError("wrong type: `image` must be a path or a list of paths")
    if images not in ([], alone):
        raise ValueError("ambiguous columns: `image` and `images` name different pictures")
    return alone


def _id_of(record: dict[str, Any], default_id: str) -> str:
    for key in ID_COLUMNS:
        value = whole_number(record.get(key))
        if value is None or value == "":
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            found = json.dumps(value, default=str)
            raise ValueError(f"wrong type: `{key}` must be text or a whole number, not {found}")
        return str(value)
    return default_id


# Forms.


def _messages_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    column = next((name for name in COLUMNS if record.get(name) is not None), None)
    if column is None:
        raise ValueError(f"unknown columns: none of {', '.join(COLUMNS)} among {', '.join(map(str, record)) or 'none'}")
    value = record[column]
    if column in LIST_COLUMNS and isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value)  # of a table that stores messages as text
    if column in TEXT_COLUMNS and not (column == "prompt" and isinstance(value, list)):
        return _question_and_answer(column, record)
    if not isinstance(value, list):
        raise ValueError(f"wrong type: `{column}` must be a list, this is {json_type(value)}")
    if column == "turns" or (column == "prompt" and value and all(isinstance(turn, str) for turn in value)):
        return [{"role": "user", "content": turn} for turn in value]
    return _messages(column, value)


def _question_and_answer(column: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """[earlier turns, question, answer], without the answer if its column holds no text."""
    asked = {name: record[name] for name in TEXT_COLUMNS if record.get(name) not in (None, "")}
    if any(text != record[column] for text in asked.values()):
        raise ValueError(f"ambiguous columns: {' and '.join(f'`{name}`' for name in asked)} both ask something")
    beside = [name for name in BESIDE_INSTRUCTION if record.get(name) not in (None, "")]
    if beside and column != "instruction":
        raise ValueError(
            f"ambiguous columns: `{beside[0]}` beside `{column}`; write them as one `prompt`, as they are to be asked"
        )
    texts = [_text(record, name) for name in (column, *beside)]
    answers = [record[name] for name in TEXT_COLUMNS[column] if isinstance(record.get(name), str)]
    if any(answer != answers[0] for answer in answers):
        names = " and ".join(f"`{name}`" for name in TEXT_COLUMNS[column])
        raise ValueError(f"ambiguous columns: {names} hold different answers")
    messages = _history(record.get("history")) if column == "instruction" else []
    messages.append({"role": "user", "content": "\n\n".join(text for text in texts if text.strip()) or texts[0]})
    return [*messages, *({"role": "assistant", "content": answer} for answer in answers[:1])]


def _history(pairs: Any) -> list[dict[str, Any]]:
    """Alpaca's earlier turns: [[question, answer], ...]."""
    messages = []
    for index, pair in enumerate(pairs if isinstance(pairs, list) else [] if pairs is None else [pairs]):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"wrong type: `history[{index}]` must be a list of a question and its answer")
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    return messages


def _with_system(record: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, a `system` column's text before them."""
    for column in SYSTEM_COLUMNS:
        if record.get(column) in (None, ""):
            continue
        text = _text(record, column)
        if not messages or messages[0].get("role") != "system":
            messages = [{"role": "system", "content": text}, *messages]
        elif messages[0].get("content") != text:
            raise ValueError(f"ambiguous columns: `{column}` and the first message are two system messages")
    return messages


def _text(record: dict[str, Any], column: str) -> str:
    if not isinstance(record[column], str):
        raise ValueError(f"wrong type: `{column}` must be text, this is {json_type(record[column])}")
    return record[column]


def _messages(column: str, items: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"wrong type: `{column}[{index}]` must be an object, this is {json_type(item)}")
        message = {key: value for key, value in item.items() if value is not None or key == "content"}
        keys = ("content", "value", "text")
        if "from" in message and "role" not in message:
            message["role"], keys = message.pop("from"), ("value", "content", "text")
        key = next((key for key in keys if message.get(key) is not None), "content")
        if key != "content":
            message["content"] = message.pop(key)
        role = message.get("role")
        if isinstance(role, str) and role.strip().lower() in (*ROLES, *OTHER_ROLES, *CALL_ROLES):
            role = message["role"] = role.strip().lower()
        if role in CALL_ROLES:
            message = {"role": "assistant", "content": None, "tool_calls": message.get("content")}
            if messages and messages[-1].get("role") == "assistant":  # the text before the call
                before = messages.pop()
                earlier = before.get("tool_calls", [])
                messages.append(before | {"tool_calls": [*earlier, *_tool_calls(message["tool_calls"], index)]})
                continue
        elif isinstance(role, str) and role in OTHER_ROLES:
            message["role"] = OTHER_ROLES[role]
        if message.get("function_call") and not message.get("tool_calls"):
            message["tool_calls"] = [message.pop("function_call")]
        if calls := _tool_calls(message.pop("tool_calls", []), index):
            message["tool_calls"] = calls
        messages.append(message)
    return messages


# Tools.


def _tool_calls(value: Any, index: int) -> list[dict[str, Any]]:
    """The calls of message `index` in OpenAI's form, arguments as objects."""
    found = []
    for call in _listed(value, f"the tool calls of message {index}"):
        if "function" not in call and "name" in call:
            rest = {key: entry for key, entry in call.items() if key not in ("name", "arguments", "parameters", "type")}
            arguments = call.get("arguments", call.get("parameters", {}))
            call = {"type": "function", **rest, "function": {"name": call["name"], "arguments": arguments}}
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError):  # malformed JSON stays text
                if isinstance(arguments := parse_json(function["arguments"]), dict):
                    call = call | {"function": function | {"arguments": arguments}}
        found.append(call)
    return found


def _tools(value: Any) -> list[dict[str, Any]]:
    """Function schemas in OpenAI's form."""
    found = []
    for tool in [] if value is None else _listed(value, "`tools`"):
        if "name" in tool and "function" not in tool:
            tool = {"type": "function", "function": {key: entry for key, entry in tool.items() if key != "type"}}
        found.append(tool)
    return found


def _listed(value: Any, what: str) -> list[dict[str, Any]]:
    """The objects in `value`: a list or one object, each or all of them possibly as JSON text."""

    def parsed(part: Any) -> Any:
        try:
            return parse_json(part) if isinstance(part, str) else part
        except ValueError as error:
            raise ValueError(f"wrong type: {what} hold text that is not JSON ({error})") from None

    value = [] if isinstance(value, str) and not value.strip() else parsed(value)
    items = [parsed(item) for item in (value if isinstance(value, list) else [value])]
    for item in items:
        if not isinstance(item, dict):
            raise ValueError(f"wrong type: {what} must be a list of objects, in it is {json_type(item)}")
    return items


# Checks.


def _check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises ValueError for roles, contents or an order of messages that chat templates cannot read."""
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            found = json.dumps(role, default=str)
            raise ValueError(f"unknown role: {found} of message {index}, known are {', '.join(ROLES)}")
        # An assistant turn may have no content if it calls tools or thinks.
        silent = role == "assistant" and (message.get("tool_calls") or message.get("reasoning_content"))
        if not (content is None and silent):
            _check_content(content, index)
        if not isinstance(message.get("reasoning_content", ""), str):
            raise ValueError(f"wrong type: reasoning_content of message {index} must be text")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if role == "user" and all(part["type"] == "text" and not part["text"].strip() for part in parts):
            raise ValueError(f"empty user turn: message {index}")
        before = [earlier["role"] for earlier in messages[:index]]
        if role == "assistant" and before[-1:] == ["assistant"]:
            raise ValueError(f"two assistant turns in a row: messages {index - 1} and {index}")
        if role == "assistant" and "user" not in before:
            raise ValueError(f"no user turn before the first assistant turn: message {index}")
    if all(message["role"] != "user" for message in messages):
        raise ValueError("no user turn")


def _check_content(content: Any, index: int) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ValueError(f"wrong type: content of message {index} must be text or parts, this is {json_type(content)}")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f'wrong type: a content part of message {index} must be an object with a "type"')
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise ValueError(f"wrong type: a text part of message {index} has no text")


def json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def is_regenerated(record: Any) -> bool:
    """Whether the record holds the token ids of its answers, as regenerate writes them."""
    turns = record.get("turns") if isinstance(record, dict) else None
    return bool(turns) and isinstance(turns, list) and isinstance(turns[0], dict) and "output_token_ids" in turns[0]


def validation_rank(conversation_id: str) -> bytes:
    """Validation, and the planner's predictions, keep conversations in the order of this hash, the lowest first.

    It depends only on the id: however the file is sorted, cut or added to, a conversation keeps its place among
    the others, and all its turns lie on one side.
    """
    return sha256(f"validation/{conversation_id}".encode()).digest()
