"""Builds report.html, a self-contained page, from the numbers, the recorded answers and the training's metrics.

The template `report.html.jinja` escapes everything except the figures of `eval.page.figures`. The page also offers the
numbers as downloads.
"""

import base64
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from draftsmith.eval.measured.generation_log import read_generations
from draftsmith.eval.page import drawing, figures
from draftsmith.eval.page.file_shapes import FORBIDDEN, ShownRecord, clean
from draftsmith.eval.page.legend import Legend
from draftsmith.recipes.errors import UserError

DASH = "\u2013"
TINTS = 4  # background colours of successive rounds
SHOWN_TOKENS = 20_000  # of all answers together; bounds the page's size
LONGEST_ANSWER = 600
RELAXED = "their output is not the target's, because their rule also accepts tokens that the target would not write"
TIES = 3  # most contenders that the verdict names as possibly equally fast
# Columns of the CSV file. A key's interval, if any, follows it as <key>_low and <key>_high.
CSV_KEYS = (
    *("tau", "speedup", "tokens_per_second", "accepted_per_round", "tree_nodes_per_round", "draft_calls_per_round"),
    *("tau_ratio", "speed_ratio", "fastest_ratio", "matches_target", "matching_share", "inner_tau", "total_variation"),
)
SHOWN_PICTURES = 8  # of an answer's prompt
THUMBNAIL = 256  # pixels of the longer side
SHARP = 64  # pixels of the longer side up to which nothing is lost
UNSEEN = re.compile(r"[\u200b\u200e\u200f\u2028\u2029\u2060-\u2064]")


def build_html(
    acceptance: dict[str, Any],
    metrics: Sequence[dict[str, Any]],
    answers: Sequence[dict[str, Any]] = (),
    faults: Sequence[str] = (),
    images: Sequence[dict[str, Any]] = (),
) -> str:
    """The whole page.

    Args:
        acceptance: the content of acceptance.json, with `clean` texts.
        metrics: the lines of metrics.jsonl; none if the file is missing.
        answers: the lines of generations.jsonl to show.
        faults: problems of unusable lines of generations.jsonl.
        images: from `choose_images`.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "interval": interval, "brackets": brackets}
    contenders = acceptance["contenders"]
    main = acceptance["contender"]
    legend = Legend.of(acceptance)
    longest = max(40, min(LONGEST_ANSWER, SHOWN_TOKENS // max(1, len(answers))))
    sources = list(contenders[main].get("drafted_by", {}))
    shown = [_answer(record, longest, sources) for record in answers]
    different = different_contenders(acceptance)
    page = environment.get_template("report.html.jinja").render(
        acceptance=acceptance,
        contenders=contenders,
        main=main,
        numbers=contenders[main],
        drafting=legend.drafting,
        many=legend.many,
        ranks=legend.numbers if len(legend.drafting) > 1 else {},
        roles=legend.roles,
        replayed=acceptance["mode"] == "replay",
        verdict=verdict(legend, acceptance["mode"]),
        downloads=[
            _download("acceptance.json", "application/json", json.dumps(acceptance)),
            _download("contenders.csv", "text/csv", contenders_csv(contenders)),
        ],
        coarse=[name for name in different if rounds_coarsely(acceptance, name)],
        precisions=partial(precisions, acceptance),
        different=different,
        promised=not any(rounds_coarsely(acceptance, name) for name in contenders),
        hierarchies={name: row for name, row in contenders.items() if row.get("inner_tau") is not None},
        relaxed=relaxed_contenders(acceptance),
        RELAXED=RELAXED,
        parts=list(figures.parts_of(acceptance)),
        acceptance_figures=_figures(figures.acceptance_plots(acceptance)),
        training_figures=_figures(figures.training_plots(metrics)),
        answers=shown,
        sources=sources,
        pictured=any(answer["pictures"] for answer in shown),
        images=images,
        captions=[answer["question"] for answer in shown],
        moved={name: row for name, row in contenders.items() if row.get("total_variation") is not None},
        faults=faults,
        light=drawing.LIGHT,
        dark=drawing.DARK,
        DASH=DASH,
    )
    return clean(page)


def verdict(legend: Legend, mode: str = "decode") -> list[str]:
    """Sentences about the fastest contender, as far as the intervals show: the verdict first, then qualifications."""
    if mode == "replay":
        return ["No verdict on speed: a replay of recorded answers times nothing."]
    timed = {name: row for name, row in legend.drafting.items() if row["speedup"] is not None}
    if not timed:
        return ["No verdict on speed: no answer was long enough to time."]
    bounds = {name: row["speedup_interval"] or [row["speedup"]] * 2 for name, row in timed.items()}
    gaining = [name for name in timed if bounds[name][0] > 1]
    best = max(gaining or timed, key=lambda name: timed[name]["speedup"])
    measured, alone = timed[best]["speedup_interval"] is not None, len(timed) == 1
    if alone and not measured:
        said = ""
    elif gaining:
        said = "Faster than plain decoding: " if alone else "Fastest here: "
    elif bounds[best][1] < 1:
        said = "Slower than plain decoding: " if alone else "Nothing beats plain decoding here. The fastest drafter is "
    elif alone:
        said = "Neither clearly faster nor clearly slower than plain decoding: "
    else:
        said = "Nothing is clearly faster than plain decoding here. The fastest drafter is "
    sentences = [f"{said}{best}, {_speed(timed[best])}."]
    others = [name for name in timed if name != best]
    ties = [name for name in others if not _clearly_faster(legend, best, name)]
    if gaining and measured and ties:
        more = f" and {len(ties) - TIES} more" if len(ties) > TIES else ""
        sentences.append(f"It is not clearly faster than {'; '.join(ties[:TIES])}{more}.")
    if legend.main != best and legend.main in timed:
        sentences.append(f"The main contender, {legend.main}: {_speed(timed[legend.main])}.")
    return sentences


def _speed(row: dict[str, Any]) -> str:
    bounds = row["speedup_interval"]
    spread = brackets(bounds) if bounds else "(too few prompts for an interval)"
    return f"{row['speedup']:.2f} times plain decoding {spread}"


def _clearly_faster(legend: Legend, one: str, other: str) -> bool:
    """Whether the intervals separate the two: that of the paired ratio where `one` is the fastest, else their own."""
    first, second = legend.drafting[one], legend.drafting[other]
    if first.get("fastest_ratio") == 1 and second["fastest_ratio_interval"] is not None:
        return second["fastest_ratio_interval"][0] > 1
    bounds = first["speedup_interval"], second["speedup_interval"]
    return bounds[0] is not None and bounds[1] is not None and bounds[0][0] > bounds[1][1]


def rounds_coarsely(acceptance: dict[str, Any], name: str) -> bool:
    """Whether rounding alone may change a contender's greedy answers: a forward over several tokens rounds
    differently."""
    precision = acceptance["contenders"][name].get("quantization") or "fake"
    return acceptance["dtype"] not in ("float32", "float64") or not precision.startswith("fake")


def precisions(acceptance: dict[str, Any], names: Sequence[str]) -> str:
    """The precisions in which these contenders ran, in words."""
    told = [acceptance["contenders"][name].get("quantization") or acceptance["dtype"] for name in names]
    return " and ".join(dict.fromkeys(told))


def relaxed_contenders(acceptance: dict[str, Any]) -> list[str]:
    """Contenders whose rule accepts other tokens than the target's. Older files only know the main contender's."""
    main, rows = acceptance["contender"], acceptance["contenders"]
    return [name for name, row in rows.items() if not row.get("lossless", name != main or acceptance["lossless"])]


def different_contenders(acceptance: dict[str, Any]) -> list[str]:
    """Contenders with greedy answers that differ from plain decoding's of their precision, of a rule under which they
    should not."""
    relaxed = relaxed_contenders(acceptance)
    rows = acceptance["contenders"].items()
    return [name for name, row in rows if row["matches_target"] is False and name not in relaxed]


# Numbers in words.


def number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def interval(bounds: Sequence[float] | None, digits: int = 2) -> str:
    return DASH if bounds is None else f"{bounds[0]:.{digits}f}{DASH}{bounds[1]:.{digits}f}"


def brackets(bounds: Sequence[float]) -> str:
    """An interval in a sentence."""
    return f"[{bounds[0]:.2f}, {bounds[1]:.2f}]"


# Downloads, figures and answers.


def _download(name: str, kind: str, text: str) -> dict[str, str]:
    content = text.encode()
    size = f"{max(1, round(len(content) / 1000)):,} kB"
    return {"name": name, "size": size, "href": f"data:{kind};base64,{base64.b64encode(content).decode()}"}


def contenders_csv(contenders: dict[str, dict[str, Any]]) -> str:
    """One line per contender, with acceptance.json's numbers; null is empty."""
    columns: dict[str, dict[str, Any]] = {}
    for name, row in contenders.items():
        cells = columns.setdefault(name, {"contender": name})
        for key in CSV_KEYS:
            cells[key] = row.get(key)  # older files lack some
            if f"{key}_interval" in row:
                cells[f"{key}_low"], cells[f"{key}_high"] = row[f"{key}_interval"] or (None, None)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for cells in columns.values() for key in cells)))
    writer.writeheader()
    writer.writerows(columns.values())
    return file.getvalue()


def _figures(plots: Sequence[drawing.Plot]) -> list[dict[str, str]]:
    return [{"title": plot.title, "svg": drawing.to_svg(plot)} for plot in plots]


def choose_answers(path: Path, contender: str, count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """(at most `count` records of the main contender, problems of unusable lines).

    Takes equally many records of every benchmark and category, evenly spread. It reads the file twice to save memory.

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
            "damaged, or of another run or version; run `draftsmith evaluate` again, or move the file away for a "
            "report without answers"
        )
    largest = max(map(len, groups.values()))
    in_turn = (group for i in range(largest) for group, members in groups.items() if i < len(members))
    shares = Counter(itertools.islice(in_turn, count))
    chosen = {
        members[i * len(members) // shares[group]] for group, members in groups.items() for i in range(shares[group])
    }
    again = read_generations(path, contender, [], ShownRecord)
    return [record for index, record in enumerate(again) if index in chosen], faults


def choose_images(path: Path, contenders: Sequence[str], answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pictures that the contenders' answers to the shown prompts make: `contender` and `pictures`, one for each of
    `answers` (`_thumbnail`; None where there is no whole one). Empty if there are none at all."""
    keys = [_turn_of(record) for record in answers]
    rows = []
    for name in contenders if answers else ():
        made = {_turn_of(each): each["image"] for each in read_generations(path, name, []) if each.get("image")}
        pictures = [None if key not in made else _thumbnail(made[key]) for key in keys]
        rows.append({"contender": name, "pictures": pictures})
    return rows if any(any(row["pictures"]) for row in rows) else []


def _turn_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["benchmark"], record["conversation_id"], record["turn"]


def _answer(record: dict[str, Any], longest: int, sources: Sequence[str] = ()) -> dict[str, Any]:
    """A record's data for the page, with its rounds up to `longest` tokens.

    Args:
        sources: who may have drafted; a token has its source's index, None without `sources`.
    """
    texts, drafted_by = record["token_texts"], record.get("drafted_by") or [{}] * len(record["tree_nodes"])
    rounds = []
    at = 1
    for i, (accepted, nodes) in enumerate(zip(record["accepted_per_round"], record["tree_nodes"], strict=True)):
        if at >= longest:
            break
        by: list[int | None] = [
            sources.index(name) for name, count in drafted_by[i].items() if name in sources for _ in range(count)
        ]
        rounds.append(
            {
                "round": i + 1,
                "accepted": accepted,
                "nodes": nodes - 1,
                "tint": i % TINTS,
                "drafted": list(zip(map(visible, texts[at : at + accepted]), by or [None] * accepted, strict=False)),
                "by": " and ".join(drafted_by[i]),
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
        "pictures": [_thumbnail(picture) for picture in record.get("pictures", [])[:SHOWN_PICTURES]],
        "more_pictures": max(0, len(record.get("pictures", [])) - SHOWN_PICTURES),
        "first": visible(texts[0]),
        "rounds": rounds,
        "tokens": len(texts),
        "hidden": max(0, len(texts) - at),
        "verifications": count,
        "tau": (len(texts) - 1) / count if count else None,
        "accepted_per_round": record["accepted_per_round"][: len(rounds)],
    }


def _thumbnail(named: dict[str, str]) -> dict[str, Any]:
    """A picture of a prompt in small, as a data URL; or `problem`: why it cannot be shown."""
    # Pillow, only where it is needed.
    from draftsmith.recipes.prompts.picture_files import data_url
    from draftsmith.recipes.prompts.pictures import UnusablePicture, read_picture

    try:
        image = read_picture(named["path"], Path(), named.get("sha256")).image
    except UnusablePicture as error:
        return {"problem": visible(str(error))}
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "PNG" if max(image.size) <= SHARP else "JPEG", quality=85)
    return {
        "problem": None,
        "src": data_url(file.getvalue()),
        "width": image.width,
        "height": image.height,
        "name": visible(Path(named["path"]).name),
    }


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more characters)"


def visible(text: str) -> str:
    """A token's text with visible line breaks and with names for forbidden or invisible characters.

    A token without text (bytes of an unfinished character) is a middle dot.
    """
    text = text.replace("\n", "↵\n").replace("\t", "⇥\t") or "·"
    return UNSEEN.sub(_named, FORBIDDEN.sub(_named, text))


def _named(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"  # Unicode's control pictures
