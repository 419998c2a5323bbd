"""Runs of regeneration by servers: what ends them, whose file it is, odd and hostile replies, keys, and kills."""

import json
import random
import re
import signal
import threading
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.server_client import client as server_client
from draftsmith.data_gen.server_client.answers import Completion, Failed, Refused, Vocabulary, read_answer
from draftsmith.data_gen.server_client.client import Client
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.server_urls import server_url
from tests.conftest import make_tokenizer
from tests.data_gen.crash import run_script, signalled_when
from tests.data_gen.fake_server import STOP, FakeServer, dripping, raw
from tests.data_gen.server_place import Place
from tests.data_gen.server_place import place as place
from tests.data_gen.test_crashes import lines_in

# What stops a run.


@pytest.mark.parametrize(
    ("manners", "generator", "problem"),
    [
        ({"model": "other"}, {"served_model": "mine"}, "serves other, not mine"),
        ({"max_model_len": 128}, {}, "serves at most 128 tokens .* rows have up to 200"),
        ({"status": 404, "fail": 1.0}, {}, "has no /v1/completions"),
        ({"status": 403, "fail": 1.0}, {}, "says 403"),
    ],
)
def test_what_holds_for_every_prompt_ends_the_run(
    place: Place, manners: dict[str, Any], generator: dict[str, Any], problem: str
) -> None:
    place.ask(30)
    with FakeServer(place.tokenizer, **manners) as server:
        place.use(server, concurrency=3, **generator)
        with pytest.raises(UserError, match=problem):
            place.run()
    assert server.asked.total() <= 3 and not place.path.exists()


PAGE = b"<!DOCTYPE html>\n<html><head><title>Oops &ndash; not here</title></head><body>Sorry!</body></html>"
NO_IDS = b'{"error": {"message": "cannot unmarshal array into field prompt of type string"}}'
DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (404, PAGE, "has no /v1/completions (404: an HTML page)"),
        (404, b'{"message": "The model `fake` does not exist."}', "does it still serve data.generator.served_model"),
        (400, NO_IDS, "refuses a prompt of one token id (refused: 400: cannot unmarshal"),
        (200, b'{"error": "Unexpected endpoint"}', "error in the reply: Unexpected endpoint"),
        (502, PAGE, "502: an HTML page"),
    ],
)
def test_servers_that_lack_what_is_needed_are_told_by_one_error(
    place: Place, status: int, body: bytes, problem: str
) -> None:
    place.ask(2)
    with FakeServer(place.tokenizer, always=raw(body, status)) as server:
        place.use(server)
        problems, printed = place.fails()
    assert server.url in problems[0] and problem in problems[0]
    assert "<" not in "".join(problems) and printed == ""


def test_names_of_the_model(place: Place) -> None:
    place.ask(2)
    with FakeServer(place.tokenizer, model="a") as one, FakeServer(place.tokenizer, model="b") as two:
        place.use(one, two)
        problems, _ = place.fails()
        assert len(problems) == 1 and ("serves a, not b" in problems[0] or "serves b, not a" in problems[0])
        place.use(one)
        place.run()
        place.ask(3)
        place.use(two)
        with pytest.raises(UserError, match="with served_model a, the model there now has b"):
            place.run()


def test_urls() -> None:
    urls = ["http://a:8000", "http://b:8000/v1/", " https://c/api/v1 ", "http://[::1]:8000/"]
    found = ["http://a:8000/v1", "http://b:8000/v1", "https://c/api/v1", "http://[::1]:8000/v1"]
    assert [server_url(url) for url in urls] == found
    for wrong in ("localhost:8000", "http://me:hunter2@a/v1", "http://b?x=1", "ftp://a", "http://[::1"):
        with pytest.raises(ValueError) as error:
            server_url(wrong)
        assert "hunter2" not in str(error.value)


def test_a_file_belongs_to_one_kind_of_writer(place: Place) -> None:
    place.ask(4)
    with FakeServer(place.tokenizer) as one, FakeServer(place.tokenizer) as two:
        place.use(one)
        place.run()
        with pytest.raises(UserError, match="written with kind 'openai', this run has 'transformers'"):
            place.run("data.generator.kind=transformers")
        place.ask(8)
        place.use(two, concurrency=1)  # elsewhere and otherwise asked, it is the same
        assert "4 of 8 conversations are done" in place.run()
    place.check()
    assert not set(one.asked) & set(two.asked)
    assert "all 8 conversations are done" in place.run()  # nothing left to ask: no server is needed


def test_plan_reaches_the_servers_and_asks_nothing(place: Place) -> None:
    place.ask(6)
    with FakeServer(place.tokenizer) as server:
        place.use(server, concurrency=7)
        printed = place.run("--plan")
        assert "7 requests at a time over 1 servers" in printed and "6 conversations, 9 answers" in printed
    assert not server.asked and not place.out.exists()
    with pytest.raises(UserError, match="no server can be used"):
        place.run("--plan")


# Odd and hostile servers: each reply costs a try, none ends or stalls a run.


def completion(**choice: Any) -> Any:
    return raw(json.dumps({"choices": [{"text": "cat", "finish_reason": "stop", **choice}]}).encode())


ODD = [
    raw(b"garbage", Content_Encoding="gzip"), raw(DEEP), raw(DEEP, 500), completion(text="cat \ud800"),
    raw(b'{"error": "so \\ud800"}', 500), raw(b'{"error": "so \\u001b[31mred"}', 500), raw(b"9" * 5000),
    completion(finish_reason={"type": "stop"}), raw(b"gone elsewhere", 302), raw(b"later", 202),
    raw(b"ab", 500, Content_Type="text/plain; charset=hex"),
]  # fmt: skip


def test_odd_replies_cost_a_try(place: Place) -> None:
    place.ask(len(ODD), turns=1)
    with FakeServer(place.tokenizer, odd=[*ODD]) as server:
        place.use(server, concurrency=1)
        printed = place.run()
    place.check()
    assert set(server.asked.values()) == {2} and "\x1b" not in printed


@pytest.mark.parametrize(
    ("piece", "said"), [(b" ", "no answer within 0.4 seconds"), (b" " * 2**18, "a reply of more than")]
)
def test_a_reply_without_end_is_left(place: Place, monkeypatch: pytest.MonkeyPatch, piece: bytes, said: str) -> None:
    monkeypatch.setattr(server_client, "REPLY_BYTES", 2**18)
    place.ask(2, turns=1)
    with FakeServer(place.tokenizer, odd=[dripping(piece)]) as server:
        place.use(server, timeout_seconds=0.4)
        assert said in place.run()
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


# The key, and the environment.


def test_keys_are_used_and_never_shown(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(8)
    with FakeServer(place.tokenizer, key="sk-secret", fail=0.3, message="because of sk-secret") as server:
        place.use(server)
        problems, printed = place.fails()
        assert "data.generator.api_key_env" in problems[0]
        place.use(server, api_key_env="MY_KEY")
        for key, said in ((None, "MY_KEY is not set"), ("sk-wrong", "MY_KEY is not taken")):
            monkeypatch.setenv("MY_KEY", key or "")
            problems, more = place.fails()
            assert said in problems[0] and "sk-wrong" not in problems[0] + more
        assert not server.asked
        monkeypatch.setenv("MY_KEY", "sk-secret\n")
        shown = printed + place.run() + place.run("--plan")
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-secret"}
        assert "because of ***" in shown
    place.check()
    assert "secret" not in shown + place.path.read_text()


def test_the_key_is_not_in_what_servers_say(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        raw(b'{"error": {"message": "bad key Bearer sk-verysecret"}}'), raw(b"bad key Bearer sk-verysecret"),
        raw(b'{"error": "' + b"x" * 192 + b' sk-verysecret"}', 500), raw(b" " * 1995 + b" sk-verysecret", 500),
        completion(finish_reason="sk-verysecret"), completion(stop_reason="sk-verysecret", token_ids=[7]),
        raw(b'{"error": "sk-\\u001bverysecret"}', 400),
    ]  # fmt: skip
    monkeypatch.setenv("MY_KEY", "sk-verysecret")
    place.ask(8, turns=3)
    for reply in said:  # one by one, because the last failure is shown
        with FakeServer(place.tokenizer, key="sk-verysecret", odd=[reply] * 3) as server:
            place.use(server, api_key_env="MY_KEY")
            printed = place.run()
            assert server.asked.total() > server.answered.total()
        written = place.path.read_text() + (place.rejects.read_text() if place.rejects.exists() else "")
        assert "sk-" not in printed + written and "secret" not in printed + written
        place.path.unlink()


@pytest.mark.parametrize(
    ("name", "value"), [("SSL_CERT_FILE", "/nope"), ("HTTPS_PROXY", "ftp://me:hunter2@x"), ("NO_PROXY", "[::1")]
)
def test_an_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"no connection can be set up .* environment variables") as error:
        Client(None, 1.0)
    assert "hunter2" not in str(error.value)


# Reading replies, without a server.


def read(tokenizer: PreTrainedTokenizerBase, **said: Any) -> tuple[list[int], str, bool]:
    return read_answer(Completion(**said), [5, 6], 6, Vocabulary(tokenizer, 320, (STOP, 9)))


def test_stop_tokens_that_servers_strip(tokenizer: PreTrainedTokenizerBase) -> None:
    word = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    told = {"text": "the cat", "finish_reason": "stop"}
    assert read(tokenizer, **told, token_ids=word) == ([*word, STOP], "stop", False)
    assert read(tokenizer, **told, token_ids=word, stopped_at=9) == ([*word, 9], "stop", False)
    assert read(tokenizer, **told) == ([*word, STOP], "stop", True)
    assert read(tokenizer, **told, stopped_at=9) == ([*word, 9], "stop", True)
    # The target may end its turn at once, and a server may go on behind its end.
    assert read(tokenizer, finish_reason="stop", completion_tokens=1) == ([STOP], "stop", True)
    assert read(tokenizer, finish_reason="stop", token_ids=[9], completion_tokens=1) == ([9], "stop", False)
    assert read(tokenizer, finish_reason="length", token_ids=[7, STOP, 7, 9]) == ([7, STOP], "stop", False)


def test_the_stop_token_that_was_stripped_is_the_template_s_before_the_tokenizer_s() -> None:
    tokenizer = make_tokenizer(roles={"pad_token": "<|pad|>", "eos_token": "<|system|>"})
    assert Vocabulary(tokenizer, 320, (9, 1, STOP)).usual_stop == STOP
    assert Vocabulary(tokenizer, 320, (9, 1)).usual_stop == 1
    assert Vocabulary(tokenizer, 320, (9,)).usual_stop == 9


def test_text_of_more_tokens_than_asked_for_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    ids, reason, retokenised = read(tokenizer, text="zqxjvkwzqxjvk", finish_reason="stop")
    assert (len(ids), reason, retokenised) == (6, "length", True)
    # Half a character at the end of a cut answer is not text of the target's.
    assert read(tokenizer, text="the cat\ufffd", finish_reason="length")[0] == tokenizer("the cat")["input_ids"]


def test_blanks_and_broken_characters_are_no_difference(tokenizer: PreTrainedTokenizerBase) -> None:
    word = tokenizer("caf\u00e9", add_special_tokens=False)["input_ids"]
    assert read(tokenizer, text=" caf", token_ids=word[:-1], finish_reason="length") == (word[:-1], "length", False)
    assert read(tokenizer, text="caf\u00e9<|end|>", token_ids=[*word, STOP], finish_reason="stop")[1] == "stop"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"token_ids": [7, 8], "completion_tokens": 3, "finish_reason": "length"}, "counts 3 tokens and gives 2"),
        ({"text": "cat", "completion_tokens": 30}, "where at most 6 were asked for"),
        ({"token_ids": [7] * 30}, "where at most 6 were asked for"),
        ({"token_ids": [7] * 6}, "7 tokens, the stop token included"),
        ({"token_ids": [7, 8], "completion_tokens": 2}, "no stop token among the tokens"),
        ({"token_ids": [7], "completion_tokens": 1, "stopped_at": "\n\n"}, "it stopped at"),
        ({"token_ids": [7], "stopped_at": 77}, "it stopped at 77"),
        ({"token_ids": [], "finish_reason": "length"}, "the answer is empty"),
        ({"completion_tokens": 0}, "the answer is empty"),
        ({"token_ids": [7, 5000]}, "5000 is none of the target's 320"),
        ({"token_ids": [-1]}, "-1 is none of the target's"),
        ({"token_ids": [7], "text": "something else"}, "another model"),
        ({"text": "cat \ud800"}, "half a character"),
        ({"text": "cat", "prompt_token_ids": [1, 2]}, "another prompt"),
        ({"text": "cat", "prompt_tokens": 1}, "counts 1 prompt tokens"),
        ({"text": "cat", "finish_reason": "abort"}, "did not finish"),
    ],
)
def test_lies_are_caught(tokenizer: PreTrainedTokenizerBase, said: dict[str, Any], problem: str) -> None:
    with pytest.raises(Failed, match=re.escape(problem)):
        read(tokenizer, **({"finish_reason": "stop"} | said))


@pytest.mark.parametrize("body", [[], {}, {"choices": [{}, {}]}, {"choices": 3}, {"error": {"message": "x"}}, "x"])
def test_replies_that_are_none(body: Any) -> None:
    with pytest.raises(Failed):
        Completion.of(body)
    with pytest.raises(Refused, match="finish_reason content_filter"):
        read_answer(Completion(text="x", finish_reason="content_filter"), [5], 6, None)  # type: ignore[arg-type]


# Kills.


def test_an_interrupt_keeps_what_is_answered(place: Place) -> None:
    place.ask(60)
    with FakeServer(place.tokenizer, seconds=0.05) as server:
        place.use(server, concurrency=4)
        with pytest.raises(KeyboardInterrupt), signalled_when(lambda: lines_in(place.path) > 5, signal.SIGINT):
            place.run()
        written = len(place.check(count=len(place.records())))
        [told] = re.findall(r"^(\d+) of 60 conversations written", place.printed(), re.MULTILINE)
        assert 5 < written < 60 and written - int(told) in (0, 1)  # it may come between a line and its count
        server.manners.seconds = 0
        place.run()
    place.check()


@pytest.mark.slow
def test_kills_of_regeneration_by_servers_lose_and_repeat_nothing(place: Place) -> None:
    place.ask(60)
    chance, manners = random.Random(0), {"seconds": 0.02, "fail": 0.05, "tear": 0.05}
    with FakeServer(place.tokenizer, **manners) as one, FakeServer(place.tokenizer) as two:
        place.use(one, two, concurrency=5)
        for least in (0, 10, 20, 30, 40, 1000):  # the last one ends by itself
            kept = place.path.read_bytes() if place.path.exists() else b""
            whole = kept[: kept.rfind(b"\n") + 1]
            done = {
                tuple(turn["prompt_token_ids"]) for line in whole.splitlines() for turn in json.loads(line)["turns"]
            }
            before = one.asked + two.asked
            ending = run_script(
                "data_gen/regenerate.py",
                [str(place.recipe)],
                kill_when=lambda least=least: lines_in(place.path) > least,
                kill_after=chance.random() / 20,
            )
            assert ending.status == (0 if least == 1000 else -signal.SIGKILL), ending.output
            after = one.asked + two.asked
            assert all(after[prompt] == before[prompt] for prompt in done), "asked again for what is written"
            assert place.path.read_bytes().startswith(whole)
    place.check()
