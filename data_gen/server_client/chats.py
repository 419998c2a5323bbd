"""Prompts with pictures for servers: chat completions, because completions take token ids alone.

The server renders the messages by its own template and processor. So a reply must name as many prompt tokens as the
prompt has here, and, where it gives their ids, the same ones outside the pictures (`answers.read_answer`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.models.prompt import Prompt
from draftsmith.recipes.prompts.picture_files import data_url
from draftsmith.recipes.prompts.pictures import plain_bytes, read_picture


@dataclass(frozen=True, eq=False)
class ChatPrompt(Prompt):
    """A prompt with the messages that it was made of."""

    messages: Sequence[dict[str, Any]] = ()  # pictures as `with_named_pictures` names them
    tools: Sequence[dict[str, Any]] = ()  # function schemas


def chat_of(prompt: ChatPrompt, template_args: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that holds the prompt: `messages`, with pictures as data URLs, `tools`, template variables.

    Raises:
        UnusablePicture: a picture is gone or changed.
    """

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] != "image":
            return given
        picture = read_picture(given["path"], Path(), given["sha256"])
        return {"type": "image_url", "image_url": {"url": data_url(plain_bytes(picture))}}

    def sent(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        return message | {"content": [part(each) for each in content]} if isinstance(content, list) else message

    more = {"tools": list(prompt.tools), "chat_template_kwargs": template_args}
    return {"messages": [sent(message) for message in prompt.messages], **{k: v for k, v in more.items() if v}}
