"""Token counts and draft vocabularies, behind data_gen/rank_vocab.py."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.corpus.counts import Processes, TextCounter, cores, count_corpus, progress_of, progress_path
from draftsmith.data_gen.corpus.coverage import SIZES_SHOWN, Coverage, sizes_below
from draftsmith.data_gen.corpus.reader import ANSWERS, check_corpora, overlaps
from draftsmith.data_gen.corpus.template_tokens import template_tokens
from draftsmith.data_gen.rows.overlap import training_check
from draftsmith.data_gen.rows.training_rows import TrainingRow, training_rows
from draftsmith.models.chat import (
    load_config,
    load_generation_config,
    load_tokenizer,
    stop_ids,
    tokenizer_fingerprint,
)
from draftsmith.models.vocab import CorpusCounts, DraftVocab, blend, covered_share, cut, rank, save_token_counts
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.schema import Recipe

# Tokens gathered before they are added to the counts: a large vocabulary is not walked through for every row.
COUNTED_AT_ONCE = 1 << 20


def main(command: Command) -> None:
    recipe, section = command.recipe, command.recipe.target
    vocab_size = load_config(section).get_text_config().vocab_size
    size = recipe.drafter.vocab_size or vocab_size
    if size > vocab_size:
        raise UserError(f"drafter.vocab_size: {size} is more than the target's vocabulary of {vocab_size} tokens")
    if command.plan:
        print("\n".join(plan(recipe, size, vocab_size)))
    elif recipe.data.ranking.sources:
        rank_by_corpora(recipe, size, vocab_size)
    else:
        rank_by_answers(recipe, size, vocab_size)


def counts_path_of(recipe: Recipe) -> Path:
    """Not eval.token_counts, which may name a file that somebody else counted."""
    return Path(recipe.output_dir) / "token_counts.safetensors"


def coverage_path_of(recipe: Recipe) -> Path:
    return Path(recipe.output_dir) / "ranking_coverage.json"


def ranking_dir_of(recipe: Recipe) -> Path:
    """What is counted of each corpus, and what could not be used of it."""
    return Path(recipe.output_dir) / "ranking"


def plan(recipe: Recipe, size: int, vocab_size: int) -> Iterator[str]:
    """What would be done, in lines."""
    conversations, sources = recipe.conversations_path, recipe.data.ranking.sources
    there = "" if conversations.exists() else ", which data_gen/regenerate.py has yet to write"
    if not sources:
        yield f"counts the supervised tokens of {conversations}{there}"
    else:
        checked = check_corpora(sources, look=False)
        yield from overlaps(checked)
        corpora = {corpus.name: corpus for corpus in checked}
        for source in sources:
            most = f", {source.max_documents:,} documents at most" if source.max_documents else ""
            if source.source == ANSWERS:
                what = f"the supervised tokens of {conversations}{there}"
            else:
                total = corpora[source.source].total
                bytes_ = "" if total is None else f", {total / 1e6:,.1f} MB"
                begun = progress_path(ranking_dir_of(recipe), source.source).exists()
                what = f"{source.source}{bytes_}{most}{', of which some is counted already' if begun else ''}"
            yield f"counts {what}; weight {source.weight:g}"
        workers = recipe.data.ranking.workers or cores()
        yield f"tokenises texts in {workers} processes; keeps what it has in {ranking_dir_of(recipe)}"
    yield f"writes {size:,} of {vocab_size:,} target tokens to {recipe.draft_vocab_path}"
    yield f"writes how often each was seen to {counts_path_of(recipe)}"
    if sources:
        yield f"writes which share of each corpus is covered to {coverage_path_of(recipe)}"


def rank_by_answers(recipe: Recipe, size: int, vocab_size: int) -> None:
    """By the supervised tokens alone."""
    tokenizer = load_tokenizer(recipe.target)
    stops = stop_ids(tokenizer, load_generation_config(recipe.target))
    must_have = sorted({*stops, *template_tokens(tokenizer).in_answers})
    rejects = Rejects(recipe.training_rejects_path)
    counts = count_answers(recipe, tokenizer, vocab_size, rejects)
    vocab = rank(counts, size, must_have)
    total, covered = int(counts.sum()), covered_share(counts, vocab)
    print(f"{total:,} supervised tokens, {int((counts > 0).sum()):,} distinct ones seen; {rejects.summary()}")
    if recipe.drafter.vocab_size is None:
        print("drafter.vocab_size is not set: the drafter proposes the target's whole vocabulary")
    print(coverage_table(counts, must_have))
    fingerprint = tokenizer_fingerprint(tokenizer)
    metadata = {
        "tokenizer_fingerprint": fingerprint,
        "counted_tokens": str(total),
        "covered_share": f"{covered:.6f}",
    }
    done = write(recipe, vocab, metadata)
    save_token_counts(counts_path_of(recipe), counts, fingerprint, stops, set(must_have).difference(stops))
    print(
        f"{recipe.draft_vocab_path}: {done}; {vocab.size:,} of {vocab_size:,} target tokens, "
        f"{covered:.2%} of the supervised ones covered"
    )
    print(f"{counts_path_of(recipe)}: written")


def rank_by_corpora(recipe: Recipe, size: int, vocab_size: int) -> None:
    """By the blend of data.ranking.sources."""
    tokenizer = load_tokenizer(recipe.target)
    fingerprint = tokenizer_fingerprint(tokenizer)
    stops = stop_ids(tokenizer, load_generation_config(recipe.target))
    template = template_tokens(tokenizer).all
    must_have = sorted({*stops, *template})
    corpora = count_corpora(recipe, tokenizer, vocab_size)
    blended = [corpus for corpus in corpora if corpus.weight is not None]
    counts = blend([(corpus.counts, corpus.weight or 0.0) for corpus in blended])
    vocab = rank(counts, size, must_have, " and ".join(corpus.source for corpus in blended))
    if recipe.drafter.vocab_size is None:
        print("drafter.vocab_size is not set: the drafter proposes the target's whole vocabulary")
    coverage = Coverage.of(corpora, counts, must_have)
    print(coverage.table())
    covered = covered_share(counts, vocab)
    facts = [corpus.facts() for corpus in corpora]
    metadata = {
        "tokenizer_fingerprint": fingerprint,
        "counted_tokens": str(int(counts.sum())),
        "covered_share": f"{covered:.6f}",
        "corpora": json.dumps(facts, ensure_ascii=False),
    }
    done = write(recipe, vocab, metadata)
    save_token_counts(counts_path_of(recipe), counts, fingerprint, stops, template, corpora)
    always = [{"id": token, "token": tokenizer.convert_ids_to_tokens(token)} for token in must_have]
    coverage.write(coverage_path_of(recipe), facts, always)
    print(f"always inside: {', '.join(str(entry['token']) for entry in always)}")
    print(
        f"{recipe.draft_vocab_path}: {done}; {vocab.size:,} of {vocab_size:,} target tokens, "
        f"{covered:.2%} of the {'blend' if len(blended) > 1 else 'corpus'} covered"
    )
    print(f"{counts_path_of(recipe)}: written\n{coverage_path_of(recipe)}: written")


def count_corpora(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[CorpusCounts]:
    """Every source of the blend, in the recipe's order; behind them the target's own answers where they are there.

    Raises:
        UserError: a source that is not there or holds nothing to count; all of them at once.
    """
    ranking, answers_there = recipe.data.ranking, recipe.conversations_path.exists()
    weights = {source.source: source.weight for source in ranking.sources}
    problems: list[str] = []
    if ANSWERS in weights and not answers_there:
        problems.append(
            f"data.ranking.sources: {ANSWERS}: {recipe.conversations_path} does not exist; data_gen/regenerate.py "
            "writes it, or name a file in data.conversations"
        )
    try:
        corpora = check_corpora(ranking.sources)
    except UserError as error:
        raise UserError([*problems, *error.problems]) from None
    if problems:
        raise UserError(problems)
    for note in overlaps(corpora):
        print(note)
    fingerprint, found = tokenizer_fingerprint(tokenizer), dict[str, CorpusCounts]()
    if ANSWERS in weights:
        found[ANSWERS] = _answers(recipe, tokenizer, vocab_size, weights[ANSWERS])
    elif answers_there:  # wanted for comparison alone: whatever is wrong with them, the ranking can do without
        try:
            answers = _answers(recipe, tokenizer, vocab_size, None)
            found |= {ANSWERS: answers} if answers.tokens else {}
            problem = "" if answers.tokens else f"{recipe.conversations_path} holds no token to count"
        except UserError as error:
            problem = "; ".join(error.problems)
        if problem:
            print(f"note: the coverage of the target's own answers is not told: {problem}")
    counter = TextCounter(tokenizer, vocab_size)
    with Processes(recipe.target, counter, vocab_size, ranking.workers or cores()) as processes:
        for corpus in corpora:
            progress = progress_of(corpus, ranking_dir_of(recipe), fingerprint, vocab_size)
            if progress.found:
                print(f"{corpus.name}: {progress.found}")
            found[corpus.name] = count_corpus(corpus, progress, processes)
    empty = [
        f"data.ranking.sources: {corpus.source} holds no token to count: {corpus.documents:,} documents, "
        f"{corpus.rejected:,} records rejected"
        for corpus in found.values()
        if not corpus.tokens
    ]
    if empty:
        raise UserError(empty)
    return [found[name] for name in (*weights, *(name for name in found if name not in weights))]


def _answers(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int, weight: float | None) -> CorpusCounts:
    rejects, documents = Rejects(recipe.training_rejects_path), set[str]()

    def noted(rows: Iterable[TrainingRow]) -> Iterator[TrainingRow]:
        for row in rows:
            documents.add(row.id)
            yield row

    counts = count_answers(recipe, tokenizer, vocab_size, rejects, noted)
    print(f"{ANSWERS}: {int(counts.sum()):,} tokens in {len(documents):,} conversations; {rejects.summary()}")
    return CorpusCounts(ANSWERS, counts, weight, len(documents), rejects.total)


def count_answers(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    rejects: Rejects,
    noted: Callable[[Iterable[TrainingRow]], Iterable[TrainingRow]] = iter,
) -> torch.Tensor:
    """[V] of the rows that training reads. `noted` sees them on the way."""
    check = training_check(recipe)
    leave_out = check.leave_out if check else None
    rows = training_rows(recipe.conversations_path, tokenizer, recipe.data.max_length, rejects, leave_out)
    counts = count_supervised(noted(Bar(rows, desc="counting", unit="row")), vocab_size)
    if check:
        check.report()
    return counts


def coverage_table(counts: torch.Tensor, must_have: Sequence[int]) -> str:
    """The share of the supervised tokens that the most frequent ones cover, at a few vocabulary sizes."""
    whole = DraftVocab.full(len(counts))
    lines = ["    tokens  of the supervised ones"]
    for size in sizes_below(len(counts), len(must_have))[-SIZES_SHOWN - 1 :]:
        lines.append(f"{size:>10,}  {covered_share(counts, cut(whole, counts, size, must_have)):>7.2%}")
    return "\n".join(lines)


def count_supervised(rows: Iterable[TrainingRow], vocab_size: int) -> torch.Tensor:
    """[V] how often each token stands in a supervised position.

    Raises:
        UserError: a token beyond the target's vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    gathered: list[int] = []

    def add() -> None:
        tokens = torch.tensor(gathered, dtype=torch.int64)
        gathered.clear()
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise UserError(
                f"data.conversations: token {int(tokens.max())} is outside the target's vocabulary of {vocab_size}"
            )
        counts.add_(torch.bincount(tokens, minlength=vocab_size))

    for row in rows:
        for start, end in row.spans:
            gathered += row.input_ids[start:end]
        if len(gathered) >= COUNTED_AT_ONCE:
            add()
    add()
    return counts


def write(recipe: Recipe, vocab: DraftVocab, metadata: dict[str, str]) -> str:
    """Writes the mapping where that changes nothing under a trained drafter; what was done, in words.

    Raises:
        UserError: another mapping is in use by checkpoints or a drafter.
    """
    path = recipe.draft_vocab_path
    if not path.exists():
        vocab.save(path, metadata)
        return "written"
    old = DraftVocab.load(path)
    if old.same_as(vocab):
        return "unchanged"
    trained = [str(place) for place in (recipe.checkpoints_dir, recipe.drafter_dir) if _has_files(place)]
    if trained:
        shared = torch.isin(old.target_ids, vocab.target_ids).sum()
        raise UserError(
            f"{path}: holds {old.size} draft tokens of {old.target_vocab_size}, the counts now give {vocab.size} of "
            f"{vocab.target_vocab_size}, {int(shared)} of them the same; {' and '.join(trained)} were trained with the "
            "old ones. Use another output_dir, or remove what was trained"
        )
    vocab.save(path, metadata)
    return f"replaced (it held {old.size} others, nothing was trained with them)"


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
