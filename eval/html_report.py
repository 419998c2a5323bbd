"""report.html: one file without a network, from the numbers, the recorded answers and the training's metrics.

The page is `report.html.jinja`; everything that goes into it is escaped there, but for the figures of `eval.plots`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from draftsmith.eval import figures, plots
from draftsmith.eval.generation_log import read_generations
from draftsmith.eval.shapes import FORBIDDEN, ShownRecord, clean
from draftsmith.eval.standing import Standing
from draftsmith.recipes.errors import UserError

DASH = "\u2013"
TINTS = 4  # background colours of successive rounds
SHOWN_TOKENS = 20_000  # of all answers together: bounds the size of the page
LONGEST_ANSWER = 600
UNSEEN = re.compile(r"[\u200b\u200e\u200f\u2028\u2029\u2060-\u2064]")


def build_html(
    acceptance: dict[str, Any],
    metrics: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]] = (),
    faults: Sequence[str] = (),
) -> str:
    """The whole page.

    Args:
        acceptance: the content of acceptance.json, its texts `clean`.
        metrics: the lines of metrics.jsonl; none where the drafter's training is not at hand.
        answers: the lines of generations.jsonl that are shown.
        faults: what is wrong with lines of it that were left out.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "interval": interval}
    contenders = acceptance["contenders"]
    main, plain = acceptance["contender"], acceptance["baseline"]
    standing = Standing.of(acceptance)
    longest = max(40, min(LONGEST_ANSWER, SHOWN_TOKENS // max(1, len(answers))))
    page = environment.get_template("report.html.jinja").render(
        acceptance=acceptance,
        contenders=contenders,
        main=main,
        plain=plain,
        numbers=contenders[main],
        drafting=standing.drafting,
        many=standing.many,
        ranks=standing.numbers if len(standing.drafting) > 1 else {},
        roles=standing.roles,
        replayed=acceptance["mode"] == "replay",
        verdict=verdict(contenders[main], acceptance["mode"]),
        rounds_coarsely=rounds_coarsely(acceptance),
        different=[name for name, row in contenders.items() if row["matches_target"] is False],
        parts=list(plots.parts_of(acceptance)),
        acceptance_figures=[_figure(plot) for plot in plots.acceptance_plots(acceptance)],
        training_figures=[_figure(plot) for plot in plots.training_plots(metrics)],
        answers=[_answer(record, longest) for record in answers],
        faults=faults,
        light=figures.LIGHT,
        dark=figures.DARK,
        tints=TINTS,
        DASH=DASH,
    )
    return clean(page)


def verdict(numbers: dict[str, Any], mode: str = "decode") -> str:
    """What the speed-up and its interval allow to say."""
    value, bounds = numbers["speedup"], numbers["speedup_interval"]
    if mode == "replay":
        return "found by replaying recorded answers, which times nothing"
    if value is None:
        return "and no answer was long enough to time"
    if bounds is None:
        return f"and decoding ran {value:.2f} times as fast as plain decoding, on too few prompts to say more"
    if bounds[0] <= 1 <= bounds[1]:
        return f"but decoding is neither clearly faster nor clearly slower than without it ({value:.2f} times)"
    if value > 1:
        return f"and decoding is {value:.2f} times as fast as without it"
    return f"yet decoding is slower than without it, {value:.2f} times as fast"


def rounds_coarsely(acceptance: dict[str, Any]) -> bool:
    """Whether rounding alone may change a greedy answer: a forward over several tokens rounds differently."""
    return acceptance["dtype"] not in ("float32", "float64")


# Numbers in words.


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def interval(bounds: Sequence[float] | None, digits: int = 2) -> str:
    return DASH if bounds is None else f"{bounds[0]:.{digits}f}{DASH}{bounds[1]:.{digits}f}"


# Figures and answers.


def _figure(plot: figures.Plot) -> dict[str, Any]:
    return {"name": plot.name, "title": plot.title, "svg": figures.to_svg(plot)}


def choose_answers(path: Path, contender: str, count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """At most `count` records of the main contender, and what is wrong with lines that had to be left out.

    As many records from every benchmark and category, evenly spread in each. The file is read twice, so that it need
    not fit into memory.

    Raises:
        UserError: no answer of the contender can be read.
    """
    if not count:
        return [], []
    faults: list[str] = []
    groups: dict[tuple[str, str | None], list[int]] = {}
    for index, record in enumerate(read_generations(path, contender, faults, ShownRecord)):
        groups.setdefault((record["benchmark"], record["category"]), []).append(index)
    if not groups:
        raise UserError(
            f"{faults[0] + '; it' if faults else f'{path}:'} holds no answer of {contender!r} that can be shown: "
            "damaged, or of another run or version; run eval/acceptance.py again, or move the file away for a report "
            "without answers"
        )
    shares = dict.fromkeys(groups, 0)
    while sum(shares.values()) < min(count, sum(map(len, groups.values()))):
        for group, members in groups.items():
            if sum(shares.values()) < count and shares[group] < len(members):
                shares[group] += 1
    chosen = {
        members[i * len(members) // shares[group]] for group, members in groups.items() for i in range(shares[group])
    }
    again = read_generations(path, contender, [], ShownRecord)
    return [record for index, record in enumerate(again) if index in chosen], faults


def _answer(record: dict[str, Any], longest: int) -> dict[str, Any]:
    """What the page shows of a record; its rounds up to `longest` tokens."""
    texts = record["token_texts"]
    rounds = []
    at = 1
    for i, (accepted, nodes) in enumerate(zip(record["accepted_per_round"], record["tree_nodes"], strict=True)):
        if at >= longest:
            break
        rounds.append(
            {
                "round": i + 1,
                "accepted": accepted,
                "nodes": nodes - 1,
                "tint": i % TINTS,
                "drafted": [visible(text) for text in texts[at : at + accepted]],
                "own": [visible(text) for text in texts[at + accepted : at + accepted + 1]],
            }
        )
        at += accepted + 1
    count = len(record["accepted_per_round"])
    return {
        "id": record["conversation_id"],
        "turn": record["turn"],
        "benchmark": record["benchmark"],
        "category": record["category"],
        "question": _shortened(record["question"], 1200),
        "first": visible(texts[0]),
        "rounds": rounds,
        "tokens": len(texts),
        "hidden": max(0, len(texts) - at),
        "verifications": count,
        "tau": (len(texts) - 1) / count if count else None,
        "accepted_per_round": record["accepted_per_round"][: len(rounds)],
    }


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def visible(text: str) -> str:
    """A token's text with line breaks shown, and by name what must not stand on a page or cannot be seen.

    A token without any text (bytes of an unfinished character) is a middle dot.
    """
    text = text.replace("\n", "↵\n").replace("\t", "⇥\t") or "·"
    return UNSEEN.sub(_named, FORBIDDEN.sub(_named, text))


def _named(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"  # Unicode has pictures of its oldest controls
