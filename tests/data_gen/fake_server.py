"""A server of completions and chats on loopback, as good or as bad as a test wants it.

Its answers follow from the prompt's token ids alone.

    with FakeServer(tokenizer) as server:
        recipe["data"]["generator"] |= {"kind": "openai", "base_urls": [server.url]}
        ...
        assert server.asked[tuple(prompt_ids)] == 1

`expected(tokenizer, prompt_ids, limit)` is what any of them answers; its text, tokenised again, gives the same ids.
"""

import hashlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from werkzeug import Request, Response

from draftsmith.models.chat import render_prompt
from tests.data_gen.loopback import Loopback, cut

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

    def drip() -> Iterator[bytes]:
        while True:
            yield piece
            time.sleep(0.02)

    return lambda: Response(drip(), mimetype="application/json")


@dataclass
class Manners:
    """How a server behaves."""

    model: str = "fake"
    max_model_len: int | None = 512
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
    models: Callable[[], Response] | None = None  # the list of models
    mute: threading.Event | None = None  # it answers nothing, not even the trial, until this is set


class FakeServer(Loopback):
    """Counts what it is asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **manners: Any):
        super().__init__()
        self.url += "/v1"
        self.tokenizer, self.manners = tokenizer, Manners(**manners)
        self.asked: Counter[tuple[int, ...]] = Counter()  # prompts that came, without the first trial of one token
        self.answered: Counter[tuple[int, ...]] = Counter()
        self.bodies: list[Reply] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.busy = self.busiest = self.looks = 0  # requests under way, at most; at the list of models
        self.chance = random.Random(0)

    def answer(self, request: Request) -> Response:
        given = request.headers.get("Authorization")
        if self.manners.key is not None and given != f"Bearer {self.manners.key}":
            return _json({"error": {"message": f"wrong key: {given}"}}, 401)  # some servers repeat what they were given
        if request.method == "GET":
            return self._models(request.path)
        if self.manners.always is not None:
            return self.manners.always()
        body = request.get_json()
        if body["model"] != self.manners.model:
            return _json({"message": f"The model {body['model']!r} does not exist."}, 404)
        with self.lock:
            if "messages" in body:
                body["prompt"] = list(render_prompt(self.tokenizer, body["messages"], body.get("tools")))
            if len(body["prompt"]) > 1:
                self.asked[tuple(body["prompt"])] += 1
                self.bodies.append(body)
                self.headers.append(dict(request.headers))
                self.times.append(time.monotonic())
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        try:
            if self.manners.mute is not None:
                self.manners.mute.wait(60)
            return _json(self._reply(body)) if len(body["prompt"]) == 1 else self._complete(request, body)
        finally:
            with self.lock:
                self.busy -= 1

    def _models(self, path: str) -> Response:
        self.looks += 1
        if self.manners.models is not None:
            return self.manners.models()
        if path != "/v1/models":
            return _json({"detail": "Not Found"}, 404)
        longest = {} if self.manners.max_model_len is None else {"max_model_len": self.manners.max_model_len}
        return _json({"object": "list", "data": [{"id": self.manners.model, "object": "model"} | longest]})

    def _complete(self, request: Request, body: Reply) -> Response:
        manners, prompt = self.manners, tuple(body["prompt"])
        with self.lock:
            odd = bool(manners.odd) and self.asked[prompt] == 1 and manners.lie_to(body["prompt"])
            other = manners.odd.pop() if odd else None
            fails, tears = (self.chance.random() < share for share in (manners.fail, manners.tear))
        if other is not None:
            return other()
        if fails:
            headers = {} if manners.retry_after is None else {"Retry-After": manners.retry_after}
            return _json({"error": {"message": manners.message}}, manners.status, headers)
        time.sleep(manners.seconds)
        reply = _json(spoken(self._reply(body), body))
        if tears:
            return cut(request, reply, len(reply.get_data()) // 2)
        with self.lock:
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
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
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


def _json(content: Reply, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, mimetype="application/json")
