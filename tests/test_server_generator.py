"""Regeneration by servers, against real HTTP on loopback: whatever they do, every answer is right and there once."""

import contextlib
import json
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, PreTrainedTokenizerBase

from draftsmith.data_gen import regenerate, server_generator
from draftsmith.data_gen.generators import GenerationSettings
from draftsmith.data_gen.server_answers import BadAnswer, Completion, Refused, Vocabulary, read_answer
from draftsmith.data_gen.server_client import normalised_urls
from draftsmith.data_gen.server_generator import Answered, Servers, generate_from_servers
from draftsmith.models.chat import load_tokenizer, render_prompt
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import GeneratorSection, TargetSection
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.crash import CAN_FORK, CrashLab, Ending
from tests.fake_server import STOP, FakeServer, Reply, expected
from tests.test_crashes import kill_until_it_ends, told

LIMIT = 24  # max_new_tokens


class Place:
    """A folder with a target that has a config and a tokenizer and no weights, prompts, a recipe, and calls of main."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        self.folder, self.out = folder, folder / "out"
        self.path, self.rejects = self.out / "conversations.jsonl", self.out / "conversations.rejects.jsonl"
        self.recipe, self.prompts, target = folder / "recipe.yaml", folder / "prompts.jsonl", folder / "target"
        self._monkeypatch, self._capsys = monkeypatch, capsys
        config = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, eos_token_id=STOP, max_position_embeddings=512)
        config.save_pretrained(target)
        make_tokenizer().save_pretrained(target)
        self.tokenizer = load_tokenizer(TargetSection(model=str(target)))
        self.content = {
            "output_dir": str(self.out),
            "target": {"model": str(target), "device": "cpu"},
            "data": {
                "prompts": str(self.prompts),
                "max_length": 200,
                "generator": {"kind": "openai", "max_new_tokens": LIMIT, "temperature": 0.7},
            },
        }

    def ask(self, count: int, turns: int = 2) -> None:
        """Conversations of 1 to `turns` user turns."""
        lines = [
            {"id": f"q{i}", "messages": [{"role": "user", "content": f"cat {i}.{n}"} for n in range(1 + i % turns)]}
            for i in range(count)
        ]
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def use(self, *servers: FakeServer, **generator: Any) -> None:
        section = self.content["data"]["generator"]
        section |= {"base_urls": [server.url for server in servers], **generator}
        self.recipe.write_text(yaml.safe_dump(self.content))

    def run(self, *arguments: str) -> str:
        self._monkeypatch.setattr(sys, "argv", ["regenerate.py", str(self.recipe), *arguments])
        regenerate.main()
        return self._capsys.readouterr().out

    def fails(self, *arguments: str) -> tuple[list[str], str]:
        """(problems, what was printed) of a run that a UserError ends."""
        with pytest.raises(UserError) as error:
            self.run(*arguments)
        return error.value.problems, self._capsys.readouterr().out

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        path = path or self.path
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def check(self, count: int | None = None) -> list[dict[str, Any]]:
        """Every conversation that is written is there once, with exactly the right answers. All of them, or `count`."""
        asked = [json.loads(line) for line in self.prompts.read_text().splitlines()]
        turns = {line["id"]: len(line["messages"]) for line in asked}
        records = self.records()
        assert len({record["id"] for record in records}) == len(records) == (len(asked) if count is None else count)
        for record in records:
            for number, turn in enumerate(record["turns"]):
                prompt = render_prompt(self.tokenizer, record["messages"][: 2 * number + 1])
                right = expected(self.tokenizer, prompt, LIMIT)
                assert turn["prompt_token_ids"] == prompt
                assert (turn["output_token_ids"], turn["finish_reason"]) == right
                said = self.tokenizer.decode(right[0], skip_special_tokens=True)
                assert record["messages"][2 * number + 1] == {"role": "assistant", "content": said}
                assert right[1] == "stop" or number == len(record["turns"]) - 1
            assert len(record["turns"]) + record.get("unasked_turns", 0) == turns[record["id"]]
        return records


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Place:
    monkeypatch.setattr(server_generator, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(server_generator, "FIRST_LOOK_SECONDS", 0.05)
    return Place(tmp_path, monkeypatch, capsys)


# Answers.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("ids", "strip"), [("token_ids", False), ("token_ids", True), ("logprobs", True)])
def test_given_token_ids_are_kept(place: Place, stream: bool, ids: str, strip: bool) -> None:
    place.ask(40, turns=3)
    with FakeServer(place.tokenizer, ids=ids, strip_stop=strip) as server:
        place.use(server, stream=stream)
        printed = place.run()
    records = place.check()
    assert {turn["finish_reason"] for record in records for turn in record["turns"]} == {"stop", "length"}
    assert not any("retokenised" in turn for record in records for turn in record["turns"])
    tokens = sum(len(turn["output_token_ids"]) for record in records for turn in record["turns"])
    turns = sum(len(record["turns"]) for record in records)
    assert f"40 conversations written, {turns} answers, {tokens:,} tokens" in printed
    assert f"{server.url}: {turns} answers, {tokens:,} tokens, 0 failed tries" in printed
    assert "tokenised again" not in printed
    assert set(server.asked.values()) == set(server.answered.values()) == {1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strip", [False, True])
def test_text_is_tokenised_again_and_said_to_be(place: Place, stream: bool, strip: bool) -> None:
    place.ask(20)
    with FakeServer(place.tokenizer, ids="text", strip_stop=strip) as server:
        place.use(server, stream=stream)
        printed = place.run()
    turns = [turn for record in place.records() for turn in record["turns"]]
    assert all(turn["retokenised"] is True for turn in turns)
    assert f"{len(turns)} answers tokenised again from text" in printed
    for turn in turns:
        ids, reason = expected(place.tokenizer, turn["prompt_token_ids"], LIMIT)
        assert turn["finish_reason"] == reason
        if reason == "stop":
            assert turn["output_token_ids"] == ids
        else:  # cut inside a word, other tokens may be the shorter way to write it
            whole, found = (str(place.tokenizer.decode(i)) for i in (ids, turn["output_token_ids"]))
            assert whole.startswith(found)
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length"}


def test_requests_say_everything_and_repeat_themselves(place: Place) -> None:
    place.ask(12)
    bodies = []
    for output in ("one", "two"):
        with FakeServer(place.tokenizer) as server:
            place.use(server, top_p=0.9, seed=5)
            place.run(f"output_dir={place.folder / output}", "data.max_length=32")
            bodies.append({tuple(body["prompt"]): body for body in server.bodies})
    assert bodies[0] == bodies[1]
    seeds = {body["seed"] for body in bodies[0].values()}
    assert len(seeds) == len(bodies[0])
    for prompt, body in bodies[0].items():
        assert body["max_tokens"] == min(LIMIT, 32 - len(prompt))
        sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
        ours = {"skip_special_tokens": False, "add_special_tokens": False, "stop_token_ids": [STOP], "model": "fake"}
        assert (sampling | ours).items() <= body.items()
    assert any(body["max_tokens"] < LIMIT for body in bodies[0].values())
    with FakeServer(place.tokenizer) as server:
        place.use(server, seed=6)
        place.run(f"output_dir={place.folder / 'three'}")
        assert not seeds & {body["seed"] for body in server.bodies}


def test_concurrency_is_used_and_kept(place: Place) -> None:
    place.ask(30)
    with FakeServer(place.tokenizer, seconds=0.03) as one, FakeServer(place.tokenizer, seconds=0.03) as two:
        place.use(one, two, concurrency=6)
        place.run()
    place.check()
    assert one.busiest + two.busiest == 6 and one.busiest == two.busiest


def test_the_least_loaded_server_is_asked(place: Place) -> None:
    place.ask(60, turns=1)
    with FakeServer(place.tokenizer, seconds=0.4) as slow, FakeServer(place.tokenizer) as fast:
        place.use(slow, fast, concurrency=4)
        place.run()
    records = place.check()
    assert 2 <= slow.asked.total() < 15
    assert slow.asked.total() + fast.asked.total() == 60
    assert [record["id"] for record in records] != [f"q{i}" for i in range(60)]  # they came out of order


@contextlib.contextmanager
def connected(server: FakeServer) -> Iterator[Servers]:
    vocabulary = Vocabulary(server.tokenizer, VOCAB_SIZE, (STOP,))
    section = GeneratorSection(kind="openai", base_urls=[server.url])
    with Servers(section, GenerationSettings(LIMIT, 200, (STOP,)), vocabulary) as servers:
        servers.connect()
        yield servers


def test_waiting_costs_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    """A pause of the servers is no work for us: the event loop sleeps."""
    with FakeServer(tokenizer, seconds=2.2) as server, connected(server) as servers:
        started = time.process_time()
        found = list(generate_from_servers(servers, iter([("a", [7, 8])])))
        used = time.process_time() - started
    assert found[:-1] == [None, None]  # a heartbeat a second
    assert found[-1] == Answered("a", *expected(tokenizer, [7, 8], LIMIT))
    assert used < 0.5


def test_prompts_that_wait_for_nothing_are_a_mistake_of_ours(tokenizer: PreTrainedTokenizerBase) -> None:
    with (
        FakeServer(tokenizer) as server,
        connected(server) as servers,
        pytest.raises(RuntimeError, match="none is being written"),
    ):
        list(generate_from_servers(servers, iter([None])))


# Failures.


@pytest.mark.parametrize("stream", [False, True])
def test_errors_and_torn_connections_are_tried_again(place: Place, stream: bool) -> None:
    place.ask(40)
    with FakeServer(place.tokenizer, fail=0.2, tear=0.2) as one, FakeServer(place.tokenizer, fail=0.1) as two:
        place.use(one, two, concurrency=8, stream=stream, max_retries=30)
        printed = place.run()
    place.check()
    answered = one.answered + two.answered
    assert set(answered.values()) == {1}
    failed = (one.asked + two.asked).total() - answered.total()
    assert failed > 5 and "got no answer" not in printed
    assert sum(map(int, re.findall(r"(\d+) failed tries", printed))) == failed


@pytest.mark.parametrize("status", [408, 429, 503])
def test_retry_after_is_honoured(place: Place, status: int) -> None:
    place.ask(1, turns=1)
    with FakeServer(place.tokenizer, fail=1.0, status=status, retry_after="0.4") as server:
        place.use(server)

        def mend() -> None:
            while not server.times:
                time.sleep(0.005)
            server.manners.fail = 0.0

        threading.Thread(target=mend, daemon=True).start()
        place.run()
    place.check()
    assert len(server.times) == 2 and 0.39 < server.times[1] - server.times[0] < 2


def test_a_stream_without_its_end_is_torn(place: Place) -> None:
    place.ask(3)
    with FakeServer(place.tokenizer, done=False) as server:
        place.use(server, stream=True, max_retries=1)
        problems, _ = place.fails()
        assert "the stream ended before [DONE]" in problems[0] and "no server gives an answer" in problems[1]
        assert not server.asked and not place.path.exists()


def test_silence_is_noticed(place: Place) -> None:
    place.ask(1)
    with FakeServer(place.tokenizer, seconds=3) as mute, FakeServer(place.tokenizer) as other:
        place.use(mute, other, timeout_seconds=0.3, max_retries=20)
        started = time.monotonic()
        printed = place.run()
    place.check()
    if mute.asked:
        assert "no sign of life" in printed
    assert time.monotonic() - started < 3


def test_a_dead_server_is_set_aside_and_used_when_it_is_back(place: Place) -> None:
    place.ask(150, turns=1)
    with FakeServer(place.tokenizer, seconds=0.02) as mortal, FakeServer(place.tokenizer, seconds=0.02) as other:
        place.use(mortal, other, concurrency=4)
        asked_before = 0

        def die_and_rise() -> None:
            nonlocal asked_before
            while mortal.asked.total() < 10:
                time.sleep(0.005)
            mortal.stop()
            asked_before = mortal.asked.total()
            time.sleep(0.3)
            mortal.start()

        thread = threading.Thread(target=die_and_rise, daemon=True)
        thread.start()
        printed = place.run()
        thread.join()
    place.check()
    assert mortal.asked.total() > asked_before >= 10
    # Those under way when it died, and no more: the least loaded server is not the dead one.
    failed = re.search(rf"{mortal.url}: .* tokens, (\d+) failed tries", printed)
    assert failed is not None and 0 < int(failed[1]) <= 6


def test_dead_at_the_start_is_said(place: Place) -> None:
    place.ask(5)
    with FakeServer(place.tokenizer) as server:
        dead = FakeServer(place.tokenizer)
        place.use(dead, server)
        printed = place.run()
        assert f"note: {dead.url} is set aside until it can be reached: cannot be reached" in printed
        assert f"{dead.url}: 0 answers" in printed
    place.check()
    place.path.unlink()
    problems, _ = place.fails()
    assert len(problems) == 3 and "no server can be reached" in problems[-1] and dead.url in problems[0]


def test_all_dead_for_too_long_ends_the_run_and_another_goes_on(place: Place) -> None:
    place.ask(60)
    with FakeServer(place.tokenizer, seconds=0.02) as server:
        place.use(server, concurrency=4, give_up_seconds=0.5)

        def die() -> None:
            while server.asked.total() < 20:
                time.sleep(0.005)
            server.stop()

        thread = threading.Thread(target=die, daemon=True)
        thread.start()
        problems, printed = place.fails()
        thread.join()
        assert server.url in problems[0] and "no server has given an answer for" in problems[1]
        assert "conversations written" in printed
        written = len(place.check(count=len(place.records())))
        assert 5 < written < 60
        whole = place.path.read_bytes()
        done = {tuple(t["prompt_token_ids"]) for record in place.records() for t in record["turns"]}
        before = server.asked.copy()
        server.start()
        assert f"{written} of 60 conversations are done" in place.run()
        place.check()
        assert place.path.read_bytes().startswith(whole)
        assert all(server.asked[prompt] == before[prompt] for prompt in done)


def test_a_server_whose_answers_are_all_torn_ends_the_run(place: Place) -> None:
    """It takes the first trial, and every look at it: only the answers show what it is."""
    place.ask(30)
    with FakeServer(place.tokenizer, tear=1.0) as server:
        place.use(server, stream=True, max_retries=10**6, give_up_seconds=0.5)
        problems, _ = place.fails()
    assert "no server has given an answer for" in problems[1] and not place.path.exists()


def test_an_answer_that_never_comes_is_asked_for_by_the_next_run(place: Place) -> None:
    place.ask(20)
    with FakeServer(place.tokenizer) as server:
        place.use(server, max_retries=2)
        server.manners.lie_to = lambda prompt_ids: sum(prompt_ids) % 5 == 0
        server.manners.lie = lambda reply: reply["usage"].update(completion_tokens=1000)
        printed = place.run()
        left = 20 - len(place.records())
        assert 0 < left < 20 and f"{left} conversations got no answer in this run" in printed
        assert "it counts 1000 tokens where at most 24 were asked for (after 3 tries" in printed
        assert not place.rejects.exists()
        place.check(count=20 - left)
        server.manners.lie = None
        place.run()
    place.check()


def lie(**changes: Any) -> Any:
    def change(reply: Reply) -> None:
        choice = reply["choices"][0]
        for key, value in changes.items():
            (reply["usage"] if key.endswith("_tokens") else choice)[key] = value(choice) if callable(value) else value

    return change


LIES = {
    "usage": (lie(completion_tokens=3), "counts 3 tokens and gives"),
    "more usage": (lie(completion_tokens=lambda c: len(c["token_ids"]) + 1), "it counts"),
    "too many": (lie(token_ids=[7] * 30, text="", completion_tokens=30), "where at most 24 were asked for"),
    "too many, silently": (lie(token_ids=[7] * 30, text="", completion_tokens=None), "30 tokens where at most 24"),
    "no stop": (
        lie(finish_reason="stop", token_ids=[7, 8], text="", completion_tokens=2),
        "no stop token among the tokens",
    ),
    "a stop of its own": (
        lie(finish_reason="stop", token_ids=[7], text="", completion_tokens=1, stop_reason="\n\n"),
        "it stopped at",
    ),
    "empty": (lie(token_ids=[], text="", finish_reason="length", completion_tokens=0), "the answer is empty"),
    "empty stop": (lie(token_ids=None, text="", finish_reason="stop", completion_tokens=0), "the answer is empty"),
    "foreign ids": (lie(token_ids=[7, 5000], text="", completion_tokens=2), "5000 is none of the target's 320"),
    "negative ids": (lie(token_ids=[-1], text="", completion_tokens=1), "-1 is none of the target's"),
    "other text": (lie(text="something else"), "is another model served"),
    "other prompt": (lie(prompt_token_ids=[1, 2, 3]), "another prompt"),
    "cut prompt": (lie(prompt_tokens=2), "counts 2 prompt tokens"),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("stream", [False, True])
def test_lies_are_caught_and_another_try_may_be_true(place: Place, name: str, stream: bool) -> None:
    place.ask(6)
    change, message = LIES[name]
    with FakeServer(place.tokenizer) as server:
        heard: set[int] = set()

        def once(prompt_ids: list[int]) -> bool:
            fresh = hash(tuple(prompt_ids)) not in heard
            heard.add(hash(tuple(prompt_ids)))
            return fresh

        server.manners.lie, server.manners.lie_to = change, once
        if stream and name in ("empty stop",):
            server.manners.ids = "text"
        place.use(server, stream=stream, concurrency=1)
        printed = place.run()
    place.check()
    assert set(server.asked.values()) == {2}
    assert message in printed  # the server's last failure


def test_what_follows_a_stop_token_is_cut_off(place: Place) -> None:
    def go_on(reply: Reply) -> None:
        choice = reply["choices"][0]
        if choice["finish_reason"] == "stop" and len(choice["token_ids"]) < LIMIT - 1:
            choice["token_ids"] = [*choice["token_ids"], 7, STOP]
            choice["text"] = place.tokenizer.decode(choice["token_ids"])
            choice["finish_reason"] = "length"
            reply["usage"]["completion_tokens"] += 2

    place.ask(20)
    with FakeServer(place.tokenizer, lie=go_on) as server:
        place.use(server)
        place.run()
    place.check()


def test_other_finish_reasons_reject_the_conversation(place: Place) -> None:
    place.ask(20, turns=2)
    first = {tuple(render_prompt(place.tokenizer, [{"role": "user", "content": f"cat {i}.0"}])): i for i in range(20)}
    reasons = {0: "content_filter", 1: "tool_calls", 2: "abort", 3: None}
    with FakeServer(place.tokenizer) as server:
        kinds = {4: "content_filter"}

        def change(reply: Reply) -> None:
            number = first.get(tuple(reply["choices"][0]["prompt_token_ids"]), 4)
            reply["choices"][0]["finish_reason"] = (reasons | kinds)[number]

        # The first turn of four conversations, and every second turn.
        server.manners.lie, server.manners.lie_to = change, lambda ids: first.get(tuple(ids), 0) in reasons
        place.use(server, max_retries=1)
        printed = place.run()
    records = place.check(count=16)
    rejected = {entry["record"]["id"]: entry["reason"] for entry in place.records(place.rejects)}
    assert rejected.keys() == {"q0", "q1", "q2", "q3"}
    assert all(rejected[f"q{i}"].startswith(f"finish_reason {reason}") for i, reason in reasons.items())
    assert "4 records rejected (1 finish_reason" in printed
    # What was answered before stays.
    two = [record for record in records if int(record["id"][1:]) % 2 and record["turns"][0]["finish_reason"] == "stop"]
    assert two
    for record in two:
        assert (len(record["turns"]), record["unasked_turns"]) == (1, 1)
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
        assert record["unasked_reason"] == "finish_reason content_filter: the server ended the answer"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            "This model's maximum context length is 64 tokens, you requested 80",
            "longer than the server",
        ),
        ("the prompt is not to my taste", "refused"),
    ],
)
def test_refused_prompts_are_rejected_once(place: Place, message: str, kind: str) -> None:
    place.ask(10, turns=1)
    with FakeServer(place.tokenizer, fail=0.3, status=400, message=message) as server:
        place.use(server)
        printed = place.run()
    rejected = place.records(place.rejects)
    assert 0 < len(rejected) < 10 and f"{len(rejected)} records rejected ({len(rejected)} {kind}" in printed
    assert all(message in entry["reason"] for entry in rejected)
    place.check(count=10 - len(rejected))
    assert set(server.asked.values()) == {1}


# What stops a run.


def test_keys_are_used_and_never_shown(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(8)
    with FakeServer(place.tokenizer, key="sk-secret", fail=0.3, message="because of sk-secret") as server:
        place.use(server)
        problems, printed = place.fails()
        assert "data.generator.api_key_env" in problems[0]
        place.use(server, api_key_env="MY_KEY")
        monkeypatch.delenv("MY_KEY", raising=False)
        problems, _ = place.fails()
        assert problems == ["data.generator.api_key_env: the environment variable MY_KEY is not set, or empty"]
        monkeypatch.setenv("MY_KEY", "sk-wrong")
        problems, more = place.fails()
        assert "MY_KEY is not taken" in problems[0] and "sk-wrong" not in problems[0]
        assert not server.asked
        monkeypatch.setenv("MY_KEY", "sk-secret\n")
        shown = printed + more + place.run() + place.run("--plan")
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-secret"}
        assert "because of ***" in shown
    place.check()
    assert "secret" not in shown + place.path.read_text()


@pytest.mark.parametrize(
    ("manners", "generator", "problem"),
    [
        ({"model": "other"}, {"served_model": "mine"}, r"does not serve 'mine'; it serves other"),
        ({"max_model_len": 128}, {}, r"serves at most 128 tokens .* rows have up to 200"),
        ({"status": 404, "fail": 1.0}, {}, r"/v1 says 404: out of order; it must have /v1/completions"),
        ({"status": 403, "fail": 1.0}, {}, r"/v1 says 403"),
        ({"status": 301, "fail": 1.0}, {}, r"/v1 says 301"),
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


def test_names_of_the_model(place: Place) -> None:
    place.ask(2)
    with FakeServer(place.tokenizer, model="a") as one, FakeServer(place.tokenizer, model="b") as two:
        place.use(one, two)
        problems, _ = place.fails()
        assert problems[:2] == [f"{one.url} serves a", f"{two.url} serves b"] and "name the one" in problems[2]
        place.use(one)
        place.run()
        assert {record["generator"]["served_model"] for record in place.check()} == {"a"}
        place.ask(3)
        place.use(two)
        with pytest.raises(UserError, match="with served_model a, what stands there now has b: the target was changed"):
            place.run()


def test_a_server_that_takes_no_token_ids(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(2)
    with FakeServer(place.tokenizer) as server:
        place.use(server)
        monkeypatch.setattr(server, "reply", lambda body: {"error": {"message": "prompt must be text"}})
        problems, _ = place.fails("data.generator.max_retries=1")
        assert "not one conversation was answered" in problems[0]


def test_urls() -> None:
    urls = ["http://a:8000", "http://b:8000/v1/", " https://c/api/v1 ", "http://[::1]:8000/"]
    assert normalised_urls(urls) == ["http://a:8000/v1", "http://b:8000/v1", "https://c/api/v1", "http://[::1]:8000/v1"]
    with pytest.raises(UserError) as error:
        normalised_urls(
            ["localhost:8000", "http://me:hunter2@a/v1", "http://a?x=1", "ftp://a", "http://a", "http://a/v1"]
        )
    assert len(error.value.problems) == 5
    assert "base_urls[1]: holds a user name" in error.value.problems[1] and "hunter2" not in str(error.value)
    assert "is there twice" in error.value.problems[4]
    with pytest.raises(UserError, match="none given"):
        normalised_urls([])


def test_a_file_belongs_to_one_kind_of_writer(place: Place) -> None:
    place.ask(4)
    with FakeServer(place.tokenizer) as one, FakeServer(place.tokenizer) as two:
        place.use(one)
        place.run()
        with pytest.raises(UserError, match="written with kind 'openai', this run has 'transformers'"):
            place.run("data.generator.kind=transformers")
        record = place.records()[0]["generator"]
        assert record["kind"] == "openai" and one.url not in json.dumps(record) and "concurrency" not in record
        # Elsewhere and otherwise asked, it is the same.
        place.ask(8)
        place.use(two, concurrency=1, stream=True)
        assert "4 of 8 conversations are done" in place.run()
    place.check()
    assert not set(one.asked) & set(two.asked)
    # Nothing left to ask: no server is needed.
    assert "all 8 conversations are done" in place.run()


def test_plan_reaches_the_servers_and_asks_nothing(place: Place) -> None:
    place.ask(6)
    with FakeServer(place.tokenizer) as server:
        place.use(server, concurrency=7)
        printed = place.run("--plan")
        assert "7 requests at a time over 1 servers" in printed and "serving fake; nothing was asked" in printed
        assert "6 conversations, 9 answers" in printed
    assert not server.asked and not place.out.exists()
    with pytest.raises(UserError, match="no server can be reached"):
        place.run("--plan")


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
    # The target may end its turn at once.
    assert read(tokenizer, finish_reason="stop", completion_tokens=1) == ([STOP], "stop", True)
    assert read(tokenizer, finish_reason="stop", token_ids=[9], completion_tokens=1) == ([9], "stop", False)
    with pytest.raises(BadAnswer, match="7 tokens, the stop token included"):
        read(tokenizer, finish_reason="stop", token_ids=[7] * 6)
    with pytest.raises(BadAnswer, match="stopped at 77"):
        read(tokenizer, **told, token_ids=word, stopped_at=77)


def test_text_of_more_tokens_than_asked_for_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    ids, reason, retokenised = read(tokenizer, text="zqxjvkwzqxjvk", finish_reason="stop")
    assert (len(ids), reason, retokenised) == (6, "length", True)
    # Half a character at the end of a cut answer is no text of the target's.
    assert read(tokenizer, text="the cat\ufffd", finish_reason="length")[0] == tokenizer("the cat")["input_ids"]


def test_blanks_and_broken_characters_are_no_difference(tokenizer: PreTrainedTokenizerBase) -> None:
    word = tokenizer("caf\u00e9", add_special_tokens=False)["input_ids"]
    assert read(tokenizer, text=" caf", token_ids=word[:-1], finish_reason="length") == (word[:-1], "length", False)
    assert read(tokenizer, text="caf\u00e9<|end|>", token_ids=[*word, STOP], finish_reason="stop")[1] == "stop"
    with pytest.raises(BadAnswer, match="another model"):
        read(tokenizer, text="tea", token_ids=word, finish_reason="length")
    with pytest.raises(Refused, match="finish_reason content_filter"):
        read(tokenizer, text="caf", finish_reason="content_filter")


@pytest.mark.parametrize("body", [[], {}, {"choices": [{}, {}]}, {"choices": 3}, {"error": {"message": "x"}}, "x"])
def test_replies_that_are_none(body: Any) -> None:
    with pytest.raises(BadAnswer):
        Completion().add(body)


# Kills.


@pytest.fixture(scope="module")
def lab() -> Iterator[CrashLab]:
    with CrashLab(["draftsmith.data_gen.regenerate", "transformers.models.llama"]) as lab:
        yield lab


@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupt_keeps_what_is_answered(place: Place, lab: CrashLab, name: str, status: int) -> None:
    place.ask(60)
    with FakeServer(place.tokenizer, seconds=0.05) as server:
        place.use(server, concurrency=4)

        def enough() -> bool:
            return place.path.exists() and place.path.read_bytes().count(b"\n") > 5

        ending = lab.run(
            "draftsmith.data_gen.regenerate", [str(place.recipe)], kill_when=enough, kill_with=signal.Signals[name]
        )
        assert ending.status == status, ending.output
        assert "Traceback" not in ending.output and "conversations written" in ending.output
        written = len(place.check(count=len(place.records())))
        assert 5 < written < 60 and f"{written} conversations written" in ending.output
        server.manners.seconds = 0
        place.run()
    place.check()


def kill_again_and_again(place: Place, lab: CrashLab, wanted: int, stream: bool) -> tuple[int, Counter[str]]:
    """Runs that are killed at drawn moments until they end by themselves: how many, and kills by kind."""
    chance, kills, runs = random.Random(0), Counter[str](), 0
    with (
        FakeServer(place.tokenizer, seconds=0.01, fail=0.05, tear=0.05) as one,
        FakeServer(place.tokenizer, seconds=0.01) as two,
    ):
        place.use(one, two, concurrency=5, stream=stream)

        def run(**how: Any) -> Ending:
            kept = place.path.read_bytes() if place.path.exists() else b""
            kept = kept[: kept.rfind(b"\n") + 1]
            done = {tuple(turn["prompt_token_ids"]) for line in kept.splitlines() for turn in json.loads(line)["turns"]}
            before = one.asked + two.asked
            arguments = [str(place.recipe), f"output_dir={place.path.parent}"]
            ending = lab.run("draftsmith.data_gen.regenerate", arguments, **how)
            after = one.asked + two.asked
            assert all(after[prompt] == before[prompt] for prompt in done), "asked again for what is written"
            assert not place.path.exists() or place.path.read_bytes().startswith(kept)
            return ending

        whole = run(count_events=True)
        assert whole.status == 0, whole.output
        while kills.total() < wanted:
            runs += 1
            place.path = place.folder / f"run{runs}" / "conversations.jsonl"
            kills += kill_until_it_ends(run, chance, whole, 20, lambda: None)
            place.check()
    return runs, kills


@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
def test_kill_9_loses_and_repeats_nothing(place: Place, lab: CrashLab) -> None:
    place.ask(60)
    kill_again_and_again(place, lab, 6, stream=False)


@pytest.mark.slow
@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
@pytest.mark.parametrize("stream", [False, True])
def test_100_kills_of_regeneration_by_servers_lose_and_repeat_nothing(
    place: Place, lab: CrashLab, stream: bool, capsys: pytest.CaptureFixture
) -> None:
    place.ask(100)
    started = time.monotonic()
    runs, kills = kill_again_and_again(place, lab, 100, stream)
    told(capsys, f"regeneration by servers, stream {stream}", runs, kills, started)
