"""Requests to OpenAI-compatible servers.

A try ends with a reply, `Failed` (another try may succeed), `Refused` (this prompt is never answered) or `UserError`
(no prompt is answered: a key, a URL or a name is wrong). No message contains the key.

The `openai` client is not used: it retries at the same server, reads replies of any size, and its timeout counts bytes
instead of tokens. Here a failed try goes to the least loaded server.
"""

import contextlib
import email.utils
import json
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import httpx

from draftsmith.data_gen.server.answers import BadAnswer, Refused, error_text, one_line
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.json_text import parse_json

CONNECT_SECONDS = 10.0
# Largest reply: a constant, plus bytes for each token of prompt and answer (id, text, logprobs, a stream's frame).
REPLY_BYTES, REPLY_BYTES_PER_TOKEN = 2**20, 2**12
ERROR_BYTES = 2**16  # read from an error's body
_ENVIRONMENT = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
_TRY_AGAIN = (408, 409, 425, 429)  # and 5xx
_OF_THE_PROMPT = (400, 413, 422)
_NO_COMPLETIONS = (404, 405)  # on a POST to /v1/completions or /v1/chat/completions
# End of messages about servers that lack something.
NEEDED = (
    "regeneration sends prompts as token ids to /v1/completions, which vLLM, SGLang and llama.cpp take, and prompts "
    "with pictures to /v1/chat/completions; "
    "docs/regeneration.md lists what a server needs"
)
_PAGE = re.compile(rb"\s*(?:<!--|<!doctype html|<html|<head|<body|<title|<h1|<pre)", re.IGNORECASE)
_TOO_LONG = re.compile(r"context|too long|longer than|too many tokens|max_model_len|max_tokens|exceed", re.IGNORECASE)


class Failed(Exception):
    """A failed try; another one may succeed."""

    def __init__(self, reason: str, unreachable: bool = False, busy: bool = False, pause: float = 0.0):
        """`pause`: seconds before the next request, as the server asks."""
        super().__init__(reason)
        self.unreachable, self.busy, self.pause = unreachable, busy, pause


class Client:
    """Connections to any number of servers. Every call runs in one event loop.

    Raises UserError if the key is missing, or if the environment's proxies or certificates cannot be used.

    Args:
        key_variable: name of the environment variable with the servers' key.
        silence_seconds: longest wait for a whole reply; in a stream, for the next token.
    """

    def __init__(self, key_variable: str | None, silence_seconds: float):
        self._variable, self._key, self._seconds = key_variable, _api_key(key_variable), silence_seconds
        try:
            self._client = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `_deadline` limits the rest
                # As many connections as requests. An idle one is dropped before the server drops it (5 seconds in
                # uvicorn), because a request on a closing connection fails.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            )
        except Exception as error:  # many kinds: httpx reads proxies and certificates from the environment
            given = [name for name in _ENVIRONMENT if os.environ.get(name) or os.environ.get(name.lower())]
            said = str(error) if isinstance(error, ImportError | OSError) else type(error).__name__
            raise UserError(
                f"data.generator: no connection can be set up with the environment variables {', '.join(given)} "
                f"({said}): correct or unset them"
            ) from None

    async def close(self) -> None:
        await self._client.aclose()

    async def models(self, url: str, timeout: float) -> dict[str, int | None]:
        """{served name: its longest sequence, or None if not given}. Raises Failed, UserError."""
        with self.translated():
            with _deadline(timeout):
                async with self._client.stream("GET", url + "/models") as reply:
                    await self._check_status(url, reply)
                    content = await _whole(reply, REPLY_BYTES)
            found: dict[str, int | None] = {"\n": None}
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                found = {str(item["id"]): item.get("max_model_len") for item in parse_json(content)["data"]}
            if all(name.isprintable() for name in found):
                return found
            raise UserError(
                f"data.generator.base_urls: {url}/models lists no models: is this an OpenAI-compatible server?"
            )

    async def complete(self, url: str, body: dict[str, Any], take: Callable[[Any], int], prompt_tokens: int) -> None:
        """Sends a request and calls `take` with the reply, or with every piece if body["stream"].

        `take` returns the number of tokens in its argument. Raises Failed, BadAnswer, Refused, UserError.

        Args:
            body: of a completion, or with `messages` of a chat completion.
        """
        most = REPLY_BYTES + REPLY_BYTES_PER_TOKEN * (prompt_tokens + body["max_tokens"])
        endpoint = "/chat/completions" if "messages" in body else "/completions"
        with self.translated(), _deadline(self._seconds) as scope:
            async with self._client.stream("POST", url + endpoint, json=body) as reply:
                await self._check_status(url, reply)
                if not body["stream"]:
                    take(_parsed(await _whole(reply, most)))
                    return
                plain = True
                async with contextlib.aclosing(_lines(reply, most)) as lines:
                    async for line in lines:
                        plain = plain and line.lstrip()[:1] in (b"", b"{")
                        if line.startswith(b"data:"):
                            data = line[5:].strip()
                            if data == b"[DONE]":
                                return
                            if take(_parsed(data)):
                                scope.deadline = anyio.current_time() + self._seconds
        raise Failed(
            "it does not stream: set data.generator.stream=false" if plain else "the stream ended before [DONE]"
        )

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turns the HTTP library's exceptions into Failed and removes the key from every message."""
        try:
            try:
                yield
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                raise Failed(f"cannot be reached: {one_line(str(error)) or 'no connection in time'}", True) from None
            except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
                raise Failed(f"the connection broke: {one_line(str(error)) or type(error).__name__}") from None
        except UserError as error:
            raise UserError([self.redacted(problem) for problem in error.problems]) from None
        except (Failed, BadAnswer, Refused) as error:
            error.args = (self.redacted(str(error)),)
            raise

    async def _check_status(self, url: str, reply: httpx.Response) -> None:
        status = reply.status_code
        if status == 200:
            return
        words = _error_of(await _beginning(reply)) or one_line(reply.reason_phrase)
        said = f"{status}: {words}"
        if status in _TRY_AGAIN or status >= 500:
            raise Failed(said, busy=status == 429, pause=_retry_after(reply))
        asked = reply.request.method == "POST"
        if status in _OF_THE_PROMPT and asked:
            raise Refused(f"longer than the server takes: {said}" if _TOO_LONG.search(said) else f"refused: {said}")
        advice = "is this the URL of an OpenAI-compatible server, up to /v1?"
        if status < 400:  # one of several servers may be moving
            raise Failed(f"{said}; {advice}")
        if status in (401, 403):
            advice = "it wants a key: name the environment variable that holds it in data.generator.api_key_env"
            if self._variable:
                advice = f"the key in the environment variable {self._variable} is not taken"
        elif status in _NO_COMPLETIONS and asked and "model" in words.lower():  # the endpoint is there
            advice = "does it still serve data.generator.served_model?"
        elif status in _NO_COMPLETIONS and asked:
            endpoint = "/v1" + reply.request.url.path.rpartition("/v1")[2]
            raise UserError(f"data.generator.base_urls: {url} has no {endpoint} ({said}): {NEEDED}")
        raise UserError(f"data.generator.base_urls: {url} says {said}; {advice}")

    def redacted(self, text: str) -> str:
        """A server's text, shortened, without the key and without the start of a key before a cut."""
        text = one_line(text, 2000)
        key = self._key or ""
        for secret in {key, " ".join(key.split()), repr(key)[1:-1], json.dumps(key)[1:-1]} - {""}:
            text = text.replace(secret, "***")
            for length in range(len(secret) - 1, 2, -1):
                text = text.replace(secret[:length] + "...", "***...")
        return text


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[anyio.CancelScope]:
    """Raises Failed after some seconds. Setting the scope's deadline gives more time."""
    try:
        with anyio.fail_after(seconds) as scope:
            yield scope
    except TimeoutError:
        raise Failed(f"no answer within {seconds:g} seconds (data.generator.timeout_seconds)") from None


async def _beginning(reply: httpx.Response) -> bytes:
    """The first ERROR_BYTES of a reply, or a few more."""
    start = b""
    async for piece in reply.aiter_bytes():
        start += piece
        if len(start) > ERROR_BYTES:
            break
    return start


async def _whole(reply: httpx.Response, most: int) -> bytes:
    return b"".join([piece async for piece in _bounded(reply, most)])


async def _bounded(reply: httpx.Response, most: int) -> AsyncIterator[bytes]:
    received = 0
    async for piece in reply.aiter_bytes():
        received += len(piece)
        if received > most:
            raise Failed(f"a reply of more than {most:,} bytes")
        yield piece


async def _lines(reply: httpx.Response, most: int) -> AsyncGenerator[bytes, None]:
    """Lines of a stream of events. httpx's own also split at U+2028, which JSON may contain."""
    rest = bytearray()
    async for piece in _bounded(reply, most):
        rest += piece
        if b"\n" in piece:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                yield line
    if rest:
        yield bytes(rest)


def _parsed(data: bytes) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        raise BadAnswer(f"the reply is not JSON ({error}): {_text_of(data)}") from None


def _error_of(content: bytes) -> str:
    try:
        return error_text(parse_json(content))
    except ValueError:
        return _text_of(content)


def _text_of(content: bytes) -> str:
    return "an HTML page" if _PAGE.match(content) else one_line(content.decode("utf-8", "replace"))


def _retry_after(reply: httpx.Response) -> float:
    """Seconds to wait before the next request, or 0 if the server gives none."""
    value = reply.headers.get("retry-after", "").strip()
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


# The recipe's settings.


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"data.generator.api_key_env: the environment variable {variable} is not set, or empty")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"data.generator.api_key_env: {variable} holds no key: it has unprintable characters")
    return key
