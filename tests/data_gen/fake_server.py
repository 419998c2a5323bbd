"""A server of completions and chats on loopback, as good or as bad as a test wants it.

    with FakeServer(tokenizer) as server:
        recipe["data"]["generator"] |= {"kind": "openai", "base_urls": [server.url]}
        ...
        assert server.asked[tuple(prompt_ids)] == 1

Its answers follow from the prompt's token ids alone (`expected`); their text, tokenised again, gives the same ids.
"""

import contextlib
import hashlib
import itertools
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from werkzeug import Request, Response
from werkzeug.serving import WSGIRequestHandler, make_server

from draftsmith.models.chat import render_prompt
from tests.ranks import free_port

WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "after", "in", "rain", "caf\u00e9", "line\u2028end"]
STOP = 4
Reply = dict[str, Any]


def expected(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], limit: int) -> tuple[list[int], str]:
    """(token ids, finish reason) of the answer to a prompt: words drawn by it, then the stop token."""
    digest = hashlib.sha256(repr(prompt_ids).encode()).digest()
    chance = random.Random(int.from_bytes(digest[:8], "big"))
    text = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 10)))
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], STOP]
    return (ids, "stop") if len(ids) <= limit else (ids[:limit], "length")


def raw(body: bytes, status: int = 200, **headers: str) -> Callable[[], Response]:
    """A response that is none of ours, for `Manners`."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda: Response(body, status, {"Content-Type": "application/json"} | given)


def dripping(piece: bytes) -> Callable[[], Response]:
    """A response that has no end: `piece` again and again."""
    return lambda: Response((time.sleep(0.02) or piece for _ in itertools.count()), mimetype="application/json")


@dataclass
class Manners:
    """How a server behaves."""

    model: str = "fake"
    max_model_len: int = 512
    key: str | None = None  # that it wants
    ids: str = "token_ids"  # how it gives them: token_ids, logprobs, content (as llama.cpp), or text for not at all
    strip_stop: bool = False  # from ids and text, and not from the count
    seconds: float = 0.0  # before it answers
    tear: float = 0.0  # share of requests whose connection it drops, in the middle of the reply
    fail: float = 0.0  # share of requests that it answers with `status`
    status: int = 500
    message: str = "out of order"
    retry_after: str | None = None
    lie: Callable[[Reply], None] | None = None  # changes the reply before it is sent
    lie_to: Callable[[list[int]], bool] = field(default=lambda prompt_ids: True)
    odd: list[Callable[[], Response]] = field(default_factory=list)  # each is given to one new prompt, at first
    always: Callable[[], Response] | None = None  # is given to every prompt, the first trial too
    mute: threading.Event | None = None  # it answers nothing, not even the trial, until this is set


class FakeServer:
    """Counts what it is asked. Used in a `with` statement; `stop` and `start` are dying and coming back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **manners: Any):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.tokenizer, self.manners = tokenizer, Manners(**manners)
        self.asked: Counter[tuple[int, ...]] = Counter()  # prompts that came, without the first trial of one token
        self.answered: Counter[tuple[int, ...]] = Counter()
        self.bodies: list[Reply] = []
        self.times: list[float] = []
        self.busy = self.busiest = self.looks = 0  # requests under way, at most; at the list of models
        self._chance, self._lock = random.Random(0), threading.RLock()
        self._connections: set[socket.socket] = set()

    def start(self) -> None:
        self._http: Any = make_server("127.0.0.1", self.port, self._serve, threaded=True, request_handler=_Quiet)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Drops every connection and listens no more."""
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()
            for connection in list(self._connections):
                _drop(connection)

    def __enter__(self) -> "FakeServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _serve(self, environ: Any, start: Any) -> Iterable[bytes]:
        connection = environ["werkzeug.socket"]
        self._connections.add(connection)
        try:
            return self._answer(Request(environ))(environ, start)
        finally:
            self._connections.discard(connection)

    def _answer(self, request: Request) -> Response:
        given = request.headers.get("Authorization")
        if self.manners.key is not None and given != f"Bearer {self.manners.key}":
            return _json({"error": {"message": f"wrong key: {given}"}}, 401)  # some servers repeat what they were given
        if request.method == "GET":
            self.looks += 1
            return _json({"data": [{"id": self.manners.model, "max_model_len": self.manners.max_model_len}]})
        if self.manners.always is not None:
            return self.manners.always()
        body = request.get_json()
        if body["model"] != self.manners.model:
            return _json({"message": f"The model {body['model']!r} does not exist."}, 404)
        with self._lock:
            if "messages" in body:
                body["prompt"] = list(render_prompt(self.tokenizer, body["messages"], body.get("tools")))
            if len(body["prompt"]) > 1:
                self.asked[tuple(body["prompt"])] += 1
                self.bodies.append(body)
                self.times.append(time.monotonic())
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        try:
            if self.manners.mute is not None:
                self.manners.mute.wait(60)
            return _json(self._reply(body)) if len(body["prompt"]) == 1 else self._complete(request, body)
        finally:
            with self._lock:
                self.busy -= 1

    def _complete(self, request: Request, body: Reply) -> Response:
        manners, prompt = self.manners, tuple(body["prompt"])
        with self._lock:
            odd = bool(manners.odd) and self.asked[prompt] == 1 and manners.lie_to(body["prompt"])
            other = manners.odd.pop() if odd else None
            fails, tears = (self._chance.random() < share for share in (manners.fail, manners.tear))
        if other is not None:
            return other()
        if fails:
            headers = {} if manners.retry_after is None else {"Retry-After": manners.retry_after}
            return _json({"error": {"message": manners.message}}, manners.status, headers)
        time.sleep(manners.seconds)
        reply = _json(self._reply(body))
        if tears:
            return _torn(request, reply)
        with self._lock:
            self.answered[prompt] += 1
        return reply

    def _reply(self, body: Reply) -> Reply:
        """The whole reply to a request, with its lies."""
        prompt_ids, manners = body["prompt"], self.manners
        ids, reason = expected(self.tokenizer, prompt_ids, body["max_tokens"])
        shown = ids[:-1] if reason == "stop" and manners.strip_stop else ids
        choice: Reply = {"index": 0, "text": self.tokenizer.decode(shown), "finish_reason": reason, "logprobs": None}
        if manners.ids == "token_ids" and body.get("return_token_ids"):
            choice |= {"token_ids": shown, "prompt_token_ids": prompt_ids}
        if manners.ids == "logprobs" and body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": [f"token_id:{i}" for i in shown]}
        if manners.ids == "content" and body.get("logprobs"):
            whole = [i for n, i in enumerate(shown, 1) if not str(self.tokenizer.decode(shown[:n])).endswith("\ufffd")]
            choice["logprobs"] = {"content": [{"id": i} for i in whole]}
        reply = {"choices": [choice], "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}}
        if manners.lie is not None and len(prompt_ids) > 1 and manners.lie_to(prompt_ids):
            manners.lie(reply)
        if "messages" in body:  # as vLLM answers chat completions
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
            if "prompt_token_ids" in choice:
                reply["prompt_token_ids"] = choice.pop("prompt_token_ids")
            if tokens := (choice["logprobs"] or {}).get("tokens"):
                choice["logprobs"] = {"content": [{"token": token} for token in tokens]}
        return reply


def _json(content: Reply, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, mimetype="application/json")


def _torn(request: Request, reply: Response) -> Response:
    """The reply, whose connection is dropped in the middle of the body."""

    def begin(content: bytes) -> Iterator[bytes]:
        yield content[: len(content) // 2]
        _drop(request.environ["werkzeug.socket"])

    content = reply.get_data()
    reply.response = begin(content)
    reply.headers["Content-Length"] = str(len(content))
    return reply


def _drop(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was gone
        connection.shutdown(socket.SHUT_RDWR)


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass
