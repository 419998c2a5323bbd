"""Token counts and draft vocabularies, behind data_gen/rank_vocab.py."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.training_rows.overlap import training_check
from draftsmith.data_gen.training_rows.rows import TrainingRow, training_rows
from draftsmith.data_gen.vocabulary.counts import Tokeniser, as_tensor, count_corpus
from draftsmith.data_gen.vocabulary.reader import ANSWERS, check_sources
from draftsmith.data_gen.vocabulary.template_tokens import template_tokens
from draftsmith.eval.decoding.target_facts import longest_row
from draftsmith.models.chat import load_config, load_tokenizer, tokenizer_fingerprint
from draftsmith.models.checkpoint import check_identity, config_identity, read_drafter_config, read_drafter_vocab
from draftsmith.models.formats.named_drafters import with_start
from draftsmith.models.turn_ends import stop_ids
from draftsmith.models.vocab import (
    CorpusCounts,
    DraftVocab,
    blend,
    covered_share,
    cut_vocab,
    fill_text,
    save_token_counts,
)
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.inputs import conversations
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, collected
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.schema import Recipe

SIZES_SHOWN = 7  # powers of two in a table, beside the target's whole vocabulary
NAME_WIDTH = 20  # characters of a corpus's name that a table shows


def main(command: Command) -> None:
    recipe = with_start(command.recipe, command.plan)
    vocab_size = load_config(recipe.target).get_text_config().vocab_size
    size = recipe.drafter.vocab_size or vocab_size
    if size > vocab_size:
        raise UserError(f"drafter.vocab_size: {size} is more than the target's vocabulary of {vocab_size} tokens")
    if command.plan:
        print_ranking_plan(recipe, size, vocab_size)
    else:
        with alone_in(Path(recipe.output_dir)):
            choose_vocab(recipe, size, vocab_size)


def counts_path_of(recipe: Recipe) -> Path:
    """The file that this run writes; eval.token_counts may name another one."""
    return Path(recipe.output_dir) / "token_counts.safetensors"


def print_ranking_plan(recipe: Recipe, size: int, vocab_size: int) -> None:
    sources = recipe.data.ranking.sources
    with PlanLines() as plan:
        if not sources or ANSWERS in {source.source for source in sources}:
            plan.reads(conversations(recipe))
        for source in sources:
            most = f", {source.max_documents:,} documents at most" if source.max_documents else ""
            plan.line("counts", f"{source.source}{most}; weight {source.weight:g}")
        check_sources(sources, look=False)
        chosen = "; where fewer are counted, the lowest other ids fill it up" if size < vocab_size else ""
        if recipe.drafter.init_from is not None:
            chosen = f", those of {recipe.drafter.init_from}"
        plan.line("tokens", f"{size:,} of the target's {vocab_size:,}{chosen}")
        plan.writes(recipe.draft_vocab_path, counts_path_of(recipe))


def choose_vocab(recipe: Recipe, size: int, vocab_size: int) -> None:
    """Ranks by the blend of data.ranking.sources, or by the target's own answers without any. Writes the files."""
    sources = recipe.data.ranking.sources
    tokenizer = load_tokenizer(recipe.target)
    fingerprint = tokenizer_fingerprint(tokenizer)
    stops = set(stop_ids(tokenizer))
    template = template_tokens(tokenizer)
    others = set(template.all) if sources else set(template.in_answers) - stops
    must_have = sorted(stops | others)
    corpora = (
        count_corpora(recipe, tokenizer, vocab_size) if sources else [count_answers(recipe, tokenizer, vocab_size, 1)]
    )
    blended = [corpus for corpus in corpora if corpus.weight is not None]
    counts = blend([(corpus.counts, corpus.weight or 0.0) for corpus in blended])
    names = " and ".join(corpus.source for corpus in blended)
    if recipe.drafter.init_from is not None:
        vocab = vocab_of_start(recipe, fingerprint)
        print(f"the draft vocabulary is that of drafter.init_from, {recipe.drafter.init_from}")
    else:
        vocab = cut_vocab(DraftVocab.full(vocab_size), counts, size, must_have, "drafter.vocab_size")
        if fill := fill_text(vocab, counts, must_have):
            print(f"note: {fill}")
    if recipe.drafter.vocab_size is None:
        print("drafter.vocab_size is not set: the drafter proposes the target's whole vocabulary")
    print(coverage_table(corpora, counts, must_have))
    covered = covered_share(counts, vocab)
    metadata = {
        "tokenizer_fingerprint": fingerprint,
        "counted_tokens": str(int(counts.sum())),
        "covered_share": f"{covered:.6f}",
    }
    if sources:
        metadata["corpora"] = json.dumps([corpus.facts() for corpus in corpora], ensure_ascii=False)
    done = write(recipe, vocab, metadata)
    save_token_counts(counts_path_of(recipe), counts, fingerprint, stops, others, corpora if sources else ())
    print(
        f"{recipe.draft_vocab_path}: {done}; {vocab.size:,} of {vocab_size:,} target tokens, "
        f"{covered:.2%} of {'the blend' if len(blended) > 1 else names} covered"
    )


def vocab_of_start(recipe: Recipe, fingerprint: str) -> DraftVocab:
    """The draft vocabulary of drafter.init_from.

    Raises:
        UserError: no drafter there, or one for another target.
    """
    start, problems = Path(recipe.drafter.init_from or ""), list[str]()
    config = load_config(recipe.target).get_text_config()
    with collected(problems, before="drafter.init_from: "):
        shape, trained_for = read_drafter_config(start)
        check_identity(
            start, trained_for, config_identity(config, recipe.target.model, recipe.target.revision, fingerprint)
        )
        return read_drafter_vocab(start, shape)
    raise UserError(problems)


# Counting.


def count_corpora(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[CorpusCounts]:
    """Counts of every source, in the recipe's order, then of the target's own answers if they exist.

    Raises UserError with all sources that are missing or hold nothing to count.
    """
    ranking, answers_there = recipe.data.ranking, recipe.conversations_path.exists()
    weights = {source.source: source.weight for source in ranking.sources}
    problems: list[str] = []
    if ANSWERS in weights and not answers_there:
        problems.append(
            f"data.ranking.sources: {ANSWERS}: {recipe.conversations_path} does not exist; run `draftsmith "
            "regenerate` first, or name a file in data.conversations"
        )
    with collected(problems):
        check_sources(ranking.sources)
    if problems:
        raise UserError(problems)
    found: dict[str, CorpusCounts] = {}
    if ANSWERS in weights:
        found[ANSWERS] = count_answers(recipe, tokenizer, vocab_size, weights[ANSWERS])
    elif answers_there:  # only for comparison; the ranking does not need them
        try:
            found[ANSWERS] = count_answers(recipe, tokenizer, vocab_size, None)
        except UserError as error:
            print(f"note: the coverage of the target's own answers is unknown: {'; '.join(error.problems)}")
    tokeniser, folder = Tokeniser(tokenizer, vocab_size), Path(recipe.output_dir) / "ranking"
    for section in ranking.sources:
        if section.source != ANSWERS:
            found[section.source] = count_corpus(section, folder, tokeniser)
    empty = [
        f"data.ranking.sources: {corpus.source} holds no tokens to count: {corpus.documents:,} documents, "
        f"{corpus.rejected:,} records rejected"
        for corpus in found.values()
        if not corpus.tokens
    ]
    if empty:
        raise UserError(empty)
    return [found[name] for name in (*weights, *(name for name in found if name not in weights))]


def count_answers(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int, weight: float | None
) -> CorpusCounts:
    """Counts the supervised tokens of training's rows. Raises UserError for none, or one beyond the vocabulary."""
    check, rejects = training_check(recipe), Rejects(recipe.training_rejects_path)
    leave_out = check.look if check else None
    rows = training_rows(recipe.conversations_path, tokenizer, longest_row(recipe), rejects, leave_out)
    ids: set[str] = set()

    def with_ids() -> Iterator[TrainingRow]:
        for row in Bar(rows, desc="counting", unit="row"):
            ids.add(row.id)
            yield row

    counts = count_supervised(with_ids(), vocab_size)
    if check:
        check.report()
    if not counts.any():
        raise UserError(f"{recipe.conversations_path} holds no tokens to count; {rejects.summary()}")
    print(f"{ANSWERS}: {int(counts.sum()):,} tokens in {len(ids):,} conversations; {rejects.summary()}")
    return CorpusCounts(ANSWERS, counts, weight, len(ids), rejects.total)


def count_supervised(rows: Iterable[TrainingRow], vocab_size: int) -> torch.Tensor:
    """[V] count of each token at supervised positions. Raises UserError for a token beyond the vocabulary."""
    found = Counter[int]()
    for row in rows:
        for start, end in row.spans:
            found.update(row.input_ids[start:end])
    if (greatest := max(found, default=0)) >= vocab_size:
        raise UserError(f"data.conversations: token {greatest} is outside the target's vocabulary of {vocab_size}")
    return as_tensor(found, vocab_size)


# Coverage.


def coverage_table(corpora: Sequence[CorpusCounts], counts: torch.Tensor, must_have: Sequence[int]) -> str:
    """What share of each corpus the most frequent tokens cover, ranked by `counts` [V], by size of the vocabulary.

    Columns are the blend, if there is one, then each corpus. Sizes are powers of two with room for `must_have`, and the
    target's whole vocabulary.
    """
    columns, whole = {corpus.source: corpus.counts for corpus in corpora}, DraftVocab.full(len(counts))
    if sum(corpus.weight is not None for corpus in corpora) > 1:
        columns = {"blend": counts} | columns
    names = [name if len(name) <= NAME_WIDTH else f"..{name[2 - NAME_WIDTH :]}" for name in columns]
    lines = ["    tokens" + "".join(f"  {name:>{NAME_WIDTH}}" for name in names)]
    powers = [1 << exponent for exponent in range((len(counts) - 1).bit_length())]
    for size in [*[power for power in powers if power >= len(must_have)][-SIZES_SHOWN:], len(counts)]:
        vocab = cut_vocab(whole, counts, size, must_have)
        lines.append(
            f"{size:>10,}" + "".join(f"  {covered_share(of, vocab):>{NAME_WIDTH}.2%}" for of in columns.values())
        )
    return "\n".join(lines)


def write(recipe: Recipe, vocab: DraftVocab, metadata: dict[str, str]) -> str:
    """Writes the mapping and says what was done. Raises UserError if a checkpoint or drafter uses another mapping."""
    path = recipe.draft_vocab_path
    if not path.exists():
        vocab.save(path, metadata)
        return "written"
    old = DraftVocab.load(path)
    if old.same_as(vocab):
        return "unchanged"
    folders = recipe.checkpoints_dir, recipe.drafter_dir
    trained = [str(folder) for folder in folders if folder.is_dir() and any(folder.iterdir())]
    if trained:
        shared = torch.isin(old.target_ids, vocab.target_ids).sum()
        raise UserError(
            f"{path}: holds {old.size} draft tokens of {old.target_vocab_size}, the counts now give {vocab.size} of "
            f"{vocab.target_vocab_size}, {int(shared)} of them the same; {' and '.join(trained)} were trained with the "
            "old ones. Use another output_dir, or remove what was trained"
        )
    vocab.save(path, metadata)
    return f"replaced (it held {old.size} others, nothing was trained with them)"
