"""Texts, corpora and calls of rank_vocab that tests of rankings share."""

import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen import rank_vocab
from draftsmith.data_gen.vocabulary import corpus_reader
from draftsmith.models.vocab import CorpusCounts, load_tensors

WORDS = ["the", "cat", "sat", "on", "mat;", "dogs", "ran,", "rain", "fell\nafter", "", "noon", "für", "3.5", "Ü", "☂"]
TEMPLATE = [1, 2, 3, 4]  # system, user, assistant, end: what the tests' chat template writes


def some_texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["A " + " ".join(chance.choices(WORDS, k=chance.randint(1, 30))) for _ in range(count)]


def counted(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Counter[int]:
    return Counter(token for text in texts for token in tokenizer.encode(text, add_special_tokens=False))


def as_counter(counts: torch.Tensor) -> Counter[int]:
    return Counter({token: count for token, count in enumerate(counts.tolist()) if count})


def load_corpora(path: Path) -> list[CorpusCounts]:
    """The corpora that a file's counts were blended from; empty for counts of the target's own answers alone."""
    tensors, metadata = load_tensors(path, "token counts")
    return [
        CorpusCounts(
            *(facts["source"], tensors[f"counts_of_{i}"], facts["weight"], facts["documents"], facts["rejected"])
        )
        for i, facts in enumerate(json.loads(metadata.get("corpora", "[]")))
    ]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def token_counts(place: Path) -> Path:
    return place / "out" / "token_counts.safetensors"


@pytest.fixture
def place(tmp_path: Path, target_dir: Path) -> Path:
    """A folder with a recipe of the tests' target; it has no conversations."""
    recipe = {"output_dir": str(tmp_path / "out"), "target": {"model": str(target_dir)}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


Script = Callable[..., str]


@pytest.fixture
def rank_by(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Script:
    """Calls rank_vocab with the sources that it is given, in this process; returns what it prints."""
    monkeypatch.setattr(corpus_reader, "BATCH_CHARACTERS", 600)
    monkeypatch.setattr(corpus_reader, "PIECE_CHARACTERS", 200)

    def call(sources: list[dict[str, Any]], *arguments: str) -> str:
        ranking = f"data.ranking={json.dumps({'sources': sources})}"
        monkeypatch.setattr(sys, "argv", ["rank_vocab.py", str(place / "recipe.yaml"), ranking, *arguments])
        rank_vocab.main()
        return capsys.readouterr().out

    return call
