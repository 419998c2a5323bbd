"""Tokenises corpora and counts their tokens.

Plain documents are tokenised without special tokens, while FR-Spec's script (arXiv 2502.14856) counts a BOS for each.
Of conversations only assistant turns with their stop tokens count, because prompts are never drafted.

A source's counts are kept in a file once it was read to its end. Weights are not part of it, so another blend reuses
the counts.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.training_rows.rows import turns_of
from draftsmith.data_gen.vocabulary.reader import Item, bytes_of, identity, items, text_of
from draftsmith.models.chat import RenderError, tokenizer_fingerprint
from draftsmith.models.vocab import CorpusCounts, load_tensors, write_tensors
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.prompts.records import is_regenerated, to_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.data import RankingSource

# Tokenised at once, by the tokenizer's threads.
BATCH_CHARACTERS = 1 << 20
BATCH_ITEMS = 1 << 12


class Document(NamedTuple):
    """Tokens of a document or of a part of one: a piece of a text file, or an answer of a conversation."""

    ids: Sequence[int]
    opens: bool = True  # begins a document


class Tokeniser:
    """Tokenises corpora for a target with a vocabulary of `vocab_size`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int):
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()

    def documents(self, section: RankingSource, rejects: Rejects, verb: str) -> Iterator[Document]:
        """The source's documents. Raises UserError as `items` does.

        Args:
            rejects: receives unusable records.
            verb: opens the progress bar's line.
        """
        size, documents, characters = bytes_of(section.source), 0, 0
        total, unit = (section.max_documents, "doc") if size is None else (size, "B")
        batch: list[tuple[Item, str | None]] = []
        with Bar(total=total, desc=f"{verb} {section.source[-40:]}", unit=unit, unit_scale=True) as bar:
            for item in items(section, rejects, bar):
                try:
                    batch.append((item, text := text_of(item.record, section.text_field)))
                except ValueError as error:
                    rejects.add(item.place, item.line, str(error), item.record)
                    continue
                documents += item.opens
                bar.set_postfix_str(f"{documents:,} documents", refresh=False)
                characters += len(text or "")
                if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_ITEMS:
                    yield from self._tokenised(batch, rejects)
                    batch, characters = [], 0
            yield from self._tokenised(batch, rejects)

    def _tokenised(self, batch: list[tuple[Item, str | None]], rejects: Rejects) -> Iterator[Document]:
        encoded = self._encoded([text for _, text in batch if text is not None])
        for item, text in batch:
            try:
                parts = [next(encoded)] if text is not None else self._answers(item)
                if (greatest := max((max(ids, default=0) for ids in parts), default=0)) >= self.vocab_size:
                    raise ValueError(f"a token the target lacks: {greatest}, it has {self.vocab_size}")
            except (RenderError, ValueError) as error:
                rejects.add(item.place, item.line, str(error), item.record)
                continue
            for number, ids in enumerate(parts):
                yield Document(ids, item.opens and number == 0)

    def _encoded(self, texts: list[str]) -> Iterator[list[int]]:
        if self._backend is not None:
            return (encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False))
        return iter(self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])  # type: ignore[arg-type]

    def _answers(self, item: Item) -> list[list[int]]:
        """The tokens of each assistant turn."""
        record, generator = item.record, item.record.get("generator")
        same = isinstance(generator, dict) and generator.get("tokenizer_fingerprint") == self.fingerprint
        if same and is_regenerated(record):
            turns = [turn.get("output_token_ids") if isinstance(turn, dict) else None for turn in record["turns"]]
            outputs = [ids for ids in turns if isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)]
            if len(outputs) < len(turns):
                raise ValueError("wrong type: every turn must have a list of output token ids")
            return outputs
        if "messages" in record:
            record = {key: value for key, value in record.items() if key != "turns"}
        conversation = to_conversation(record, f"{item.place}:{item.line}", item.place, item.line)
        return [turn.output for turn in turns_of(self._tokenizer, conversation)]


def as_tensor(counts: Mapping[int, int], vocab_size: int) -> torch.Tensor:
    """[V] int64 from the counts of the tokens that were seen."""
    found = torch.zeros(vocab_size, dtype=torch.int64)
    found[torch.tensor([*counts], dtype=torch.int64)] = torch.tensor([*counts.values()], dtype=torch.int64)
    return found


def counts_path(folder: Path, source: str) -> Path:
    """The file of a source's counts: readable words of its name and a digest."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", source).strip("-")[-40:]
    return folder / f"{words}-{hashlib.sha256(source.encode()).hexdigest()[:8]}.safetensors"


def count_corpus(section: RankingSource, folder: Path, tokeniser: Tokeniser) -> CorpusCounts:
    """Counts a source, or takes its finished counts from `folder`.

    A changed file, tokenizer or recipe has it counted again. Unusable records are kept beside the counts, with place
    and reason. Raises UserError if a dataset cannot be read to its end.
    """
    path = counts_path(folder, section.source)
    rejects = Rejects(path.with_suffix(".rejects.jsonl"))
    made_of = {
        "tokenizer": tokeniser.fingerprint,
        "vocabulary": str(tokeniser.vocab_size),
        "text_field": section.text_field,
        "max_documents": str(section.max_documents),
        **identity(section.source),
    }
    found: tuple[torch.Tensor, int] | None = None
    if path.exists():
        try:
            tensors, metadata = load_tensors(path, "counts of a corpus")
            changed = [key for key in made_of if metadata.get(key) != made_of[key]]
            why = f"counted again: its {' and '.join(changed)} changed" if changed else "counted before"
            if not changed:
                found = tensors["counts"], int(metadata["documents"])
                rejects.counts.update(json.loads(metadata["rejected"]))
        except (UserError, ValueError, KeyError) as error:
            why = f"counted again: {path} cannot be read ({first_line(error)})"
        print(f"{section.source}: {why}")
    if found is None:
        path.with_suffix(".rejects.jsonl").unlink(missing_ok=True)  # of an earlier count
        counter, documents = Counter[int](), 0
        for document in tokeniser.documents(section, rejects, "counting"):
            counter.update(document.ids)
            documents += document.opens
        found = as_tensor(counter, tokeniser.vocab_size), documents
        facts = {"documents": str(documents), "rejected": json.dumps(rejects.counts)}
        write_tensors(path, {"counts": found[0]}, made_of | facts)
    counts, documents = found
    print(f"{section.source}: {int(counts.sum()):,} tokens in {documents:,} documents; {rejects.summary()}")
    return CorpusCounts(section.source, counts, section.weight, documents, rejects.total)
