"""What the numbers of an evaluation say, in sentences for the terminal and the page."""

from collections.abc import Sequence
from typing import Any

from draftsmith.eval.report_page.legend import Legend

NEXT = 5  # contenders to compare with the fastest
WORTHLESS_TAU = 1.05
RELAXED = "their output is not the target's, because their rule also accepts tokens that the target would not write"


def verdict(acceptance: dict[str, Any]) -> str:
    """A sentence on the fastest contender, as far as the intervals show."""
    if acceptance["mode"] == "replay":
        return "No verdict on speed: a replay of recorded answers times nothing."
    timed = {name: row for name, row in Legend.of(acceptance).drafting.items() if row["speedup"] is not None}
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


def advice(acceptance: dict[str, Any]) -> list[str]:
    """A note if the target accepts almost no drafted token."""
    main = acceptance["contender"]
    row = acceptance["contenders"][main]
    tau = row["tau"]
    if tau is None or tau >= WORTHLESS_TAU or row["proposer"] != "drafter":
        return []
    return [
        f"note: tau {tau:.2f}: the target accepted almost nothing that {main} drafted. Train longer, while the loss "
        "in metrics.jsonl still falls, or on more answers; its validation_simulated_tau should be well above 1"
    ]


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
    rows = {name: row for name, row in acceptance["contenders"].items() if row["proposer"] is not None}
    best = next((name for name, row in rows.items() if row["fastest_ratio"] == 1), None)
    others = [(name, row) for name, row in rows.items() if name != best and row["fastest_ratio_interval"]]
    if best is None or not others:
        return None
    others.sort(key=lambda other: other[1]["fastest_ratio"])
    told = [
        f"  {name} {row['fastest_ratio']:.2f} ({interval_text(row['fastest_ratio_interval'])})"
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
    different = [name for name, row in rows.items() if row["matches_target"] is False and name not in relaxed]
    if not different:
        return f"Answers, token for token: all those of plain decoding{others}."
    told = ", ".join(f"{name} ({rows[name]['matching_share']:.0%} are)" for name in different)
    said = f"Answers, token for token: not all those of plain decoding: {told}. {_cause(acceptance, different)}"
    return f"{said} The rest are those of plain decoding{others}." if relaxed else said


def _cause(acceptance: dict[str, Any], different: Sequence[str]) -> str:
    """Why greedy answers differ: rounding, or a defect."""
    rounding, exact = dict[str, None](), dict[str, None]()
    for name in different:
        quantized = acceptance["contenders"][name].get("quantization")
        precision = quantized or acceptance["dtype"]
        kernels = quantized is not None and not quantized.startswith("fake")
        coarse = kernels or acceptance["dtype"] not in ("float32", "float64")
        (rounding if coarse else exact)[precision] = None
    said = [f"{' and '.join(rounding)} rounds: longer forwards, other last bits."] if rounding else []
    said += [f"In {' and '.join(exact)} that is a defect: please report it."] if exact else []
    return " ".join(said)


def interval_text(bounds: Sequence[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"
