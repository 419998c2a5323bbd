"""Talking to OpenAI-compatible servers: what is sent, and every way in which it can go wrong, in our words.

A try ends in one of four ways: a reply; `Failed` (another try may succeed); `Refused` (this prompt will not be
answered); `UserError` (no prompt will be: a key, a URL or a name is wrong). The key is never part of a message.
"""

import contextlib
import email.utils
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from draftsmith.data_gen.server_answers import BadAnswer, Refused, error_text
from draftsmith.recipes.errors import UserError

CONNECT_SECONDS = 10.0
_TRY_AGAIN = (408, 409, 425, 429)  # and 5xx
_OF_THE_PROMPT = (400, 413, 422)
_TOO_LONG = re.compile(r"context|too long|longer than|too many tokens|max_model_len|max_tokens|exceed", re.IGNORECASE)


class Failed(Exception):
    """A failed try; another one may succeed."""

    def __init__(self, reason: str, unreachable: bool = False, busy: bool = False, pause: float = 0.0):
        """`pause`: seconds that the server asks for before the next request."""
        super().__init__(reason)
        self.unreachable, self.busy, self.pause = unreachable, busy, pause


class Client:
    """Connections to any number of servers. Every call runs in one event loop.

    Args:
        key_variable: name of the environment variable with the servers' key.
        silence_seconds: longest pause between two signs of life.

    Raises:
        UserError: the key is not where it should be.
    """

    def __init__(self, key_variable: str | None, silence_seconds: float):
        self._variable, self._key = key_variable, _api_key(key_variable)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS, pool=None),
            # As many connections as requests. An idle one is dropped before servers do it (5 seconds in uvicorn): a
            # request on a connection that is just being closed fails.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def models(self, url: str, timeout: float) -> dict[str, int | None]:
        """{served name: its longest sequence, where that is said}. Raises Failed, UserError."""
        reply = await self._send("GET", url, "/models", timeout=timeout)
        try:
            return {str(item["id"]): item.get("max_model_len") for item in json.loads(reply.content)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"data.generator.base_urls: {url}/models lists no models: is this an OpenAI-compatible server?"
            ) from None

    async def complete(self, url: str, body: dict[str, Any], take: Callable[[Any], None]) -> None:
        """Sends a completion request; `take` gets the reply, or every piece of it if body["stream"].

        Raises Failed, BadAnswer, Refused, UserError.
        """
        if not body["stream"]:
            take(_parsed((await self._send("POST", url, "/completions", json=body)).content))
            return
        done = False
        async with self._translated(), self._client.stream("POST", url + "/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
            self._check_status(url, reply)
            async for line in _lines(reply):
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    done = done or data == b"[DONE]"
                    if not done:
                        take(_parsed(data))
        if not done:
            raise Failed("the stream ended before [DONE]")

    async def _send(self, method: str, url: str, path: str, **arguments: Any) -> httpx.Response:
        async with self._translated():
            reply = await self._client.request(method, url + path, **arguments)
        self._check_status(url, reply)
        return reply

    @contextlib.asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """The HTTP library's exceptions in our words."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Failed(f"cannot be reached: {self._say(str(error) or 'no connection in time')}", True) from None
        except httpx.TimeoutException:
            raise Failed("no sign of life in time (data.generator.timeout_seconds)") from None
        except httpx.TransportError as error:
            raise Failed(f"the connection broke: {self._say(str(error) or type(error).__name__)}") from None

    def _check_status(self, url: str, reply: httpx.Response) -> None:
        status = reply.status_code
        if status == 200:
            return
        said = f"{status}: {self._say(_error_of(reply))}"
        if status in _TRY_AGAIN or status >= 500:
            raise Failed(said, busy=status == 429, pause=_retry_after(reply))
        asked = reply.request.method == "POST"
        if status in _OF_THE_PROMPT and asked:
            raise Refused(f"longer than the server takes: {said}" if _TOO_LONG.search(said) else f"refused: {said}")
        advice = "is this the URL of an OpenAI-compatible server, up to /v1?"
        if status in (401, 403):
            advice = "it wants a key: name the environment variable that holds it in data.generator.api_key_env"
            if self._variable:
                advice = f"the key in the environment variable {self._variable} is not taken"
        elif status == 404 and asked:
            advice = "it must have /v1/completions and serve data.generator.served_model"
        raise UserError(f"data.generator.base_urls: {url} says {said}; {advice}")

    def _say(self, text: str) -> str:
        """What a server said, fit to be printed and kept."""
        return text.replace(self._key, "***") if self._key else text


async def _lines(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a stream of events. The library's own would also split at U+2028 and its like, which JSON may hold."""
    rest = b""
    async for piece in reply.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise BadAnswer(f"the reply is no JSON: {error_text(data[:200].decode('utf-8', 'replace'))}") from None


def _error_of(reply: httpx.Response) -> str:
    try:
        return error_text(json.loads(reply.content))
    except ValueError:
        return error_text(reply.text or reply.reason_phrase)


def _retry_after(reply: httpx.Response) -> float:
    """Seconds that the server asks us to wait; 0 where it does not."""
    value = reply.headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return 0.0


# What the recipe says.


def normalised_urls(urls: list[str]) -> list[str]:
    """Each up to /v1, however it was written. Raises UserError with every problem."""
    problems, found = [], []
    for number, url in enumerate(urls):
        where = f"data.generator.base_urls[{number}]"
        try:
            parsed = httpx.URL(url.strip())
        except httpx.InvalidURL as error:
            problems.append(f"{where}: no URL: {error}")
            continue
        if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
            problems.append(f"{where}: must be like http://host:8000/v1")
        elif parsed.userinfo:
            problems.append(
                f"{where}: holds a user name or password; put the key into an environment variable and name that in "
                "data.generator.api_key_env"
            )
        else:
            normal = str(parsed).rstrip("/")
            normal += "" if normal.endswith("/v1") else "/v1"
            if normal in found:
                problems.append(f"{where}: {normal} is there twice")
            found.append(normal)
    if not urls:
        problems.append("data.generator.base_urls: none given; kind openai needs one, like [http://localhost:8000/v1]")
    if problems:
        raise UserError(problems)
    return found


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"data.generator.api_key_env: the environment variable {variable} is not set, or empty")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"data.generator.api_key_env: what {variable} holds is no key: it has unprintable characters")
    return key
