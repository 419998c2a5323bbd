"""Builds report.html, a self-contained page, from the numbers, the recorded answers and the training's metrics.

The template `report.html.jinja` escapes everything.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from draftsmith.eval.measurement.generation_log import UNUSABLE, read_generations
from draftsmith.eval.report_page import figures, summary
from draftsmith.recipes.errors import UserError

SHOWN_ANSWERS = 12  # token by token
TINTS = 4  # background colours of successive rounds
LONGEST_ANSWER = 600  # tokens
LONGEST_QUESTION = 1200  # characters
THUMBNAIL = 256  # pixels of the longer side
SHARP = 64  # pixels of the longer side up to which nothing is lost


def build_html(acceptance: dict[str, Any], metrics: Sequence[dict[str, Any]], generations: Path) -> str:
    """The whole page, of the content of acceptance.json, the lines of metrics.jsonl (none without the file) and the
    file generations.jsonl, if it exists."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": summary.number, "interval": summary.interval}
    main, contenders = acceptance["contender"], acceptance["contenders"]
    numbers = contenders[main]
    answers = choose_answers(generations, main, SHOWN_ANSWERS) if generations.exists() else []
    page = environment.get_template("report.html.jinja").render(
        acceptance=acceptance,
        contenders=contenders,
        main=main,
        numbers=numbers,
        drafting=summary.drafting(acceptance),
        roles=figures.roles_of(acceptance),
        verdict=summary.verdict(acceptance),
        notes=[*summary.notes(acceptance), summary.equality(acceptance)],
        parts=list(summary.parts_of(acceptance)),
        acceptance_figures=figures.acceptance_figures(acceptance),
        training_figures=figures.training_figures(metrics),
        answers=[_answer(record, list(numbers["drafted_by"])) for record in answers],
        images=choose_images(generations, list(contenders), answers),
        TINTS=TINTS,
        colours=figures.COLOURS,
    )
    return figures.harmless(page)


# Answers.


def choose_answers(path: Path, contender: str, count: int) -> list[dict[str, Any]]:
    """At most `count` records of a contender, evenly spread over the file.

    Raises:
        UserError: the file holds none of them, or a line is damaged.
    """
    records = list(read_generations(path, contender))
    if not records:
        raise UserError(f"{path}: holds no answer of {contender!r}; {UNUSABLE}")
    return records if len(records) <= count else [records[i * len(records) // count] for i in range(count)]


def choose_images(path: Path, contenders: Sequence[str], answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pictures that the contenders' answers to the shown prompts make: `contender` and `pictures`, one for each of
    `answers` (`_thumbnail`; None where there is no whole one). Empty if there are none at all."""
    keys = [_turn_of(record) for record in answers]
    rows = []
    for name in contenders if answers else ():
        made = {_turn_of(each): each["image"] for each in read_generations(path, name) if each.get("image")}
        pictures = [_thumbnail(made[key]) if key in made else None for key in keys]
        rows.append({"contender": name, "pictures": pictures})
    return rows if any(any(row["pictures"]) for row in rows) else []


def _turn_of(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["benchmark"], record["conversation_id"], record["turn"]


def _answer(record: dict[str, Any], sources: Sequence[str]) -> dict[str, Any]:
    """A record's data for the page, with its rounds up to LONGEST_ANSWER tokens.

    Args:
        sources: who may have drafted; a drafted token has its source's index, None without `sources`.
    """
    texts = [text.replace("\n", "↵\n").replace("\t", "⇥\t") or "·" for text in record["token_texts"]]
    count = len(record["accepted_per_round"])
    drafted_by: list[dict[str, int]] = record.get("drafted_by") or [{}] * count
    rounds, at = [], 1
    for accepted, nodes, by in zip(record["accepted_per_round"], record["tree_nodes"], drafted_by, strict=True):
        if at >= LONGEST_ANSWER:
            break
        end = at + accepted
        whose = [sources.index(name) for name, tokens in by.items() for _ in range(tokens)] or [None] * accepted
        drafted, own = list(zip(texts[at:end], whose, strict=True)), texts[end : end + 1]
        rounds.append({"drafted": drafted, "own": own, "nodes": nodes - 1, "by": " and ".join(by)})
        at = end + 1
    question = record["question"]
    return {
        "record": record,
        "question": question[:LONGEST_QUESTION] + " …" * (len(question) > LONGEST_QUESTION),
        "pictures": [_thumbnail(picture) for picture in record.get("pictures", [])],
        "first": texts[0],
        "rounds": rounds,
        "tokens": len(texts),
        "hidden": max(0, len(texts) - at),
        "tau": (len(texts) - 1) / count if count else None,
    }


def _thumbnail(named: dict[str, str]) -> dict[str, Any]:
    """A small copy of a picture as a data URL; or `problem`: why it cannot be shown."""
    # Pillow, only where it is needed.
    from draftsmith.recipes.prompts.picture_parts import data_url
    from draftsmith.recipes.prompts.pictures import UnusablePicture, read_picture

    try:
        image = read_picture(named["path"], Path(), named.get("sha256")).image
    except UnusablePicture as error:
        return {"problem": str(error)}
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "PNG" if max(image.size) <= SHARP else "JPEG", quality=85)
    return {"problem": None, "src": data_url(file.getvalue()), "width": image.width, "height": image.height}
