"""Benchmarks by name: what the hub is asked for, how published rows become conversations, and what a user is told."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.benchmark_prompts import BENCHMARKS, HUMANEVAL_REQUEST
from draftsmith.recipes.prompts.prompt_reader import check_source, read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects

# Rows as they are published, shortened.
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."], "reference": None}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": '\n\ndef half(x):\n    """ Half of x. """\n',
    "canonical_solution": "    return x / 2\n",
    "test": "def check(candidate):\n    assert candidate(2) == 1\n",
    "entry_point": "half",
}
HALF = '```python\ndef half(x):\n    """ Half of x. """\n```'
GSM8K = {"question": "Ann has 2 cats. How many?", "answer": "She has <<2=2>>2.\n#### 2"}
QA = {"question_id": 321, "category": "qa", "turns": ["who sang it?"], "reference": ["She"]}
# EAGLE's form of HumanEval: the request is in it.
HUMANEVAL_TURNS = {"question_id": 7, "category": "code", "turns": ["Complete the code I provided.\n\ndef f(): ..."]}


def read(source: str | list[str], rejects: Rejects | None = None) -> list[Conversation]:
    return list(read_conversations(source, rejects or Rejects()))


def copy_of(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def users(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


# The user's copy.


@pytest.mark.parametrize(
    ("row", "id_", "messages", "meta"),
    [
        (MT_BENCH, "mt_bench/81", users("Write a post.", "Rewrite it."), {"category": "writing"}),
        ({"question_id": 0.0, "turns": ["x"]}, "mt_bench/0", users("x"), {}),  # as pandas writes it
        ({"question_id": float("nan"), "turns": ["x"]}, "mt_bench/1", users("x"), {}),
        (HUMANEVAL, "humaneval/0", users(HUMANEVAL_REQUEST + HALF), {}),
        (HUMANEVAL_TURNS, "humaneval/7", users(HUMANEVAL_TURNS["turns"][0]), {"category": "code"}),
        (GSM8K, "gsm8k/1", [*users(GSM8K["question"]), {"role": "assistant", "content": GSM8K["answer"]}], {}),
        (
            MT_BENCH,
            "spec_bench/81",
            users("Write a post.", "Rewrite it."),
            {"category": "mt_bench"},
        ),
        (QA, "spec_bench/321", users("who sang it?"), {"category": "qa"}),
    ],
)
def test_published_forms(tmp_path: Path, row: dict[str, Any], id_: str, messages: Any, meta: dict[str, str]) -> None:
    name, path = id_.partition("/")[0], copy_of(tmp_path / "copy.jsonl", row)
    (conversation,) = read(f"{name}:{path}")
    assert conversation == Conversation(id_, messages, meta=meta | {"benchmark": name})
    assert (conversation.source, conversation.line) == (f"{name}:{path}", 1)


def test_benchmarks_side_by_side(tmp_path: Path) -> None:
    """A file alone is named by its stem, and nobody said that it is HumanEval."""
    path = copy_of(tmp_path / "q.jsonl", MT_BENCH)
    (tmp_path / "a").mkdir()
    same_stem = copy_of(tmp_path / "a/q.jsonl", {"id": "y", "prompt": HUMANEVAL["prompt"]})
    assert read(same_stem)[0].messages == users(HUMANEVAL["prompt"])
    other = copy_of(tmp_path / "own.jsonl", {"id": "x", "prompt": "p", "meta": {"benchmark": "mine"}})
    found = read([f"mt_bench:{path}", f"spec_bench:{path}", path, other])
    assert [c.id for c in found] == ["mt_bench/81", "spec_bench/81", "81", "x"]
    assert [c.meta["benchmark"] for c in found] == ["mt_bench", "spec_bench", "q", "mine"]
    assert [c.meta["benchmark"] for c in read([path, same_stem])] == [path, same_stem]


# Fetching.


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A hub that holds the rows above; what it was asked for."""
    asked = []
    rows = {
        ("philschmid/mt-bench", None, "train", None): [MT_BENCH],
        ("openai/openai_humaneval", None, "test", None): [HUMANEVAL],
        ("openai/gsm8k", "main", "test", None): [GSM8K],
    }
    for number, task in enumerate(("translation", "summarization", "qa", "math_reasoning", "rag")):
        row = {"question_id": number, "category": task, "turns": ["x"]} | ({"reference": ["y"]} if task == "qa" else {})
        rows["RedHatAI/speculator_benchmarks", None, "train", f"{task}.jsonl"] = [row]
    rows["RedHatAI/speculator_benchmarks", None, "train", "question.jsonl"] = [MT_BENCH]

    def load_dataset(name: str, config: str | None = None, *, split: str, data_files: str | None = None) -> Any:
        asked.append((name, config, split, data_files))
        return datasets.Dataset.from_list(rows[name, config, split, data_files])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_fetched_benchmarks(hub: list[tuple[Any, ...]]) -> None:
    found = read(["mt_bench", "humaneval", "gsm8k"])
    assert [c.id for c in found] == ["mt_bench/81", "humaneval/0", "gsm8k/1"]
    assert [c.meta["benchmark"] for c in found] == ["mt_bench", "humaneval", "gsm8k"]
    assert found[1].messages[0]["content"].startswith(HUMANEVAL_REQUEST)
    found = read("spec_bench")
    tasks = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    assert [c.meta["category"] for c in found] == tasks
    assert all(check_source(name) is None for name in BENCHMARKS) and len(hub) == 3 + 6


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_that_cannot_be_fetched_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub\nand a page more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    said = rf"^{name}: .*{BENCHMARKS[name].hub_id}: ConnectionError.*; .* write {name}:path/to/file\.jsonl [^\n]*$"
    with pytest.raises(UserError, match=said):
        read(name)
