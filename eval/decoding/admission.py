"""Who decodes next, where many prompts share a few rows."""

from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_END: Any = object()


def worth_a_prefill(active: int, rows: int) -> bool:
    """Prompts are read in groups: a quarter of the rows is free (all of them at the start and at lulls)."""
    return active <= rows - max(1, rows // 4)


def taken(waiting: Iterator[T | None], most: int) -> tuple[list[T], bool]:
    """The next ones, and whether there are none behind them: fewer than `most` also where None says "not now"."""
    new: list[T] = []
    while len(new) < most:
        one = next(waiting, _END)
        if one is _END or one is None:
            return new, one is _END
        new.append(one)
    return new, False
