"""The report's verdict says what the intervals allow, and no more."""

from typing import Any

import pytest

from draftsmith.eval.report_page import summary
from tests.report_cases import PLAIN

Speeds = dict[str, tuple[float | None, list[float] | None]]
FAST, SLOW, WIDE = (1.64, [1.41, 1.93]), (0.74, [0.67, 0.83]), (1.7, [0.9, 2.5])


@pytest.mark.parametrize(
    ("speeds", "said", "fastest"),
    [
        ({"a": SLOW, "b": FAST}, "Fastest here", "b"),
        ({"a": WIDE, "b": FAST}, "Fastest here", "b"),  # a is not sure to be fast
        ({"a": SLOW, "b": (0.5, [0.4, 0.6])}, "Nothing beats", "a"),
        ({"a": WIDE, "b": SLOW}, "Nothing is clearly faster", "a"),
        ({"a": (1.1, None)}, "Nothing is clearly faster", "a"),
        ({"a": (None, None)}, "No verdict", None),
    ],
)
def test_the_verdict_says_what_the_intervals_allow(speeds: Speeds, said: str, fastest: str | None) -> None:
    rows = {
        name: {"speedup": value, "speedup_interval": bounds}
        for name, (value, bounds) in ({PLAIN: (1.0, [1.0, 1.0])} | speeds).items()
    }
    acceptance = {"contenders": rows, "contender": "a", "baseline": PLAIN, "mode": "decode"}
    verdict = summary.verdict(acceptance)
    assert verdict.startswith(said) and (fastest is None or f" {fastest}, {speeds[fastest][0]:.2f} times" in verdict)
    assert "times nothing" in summary.verdict(acceptance | {"mode": "replay"})


def test_the_terminal_compares_the_fastest_with_the_next() -> None:
    def row(ratio: float, proposer: str | None = "drafter") -> dict[str, Any]:
        return {"proposer": proposer, "fastest_ratio": ratio, "fastest_ratio_interval": [ratio - 0.1, ratio + 0.1]}

    rows = {PLAIN: row(2.0, None), "a": row(1.5), "b": row(1.0), "c": row(1.2)}
    heading = "Fastest drafting: b. Times as fast as the next ones, paired by prompt:"
    told = f"{heading}\n  c 1.20 (1.10-1.30)\n  a 1.50 (1.40-1.60)"
    assert summary.fastest({"contenders": rows}) == told
    assert summary.fastest({"contenders": {name: rows[name] for name in (PLAIN, "b")}}) is None
