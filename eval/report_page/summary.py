"""What the numbers of an evaluation say, in sentences for the terminal and the page."""

from collections.abc import Iterator, Sequence
from typing import Any

NEXT = 5  # contenders to compare with the fastest
WORTHLESS_TAU = 1.05
RELAXED = "their output is not the target's, because their rule also accepts tokens that the target would not write"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def interval(bounds: Sequence[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def drafting(acceptance: dict[str, Any]) -> dict[str, Any]:
    """The numbers of all contenders but plain decoding, in whatever precision."""
    return {name: row for name, row in acceptance["contenders"].items() if row["proposer"] is not None}


def parts_of(acceptance: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields (kind, name, numbers by contender) for every part of acceptance.json, if there are several.

    Kinds: benchmark, category (after its benchmark, if that has several), turn.
    """
    benchmarks, categories, turns = (acceptance[part] for part in ("benchmarks", "categories", "turns"))
    for benchmark, numbers in benchmarks.items():
        inside = {name: row for name, row in categories.items() if name.startswith(f"{benchmark}/")}
        if len(benchmarks) > 1:
            yield "benchmark", benchmark, numbers
        for name, row in inside.items() if len(inside) > 1 else ():
            yield "category", name.removeprefix(f"{benchmark}/"), row
    if len(turns) > 1:
        yield "turn", "first turns", turns["1"]
        yield "turn", "later turns", turns["2"]


def verdict(acceptance: dict[str, Any]) -> str:
    """A sentence on the fastest contender, as far as the intervals show."""
    if acceptance["mode"] == "replay":
        return "No verdict on speed: a replay of recorded answers times nothing."
    timed = {name: row for name, row in drafting(acceptance).items() if row["speedup"] is not None}
    if not timed:
        return "No verdict on speed: no answer was long enough to time."
    bounds = {name: row["speedup_interval"] or (0, float("inf")) for name, row in timed.items()}
    gaining = [name for name in timed if bounds[name][0] > 1]
    best = max(gaining or timed, key=lambda name: timed[name]["speedup"])
    if gaining:
        said = f"Fastest here: {best},"
    elif bounds[best][1] < 1:
        said = f"Nothing beats plain decoding here. The fastest is {best},"
    else:
        said = f"Nothing is clearly faster than plain decoding here. The fastest is {best},"
    spread = timed[best]["speedup_interval"]
    told = f"[{spread[0]:.2f}, {spread[1]:.2f}]" if spread else "(too few prompts for an interval)"
    return f"{said} {timed[best]['speedup']:.2f} times plain decoding {told}."


def advice(acceptance: dict[str, Any]) -> str | None:
    """A note if the target accepts almost no drafted token."""
    main = acceptance["contender"]
    row = acceptance["contenders"][main]
    if row["tau"] is None or row["tau"] >= WORTHLESS_TAU or row["proposer"] != "drafter":
        return None
    return (
        f"note: tau {row['tau']:.2f}: the target accepted almost nothing that {main} drafted. Train longer, while the "
        "loss in metrics.jsonl still falls, or on more answers; its validation_simulated_tau should be well above 1"
    )


def notes(acceptance: dict[str, Any]) -> list[str]:
    """How the numbers came about, and whether the answers are plain decoding's."""
    rows, said = acceptance["contenders"].items(), []
    if acceptance["mode"] != "replay" and acceptance["batch_size"] > 1:
        said.append(f"Speeds: {acceptance['batch_size']} answers decoded side by side, by plain decoding, too.")
    if inner := [f"{name} {row['inner_tau']:.2f}" for name, row in rows if row["inner_tau"] is not None]:
        said.append(f"Tokens per verification by the small model: {', '.join(inner)}.")
    moved = [f"  {name} {row['total_variation']:.3f}" for name, row in rows if row["total_variation"] is not None]
    if moved:
        drawn = "Total variation from the target's distribution", "Probability moved, of temperature 1"
        said.append("\n".join([f"{drawn[acceptance['temperature'] == 0]}, a token:", *moved]))
    return said


def fastest(acceptance: dict[str, Any]) -> str | None:
    """The speed of the fastest contender over that of the next ones. The intervals are paired."""
    rows = drafting(acceptance)
    best = next((name for name, row in rows.items() if row["fastest_ratio"] == 1), None)
    others = [(name, row) for name, row in rows.items() if name != best and row["fastest_ratio_interval"]]
    if best is None or not others:
        return None
    others.sort(key=lambda other: other[1]["fastest_ratio"])
    told = [
        f"  {name} {row['fastest_ratio']:.2f} ({interval(row['fastest_ratio_interval'])})"
        for name, row in others[:NEXT]
    ]
    return "\n".join([f"Fastest drafting: {best}. Times as fast as the next ones, paired by prompt:", *told])


def equality(acceptance: dict[str, Any]) -> str:
    """Whether the answers are the target's own."""
    if acceptance["mode"] == "replay":
        return "Replayed: the rounds that decoding these recorded answers would have had. Nothing was timed."
    rows = acceptance["contenders"]
    relaxed = [name for name, row in rows.items() if not row["lossless"]]
    others = f", but not of {'; '.join(relaxed)}: {RELAXED}" if relaxed else ""
    if acceptance["temperature"] > 0:
        cut = f", top-p {acceptance['top_p']}" if acceptance["top_p"] < 1 else ""
        cut += f", top-k {acceptance['top_k']}" if acceptance["top_k"] else ""
        drawn = f"Answers were drawn at temperature {acceptance['temperature']}{cut}"
        return f"{drawn}, by the target's own distribution (lossless){others}."
    different = {name: row for name, row in rows.items() if row["matches_target"] is False and name not in relaxed}
    if not different:
        return f"Answers, token for token: all those of plain decoding{others}."
    told = ", ".join(f"{name} ({row['matching_share']:.0%} are)" for name, row in different.items())
    causes = dict.fromkeys(_cause(row.get("quantization"), acceptance["dtype"]) for row in different.values())
    said = f"Answers, token for token: not all those of plain decoding: {told}. {' '.join(causes)}"
    return f"{said} The rest are those of plain decoding{others}." if relaxed else said


def _cause(quantization: str | None, dtype: str) -> str:
    """Why greedy answers differ: rounding, or a defect."""
    kernels = quantization is not None and not quantization.startswith("fake")
    if kernels or dtype not in ("float32", "float64"):
        return f"{quantization or dtype} rounds: longer forwards, other last bits."
    return f"In {quantization or dtype} that is a defect: please report it."
