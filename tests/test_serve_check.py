"""What `make serve-check` concludes from an engine's answers."""

from typing import Any

import pytest

from tests.serving.serve_check import compared, table

OURS = [  # the first answer's end token was drafted, so it cut the round
    {"token_ids": [5, 6, 7, 8, 9, 2], "accepted_per_round": [2, 0, 1], "last_round_cut": True},
    {"token_ids": [5, 1], "accepted_per_round": [0], "last_round_cut": False},
]
PLAIN = [{"token_ids": each["token_ids"]} for each in OURS]
COUNTED = [  # as vLLM counts: by place
    {"token_ids": [5, 6, 7, 8, 9, 2], "rounds": 3, "accepted_at": [2, 1, 0, 0]},
    {"token_ids": [5, 1], "rounds": 1, "accepted_at": [0, 0, 0, 0]},
]


def changed(answers: list[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    """With other values in the first answer."""
    return [answers[0] | values, *answers[1:]]


def test_equal_answers_and_counts_have_no_differences() -> None:
    for drafted in (COUNTED, OURS):
        row = compared("engine", PLAIN, drafted, OURS, (2.0, 1.0), 4)
        assert row.differences == [] and row.equal == (2, 2) and row.speeds == (4.0, 8.0)
        assert (row.rounds, row.accepted_at) == (4, [2, 1, 0, 0])


@pytest.mark.parametrize(
    "plain, drafted, words",
    [
        (changed(PLAIN, token_ids=[5, 6, 0]), COUNTED, "prompt 0, plain: first other token at 2"),
        (
            PLAIN,
            changed(COUNTED, token_ids=[5, 6, 7, 8, 9]),
            "prompt 0, with the drafter: first other token at the end",
        ),
        (PLAIN, changed(COUNTED, rounds=4), "prompt 0: rounds and accepted by place (4, [2, 1, 0, 0]), ours (3, "),
        (PLAIN, changed(COUNTED, accepted_at=[3, 0, 0, 0]), "prompt 0: rounds and accepted by place (3, [3, 0, 0, 0])"),
        (
            PLAIN,
            changed(OURS, accepted_per_round=[0, 2, 1]),
            "prompt 0: rounds and accepted by place (3, [2, 1, 0, 0]), ",
        ),
        (PLAIN, [OURS[0], OURS[1] | {"accepted_per_round": [1]}], "prompt 1: rounds and accepted by place (1, [1, "),
    ],
)
def test_each_difference_is_named(plain: list[Any], drafted: list[Any], words: str) -> None:
    differences = compared("engine", plain, drafted, OURS, (1.0, 1.0), 4).differences
    assert len(differences) == 1 and differences[0].startswith(words)


def test_engines_may_count_a_round_that_the_end_cut_in_their_own_way() -> None:
    for drafted in (  # without the end token, as llama.cpp; with accepted tokens behind the end, as vLLM
        changed(OURS, accepted_per_round=[2, 0, 0]),
        changed(COUNTED, accepted_at=[2, 2, 1, 0]),
    ):
        assert compared("engine", PLAIN, drafted, OURS, (1.0, 1.0), 4).differences == []
    elsewhere = changed(OURS, accepted_per_round=[1, 0, 1])
    assert len(compared("engine", PLAIN, elsewhere, OURS, (1.0, 1.0), 4).differences) == 1


def test_the_table_has_a_line_for_each_engine() -> None:
    row = compared("vLLM", PLAIN, COUNTED, OURS, (2.0, 1.0), 4)
    assert table([row]).splitlines()[2] == "| vLLM | 2, 2 of 2 | 4 | 2, 1, 0, 0 (3) | 4, 8 |"
