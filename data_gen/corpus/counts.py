"""Counts the tokens of a corpus in several processes. A killed run resumes.

Plain documents are tokenised without special tokens, while FR-Spec's script (arXiv 2502.14856) counts a BOS for each.
Of conversations only assistant turns with their stop tokens count, because prompts are never drafted.

Each source has one file of counts. It is replaced every few seconds together with the position in the corpus, so a kill
neither loses nor repeats a count. Weights are not part of it, so another blend reuses the counts.
"""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.corpus.reader import Chunk, Corpus, Item, Position, content_of
from draftsmith.data_gen.rows.training_rows import turns_of
from draftsmith.models.chat import RenderError, load_tokenizer, tokenizer_fingerprint
from draftsmith.models.vocab import CorpusCounts, load_tensors, write_tensors
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.prompts.records import is_regenerated, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects, is_unicode
from draftsmith.recipes.schema import TargetSection

FORM = 3  # version of the file; other versions are counted again
SECONDS_BETWEEN_SAVES = 5.0
CHUNKS_BEFORE_PROCESSES = 8  # counted in this process, because starting others takes longer
WAITING_PER_PROCESS = 2  # chunks: one being counted, one waiting


# One chunk.


class ChunkCounts(NamedTuple):
    """Sparse counts of one chunk, which has few of a vocabulary's tokens."""

    token_ids: Any  # [n] int64, distinct
    times: Any  # [n] int64
    rejects: list[tuple[str, int, str, Any]]  # arguments of `Rejects.add`


class Tokenised(NamedTuple):
    """The documents of one chunk: texts, pieces of long ones, and the answers of conversations."""

    documents: list[Sequence[int]]
    rejects: list[tuple[str, int, str, Any]]  # arguments of `Rejects.add`


class TextCounter:
    """Tokenises and counts chunks in this process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self._fingerprint = tokenizer_fingerprint(tokenizer)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def count(self, items: Sequence[Item], text_field: str) -> ChunkCounts:
        documents, rejects = self.tokenised(items, text_field)
        tokens = [token for ids in documents for token in ids]
        counts = numpy.bincount(numpy.asarray(tokens, dtype=numpy.int64), minlength=self.vocab_size)
        found = counts.nonzero()[0]
        return ChunkCounts(found, counts[found], rejects)

    def tokenised(self, items: Sequence[Item], text_field: str) -> Tokenised:
        rejects: list[tuple[str, int, str, Any]] = []
        texts: list[tuple[Item, str]] = []
        documents: list[Sequence[int]] = []

        def add(item: Item, of_item: Sequence[Sequence[int]], record: Any) -> None:
            greatest = max((max(ids) for ids in of_item if ids), default=0)
            if greatest >= self.vocab_size:
                reason = f"a token the target lacks: {greatest}, it has {self.vocab_size}"
                rejects.append((item.place, item.line, reason, record))
            else:
                documents.extend(of_item)

        for item in items:
            if item.kind == "piece":
                texts += [(item._replace(line=line), text) for line, text in _decoded(item, rejects)]
                continue
            record: Any = item.content
            try:
                if item.kind == "bad":
                    record = None
                    raise ValueError(item.content)
                if item.kind == "line":
                    record = parse_json(item.content)
                text = record if item.kind == "text" else content_of(record, text_field)
                if text is None:
                    add(item, self._answers(record, item), record)
                elif not text.strip():
                    raise ValueError("empty text")
                elif not is_unicode(text):
                    raise ValueError("not Unicode: a lone surrogate in the text")
                else:
                    texts.append((item, text))
            except (RenderError, ValueError) as error:
                if isinstance(record, bytes):
                    record = record.decode("utf-8", "replace").rstrip()
                rejects.append((item.place, item.line, str(error), record))
        for (item, text), ids in zip(texts, self._encode([text for _, text in texts]), strict=True):
            add(item, [ids], text)
        return Tokenised(documents, rejects)

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        if not texts:
            return
        if self._backend is None:
            yield from self._tokenizer(texts, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
            return
        for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            yield encoding.ids

    def _answers(self, record: dict[str, Any], item: Item) -> list[list[int]]:
        """The tokens of each assistant turn."""
        generator = record.get("generator")
        same = isinstance(generator, dict) and generator.get("tokenizer_fingerprint") == self._fingerprint
        if same and is_regenerated(record):
            turns = [turn.get("output_token_ids") if isinstance(turn, dict) else None for turn in record["turns"]]
            for number, ids in enumerate(turns):
                if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
                    raise ValueError(f"wrong type: turn {number} must have a list of output token ids")
            return turns  # type: ignore[return-value]
        if "messages" in record:
            record = {key: value for key, value in record.items() if key != "turns"}
        conversation = to_conversation(record, f"{item.place}:{item.line}", item.place, item.line)
        return [turn.output for turn in turns_of(self._tokenizer, conversation)]


def _decoded(item: Item, rejects: list[tuple[str, int, str, Any]]) -> Iterator[tuple[int, str]]:
    """(line, text) of a piece of a text file: the whole piece, or line by line if it is not all UTF-8."""
    encoding = "utf-8-sig" if item.opens else "utf-8"
    try:
        text = item.content.decode(encoding)
        if text.strip():
            yield item.line, text
        return
    except UnicodeDecodeError:
        pass
    for number, line in enumerate(io.BytesIO(item.content), start=item.line):
        try:
            yield number, line.decode(encoding)
        except UnicodeDecodeError as error:
            reason = f"not UTF-8: byte {error.start + 1}"
            rejects.append((item.place, number, reason, line.decode("utf-8", "replace").rstrip()))


# Several processes.


class Processes:
    """Processes that count chunks, started with their first chunk. Use in a `with` statement.

    The tokenizer's own threads would not scale to a dozen cores: one Python process, with an eighth of the work, would
    receive all their tokens.
    """

    def __init__(self, section: TargetSection, counter: TextCounter, workers: int):
        self._section, self.counter, self.workers = section, counter, workers
        self._executor: Executor | None = None

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def counted(self, chunks: Iterator[Chunk], text_field: str) -> Generator[tuple[Chunk, ChunkCounts]]:
        """Every chunk with its counts, in order. Raises UserError if a process was killed."""
        here = CHUNKS_BEFORE_PROCESSES if self.workers > 1 else None
        for chunk in islice(chunks, here):
            yield chunk, self.counter.count(chunk.items, text_field)
        waiting: deque[tuple[Chunk, Future[ChunkCounts]]] = deque()
        try:
            for chunk in chunks:
                future = self._pool().submit(_count_in_worker, chunk.items, text_field)
                waiting.append((chunk._replace(items=[]), future))
                if len(waiting) > WAITING_PER_PROCESS * self.workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        except BrokenProcessPool:
            raise UserError(
                f"data.ranking.workers: one of {self.workers} processes was killed, perhaps for lack of memory; fewer "
                "workers need less. The same command resumes the counting"
            ) from None

    def _pool(self) -> Executor:
        if self._executor is None:
            methods = multiprocessing.get_all_start_methods()
            context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
            if "forkserver" in methods:  # imports once for all
                context.set_forkserver_preload([__name__])
            arguments = (self._section, self.counter.vocab_size)
            self._executor = ProcessPoolExecutor(self.workers, context, _start_worker, arguments)
        return self._executor


_counter: TextCounter | None = None  # of a worker process


def _start_worker(section: TargetSection, vocab_size: int) -> None:
    global _counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _counter = TextCounter(load_tokenizer(section), vocab_size)


def _count_in_worker(items: list[Item], text_field: str) -> ChunkCounts:
    assert _counter is not None
    return _counter.count(items, text_field)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Saved counts.


@dataclass
class Progress:
    """The counts of one source and the position behind them. Saved atomically."""

    path: Path
    identity: dict[str, Any]
    counts: torch.Tensor  # [V] int64
    documents: int = 0  # that were begun, including unusable ones
    position: Position = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)  # by kind
    complete: bool = False

    @classmethod
    def load(cls, path: Path, identity: dict[str, Any], vocab_size: int) -> tuple["Progress", str]:
        """(progress, a message about it). Starts again if the file is damaged or its identity differs."""
        fresh = cls(path, identity, torch.zeros(vocab_size, dtype=torch.int64))
        if not path.exists():
            return fresh, ""
        try:
            tensors, metadata = load_tensors(path, "counts of a corpus")
            state = parse_json(metadata["progress"])
            was = state.pop("identity")
            if changed := sorted(key for key in {*was, *identity} if was.get(key) != identity.get(key)):
                return fresh, f"counted again: its {' and '.join(changed)} changed"
            found = cls(path, identity, tensors["counts"], **state)
        except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
            return fresh, f"counted again: {path} cannot be read ({first_line(error)})"
        return found, "counted before" if found.complete else f"resumes behind {found.documents:,} documents"

    def save(self) -> None:
        names = ("identity", "documents", "position", "rejected", "complete")
        state = {name: getattr(self, name) for name in names}
        write_tensors(self.path, {"counts": self.counts}, {"progress": json.dumps(state)})


def progress_path(folder: Path, source: str) -> Path:
    """The file of a source's counts: readable words of its name and a digest."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", source).strip("-")[-40:]
    return folder / f"{words}-{hashlib.sha256(source.encode()).hexdigest()[:8]}.safetensors"


def count_corpus(corpus: Corpus, folder: Path, fingerprint: str, processes: Processes) -> CorpusCounts:
    """Counts the rest of a corpus and saves the counts in `folder`.

    A changed file, tokenizer or recipe restarts the count. Unusable records are kept beside the counts, with place and
    reason. Raises UserError, after saving the counts, if a dataset or file cannot be read on or a process is killed.
    """
    section = corpus.section
    identity: dict[str, Any] = {
        "form": FORM,
        "tokenizer": fingerprint,
        "vocabulary": processes.counter.vocab_size,
        "text_field": section.text_field,
        "max_documents": section.max_documents,
        **corpus.identity(),
    }
    progress, found = Progress.load(progress_path(folder, corpus.name), identity, processes.counter.vocab_size)
    if found:
        print(f"{corpus.name}: {found}")
    rejects = Rejects(progress.path.with_suffix(".rejects.jsonl"))
    if not progress.position and rejects.path:
        rejects.path.unlink(missing_ok=True)  # from an earlier count
    rejects.counts.update(progress.rejected)
    if not progress.complete:
        _count_the_rest(corpus, progress, processes, rejects)
    counts, documents = progress.counts, progress.documents
    print(f"{corpus.name}: {int(counts.sum()):,} tokens in {documents:,} documents; {rejects.summary()}")
    return CorpusCounts(corpus.name, counts, section.weight, documents, rejects.total)


def _count_the_rest(corpus: Corpus, progress: Progress, processes: Processes, rejects: Rejects) -> None:
    chunks = corpus.chunks(progress.position, progress.documents)
    done = corpus.units_before(progress.position)
    bar = Bar(total=corpus.total, initial=done, desc=f"counting {corpus.name[-40:]}", unit=corpus.unit, unit_scale=True)
    saved = time.monotonic()
    with bar, contextlib.closing(processes.counted(chunks, corpus.section.text_field)) as counted:
        try:
            for chunk, found in counted:
                for reject in found.rejects:
                    rejects.add(*reject)
                progress.counts[torch.from_numpy(found.token_ids)] += torch.from_numpy(found.times)
                progress.documents += chunk.documents
                progress.position = chunk.position
                progress.rejected = dict(rejects.counts)
                bar.set_postfix_str(f"{progress.documents:,} documents", refresh=False)
                bar.update(corpus.units_before(progress.position) - bar.n)
                if time.monotonic() - saved >= SECONDS_BETWEEN_SAVES:
                    progress.save()
                    saved = time.monotonic()
        except UserError:  # comes between two chunks, while Ctrl-C may come within one
            progress.save()
            raise
    progress.complete = True
    progress.save()
