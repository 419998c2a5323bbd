"""A few of many combinations, in which values still meet in pairs; and how many examples hypothesis tries."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, settings

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


def meeting(combinations: Sequence[tuple[Any, ...]], together: int = 2) -> Iterator[tuple[Any, ...]]:
    """A few of the combinations, in which any `together` values meet that meet anywhere; with one, each is there."""

    def groups(combination: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), together))

    left = set().union(*map(groups, combinations))
    while left:
        best = max(combinations, key=lambda each: len(groups(each) & left))
        left -= groups(best)
        yield best


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Some combinations of the axes' values: any two values of different axes meet in one of them."""
    return list(meeting(list(itertools.product(*axes))))


def thinned(*axes: Iterable[Any], together: int = 1) -> list[Any]:
    """All combinations of the axes' values as parameters of a test, exhaustive those that `meeting` leaves out."""
    combinations = list(itertools.product(*axes))
    kept = set(meeting(combinations, together))
    return [each if each in kept else pytest.param(*each, marks=EXHAUSTIVE) for each in combinations]


def a_few(values: Iterable[Any], *fast: Any, marks: Any = EXHAUSTIVE) -> list[Any]:
    """The values as parameters of a test, exhaustive those that are not named; tuples are one combination each."""
    values = list(values)
    assert all(value in values for value in fast), fast
    left = [value for value in values if value not in fast]
    return [*fast, *(pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=marks) for v in left)]


MANY = 100  # examples


def efforts(names: Iterable[str], *fast: str) -> list[Any]:
    """(name, examples) of a test: few examples for those that are fast, more for all, slow, and many, exhaustive."""
    marks = {15: (pytest.mark.slow,), MANY: EXHAUSTIVE}
    more = [pytest.param(name, count, marks=marks[count]) for name in names for count in marks]
    return [*((name, 4) for name in fast), *more]


def effort(examples: int, steps: int = 10) -> settings:
    """The same examples in every run, whatever the time they take; `steps`: of a state machine."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)),
    )
