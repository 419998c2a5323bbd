"""Prompts with pictures for servers: chat completions, because completions take token ids alone.

The server renders the messages by its own template and processor. So a reply must name as many prompt tokens as the
prompt has here, and, where it gives their ids, the same ones outside the pictures (`answers.read_answer`).

A reply becomes one to a completion:

    choices[].message.content, .delta.content             choices[].text
    prompt_token_ids (vLLM; beside choices)               choices[].prompt_token_ids
    choices[].logprobs.content[].token, "token_id:123"    choices[].logprobs.tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data_gen.server.answers import BadAnswer
from draftsmith.models.prompt import Prompt
from draftsmith.recipes.prompts.picture_files import data_url
from draftsmith.recipes.prompts.pictures import plain_bytes, read_picture


@dataclass(frozen=True, eq=False)
class ChatPrompt(Prompt):
    """A prompt with the messages that it was made of."""

    messages: Sequence[dict[str, Any]] = ()  # pictures as `with_named_pictures` names them
    tools: Sequence[dict[str, Any]] = ()  # function schemas


def chat_of(prompt: ChatPrompt) -> dict[str, Any]:
    """The part of a request that holds the prompt: `messages`, with pictures as data URLs, and `tools`.

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

    tools = {"tools": list(prompt.tools)} if prompt.tools else {}
    return {"messages": [sent(message) for message in prompt.messages], **tools}


def as_completion(reply: Any) -> Any:
    """A chat completion, or a piece of its stream, in the form of a completion; malformed ones as they are.

    Raises:
        BadAnswer: the server took thoughts out of the text.
    """
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return reply
    asked = {key: reply[key] for key in ("prompt_token_ids",) if reply.get(key) is not None}
    return reply | {"choices": [asked | _choice(choice) for choice in choices]}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    said = choice.get("message") or choice.get("delta") or {}
    if not isinstance(said, dict):
        raise BadAnswer("the message of the reply is not a JSON object")
    if said.get("reasoning_content") or said.get("reasoning"):
        raise BadAnswer("the server takes thoughts out of the text: start it without a reasoning parser")
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if isinstance(content, list) and all(isinstance(each, dict) and "id" not in each for each in content):
        logprobs = {"tokens": [each.get("token") for each in content]}
    return choice | {"text": said.get("content"), "logprobs": logprobs}
