"""Regeneration by servers, against real HTTP on loopback: whatever they do, every answer is right and there once."""

import contextlib
import json
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from werkzeug import Response

from draftsmith.data_gen.server_client import client as server_client
from draftsmith.data_gen.server_client import generator as server_generator
from draftsmith.data_gen.server_client.client import Client
from draftsmith.data_gen.server_client.server_answers import Completion, Failed, Vocabulary, read_answer
from draftsmith.models.chat import render_prompt
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.data import server_url
from tests.clock import lines_in, meanwhile, signalled_when
from tests.conftest import make_config, make_tokenizer
from tests.data_gen.fake_server import STOP, FakeServer, Reply, dripping, expected, raw
from tests.data_gen.regeneration_place import RegenerationPlace

LIMIT = 24  # max_new_tokens


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


def test_text_and_tokens_that_agree_well_enough(tokenizer: PreTrainedTokenizerBase) -> None:
    ids, reason, retokenised = read(tokenizer, text="zqxjvkwzqxjvk", finish_reason="stop")  # more than asked for
    assert (len(ids), reason, retokenised) == (6, "length", True)
    # Half a character at the end of a cut answer is not text of the target's.
    assert read(tokenizer, text="the cat\ufffd", finish_reason="length")[0] == tokenizer("the cat")["input_ids"]
    word = tokenizer("caf\u00e9", add_special_tokens=False)["input_ids"]
    assert read(tokenizer, text=" caf", token_ids=word[:-1], finish_reason="length") == (word[:-1], "length", False)
    assert read(tokenizer, text="caf\u00e9<|end|>", token_ids=[*word, STOP], finish_reason="stop")[1] == "stop"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"token_ids": [7, 8], "completion_tokens": 3, "finish_reason": "length"}, "counts 3 tokens and gives 2"),
        ({"token_ids": [7] * 30}, "where at most 6 were asked for"),
        ({"token_ids": [7] * 6}, "7 tokens, the stop token included"),
        ({"token_ids": [7, 8], "completion_tokens": 2}, "no stop token among the tokens"),
        ({"token_ids": [7], "completion_tokens": 1, "stopped_at": "\n\n"}, "it stopped at"),
        ({"token_ids": [7], "stopped_at": 77}, "it stopped at 77"),
        ({"token_ids": [], "finish_reason": "length"}, "the answer is empty"),
        ({"token_ids": [7, 5000]}, "5000 is none of the target's 320"),
        ({"token_ids": [-1]}, "-1 is none of the target's"),
        ({"token_ids": [None]}, "None is none of the target's"),
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


class ServedPlace(RegenerationPlace):
    """With a target that has a config and a tokenizer and no weights, whose answers come from servers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        target = folder / "target"
        self._monkeypatch = monkeypatch
        self.change(FIRST_PAUSE_SECONDS=0.01, FIRST_LOOK_SECONDS=0.05, HEARTBEAT_SECONDS=0.05)
        make_config().save_pretrained(target)
        make_tokenizer().save_pretrained(target)
        super().__init__(folder, target, capsys, {"kind": "openai", "max_new_tokens": LIMIT, "temperature": 0.7})

    def change(self, **constants: float) -> None:
        """Those of the module that asks servers."""
        for name, value in constants.items():
            self._monkeypatch.setattr(server_generator, name, value)

    def use(self, *servers: FakeServer, **generator: Any) -> None:
        self.generator |= {"base_urls": [server.url for server in servers], **generator}
        self.write_recipe()

    def fails(self) -> tuple[list[str], str]:
        """(problems, what was printed) of a run that a UserError ends."""
        with pytest.raises(UserError) as error:
            self.run()
        return error.value.problems, self.printed()

    def check(self, count: int | None = None) -> list[dict[str, Any]]:
        """With exactly the right answers."""
        records, tokenizer = super().check(count), self.tokenizer
        for turn in (turn for record in records for turn in record["turns"]):
            right = expected(tokenizer, turn["prompt_token_ids"], LIMIT)
            assert (turn["output_token_ids"], turn["finish_reason"]) == right
        return records


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> ServedPlace:
    return ServedPlace(tmp_path, monkeypatch, capsys)


# Answers.


@pytest.mark.parametrize(
    ("ids", "strip"),
    [("token_ids", True), ("logprobs", True), ("content", False), ("text", False), ("text", True)],
)
def test_token_ids_are_kept_or_made_of_the_text_and_said_to_be(place: ServedPlace, ids: str, strip: bool) -> None:
    place.ask(20)
    with FakeServer(place.tokenizer, ids=ids, strip_stop=strip) as server:
        place.use(server)
        printed = place.run()
    assert set(server.asked.values()) == set(server.answered.values()) == {1}
    turns = [turn for record in place.records() for turn in record["turns"]]
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length"}
    decode: Any = place.tokenizer.decode
    for turn in turns:
        wanted, reason = expected(place.tokenizer, turn["prompt_token_ids"], LIMIT)
        # llama.cpp leaves out the ids of a character of several tokens.
        skipped = any(decode(wanted[:n]).endswith("\ufffd") for n in range(1, len(wanted) + 1))
        made = ids == "text" or (ids == "content" and skipped)
        assert turn.get("retokenised", False) is made and turn["finish_reason"] == reason
        if turn["output_token_ids"] != wanted:  # cut inside a word, other tokens may be the shorter way to write it
            assert made and reason == "length" and decode(wanted).startswith(decode(turn["output_token_ids"]))
    tokens, made = (sum(map(of, turns)) for of in (lambda t: len(t["output_token_ids"]), lambda t: "retokenised" in t))
    assert f"20 of 20 conversations written\n{len(turns)} answers, {tokens:,} tokens" in printed
    assert f"{server.url}: {len(turns)} answers, {tokens:,} tokens, 0 failed tries" in printed
    assert (f"{made} answers tokenised again from text" in printed) is (made > 0)


def test_requests_say_everything_and_repeat_themselves(place: ServedPlace) -> None:
    place.ask(12)
    bodies = []
    for seed in (5, 5, 6):
        with FakeServer(place.tokenizer) as server:
            place.use(server, top_p=0.9, seed=seed)
            place.run(f"output_dir={place.folder / str(len(bodies))}", "data.max_length=36")
            bodies.append({tuple(body["prompt"]): body for body in server.bodies})
    assert bodies[0] == bodies[1]
    seeds = {body["seed"] for body in bodies[0].values()}
    assert len(seeds) == len(bodies[0]) and not seeds & {body["seed"] for body in bodies[2].values()}
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    ours = {"skip_special_tokens": False, "add_special_tokens": False, "stop_token_ids": [STOP], "model": "fake"}
    for prompt, body in bodies[0].items():
        assert body["max_tokens"] == min(LIMIT, 36 - len(prompt))
        assert (sampling | ours).items() <= body.items()
    assert {body["max_tokens"] < LIMIT for body in bodies[0].values()} == {True, False}


def test_concurrency_is_used_and_the_least_loaded_server_is_asked(place: ServedPlace) -> None:
    place.ask(60, turns=1)
    with FakeServer(place.tokenizer, seconds=0.4) as slow, FakeServer(place.tokenizer, seconds=0.01) as fast:
        place.use(slow, fast, concurrency=4)
        place.run()
    records = place.check()
    assert 2 <= slow.busiest <= 4 and 2 <= fast.busiest <= 4  # the first four are shared
    assert slow.asked.total() < 20 and slow.asked.total() + fast.asked.total() == 60
    assert [record["id"] for record in records] != [f"q{i}" for i in range(60)]  # they came out of order


# Failures of a try.


def test_errors_and_torn_connections_are_tried_again(place: ServedPlace) -> None:
    place.ask(30)
    with FakeServer(place.tokenizer, fail=0.2, tear=0.2) as one, FakeServer(place.tokenizer, fail=0.1) as two:
        place.use(one, two, concurrency=8)
        place.change(TRIES=31)
        printed = place.run()
    place.check()
    answered = one.answered + two.answered
    assert set(answered.values()) == {1}
    failed = (one.asked + two.asked).total() - answered.total()
    assert failed > 5 and sum(map(int, re.findall(r"(\d+) failed tries", printed))) == failed


def test_retry_after_is_honoured(place: ServedPlace) -> None:
    place.ask(1, turns=1)
    with FakeServer(place.tokenizer, fail=1.0, status=503, retry_after="0.4") as server:
        place.use(server)
        with meanwhile(lambda: bool(server.times), lambda: setattr(server.manners, "fail", 0.0)):
            place.run()
    place.check()
    assert len(server.times) == 2 and 0.39 < server.times[1] - server.times[0] < 2


@pytest.mark.parametrize(("status", "looks"), [(429, 1), (503, 2)])
def test_busy_servers_stay_and_broken_ones_are_looked_at_again(place: ServedPlace, status: int, looks: int) -> None:
    place.ask(1, turns=1)
    with FakeServer(place.tokenizer, fail=1.0, status=status) as server:
        place.use(server)
        place.change(TRIES=server_generator.FAILURES_IN_A_ROW + 1)
        place.fails()
    assert server.looks == looks


def test_a_dead_server_is_set_aside_and_used_when_it_is_back(place: ServedPlace) -> None:
    place.ask(150, turns=1)
    with FakeServer(place.tokenizer, seconds=0.02) as mortal, FakeServer(place.tokenizer, seconds=0.02) as other:
        place.use(mortal, other, concurrency=4)
        asked_before: list[int] = []

        def die_and_rise() -> None:
            mortal.stop()
            asked_before.append(mortal.asked.total())
            time.sleep(0.3)
            mortal.start()

        with meanwhile(lambda: mortal.asked.total() >= 10, die_and_rise):
            printed = place.run()
    place.check()
    assert mortal.asked.total() > asked_before[0] >= 10
    # Those under way when it died, and no more: the least loaded server is not the dead one.
    failed = re.search(rf"{mortal.url}: .* tokens, (\d+) failed tries", printed)
    assert failed is not None and 0 < int(failed[1]) <= 6


def test_all_dead_for_too_long_ends_the_run_and_another_goes_on(place: ServedPlace) -> None:
    place.ask(40)
    with FakeServer(place.tokenizer, seconds=0.02) as server:
        place.use(server, concurrency=4)
        place.change(GIVE_UP_SECONDS=0.5)
        with meanwhile(lambda: server.asked.total() >= 20, server.stop):
            problems, printed = place.fails()
        assert server.url in problems[0] and "no server has answered for" in problems[1]
        assert "conversations written" in printed
        written, whole = len(place.check(count=len(place.records()))), place.path.read_bytes()
        assert 5 < written < 40
        done = {tuple(t["prompt_token_ids"]) for record in place.records() for t in record["turns"]}
        before = server.asked.copy()
        server.start()
        assert f"{written} of 40 conversations are done" in place.run()
        place.check()
        assert place.path.read_bytes().startswith(whole)
        assert all(server.asked[prompt] == before[prompt] for prompt in done)


def test_an_answer_that_never_comes_is_asked_for_by_the_next_run(place: ServedPlace) -> None:
    place.ask(20)
    with FakeServer(place.tokenizer, lie_to=lambda prompt_ids: sum(prompt_ids) % 5 == 0) as server:
        place.use(server)
        place.change(TRIES=3)
        server.manners.lie = lambda reply: reply["usage"].update(completion_tokens=1000)
        with pytest.raises(SystemExit, match="1"):
            place.run()
        printed = place.printed()
        left = 20 - len(place.records())
        assert 0 < left < 20 and f"{20 - left} of 20 conversations written, {left} without an answer" in printed
        assert "(after 3 tries" in printed and not place.rejects.exists()
        place.check(count=20 - left)
        server.manners.lie = None
        place.run()
    place.check()


def test_other_finish_reasons_reject_the_conversation(place: ServedPlace) -> None:
    """The first turn of one conversation, and every second turn: what was answered before stays."""
    place.ask(20, turns=2)
    asked = [[{"role": "user", "content": f"the cat {i} 0"}] for i in range(20)]
    kept = [tuple(render_prompt(place.tokenizer, messages)) for messages in asked[1:]]

    def change(reply: Reply) -> None:
        reply["choices"][0]["finish_reason"] = "content_filter"

    with FakeServer(place.tokenizer, lie=change, lie_to=lambda ids: tuple(ids) not in kept) as server:
        place.use(server)
        place.change(TRIES=2)
        place.run()
    [rejected] = place.records(place.rejects)
    assert rejected["record"]["id"] == "q0" and rejected["reason"].startswith("finish_reason content_filter")
    cut = [record for record in place.check(count=19) if "unasked_reason" in record]
    assert cut and all((len(record["turns"]), record["unasked_turns"]) == (1, 1) for record in cut)


def test_refused_prompts_are_rejected_once(place: ServedPlace) -> None:
    place.ask(10, turns=1)
    message = "This model's maximum context length is 64 tokens, you requested 80"
    with FakeServer(place.tokenizer, fail=0.5, status=400, message=message) as server:
        place.use(server)
        printed = place.run()
    rejected = place.records(place.rejects)
    assert 0 < len(rejected) < 10 and f"{len(rejected)} records rejected ({len(rejected)} refused" in printed
    assert all(message in entry["reason"] for entry in rejected)
    place.check(count=10 - len(rejected))
    assert set(server.asked.values()) == {1}


def completion(**choice: Any) -> Any:
    return raw(json.dumps({"choices": [{"text": "cat", "finish_reason": "stop", **choice}]}).encode())


DEEP, KEY = b"[" * 200_000, "sk-verysecret"
ODD = [
    raw(b"garbage", Content_Encoding="gzip"), raw(DEEP), raw(DEEP, 500), completion(text="cat \ud800"),
    raw(b'{"error": "so \\ud800"}', 500), raw(b'{"error": "so \\u001b[31mred"}', 500), raw(b"9" * 5000),
    completion(finish_reason={"type": "stop"}), raw(b"gone elsewhere", 302), raw(b"later", 202),
    raw(b"ab", 500, Content_Type="text/plain; charset=hex"), *map(raw, (b"[]", b"{}", b'"x"', b'{"choices": 3}')),
    raw(b'{"choices": [{}, {}]}'),
    # With the key
    raw(b'{"error": {"message": "bad key Bearer sk-verysecret"}}'), raw(b"bad key Bearer sk-verysecret"),
    raw(b'{"error": "' + b"x" * 192 + b' sk-verysecret"}', 500), raw(b" " * 1995 + b" sk-verysecret", 500),
    completion(stop_reason=KEY, token_ids=[7]), completion(text=KEY, token_ids=[7]), completion(token_ids=[KEY]),
    lambda: Response(b"", f"500 no {KEY}"),
]  # fmt: skip


def test_odd_replies_cost_a_try_and_never_show_the_key(place: ServedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    odd = [*ODD, completion(finish_reason=KEY)]  # the last of which rejects a conversation
    place.ask(len(odd), turns=1)
    with contextlib.ExitStack() as stack:  # a server for each, because the last failure is shown
        servers = [stack.enter_context(FakeServer(place.tokenizer, key=KEY, odd=[reply])) for reply in odd]
        place.use(*servers, api_key_env="MY_KEY", concurrency=len(odd))
        shown = place.run() + place.path.read_text() + place.rejects.read_text()
    place.check(count=len(ODD))
    assert sum(server.asked.total() - server.answered.total() for server in servers) == len(odd)
    assert shown.count(" (the last: ") == len(ODD) and "finish_reason ***" in place.records(place.rejects)[0]["reason"]
    assert not re.search("sk-|secret|\x1b", shown)
    with FakeServer(place.tokenizer, model=KEY, key=KEY) as server:
        place.use(server, served_model="mine")
        assert "serves ***, not mine" in place.fails()[0][0]


def test_replies_without_end_are_left(place: ServedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "REPLY_BYTES", 2**18)
    place.ask(2, turns=1)
    pieces = (b" ", b" " * 2**18)
    slow, large = (FakeServer(place.tokenizer, odd=[dripping(piece)]) for piece in pieces)
    with slow, large:
        place.use(slow, large, timeout_seconds=0.4)
        printed = place.run()
    assert "no answer within 0.4 seconds" in printed and "a reply of more than" in printed
    place.check()


def test_a_silent_server_does_not_keep_the_others_waiting(place: ServedPlace) -> None:
    place.change(TRIAL_SECONDS=0.3)
    place.ask(10)
    mute = threading.Event()
    with FakeServer(place.tokenizer, mute=mute) as silent, FakeServer(place.tokenizer) as other:
        place.use(silent, other)
        assert f"note: {silent.url} is set aside for now: no answer within 0.3" in place.run()
        place.path.unlink()  # alone, it is waited for
        place.use(silent)
        looks = silent.looks
        with meanwhile(lambda: silent.looks > looks, lambda: (time.sleep(0.6), mute.set())):
            assert f"note: waiting for a first answer of {silent.url}" in place.run()
    place.check()


# What ends a run.

PAGE = b"<!DOCTYPE html>\n<html><head><title>Oops &ndash; not here</title></head><body>Sorry!</body></html>"
NO_IDS = b'{"error": {"message": "cannot unmarshal array into field prompt of type string"}}'


@pytest.mark.parametrize(
    ("manners", "problem"),
    [
        ({"model": "other"}, "serves other, not mine"),
        ({"max_model_len": 128}, "serves at most 128 tokens (max_model_len), rows have up to 200"),
        ({"status": 404, "fail": 1.0}, "has no /v1/completions"),
        ({"status": 403, "fail": 1.0}, "says 403"),
        ({"always": raw(NO_IDS, 400)}, "refuses a prompt of one token id (refused: 400: cannot unmarshal"),
        ({"always": raw(b'{"error": "Unexpected endpoint"}')}, "error in the reply: Unexpected endpoint"),
        ({"always": raw(PAGE, 502)}, "502: an HTML page"),
    ],
)
def test_what_holds_for_every_prompt_ends_the_run(place: ServedPlace, manners: dict[str, Any], problem: str) -> None:
    place.ask(30)
    with FakeServer(place.tokenizer, **{"model": "mine", **manners}) as server:
        place.use(server, concurrency=3, served_model="mine")
        problems, printed = place.fails()
    assert server.url in problems[0] and problem in problems[0] and "<" not in problems[0] + printed
    assert server.asked.total() <= 3 and not place.path.exists()


def test_a_file_belongs_to_one_kind_of_writer_and_one_model(place: ServedPlace) -> None:
    place.ask(4)
    with FakeServer(place.tokenizer) as one, FakeServer(place.tokenizer) as two:
        place.use(one)
        place.run()
        with pytest.raises(UserError, match="written with kind 'openai', this run has 'transformers'"):
            place.run("data.generator.kind=transformers")
        place.ask(8)
        place.use(two, concurrency=1)  # elsewhere and otherwise asked, it is the same
        assert "4 of 8 conversations are done" in place.run()
        two.manners.model = "b"
        place.use(one, two)
        with pytest.raises(UserError, match=r"serves fake, not b|serves b, not fake"):
            place.run(f"output_dir={place.folder / 'other'}")
        place.check()
        place.ask(9)
        place.use(two)
        with pytest.raises(UserError, match="with served_model fake, the model there now has b"):
            place.run()
    assert not set(one.asked) & set(two.asked)


def test_urls() -> None:
    for url in ("http://a:8000", "http://a:8000/v1/", " http://a:8000/v1 "):
        assert server_url(url) == "http://a:8000/v1"
    for wrong in ("localhost:8000", "http://me:hunter2@a/v1", "http://b?x=1", "ftp://a", "http://a:abc/v1"):
        with pytest.raises(ValueError) as error:
            server_url(wrong)
        assert "hunter2" not in str(error.value)


# The key, and the environment.


def test_keys_are_used_and_never_shown(place: ServedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(8)
    with FakeServer(place.tokenizer, key="sk-secret", fail=0.3, message="because of sk-secret") as server:
        place.use(server)
        problems, printed = place.fails()
        assert "data.generator.api_key_env" in problems[0]
        place.use(server, api_key_env="MY_KEY")
        for key, said in (("", "MY_KEY is not set"), ("sk-wrong", "its key, now MY_KEY")):
            monkeypatch.setenv("MY_KEY", key)
            problems, more = place.fails()
            assert said in problems[0] and "sk-wrong" not in problems[0] + more
        assert not server.asked
        monkeypatch.setenv("MY_KEY", "sk-secret\n")
        shown = printed + place.run() + place.run("--plan")
        assert "because of ***" in shown
    place.check()
    assert "secret" not in shown + place.path.read_text()


@pytest.mark.parametrize("key", ["cat", "token"])
def test_a_key_may_be_a_word_of_a_reply(place: ServedPlace, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("MY_KEY", key)
    place.ask(8)
    with FakeServer(place.tokenizer, key=key) as server:
        place.use(server, api_key_env="MY_KEY")
        place.run()
    assert not any("retokenised" in turn for record in place.check() for turn in record["turns"])


@pytest.mark.parametrize(("name", "value"), [("SSL_CERT_FILE", "/nope"), ("HTTPS_PROXY", "ftp://me:hunter2@x")])
def test_an_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"no connection can be set up .*\s*environment variables") as error:
        Client(None, 1.0)
    assert "hunter2" not in str(error.value)


# Kills.


def test_an_interrupt_keeps_what_is_answered(place: ServedPlace) -> None:
    place.ask(40)
    with FakeServer(place.tokenizer, seconds=0.05) as server:
        place.use(server, concurrency=4)
        with pytest.raises(KeyboardInterrupt), signalled_when(lambda: lines_in(place.path) > 5, signal.SIGINT):
            place.run()
        written = len(place.check(count=len(place.records())))
        [told] = re.findall(r"^(\d+) of 40 conversations written", place.printed(), re.MULTILINE)
        assert 5 < written < 40 and written - int(told) in (0, 1)  # it may come between a line and its count
        server.manners.seconds = 0
        place.run()
    place.check()
