"""Reading replies of servers: stripped stop tokens, ids and text that do not agree, and lies."""

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.server_client.server_answers import Completion, Failed, Vocabulary, read_answer
from tests.conftest import make_tokenizer
from tests.data_gen.fake_server import STOP


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
