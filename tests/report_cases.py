"""An evaluation's files with made-up answers, and the page read back."""

import json
import random
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.generation_log import record_of
from draftsmith.eval.measurement.metrics import summarise_all
from draftsmith.eval.report_page import result_files
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe

PLAIN, MAIN = "plain decoding", "eagle3, tree of 60"
MADE = {
    "device": "cpu",
    "dtype": "float32",
    "made": {
        **{"versions": {"torch": "2.13.0"}, "commit": "0123456789abcdef", "command": ["acceptance.py", "r.yaml"]},
        **{"data": {"drafter": {"file": "model.safetensors", "sha256": "ab" * 32}}},
        **{"date": "2026-01-01 00:00 UTC", "hardware": "x86_64, 2 threads"},
    },
}
VOID = {"meta", "br", "img"}


def generation(chance: random.Random, length: int, drafts: bool, name: str, benchmark: str, turn: int) -> Generation:
    """Random rounds of a tree of 9 (or of plain decoding) that make `length` tokens."""
    accepted, tokens = [], 1
    while tokens < length:
        accepted.append(min(chance.randrange(5), length - tokens) if drafts else 0)
        tokens += accepted[-1] + 1
    cut = tokens > length
    out = Generation([1, 2, 3], list(range(length)), accepted, cut, [9 if drafts else 1] * len(accepted))
    out.draft_calls = out.tried = [4 * drafts] * len(accepted)
    out.decode_seconds = 0.01 * len(accepted) + 1e-4
    out.draft_seconds, out.verify_seconds = 0.3 * out.decode_seconds, 0.6 * out.decode_seconds
    out.benchmark, out.conversation_id, out.turn = benchmark, name, turn
    return out


def described(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What `contenders.describe` says of each."""
    tree = {"policy": "eagle2", "nodes": 9, "draft_calls": 4, "top_k": 10, "vocab_size": None}
    drafted = {"proposer": "drafter", "drafter": "run/drafter", "tree": tree, "lossless": True}
    return {name: result_files.UNDRAFTED if name == PLAIN else drafted for name in names}


def make_recipe(folder: Path, **settings: Any) -> Recipe:
    path = folder / "recipe.yaml"
    content = {"output_dir": str(folder / "run"), "target": {"model": "some/model"}, "eval": settings}
    path.write_text(json.dumps(content))
    return load_recipe(path)


def evaluate(
    recipe: Recipe,
    questions: Sequence[tuple[str, str | None, str, int]],
    length: int = 30,
    contenders: tuple[str, ...] = (MAIN,),
    texts: list[str] | None = None,
) -> dict[str, list[Generation]]:
    """Writes what eval/acceptance.py writes, for random rounds. `questions`: benchmark, category, id, turn."""
    chance = random.Random(0)
    recipe.eval_out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Generation]] = {name: [] for name in (PLAIN, *contenders)}
    words = texts or [f" word{i}" for i in range(length)]
    with result_files.generations_path(recipe).open("w") as file:
        for benchmark, category, name, turn in questions:
            for contender, generations in results.items():
                out = generation(chance, length, contender != PLAIN, name, benchmark, turn)
                out.category = category
                generations.append(out)
                shown = {"question": f"question {name}", "token_texts": words} if contender == contenders[0] else {}
                file.write(json.dumps(record_of(out, contender, "".join(words), shown)) + "\n")
    sampled = recipe.eval.temperature > 0
    numbers = summarise_all(results, PLAIN, 0, sampled)
    result_files.write_acceptance(recipe, numbers, described(results), contenders[0], PLAIN, MADE)
    return results


def page_of(recipe: Recipe) -> str:
    return result_files.write_report(recipe).read_bytes().decode("utf-8")


class Page(HTMLParser):
    """Collects a page's text, tags and pictures, and the text of each answer; complains of elements left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.sources: list[str] = []  # of pictures
        self.answers: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert not [name for name in given if name.startswith("on")]
        self.tags.append(tag)
        self.sources += [given["src"]] if tag == "img" else []
        if given.get("class") == "answer":
            self.answers.append("")
        if tag not in VOID:
            self.open.append((tag, given.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if any(cls == "answer" for _, cls in self.open):
            self.answers[-1] += data
