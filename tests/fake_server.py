"""A server of completions and chats on loopback, as good or as bad as a test wants it.

Its answers follow from the prompt's token ids alone.

    with FakeServer(tokenizer) as server:
        recipe["data"]["generator"] |= {"kind": "openai", "base_urls": [server.url]}
        ...
        assert server.asked[tuple(prompt_ids)] == 1

`expected(tokenizer, prompt_ids, limit)` is what any of them answers; its text, tokenised again, gives the same ids.
"""

import contextlib
import hashlib
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.models.chat import render_prompt

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


@dataclass
class Manners:
    """How a server behaves."""

    model: str = "fake"
    max_model_len: int | None = 512
    key: str | None = None  # that it wants
    ids: str = (
        "token_ids"  # how it gives token ids: token_ids, logprobs, content (as llama.cpp), or text for not at all
    )
    strip_stop: bool = False  # from ids and text, and not from the count
    seconds: float = 0.0  # before it answers
    tear: float = 0.0  # share of requests whose connection it drops, in the middle of the reply
    fail: float = 0.0  # share of requests that it answers with `status`
    status: int = 500
    message: str = "out of order"
    retry_after: str | None = None
    lie: Callable[[Reply], None] | None = None  # changes the reply before it is sent
    lie_to: Callable[[list[int]], bool] = field(default=lambda prompt_ids: True)
    raw: bytes | None = None  # a whole response that it gives at first to a prompt of `lie_to`
    raw_always: bytes | None = None  # a whole response that it gives to every prompt, the first trial too
    raw_models: bytes | None = None  # the same for the list of models
    drip: bytes | None = None  # what it sends after `raw` every 0.02 seconds, for ever
    mute: threading.Event | None = None  # it answers nothing, not even the trial, until this is set


class FakeServer:
    """Counts what it is asked. Used in a `with` statement; `stop` and `start` are dying and coming back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **manners: Any):
        self.tokenizer, self.manners = tokenizer, Manners(**manners)
        self.asked: Counter[tuple[int, ...]] = Counter()  # prompts that came, without the first trial of one token
        self.answered: Counter[tuple[int, ...]] = Counter()
        self.bodies: list[Reply] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.busy = self.busiest = 0
        self.chance = random.Random(0)
        self.lock = threading.Lock()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._http: _Http | None = None

    def start(self) -> None:
        self._http = _Http(self)
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Drops every connection and listens no more."""
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()
            for connection in list(http.connections):
                _drop(connection)

    def __enter__(self) -> "FakeServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def draw(self, share: float) -> bool:
        with self.lock:
            return share > 0 and self.chance.random() < share

    def reply(self, body: Reply) -> Reply:
        """The whole reply to a request, before any lie."""
        prompt_ids, manners = body["prompt"], self.manners
        ids, reason = expected(self.tokenizer, prompt_ids, body["max_tokens"])
        counted = len(ids)
        shown = ids[:-1] if reason == "stop" and manners.strip_stop else ids
        choice: Reply = {"index": 0, "text": self.tokenizer.decode(shown), "finish_reason": reason, "logprobs": None}
        if manners.ids == "token_ids" and body.get("return_token_ids"):
            choice |= {"token_ids": shown, "prompt_token_ids": prompt_ids}
        if manners.ids == "logprobs" and body.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": [f"token_id:{i}" for i in shown]}
        if manners.ids == "content" and body.get("logprobs"):
            whole = [i for n, i in enumerate(shown, 1) if not str(self.tokenizer.decode(shown[:n])).endswith("\ufffd")]
            choice["logprobs"] = {"content": [{"id": i} for i in whole]}
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": counted}
        reply = {"object": "text_completion", "model": manners.model, "choices": [choice], "usage": usage}
        if manners.lie is not None and len(prompt_ids) > 1 and manners.lie_to(prompt_ids):
            manners.lie(reply)
        return reply


def spoken(reply: Reply, body: Reply) -> Reply:
    """The reply as vLLM gives it to a chat completion, if the request is one."""
    if "messages" not in body:
        return reply
    choices, beside = [], {}
    for choice in reply["choices"]:
        said = {key: value for key, value in choice.items() if key not in ("text", "prompt_token_ids")}
        said["message"] = {"role": "assistant", "content": choice["text"]}
        if tokens := (choice.get("logprobs") or {}).get("tokens"):
            said["logprobs"] = {"content": [{"token": token} for token in tokens]}
        choices.append(said)
        beside = {"prompt_token_ids": choice["prompt_token_ids"]} if "prompt_token_ids" in choice else {}
    return reply | {"choices": choices} | beside


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, server: FakeServer):
        self.fake = server
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", server.port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # whoever asked is gone


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        fake = self.server.fake
        if not self._welcome():
            return
        if fake.manners.raw_models is not None:
            self._raw(fake.manners.raw_models)
            return
        if self.path != "/v1/models":
            self._send(404, {"detail": "Not Found"})
            return
        model: Reply = {"id": fake.manners.model, "object": "model"}
        if fake.manners.max_model_len is not None:
            model["max_model_len"] = fake.manners.max_model_len
        self._send(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        fake, manners = self.server.fake, self.server.fake.manners
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._welcome():
            return
        if manners.raw_always is not None:
            self._raw(manners.raw_always)
            return
        if "messages" in body:
            with fake.lock:
                body["prompt"] = list(render_prompt(fake.tokenizer, body["messages"], body.get("tools")))
        prompt = tuple(body["prompt"])
        trial = len(prompt) == 1
        if body["model"] != manners.model:
            self._send(404, {"object": "error", "message": f"The model {body['model']!r} does not exist."})
            return
        with fake.lock:
            if not trial:
                fake.asked[prompt] += 1
                fake.bodies.append(body)
                fake.headers.append(dict(self.headers))
                fake.times.append(time.monotonic())
            fake.busy += 1
            fake.busiest = max(fake.busiest, fake.busy)
        try:
            if manners.mute is not None:
                manners.mute.wait(60)
            if not trial and manners.raw is not None and fake.asked[prompt] == 1 and manners.lie_to(body["prompt"]):
                self._raw(manners.raw)
                while manners.drip is not None:
                    self.wfile.write(manners.drip)
                    time.sleep(0.02)
            elif not trial and fake.draw(manners.fail):
                headers = {} if manners.retry_after is None else {"Retry-After": manners.retry_after}
                self._send(manners.status, {"error": {"message": manners.message}}, headers)
            else:
                time.sleep(0 if trial else manners.seconds)
                torn = not trial and fake.draw(manners.tear)
                self._send(200, spoken(fake.reply(body), body), torn=torn)
                if not trial and not torn:
                    with fake.lock:
                        fake.answered[prompt] += 1
        finally:
            with fake.lock:
                fake.busy -= 1

    def _raw(self, response: bytes) -> None:
        self.wfile.write(response)
        self.wfile.flush()
        self.close_connection = True

    def _welcome(self) -> bool:
        key = self.server.fake.manners.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        # Some servers repeat what they were given.
        self._send(401, {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}})
        return False

    def _send(self, status: int, reply: Reply, headers: dict[str, str] | None = None, torn: bool = False) -> None:
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if torn:
            self.wfile.write(data[: len(data) // 2])
            _drop(self.connection)
        else:
            self.wfile.write(data)


def response(
    body: bytes, status: int = 200, headers: str = "Content-Type: application/json", whole: bool = True
) -> bytes:
    """One for `Manners.raw`; `whole` where nothing drips after it."""
    length = f"Content-Length: {len(body)}\r\n" * whole
    return f"HTTP/1.1 {status} So\r\n{headers}\r\n{length}Connection: close\r\n\r\n".encode() + body


def _drop(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was gone
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
