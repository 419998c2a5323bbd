"""Counts of corpora: several processes, kills, changed sources, datasets that break off."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.corpus import counts as corpus_counts
from draftsmith.data_gen.corpus import reader as corpus_reader
from draftsmith.data_gen.corpus.counts import Processes, TextCounter
from draftsmith.data_gen.corpus.reader import corpus_of
from draftsmith.models.chat import load_tokenizer
from draftsmith.models.vocab import load_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import RankingSource, TargetSection
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.crash import CAN_FORK, ROOT, CrashLab, Fault
from tests.ranking_cases import (
    Script,
    as_counter,
    counted,
    load_corpora,
    some_texts,
    token_counts,
    write_lines,
)
from tests.ranking_cases import place as place
from tests.ranking_cases import rank_by as rank_by

# Killed and gone on with.


@pytest.mark.slow
def test_several_processes_count_what_one_counts(
    place: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_reader, "CHUNK_CHARACTERS", 300)
    monkeypatch.setattr(corpus_counts, "CHUNKS_BEFORE_PROCESSES", 2)
    path = write_lines(place / "a.jsonl", [*({"text": text} for text in some_texts(200, 5)), "{torn\n", {"text": ""}])
    section = TargetSection(model=str(target_dir))
    tokenizer = load_tokenizer(section)
    found = []
    for workers in (1, 2):
        corpus = corpus_of(RankingSource(source=str(path)))
        with Processes(section, TextCounter(tokenizer, VOCAB_SIZE), workers) as processes:
            folder = place / str(workers)
            found.append(corpus_counts.count_corpus(corpus, folder, "ab" * 32, processes))
            assert (processes._executor is not None) == (workers == 2)
    assert torch.equal(found[0].counts, found[1].counts) and found[0].facts() == found[1].facts()
    assert as_counter(found[0].counts) == counted(some_texts(200, 5), tokenizer) and found[0].rejected == 2


@pytest.fixture(scope="module")
def lab() -> Iterator[CrashLab]:
    with CrashLab(["tests.ranking_in_small_steps", "transformers.models.llama.modeling_llama"]) as lab:
        yield lab


def small_corpora(folder: Path) -> tuple[list[dict[str, Any]], Counter[int], int]:
    """(sources, what their pieces hold, how many records are bad): lines with bad ones between, and text files."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = some_texts(60, 6)
    lines: list[Any] = [{"text": text} for text in texts[:40]]
    lines[10:10] = lines[25:25] = ["{torn\n", {"text": 1}]
    write_lines(folder / "a.jsonl", lines)
    for i in range(2):
        (folder / f"{i}.txt").write_text("\n".join(texts[40 + 10 * i : 50 + 10 * i]))
    pieces = [text for i in range(2) for text in lines_of_at_most_200_bytes(folder / f"{i}.txt")]
    sources = [{"source": str(folder / "a.jsonl")}, {"source": str(folder / "*.txt")}]
    return sources, counted([*texts[:40], *pieces], make_tokenizer()), 4


def lines_of_at_most_200_bytes(path: Path) -> list[str]:
    """Whole lines joined while they have room, as pieces of text files are cut."""
    pieces = [b""]
    for line in path.read_bytes().splitlines(keepends=True):
        assert len(line) <= 200
        if len(pieces[-1] + line) > 200:
            pieces.append(b"")
        pieces[-1] += line
    return [piece.decode() for piece in pieces]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(not CAN_FORK, reason="kills forked processes")
def test_a_kill_at_any_moment_counts_nothing_twice_and_loses_nothing(place: Path, lab: CrashLab) -> None:
    sources, seen, bad = small_corpora(place / "texts")

    def arguments(out: str) -> list[str]:
        ranking = json.dumps({"sources": sources, "workers": 1})
        return [str(place / "recipe.yaml"), f"output_dir={place / out}", f"data.ranking={ranking}"]

    module = "tests.ranking_in_small_steps"
    whole = lab.run(module, arguments("whole"), count_events=True)
    assert whole.status == 0, whole.output

    def results(out: str) -> tuple[Any, ...]:
        path = place / out / "token_counts.safetensors"
        corpora = [(corpus.counts.tolist(), corpus.facts()) for corpus in load_corpora(path)]
        return (*(load_token_counts(path)[0].tolist(), load_token_counts(path)[1]), corpora)

    wanted = results("whole")
    assert sum((Counter(dict(enumerate(counts))) for counts, _ in wanted[2]), Counter()) == seen
    chance, killed = random.Random(7), 0
    faults = [Fault("rename", n) for n in range(1, whole.events["rename"] + 1, 3)]
    faults += [Fault("write", n, chance.random()) for n in range(1, whole.events["write"] + 1, 4)]
    for number, fault in enumerate(faults):
        out = f"killed{number}"
        ending = lab.run(module, arguments(out), fault=fault)
        assert ending.status == -signal.SIGKILL, ending.output
        killed += 1
        # Once more, early in what is left.
        lab.run(module, arguments(out), fault=Fault("rename", 2))
        ending = lab.run(module, arguments(out))
        assert ending.status == 0, ending.output
        assert results(out) == wanted, fault
        kept = [line for file in (place / out / "ranking").glob("*.rejects.jsonl") for line in file.open()]
        assert len(kept) == bad, fault
    assert killed == len(faults) >= 8


@pytest.mark.slow
def test_killed_with_its_processes_it_goes_on(place: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = some_texts(3000, 8)
    path = write_lines(place / "a.jsonl", [{"text": text} for text in texts])
    ranking = json.dumps({"sources": [{"source": str(path)}], "workers": 2})
    command = [
        sys.executable,
        "-c",
        "from tests.ranking_in_small_steps import main; main()",
        str(place / "recipe.yaml"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        [*command, f"data.ranking={ranking}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    state = corpus_counts.progress_path(place / "out/ranking", str(path))

    def documents() -> int:
        if not state.exists():
            return 0
        _, metadata = corpus_counts.load_tensors(state, "progress")
        return json.loads(metadata["progress"])["documents"]

    children: list[int] = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None and documents() < 200:
        time.sleep(0.02)
    assert run.poll() is None, run.stdout.read() if run.stdout else ""
    children = descendants(run.pid)
    run.kill()
    run.wait()
    before = documents()
    assert 200 <= before < 3000
    while any(alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(child) for child in children)  # nobody is left behind
    alone = ranking.replace('"workers": 2', '"workers": 1')  # how many there are changes nothing
    again = subprocess.run(
        [*command, f"data.ranking={alone}"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert f"resumes behind {before:,} documents" in again.stdout
    assert as_counter(load_token_counts(token_counts(place))[0]) == counted(texts, tokenizer)


def descendants(pid: int) -> list[int]:
    """Where the system tells them."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_changed_is_counted_anew_with_a_word(place: Path, rank_by: Script) -> None:
    a, b = write_lines(place / "a.jsonl", [{"text": "the cat"}, "{torn\n"]), place / "b.txt"
    b.write_text("the dog ran")
    sources = [{"source": str(a)}, {"source": str(b)}]
    printed = rank_by(sources)
    assert "counted again" not in printed and "counted before" not in printed
    # Weights and company change nothing.
    assert rank_by([{"source": str(b), "weight": 2.5}]).count("counted before") == 1
    write_lines(a, [{"text": "the mat"}])
    printed = rank_by(sources)
    assert f"{a}: counted again: its files changed" in printed and f"{b}: counted before" in printed
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == counted(["the mat"], make_tokenizer()) and corpus.rejected == 0
    assert not list((place / "out/ranking").glob("*a-jsonl*.rejects.jsonl"))
    assert f"{a}: counted again: its max_documents changed" in rank_by([{"source": str(a), "max_documents": 1}])
    state = corpus_counts.progress_path(place / "out/ranking", str(b))
    state.write_bytes(state.read_bytes()[:-7])
    assert f"{b}: counted again: {state} cannot be read" in rank_by([{"source": str(b)}])
    recipe = yaml.safe_load((place / "recipe.yaml").read_text())
    template = place / "other.jinja"
    template.write_text(make_tokenizer().get_chat_template() + " ")
    recipe["target"]["chat_template"] = str(template)
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert f"{b}: counted again: its tokenizer changed" in rank_by([{"source": str(b)}])


@pytest.mark.slow
def test_a_dataset_that_breaks_off_goes_on(place: Path, rank_by: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    texts = some_texts(60, 9)
    broken = [True]

    def stream() -> Iterator[dict[str, str]]:
        for i, text in enumerate(texts):
            if i == 41 and broken[0]:
                raise ConnectionError("the line is dead\nand more")
            yield {"text": text}

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(stream))
    monkeypatch.setattr(corpus_reader, "CHUNK_CHARACTERS", 100)
    with pytest.raises(UserError, match=r"hf:org/texts:train: .* behind row 41: ConnectionError: the"):
        rank_by([{"source": "hf:org/texts:train"}])
    broken[0] = False
    assert "resumes behind" in rank_by([{"source": "hf:org/texts:train"}])
    assert as_counter(load_token_counts(token_counts(place))[0]) == counted(texts, make_tokenizer())
