"""Sorts a corpus into the static automaton of SAM-Decoding, behind data_gen/build_sam.py."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data_gen.vocabulary.corpus_reader import ANSWERS, Tokeniser, check_sources, files_of
from draftsmith.models.sizes import device_here, gigabytes, plan_memory
from draftsmith.models.suffix_automaton import MOST_TOKENS, StaticAutomaton, corpus_tokens
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.data import RankingSource

CHARACTERS = 4  # of a token, for the plan
SORTING_BYTES = 60  # a token at the peak of sorting; 57 measured by tools/bench/sam.py


def main(command: Command) -> None:
    recipe = command.recipe
    files = TargetFiles(recipe.target)
    if command.plan:
        print_sorting_plan(recipe, files.text_config.vocab_size)
    else:
        with alone_in(recipe.sam_path.parent):
            sort_corpus(recipe, files)


def sources_of(recipe: Recipe, look: bool) -> list[RankingSource]:
    """The sources in the recipe's order, `answers` as their file. Raises UserError with the problems of all."""
    section = recipe.data.sam
    settings: dict[str, Any] = {"text_field": section.text_field, "max_documents": section.max_documents}
    named = [RankingSource(source=name, **(settings if name != ANSWERS else {})) for name in section.names]
    check_sources(named, look, "data.sam.sources")
    answers = RankingSource(source=str(recipe.conversations_path), max_documents=section.max_documents)
    return [answers if source.source == ANSWERS else source for source in named]


def print_sorting_plan(recipe: Recipe, vocab_size: int) -> None:
    total = 0
    with PlanLines() as plan:
        for section in sources_of(recipe, look=False):
            size = sum(Path(path).stat().st_size for path in files_of(section.source) or [])
            total += size
            plan.line("reads", section.source + (f", {size:,} bytes" if size else ", of unknown size"))
        tokens, each = total // CHARACTERS, 6 if vocab_size < 2**16 else 8
        plan.line("tokens", f"about {tokens:,}", f"assumed: {CHARACTERS} bytes each")
        plan_memory(plan, SORTING_BYTES * tokens, "to sort them", device_here("cpu"))
        plan.line("disk", f"about {gigabytes(each * tokens)}: {each} bytes a token")
        plan.writes(recipe.sam_path)


def sort_corpus(recipe: Recipe, files: TargetFiles) -> None:
    """Reads, sorts and writes the corpus; prints its size.

    Documents are split behind stop tokens, and repeated parts are left out. Raises UserError if a source is missing or
    cannot be used, or if there is no token.
    """
    sources = sources_of(recipe, look=True)
    vocab_size, stop_ids = files.text_config.vocab_size, np.array(sorted(files.stop_ids))
    tokeniser, repeated = Tokeniser(files.tokenizer, vocab_size), 0
    by_digest: dict[bytes, np.ndarray] = {}
    rejects = Rejects(recipe.sam_path.with_suffix(".rejects.jsonl"))
    for section in sources:
        for ids, _ in tokeniser.documents(section, rejects):
            document = np.array(ids, dtype=np.int32)
            for part in np.split(document, np.flatnonzero(np.isin(document, stop_ids)) + 1):
                digest = hashlib.blake2b(part.tobytes(), digest_size=16).digest()
                repeated += digest in by_digest
                if len(part):
                    by_digest.setdefault(digest, part)
    names, found = ", ".join(recipe.data.sam.names), [*by_digest.values()]
    tokens = sum(map(len, found))
    if not tokens:
        raise UserError(f"data.sam.sources: {names} hold no token; {rejects.summary()}")
    if tokens + len(found) >= MOST_TOKENS:
        raise UserError(f"data.sam.sources: {tokens:,} tokens; an automaton holds {MOST_TOKENS:,}. Set max_documents")
    with Bar(total=tokens, desc="sorting", unit="token", leave=False):
        automaton = StaticAutomaton.of_documents(corpus_tokens(found, vocab_size), vocab_size)
    facts = {"sources": recipe.data.sam.names, "tokens": tokens, "documents": len(found)}
    automaton.save(recipe.sam_path, tokeniser.fingerprint, facts)
    print(
        f"{names}: {tokens:,} tokens in {len(found):,} documents, {repeated:,} repeated ones left out; "
        f"{rejects.summary()}\n{recipe.sam_path}: {automaton.bytes / tokens:.1f} bytes a token"
    )
