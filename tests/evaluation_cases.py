"""What evaluations read and write: a folder with drafters and recipes; recorded answers and conversations; files with
made-up answers, and their report, read back."""

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.eval import acceptance
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.generation_log import record_of
from draftsmith.eval.measurement.metrics import summarise_all
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.report_page import result_files
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.sampling import GREEDY, Sampling
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab, save_token_counts
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import make_target, make_tokenizer
from tests.pairs import greedy
from tests.training_runs import run_main


def write_lines(path: Path, *lines: Any) -> Path:
    """Text as it is, all else as JSON; packed if the path ends so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Drafters and recipes.

PROMPTS = ["the cat", "the dog ran after the cat in the rain", "a mat", "rain", "the dog and the cat"]


def save_untrained(
    directory: Path,
    target_dir: Path,
    layers: tuple[int, ...] | None = None,
    seed: int = 0,
    draftable: range = range(3, 63),
) -> Path:
    """A drafter as training would save it, of these tokens; `layers` it reads."""
    files = TargetFiles(TargetSection(model=str(target_dir)))
    target = Target(files.load_model("cpu"), layers)
    vocab = DraftVocab(torch.tensor(draftable), target.vocab_size)
    torch.manual_seed(seed)
    config = Eagle3Config.for_target(target.config, target.vocab_size, target.capture_layers, vocab.size)
    save_drafter(directory, Eagle3Drafter(config, vocab), files.identity_of(target), "", {})
    return directory


@pytest.fixture(scope="module")
def place(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafters that read different layers, a small LM, token counts, prompts; and a recipe over them."""
    folder = tmp_path_factory.mktemp("compare")
    save_untrained(folder / "run/drafter", target_dir)
    save_untrained(folder / "other/drafter", target_dir, (1, 5), seed=1)
    tokenizer = make_tokenizer()
    make_target(num_layers=2, seed=3).save_pretrained(folder / "small")
    tokenizer.save_pretrained(folder / "small")
    counts = torch.arange(320).flip(0) + 1
    save_token_counts(folder / "run/token_counts.safetensors", counts, tokenizer_fingerprint(tokenizer), [4])
    turns = ({"id": f"q{i}", "turns": [text, "and the mat?"][: 1 + i % 2]} for i, text in enumerate(PROMPTS))
    tree = {"nodes": 12, "draft_calls": 3, "top_k": 4}
    content: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "eval": {"prompts": str(write_lines(folder / "prompts.jsonl", *turns)), "max_new_tokens": 24, "tree": tree},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    other = content | {"output_dir": str(folder / "other"), "eval": {"tree": {"policy": "chain", "nodes": 4}}}
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    return folder


def measure(place: Path, *overrides: str) -> None:
    """Runs eval/acceptance.py with the recipe of that folder."""
    run_main(acceptance, place / "recipe.yaml", *overrides)


# Recorded answers.

SAME = ("prompt_token_ids", "token_ids", "accepted_per_round", "last_round_cut", "tree_nodes", "draft_calls")


def recorded(generations: Sequence[Generation], sampling: Sampling | None = GREEDY) -> list[RecordedAnswer]:
    return [
        RecordedAnswer(g.prompt_token_ids, g.token_ids, sampling, conversation_id=str(i))
        for i, g in enumerate(generations)
    ]


def assert_same_rounds(replayed: Sequence[Generation], decoded: Sequence[Generation]) -> None:
    for mine, its in zip(replayed, decoded, strict=True):
        for name in (*SAME, "drafted_by"):
            assert getattr(mine, name) == getattr(its, name), name
        if its.drafted_by:
            assert [sum(each.values()) for each in its.drafted_by] == its.accepted_per_round


def conversation(number: int, target: Target | None = None, **generator: Any) -> dict[str, Any]:
    """As regenerate writes them: two turns, greedy answers."""
    turns, history = [], []
    for turn in range(2):
        prompt = [*history, 2, 11 + number, 12 + turn, 4, 3]
        answer = greedy(target, prompt, 12) if target else [9, 8, 4]
        turns.append({"prompt_token_ids": prompt, "output_token_ids": answer, "finish_reason": "stop"})
        history = prompt + answer
    return {
        "id": f"c{number}",
        "messages": [{"role": "user", "content": "x"}] * 2,
        "turns": turns,
        "meta": {"benchmark": "mine", "category": "maths"},
        "generator": {"kind": "transformers", "temperature": 0.0, "top_p": 1.0, "top_k": 0} | generator,
    }


# Made-up answers and their report.

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


def trace(accepted: list[int], is_cut: bool = False, nodes: int = 8, calls: int = 7, **said: Any) -> Generation:
    """An answer of these rounds, with a tree of `nodes` in each; `said`: more of its fields."""
    tokens, each = list(range(1 + sum(accepted) + len(accepted) - is_cut)), [calls] * len(accepted)
    out = Generation([1], tokens, accepted, is_cut, [nodes] * len(accepted), each, each)
    seconds = {"draft_seconds": 0.2, "verify_seconds": 0.5, "decode_seconds": 1.0}
    return replace(out, **seconds | said)


def random_answer(chance: random.Random, length: int, drafts: bool, **said: Any) -> Generation:
    """Random rounds of a tree of 9 (or of plain decoding) that make `length` tokens."""
    accepted, tokens = [], 1
    while tokens < length:
        accepted.append(min(chance.randrange(5), length - tokens) if drafts else 0)
        tokens += accepted[-1] + 1
    seconds = 0.01 * len(accepted) + 1e-4
    timed = {"decode_seconds": seconds, "draft_seconds": 0.3 * seconds, "verify_seconds": 0.6 * seconds}
    return trace(accepted, tokens > length, *((9, 4) if drafts else (1, 0)), **timed, **said)


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
    results: dict[str, list[Generation]] = {name: [] for name in (PLAIN, *contenders)}
    words, records = texts or [f" word{i}" for i in range(length)], []
    for question in questions:
        whose = dict(zip(("benchmark", "category", "conversation_id", "turn"), question, strict=True))
        for contender, generations in results.items():
            generations.append(random_answer(chance, length, contender != PLAIN, **whose))
            shown = {"question": f"question {question[2]}", "token_texts": words} if contender == contenders[0] else {}
            records.append(record_of(generations[-1], contender, "".join(words), shown))
    recipe.eval_out.mkdir(parents=True, exist_ok=True)
    write_lines(result_files.generations_path(recipe), *records)
    numbers = summarise_all(results, PLAIN, 0, sampled=recipe.eval.temperature > 0)
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
