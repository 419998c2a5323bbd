"""Counted columns against the definition, at span edges, turn boundaries and the end of the text."""

import pytest
import torch

from draftsmith.models.alignment import columns_of, remaining_in_span
from tests import reference

SPANS = {
    "one answer": [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0],
    "answer at the end of the text": [0, 0, 1, 1, 1, 1],
    "answer at the very start": [1, 1, 1, 1, 0],
    "two turns": [0, 1, 1, 1, 0, 0, 2, 2, 2, 2],
    "turns that touch": [0, 1, 1, 1, 2, 2, 2, 0],
    "answers of one and two tokens": [0, 1, 0, 2, 2, 0],
    "nothing supervised": [0, 0, 0, 0],
    "a single token": [1],
}


def counted_pairs(span: list[int], steps: int) -> set[tuple[int, int]]:
    columns = columns_of(torch.tensor([span]), steps)
    return {
        (int(t), k)
        for t, depth in zip(columns.index[0], columns.depth[0], strict=True)
        for k in range(steps)
        if depth > k
    }


@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_counted_columns_are_those_of_the_definition(name: str, steps: int) -> None:
    span = SPANS[name]
    expected = {(t, k) for t in range(len(span)) for k in range(steps) if reference.counted(span, t, k)}
    assert counted_pairs(span, steps) == expected


def test_later_steps_are_neighbours_among_the_counted_columns() -> None:
    """What the unroll relies on: column c + k stands k positions after column c, wherever c counts at step k."""
    columns = columns_of(torch.tensor([SPANS["two turns"], [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]]), 7)
    for k in range(7):
        for b, c in columns.counted(k).nonzero().tolist():
            assert columns.index[b, c + k] == columns.index[b, c] + k


def test_remaining_counts_down_inside_a_span() -> None:
    assert remaining_in_span(torch.tensor([[0, 1, 1, 2, 2, 2, 0, 3]])).tolist() == [[0, 2, 1, 3, 2, 1, 0, 1]]
