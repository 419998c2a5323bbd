"""Regeneration by servers, against real HTTP on loopback: whatever they do, every answer is right and there once."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from draftsmith.data_gen.server_client import generator as server_generator
from draftsmith.models.chat import render_prompt
from tests.data_gen.fake_server import STOP, FakeServer, Reply, expected
from tests.data_gen.server_place import LIMIT, Place
from tests.data_gen.server_place import place as place

# Answers.


@pytest.mark.parametrize(("ids", "strip"), [("token_ids", False), ("token_ids", True), ("logprobs", True)])
def test_given_token_ids_are_kept(place: Place, ids: str, strip: bool) -> None:
    place.ask(40, turns=3)
    with FakeServer(place.tokenizer, ids=ids, strip_stop=strip) as server:
        place.use(server)
        printed = place.run()
    turns = [turn for record in place.check() for turn in record["turns"]]
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length"}
    assert not any("retokenised" in turn for turn in turns)
    tokens = sum(len(turn["output_token_ids"]) for turn in turns)
    assert f"40 of 40 conversations written\n{len(turns)} answers, {tokens:,} tokens" in printed
    assert f"{server.url}: {len(turns)} answers, {tokens:,} tokens, 0 failed tries" in printed
    assert set(server.asked.values()) == set(server.answered.values()) == {1}


@pytest.mark.parametrize(("ids", "strip"), [("content", False), ("text", False), ("text", True)])
def test_ids_that_are_not_given_are_made_of_the_text_and_said_to_be(place: Place, ids: str, strip: bool) -> None:
    """llama.cpp leaves out those of a character of several tokens."""
    place.ask(40)
    with FakeServer(place.tokenizer, ids=ids, strip_stop=strip) as server:
        place.use(server)
        printed = place.run()
    turns = [turn for record in place.records() for turn in record["turns"]]
    assert {turn["finish_reason"] for turn in turns} == {"stop", "length"} and ", 0 failed tries" in printed
    made = 0
    for turn in turns:
        wanted, reason = expected(place.tokenizer, turn["prompt_token_ids"], LIMIT)
        skipped = any(str(place.tokenizer.decode(wanted[:n])).endswith("\ufffd") for n in range(1, len(wanted) + 1))
        assert turn.get("retokenised", False) is (ids == "text" or skipped)
        assert turn["finish_reason"] == reason
        if turn["output_token_ids"] != wanted:  # cut inside a word, other tokens may be the shorter way to write it
            whole, found = (str(place.tokenizer.decode(i)) for i in (wanted, turn["output_token_ids"]))
            assert reason == "length" and whole.startswith(found)
        made += turn.get("retokenised", False)
    assert f"{made} answers tokenised again from text" in printed and (ids == "text" or made < len(turns))


def test_requests_say_everything_and_repeat_themselves(place: Place) -> None:
    place.ask(12)
    bodies = []
    for seed in (5, 5, 6):
        with FakeServer(place.tokenizer) as server:
            place.use(server, top_p=0.9, seed=seed)
            place.run(f"output_dir={place.folder / str(len(bodies))}", "data.max_length=32")
            bodies.append({tuple(body["prompt"]): body for body in server.bodies})
    assert bodies[0] == bodies[1]
    seeds = {body["seed"] for body in bodies[0].values()}
    assert len(seeds) == len(bodies[0]) and not seeds & {body["seed"] for body in bodies[2].values()}
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    ours = {"skip_special_tokens": False, "add_special_tokens": False, "stop_token_ids": [STOP], "model": "fake"}
    for prompt, body in bodies[0].items():
        assert body["max_tokens"] == min(LIMIT, 32 - len(prompt))
        assert (sampling | ours).items() <= body.items()
    assert any(body["max_tokens"] < LIMIT for body in bodies[0].values())


def test_concurrency_is_used_and_the_least_loaded_server_is_asked(place: Place) -> None:
    place.ask(60, turns=1)
    with FakeServer(place.tokenizer, seconds=0.4) as slow, FakeServer(place.tokenizer, seconds=0.01) as fast:
        place.use(slow, fast, concurrency=4)
        place.run()
    records = place.check()
    assert 2 <= slow.busiest <= 4 and 2 <= fast.busiest <= 4  # the first four are shared
    assert slow.asked.total() < 20 and slow.asked.total() + fast.asked.total() == 60
    assert [record["id"] for record in records] != [f"q{i}" for i in range(60)]  # they came out of order


# Failures.


@contextlib.contextmanager
def meanwhile(ready: Callable[[], bool], do: Callable[[], object]) -> Iterator[None]:
    """Does something in another thread once `ready` says so."""

    def watch() -> None:
        while not ready():
            time.sleep(0.005)
        do()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    thread.join()


def test_errors_and_torn_connections_are_tried_again(place: Place) -> None:
    place.ask(40)
    with FakeServer(place.tokenizer, fail=0.2, tear=0.2) as one, FakeServer(place.tokenizer, fail=0.1) as two:
        place.use(one, two, concurrency=8)
        place.change(TRIES=31)
        printed = place.run()
    place.check()
    answered = one.answered + two.answered
    assert set(answered.values()) == {1}
    failed = (one.asked + two.asked).total() - answered.total()
    assert failed > 5 and "got no answer" not in printed
    assert sum(map(int, re.findall(r"(\d+) failed tries", printed))) == failed


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(place: Place, status: int) -> None:
    place.ask(1, turns=1)
    with FakeServer(place.tokenizer, fail=1.0, status=status, retry_after="0.4") as server:
        place.use(server)
        with meanwhile(lambda: bool(server.times), lambda: setattr(server.manners, "fail", 0.0)):
            place.run()
    place.check()
    assert len(server.times) == 2 and 0.39 < server.times[1] - server.times[0] < 2


@pytest.mark.parametrize(("status", "looks"), [(429, 1), (503, 2)])
def test_a_busy_server_is_not_set_aside_and_a_broken_one_is_looked_at_again(
    place: Place, status: int, looks: int
) -> None:
    place.ask(1, turns=1)
    with FakeServer(place.tokenizer, fail=1.0, status=status) as server:
        place.use(server)
        place.change(TRIES=server_generator.FAILURES_IN_A_ROW + 1)
        place.fails()
    assert server.looks == looks


def test_a_dead_server_is_set_aside_and_used_when_it_is_back(place: Place) -> None:
    place.ask(150, turns=1)
    with FakeServer(place.tokenizer, seconds=0.02) as mortal, FakeServer(place.tokenizer, seconds=0.02) as other:
        place.use(mortal, other, concurrency=4)
        asked_before = 0

        def die_and_rise() -> None:
            nonlocal asked_before
            mortal.stop()
            asked_before = mortal.asked.total()
            time.sleep(0.3)
            mortal.start()

        with meanwhile(lambda: mortal.asked.total() >= 10, die_and_rise):
            printed = place.run()
    place.check()
    assert mortal.asked.total() > asked_before >= 10
    # Those under way when it died, and no more: the least loaded server is not the dead one.
    failed = re.search(rf"{mortal.url}: .* tokens, (\d+) failed tries", printed)
    assert failed is not None and 0 < int(failed[1]) <= 6


def test_all_dead_for_too_long_ends_the_run_and_another_goes_on(place: Place) -> None:
    place.ask(60)
    with FakeServer(place.tokenizer, seconds=0.02) as server:
        place.use(server, concurrency=4)
        place.change(GIVE_UP_SECONDS=0.5)
        with meanwhile(lambda: server.asked.total() >= 20, server.stop):
            problems, printed = place.fails()
        assert server.url in problems[0] and "no server has answered for" in problems[1]
        assert "conversations written" in printed
        written, whole = len(place.check(count=len(place.records()))), place.path.read_bytes()
        assert 5 < written < 60
        done = {tuple(t["prompt_token_ids"]) for record in place.records() for t in record["turns"]}
        before = server.asked.copy()
        server.start()
        assert f"{written} of 60 conversations are done" in place.run()
        place.check()
        assert place.path.read_bytes().startswith(whole)
        assert all(server.asked[prompt] == before[prompt] for prompt in done)


def test_an_answer_that_never_comes_is_asked_for_by_the_next_run(place: Place) -> None:
    place.ask(20)
    with FakeServer(place.tokenizer, lie_to=lambda prompt_ids: sum(prompt_ids) % 5 == 0) as server:
        place.use(server)
        place.change(TRIES=3)
        server.manners.lie = lambda reply: reply["usage"].update(completion_tokens=1000)
        printed = place.leaves_some()
        left = 20 - len(place.records())
        assert 0 < left < 20 and f"{20 - left} of 20 conversations written, {left} without an answer" in printed
        assert "(after 3 tries" in printed and not place.rejects.exists()
        place.check(count=20 - left)
        server.manners.lie = None
        place.run()
    place.check()


def test_a_lie_is_caught_and_another_try_may_be_true(place: Place) -> None:
    place.ask(6)
    with FakeServer(place.tokenizer) as server:
        server.manners.lie = lambda reply: reply["choices"][0].update(token_ids=[7, 5000], text="")
        server.manners.lie_to = lambda prompt_ids: server.asked[tuple(prompt_ids)] == 1
        place.use(server, concurrency=1)
        printed = place.run()
    place.check()
    assert set(server.asked.values()) == {2} and "is another model served" in printed  # the server's last failure


def test_other_finish_reasons_reject_the_conversation(place: Place) -> None:
    """The first turn of four conversations, and every second turn."""
    place.ask(20, turns=2)
    first = {tuple(render_prompt(place.tokenizer, [{"role": "user", "content": f"cat {i}.0"}])): i for i in range(20)}
    reasons = {0: "content_filter", 1: "tool_calls", 2: "abort", 3: None}

    def change(reply: Reply) -> None:
        number = first.get(tuple(reply["choices"][0]["prompt_token_ids"]), 0)
        reply["choices"][0]["finish_reason"] = reasons[number]

    with FakeServer(place.tokenizer, lie=change, lie_to=lambda ids: first.get(tuple(ids), 0) in reasons) as server:
        place.use(server)
        place.change(TRIES=2)
        printed = place.run()
    records = place.check(count=16)
    rejected = {entry["record"]["id"]: entry["reason"] for entry in place.records(place.rejects)}
    assert rejected.keys() == {"q0", "q1", "q2", "q3"} and "4 records rejected (1 finish_reason" in printed
    assert all(rejected[f"q{i}"].startswith(f"finish_reason {reason}") for i, reason in reasons.items())
    # What was answered before stays.
    two = [record for record in records if int(record["id"][1:]) % 2 and record["turns"][0]["finish_reason"] == "stop"]
    assert two and all((len(record["turns"]), record["unasked_turns"]) == (1, 1) for record in two)
    assert all(record["unasked_reason"].startswith("finish_reason content_filter") for record in two)


def test_refused_prompts_are_rejected_once(place: Place) -> None:
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
