"""Counted columns against the definition, at span edges, turn boundaries and the end of the text."""

import pytest
import torch

from draftsmith.models.alignment import columns_of
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


@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_counted_columns_are_those_of_the_definition(name: str, steps: int) -> None:
    """And a column's later steps are its neighbours', which the unroll relies on."""
    span = SPANS[name]
    columns = columns_of(torch.tensor([span]), steps)
    index, depths = columns.index[0].tolist(), columns.depth[0].tolist()
    expected = {(t, k) for t in range(len(span)) for k in range(steps) if reference.counted(span, t, k)}
    assert {(t, k) for t, depth in zip(index, depths, strict=True) for k in range(depth)} == expected
    assert all(index[c + k] == index[c] + k for c, depth in enumerate(depths) for k in range(depth))
