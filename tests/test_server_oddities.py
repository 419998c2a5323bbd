"""Servers that are odd, broken or hostile: each costs a try, none ends or stalls a run, and no key gets out."""

import json
import threading
from typing import Any

import pytest

from draftsmith.data_gen.server import client as server_client
from draftsmith.data_gen.server.client import Client
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.server_urls import normalised_urls
from tests.fake_server import FakeServer, response
from tests.server_place import Place
from tests.server_place import place as place

DEEP = b"[" * 200_000


def completion(**choice: Any) -> bytes:
    return response(json.dumps({"choices": [{"text": "cat", "finish_reason": "stop", **choice}]}).encode())


ODD = {
    "no gzip": (response(b"garbage", headers="Content-Encoding: gzip"), "the connection broke"),
    "deep": (response(DEEP), "nested too deeply"),
    "deep 500": (response(DEEP, 500), "500: [["),
    "half a character": (completion(text="cat \ud800"), "half a character"),
    "half a character in an error": (response(b'{"error": "so \\ud800"}', 500), "500: so"),
    "a terminal's escapes": (response(b'{"error": "so \\u001b[31mred"}', 500), "500: so [31mred"),
    "an id of 5,000 digits": (completion(logprobs={"tokens": ["token_id:" + "9" * 5000]}), "no stop token|the text|"),
    "a number of 5,000 digits": (response(b"9" * 5000), "the reply is not JSON"),
    "a reason that is not text": (
        completion(finish_reason={"type": "stop"}),
        "the finish_reason of the reply is not a string",
    ),
    "moved": (response(b"gone elsewhere", 302), "302: gone elsewhere"),
    "accepted": (response(b"later", 202), "202: later"),
    "a charset that is none": (response(b"ab", 500, "Content-Type: text/plain; charset=hex"), "500: ab"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_replies_cost_a_try(place: Place, name: str) -> None:
    place.ask(6, turns=1)
    raw, message = ODD[name]
    with FakeServer(place.tokenizer, raw=raw) as odd, FakeServer(place.tokenizer) as other:
        place.use(odd, other)
        printed = place.run()
    if name == "an id of 5,000 digits":  # no id at all: the text counts
        assert len(place.records()) == 6
        return
    place.check()
    assert odd.asked.total() > odd.answered.total() and message in printed
    assert "\x1b" not in printed


def test_odd_lists_of_models(place: Place) -> None:
    place.ask(1)
    for raw, problem in (
        (response(DEEP), "lists no models"),
        (response(b'{"data": [{"id": "\\ud800"}]}'), "lists no models"),
        (response(b"garbage", headers="Content-Encoding: gzip"), "no server can be used"),
    ):
        with FakeServer(place.tokenizer, raw_models=raw) as server:
            place.use(server)
            problems, _ = place.fails()
        assert problem in problems[-1]


def test_bytes_alone_are_no_progress(place: Place) -> None:
    place.ask(2, turns=1)
    with FakeServer(place.tokenizer, raw=response(b"", whole=False), drip=b" ") as server:
        place.use(server, timeout_seconds=0.4)
        assert "no answer within 0.4 seconds" in place.run()
    place.check()


def test_a_reply_without_end_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "REPLY_BYTES", 2**18)
    place.ask(2, turns=1)
    with FakeServer(place.tokenizer, raw=response(b"", whole=False), drip=b" " * 2**16) as server:
        place.use(server)
        assert "a reply of more than" in place.run()
    place.check()


def test_a_silent_server_does_not_keep_the_others_waiting(place: Place) -> None:
    place.change(TRIAL_SECONDS=0.3)
    place.ask(10)
    mute = threading.Event()
    with FakeServer(place.tokenizer, mute=mute) as silent, FakeServer(place.tokenizer) as other:
        place.use(silent, other)
        assert f"note: {silent.url} is set aside for now: no answer within 0.3" in place.run()
        place.check()
        # Alone, it is waited for.
        place.path.unlink()
        threading.Timer(1.0, mute.set).start()
        place.use(silent)
        assert f"note: waiting for a first answer of {silent.url}" in place.run()
    place.check()


# The key.


@pytest.mark.parametrize(
    "raw",
    [
        response(b'{"error": {"message": "bad key Bearer sk-verysecret"}}'),
        response(b"bad key Bearer sk-verysecret"),
        response(b'{"error": "' + b"x" * 192 + b' sk-verysecret"}', 500),
        response(b" " * 1995 + b" sk-verysecret", 500),
        completion(finish_reason="sk-verysecret"),
        completion(stop_reason="sk-verysecret", token_ids=[7]),
        response(b'{"error": "sk-\\u001bverysecret"}', 400),
    ],
)
def test_the_key_is_not_in_what_servers_say(place: Place, monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setenv("MY_KEY", "sk-verysecret")
    place.ask(8, turns=3)
    with FakeServer(place.tokenizer, key="sk-verysecret", raw=raw) as server:
        server.manners.lie_to = lambda ids: sum(ids) % 2 == 0
        place.use(server, api_key_env="MY_KEY")
        place.change(TRIES=2)
        printed = place.run()
        assert server.asked.total() > server.answered.total()
    written = place.path.read_text() + (place.rejects.read_text() if place.rejects.exists() else "")
    assert "sk-" not in printed + written and "secret" not in printed + written


# The environment.


@pytest.mark.parametrize(
    ("name", "value"), [("SSL_CERT_FILE", "/nope"), ("HTTPS_PROXY", "ftp://me:hunter2@x"), ("NO_PROXY", "[::1")]
)
def test_an_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"no connection can be set up .* environment variables") as error:
        Client(None, 1.0)
    assert "hunter2" not in str(error.value)


def test_hosts_that_are_none() -> None:
    (problem,) = normalised_urls(["http://xn--a:1"])[1]
    assert problem.startswith("base_urls.0: not a URL: ")
