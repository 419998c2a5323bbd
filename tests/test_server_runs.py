"""Runs of regeneration by servers: what ends them, whose file it is, how replies are read, and kills."""

import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.server.answers import Completion, Failed, Refused, Vocabulary, read_answer
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.server_urls import normalised_urls
from tests.crash import CAN_FORK, CrashLab, Ending
from tests.fake_server import STOP, FakeServer, response
from tests.server_place import Place
from tests.server_place import place as place
from tests.test_crashes import kill_until_it_ends, told
from tests.thinning import a_few

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
        ({"model": "other"}, {"served_model": "mine"}, r"serves other, not mine"),
        ({"max_model_len": 128}, {}, r"serves at most 128 tokens .* rows have up to 200"),
        ({"status": 404, "fail": 1.0}, {}, r"/v1 has no /v1/completions \(404: out of order\)"),
        ({"status": 403, "fail": 1.0}, {}, r"/v1 says 403"),
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
        assert len(problems) == 1 and ("serves a, not b" in problems[0] or "serves b, not a" in problems[0])
        place.use(one)
        place.run()
        assert {record["generator"]["served_model"] for record in place.check()} == {"a"}
        place.ask(3)
        place.use(two)
        with pytest.raises(UserError, match="with served_model a, the model there now has b: the target was changed"):
            place.run()


PAGE = b"<!DOCTYPE html>\n<html><head><title>Oops &ndash; not here</title></head><body>Sorry!</body></html>"
NO_IDS = b'{"error": {"message": "cannot unmarshal array into field prompt of type string"}}'


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (response(PAGE, 404), "{url} has no /v1/completions (404: an HTML page): regeneration sends prompts as token"),
        (response(b"<html><body>Sorry!</body></html>", 405), "{url} has no /v1/completions (405: an HTML page)"),
        (response(b'{"message": "The model `fake` does not exist."}', 404), "does it still serve data.generator"),
        (response(NO_IDS, 400), "{url}/completions refuses a prompt of one token id (refused: 400: cannot unmarshal"),
        (response(b'{"error": "Unexpected endpoint"}'), "{url}: error in the reply: Unexpected endpoint"),
        (response(PAGE), "{url}: the reply is not JSON (malformed JSON: Expecting value"),
        (response(PAGE, 502), "{url}: 502: an HTML page"),
    ],
)
def test_servers_that_lack_what_is_needed_are_told_by_one_error(place: Place, raw: bytes, problem: str) -> None:
    place.ask(2)
    with FakeServer(place.tokenizer, raw_always=raw) as server:
        place.use(server)
        problems, printed = place.fails()
    assert problem.format(url=server.url) in problems[0]
    assert "model `fake`" in problems[0] or "docs/prompts-and-answers.md lists what a server needs" in problems[-1]
    assert "<" not in "".join(problems) and printed == ""


def test_nothing_answered_is_an_error_alone(place: Place) -> None:
    place.ask(2)
    with FakeServer(place.tokenizer, fail=1.0) as server:
        place.use(server)
        place.change(TRIES=2)
        problems, printed = place.fails()
    pattern = r"data\.generator: none of 2 conversations was answered; q\d: 500: out of order \(after 2 tries\)"
    assert len(problems) == 1 and re.fullmatch(pattern, problems[0]) and printed == ""


def test_urls() -> None:
    urls = ["http://a:8000", "http://b:8000/v1/", " https://c/api/v1 ", "http://[::1]:8000/"]
    found = ["http://a:8000/v1", "http://b:8000/v1", "https://c/api/v1", "http://[::1]:8000/v1"]
    assert normalised_urls(urls) == (found, [])


def test_a_recipe_with_wrong_urls_is_refused_before_prompts_are_read(place: Place) -> None:
    place.prompts.write_text("not JSON\n")
    place.use()
    wrong = ["localhost:8000", "http://me:hunter2@a/v1", "http://a?x=1", "ftp://a", "http://a", "http://a/v1"]
    problems, _ = place.fails(f"data.generator.base_urls=[{', '.join(map(json.dumps, wrong))}]", "train.max_steps=0")
    assert len(problems) == 6 and "hunter2" not in "".join(problems)
    assert "`data.generator.base_urls.1`: holds a user name" in problems[1]
    assert "`data.generator.base_urls.5`: http://a/v1 is there twice" in problems[4]
    problems, _ = place.fails()
    assert len(problems) == 1 and "`data.generator.base_urls`: none given" in problems[0]


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
        place.use(two, concurrency=1)
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
    with pytest.raises(UserError, match="no server can be used"):
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
    with pytest.raises(Failed, match="7 tokens, the stop token included"):
        read(tokenizer, finish_reason="stop", token_ids=[7] * 6)
    with pytest.raises(Failed, match="stopped at 77"):
        read(tokenizer, **told, token_ids=word, stopped_at=77)


def test_text_of_more_tokens_than_asked_for_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    ids, reason, retokenised = read(tokenizer, text="zqxjvkwzqxjvk", finish_reason="stop")
    assert (len(ids), reason, retokenised) == (6, "length", True)
    # Half a character at the end of a cut answer is not text of the target's.
    assert read(tokenizer, text="the cat\ufffd", finish_reason="length")[0] == tokenizer("the cat")["input_ids"]


def test_blanks_and_broken_characters_are_no_difference(tokenizer: PreTrainedTokenizerBase) -> None:
    word = tokenizer("caf\u00e9", add_special_tokens=False)["input_ids"]
    assert read(tokenizer, text=" caf", token_ids=word[:-1], finish_reason="length") == (word[:-1], "length", False)
    assert read(tokenizer, text="caf\u00e9<|end|>", token_ids=[*word, STOP], finish_reason="stop")[1] == "stop"
    with pytest.raises(Failed, match="another model"):
        read(tokenizer, text="tea", token_ids=word, finish_reason="length")
    with pytest.raises(Refused, match="finish_reason content_filter"):
        read(tokenizer, text="caf", finish_reason="content_filter")


@pytest.mark.parametrize("body", [[], {}, {"choices": [{}, {}]}, {"choices": 3}, {"error": {"message": "x"}}, "x"])
def test_replies_that_are_none(body: Any) -> None:
    with pytest.raises(Failed):
        Completion.of(body)


# Kills.


@pytest.fixture(scope="module")
def lab() -> Iterator[CrashLab]:
    with CrashLab(["draftsmith.data_gen.answers.regeneration", "transformers.models.llama"]) as lab:
        yield lab


@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
@pytest.mark.parametrize(("name", "status"), a_few([("SIGINT", 130), ("SIGTERM", 143)], ("SIGINT", 130)))
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
        assert 5 < written < 60 and f"{written} of 60 conversations written" in ending.output
        server.manners.seconds = 0
        place.run()
    place.check()


def kill_again_and_again(place: Place, lab: CrashLab, wanted: int) -> tuple[int, Counter[str]]:
    """Runs that are killed at drawn moments until they end by themselves: how many, and kills by kind."""
    chance, kills, runs = random.Random(0), Counter[str](), 0
    with (
        FakeServer(place.tokenizer, seconds=0.01, fail=0.05, tear=0.05) as one,
        FakeServer(place.tokenizer, seconds=0.01) as two,
    ):
        place.use(one, two, concurrency=5)

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


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not CAN_FORK, reason="needs fork")
def test_100_kills_of_regeneration_by_servers_lose_and_repeat_nothing(
    place: Place, lab: CrashLab, capsys: pytest.CaptureFixture
) -> None:
    place.ask(100)
    started = time.monotonic()
    runs, kills = kill_again_and_again(place, lab, 100)
    told(capsys, "regeneration by servers", runs, kills, started)
