"""Requests to OpenAI-compatible servers.

A try ends with a reply, `Failed` (another try may succeed), `Refused` (this prompt is never answered) or `UserError`
(no prompt is answered: a key, a URL or a name is wrong). No message contains the key: whatever servers say goes into
messages by `one_line`. Replies are read as they are, because a key may be a word of an answer.

The `openai` client is not used: it retries at the same server and reads replies of any size. Here a failed try goes to
the least loaded server.

Prompts with pictures are sent as chat completions, because completions take token ids alone. The server renders the
messages by its own template and processor. So a reply must name as many prompt tokens as the prompt has here, and,
where it gives their ids, the same ones outside the pictures (`answers.read_answer`).
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import anyio
import httpx

from draftsmith.data_gen.server_client.server_answers import Completion, Failed, Refused, error_text, one_line
from draftsmith.models.prompt import Prompt
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.prompts.picture_parts import data_url
from draftsmith.recipes.prompts.pictures import plain_bytes, read_picture

CONNECT_SECONDS = 10.0
# Largest reply: a constant, plus bytes for each token of prompt and answer (id, text, logprobs).
REPLY_BYTES, REPLY_BYTES_PER_TOKEN = 2**20, 2**12
ERROR_BYTES = 2**16  # read from an error's body
# End of messages about servers that lack something.
NEEDED = (
    "regeneration sends prompts as token ids to /v1/completions, which vLLM, SGLang and llama.cpp take, and prompts "
    "with pictures to /v1/chat/completions; docs/prompts-and-answers.md lists what a server needs"
)


@dataclass(frozen=True, eq=False)
class ChatPrompt(Prompt):
    """A prompt with the messages that it was made of."""

    messages: Sequence[dict[str, Any]] = ()  # pictures as `with_named_pictures` names them
    tools: Sequence[dict[str, Any]] = ()  # function schemas


def chat_of(prompt: ChatPrompt, template_args: dict[str, Any]) -> dict[str, Any]:
    """The part of a request that holds the prompt: `messages`, with pictures as data URLs, `tools`, template variables.

    Raises UnusablePicture if a picture is gone or changed.
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


class Client:
    """Connections to any number of servers. Every call runs in one event loop.

    Raises UserError if the environment variable `key_variable` holds no key, or if the environment's proxies or
    certificates cannot be used.
    """

    def __init__(self, key_variable: str | None, timeout_seconds: float):
        self._variable, self._seconds = key_variable, timeout_seconds
        self._key = "" if key_variable is None else os.environ.get(key_variable, "").strip()
        if key_variable is not None and not re.fullmatch("[!-~]+", self._key):
            raise UserError(f"data.generator.api_key_env: {key_variable} is not set, or holds no key")
        self.secrets = {self._key, repr(self._key)[1:-1], json.dumps(self._key)[1:-1]} - {""}
        try:
            self.http = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `_request` limits the rest
                # As many connections as requests. An idle one is dropped before the server drops it (5 seconds in
                # uvicorn), because a request on a closing connection fails.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            )
        except Exception as error:  # many kinds; some name a proxy's password
            raise UserError(
                f"data.generator: no connection can be set up ({type(error).__name__}): correct or unset the "
                "environment variables HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR"
            ) from None

    async def models(self, url: str) -> dict[str, int | None]:
        """{served name: its longest sequence, or None if not given}. Raises Failed, UserError."""
        content = await self._request(url, "GET", "/models", CONNECT_SECONDS, REPLY_BYTES)
        try:
            return {str(item["id"]): item.get("max_model_len") for item in parse_json(content)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"data.generator.base_urls: {url}/models lists no models: is this an OpenAI-compatible server?"
            ) from None

    async def complete(self, url: str, body: dict[str, Any], prompt_tokens: int) -> Completion:
        """The reply to a completion or, with `messages`, a chat completion. Raises Failed, Refused, UserError."""
        most = REPLY_BYTES + REPLY_BYTES_PER_TOKEN * (prompt_tokens + body["max_tokens"])
        endpoint = "/chat/completions" if "messages" in body else "/completions"
        content = await self._request(url, "POST", endpoint, self._seconds, most, body)
        try:
            return Completion.of(parse_json(content), self.secrets)
        except ValueError as error:
            raise Failed(f"the reply is not JSON ({error}): {self._text_of(content)}") from None

    async def _request(
        self, url: str, method: str, endpoint: str, timeout: float, most: int, body: dict[str, Any] | None = None
    ) -> bytes:
        """The content of a reply with status 200, of at most `most` bytes."""
        try:
            with anyio.fail_after(timeout):
                async with self.http.stream(method, url + endpoint, json=body) as reply:
                    content = await _read(reply, most if reply.status_code == 200 else ERROR_BYTES)
        except TimeoutError:
            raise Failed(f"no answer within {timeout:g} seconds (data.generator.timeout_seconds)") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            said = one_line(str(error), self.secrets) or "no connection in time"
            raise Failed(f"cannot be reached: {said}", True) from None
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            said = one_line(str(error), self.secrets) or type(error).__name__
            raise Failed(f"the connection broke: {said}") from None
        if reply.status_code != 200:
            self._raise_for(url, endpoint, reply, content)
        if len(content) > most:
            raise Failed(f"a reply of more than {most:,} bytes")
        return content

    def _raise_for(self, url: str, endpoint: str, reply: httpx.Response, content: bytes) -> NoReturn:
        status, asked = reply.status_code, endpoint != "/models"
        try:
            words = error_text(parse_json(content), self.secrets)
        except ValueError:
            words = self._text_of(content)
        said = f"{status}: {words or one_line(reply.reason_phrase, self.secrets)}"
        if status in (408, 409, 425, 429) or status >= 500:
            raise Failed(said, busy=status == 429, pause=_retry_after(reply))
        if asked and status in (400, 413, 422):
            raise Refused(f"refused: {said}")
        advice = "is this the URL of an OpenAI-compatible server, up to /v1?"
        if status < 400:  # one of several servers may be moving
            raise Failed(f"{said}; {advice}")
        if asked and status in (404, 405):
            if "model" not in words.lower():
                raise UserError(f"data.generator.base_urls: {url} has no /v1{endpoint} ({said}): {NEEDED}")
            advice = "does it still serve data.generator.served_model?"
        elif status in (401, 403):
            advice = f"data.generator.api_key_env names the variable with its key, now {self._variable or 'none'}"
        raise UserError(f"data.generator.base_urls: {url} says {said}; {advice}")

    def _text_of(self, content: bytes) -> str:
        page, text = content.lstrip().startswith(b"<"), content.decode("utf-8", "replace")
        return "an HTML page" if page else one_line(text, self.secrets)


async def _read(reply: httpx.Response, most: int) -> bytes:
    """The reply's content, or its beginning of more than `most` bytes."""
    content = bytearray()
    async for piece in reply.aiter_bytes():
        content += piece
        if len(content) > most:
            break
    return bytes(content)


def _retry_after(reply: httpx.Response) -> float:
    """Seconds to wait before the next request. A date is ignored."""
    try:
        return max(0.0, float(reply.headers.get("retry-after", "")))
    except ValueError:
        return 0.0
