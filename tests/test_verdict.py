"""The report's verdict says what the intervals allow, and no more."""

from collections.abc import Iterator
from typing import Any

import pytest

from draftsmith.eval.page import files
from draftsmith.eval.page import html as html_report
from draftsmith.eval.page.legend import Legend
from tests.report_cases import PLAIN


def speeds(**given: tuple[float | None, list[float] | None]) -> dict[str, Any]:
    return {
        name: {"speedup": value, "speedup_interval": bounds, "fastest_ratio": None, "fastest_ratio_interval": None}
        for name, (value, bounds) in given.items()
    }


NONE = "Nothing beats plain decoding here."


UNCLEAR = "Nothing is clearly faster than plain decoding here."


def verdicts() -> Iterator[tuple[str, dict[str, Any], str]]:
    """`a` is the main contender."""
    alone = {
        "faster": ((2.0, [1.5, 2.5]), "Faster than plain decoding: a, 2.00 times plain decoding [1.50, 2.50]."),
        "slower": ((0.8, [0.7, 0.9]), "Slower than plain decoding: a, 0.80 times plain decoding [0.70, 0.90]."),
        "unclear": ((1.1, [0.9, 1.3]), "Neither clearly faster nor clearly slower than plain decoding: a, 1.10 times"),
        "one prompt": ((1.1, None), "a, 1.10 times plain decoding (too few prompts for an interval)."),
        "untimed": ((None, None), "No verdict on speed: no answer was long enough to time."),
    }
    for case, (row, said) in alone.items():
        yield case, speeds(a=row), said
    fast, slow, wide = (1.64, [1.41, 1.93]), (0.74, [0.67, 0.83]), (1.7, [0.9, 2.5])
    said = "Fastest here: b, 1.64 times plain decoding [1.41, 1.93]."
    main = " The main contender, a: {} times plain decoding {}."
    yield "clear", speeds(a=slow, b=fast), said + main.format("0.74", "[0.67, 0.83]")
    tied = " It is not clearly faster than a; c."
    yield "ties", speeds(a=wide, b=fast, c=(1.5, [1.3, 1.7])), said + tied + main.format("1.70", "[0.90, 2.50]")
    many = speeds(a=fast, **{name: (1.5, [1.3, 1.7]) for name in "bcdef"})
    yield "many ties", many, said.replace(" b,", " a,") + " It is not clearly faster than b; c; d and 2 more."
    paired = speeds(a=(1.5, [1.3, 1.7]), b=fast)  # their own intervals overlap, that of the ratio tells them apart
    paired["b"]["fastest_ratio"] = 1.0
    paired["a"]["fastest_ratio_interval"] = [1.05, 1.15]
    yield "paired", paired, said + main.format("1.50", "[1.30, 1.70]")
    other = speeds(a=(1.5, [1.3, 1.7]), b=fast, c=(1.7, [0.9, 2.5]))  # the fastest one is not sure to be fast at all
    other["c"]["fastest_ratio"] = 1.0
    other["a"]["fastest_ratio_interval"] = [1.05, 1.15]
    yield (
        "paired with another",
        other,
        said + " It is not clearly faster than a; c." + main.format("1.50", "[1.30, 1.70]"),
    )
    lost = f"{NONE} The fastest drafter is a, 0.74 times plain decoding [0.67, 0.83]."
    yield "none", speeds(a=slow, b=(0.5, [0.4, 0.6])), lost
    yield "none clearly", speeds(a=wide, b=slow), f"{UNCLEAR} The fastest drafter is a, 1.70 times plain decoding"


@pytest.mark.parametrize(("rows", "said"), [v[1:] for v in verdicts()], ids=[v[0] for v in verdicts()])
def test_the_verdict_says_what_the_intervals_allow(rows: dict[str, Any], said: str) -> None:
    legend = Legend(speeds(**{PLAIN: (1.0, [1.0, 1.0])}) | rows, "a", PLAIN)
    found = " ".join(html_report.verdict(legend))
    assert found == said if said.endswith(".") else found.startswith(said)


def test_the_terminal_compares_the_fastest_with_the_next() -> None:
    def row(ratio: float, proposer: str | None = "drafter") -> dict[str, Any]:
        return {"proposer": proposer, "fastest_ratio": ratio, "fastest_ratio_interval": [ratio - 0.1, ratio + 0.1]}

    rows = {PLAIN: row(2.0, None), "a": row(1.5), "b": row(1.0), "c": row(1.2)}
    heading = "Fastest drafting: b. Times as fast as the next ones, paired by prompt:"
    told = f"\n{heading}\n  c 1.20 (1.10-1.30)\n  a 1.50 (1.40-1.60)"
    assert files._fastest({"contenders": rows}) == told
    assert files._fastest({"contenders": {name: rows[name] for name in (PLAIN, "b")}}) == ""
    assert files._fastest({"contenders": {"older": {"proposer": "drafter"}, "file": {"proposer": "drafter"}}}) == ""
