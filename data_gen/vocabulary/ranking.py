"""Token counts and draft vocabularies, behind data_gen/rank_vocab.py."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.data_gen.training_rows.overlap import training_check
from draftsmith.data_gen.training_rows.rows import training_rows
from draftsmith.data_gen.vocabulary.corpus_reader import ANSWERS, Tokeniser, check_sources, files_of
from draftsmith.data_gen.vocabulary.template_tokens import template_tokens
from draftsmith.models.checkpoint import check_identity, read_drafter_config, read_drafter_vocab
from draftsmith.models.formats.named_drafters import with_start
from draftsmith.models.target_files import TargetFiles, longest_row
from draftsmith.models.vocab import (
    CorpusCounts,
    DraftVocab,
    blend,
    covered_share,
    cut_vocab,
    fill_text,
    load_tensors,
    save_token_counts,
    write_tensors,
)
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.command.stages import made_by, require_files
from draftsmith.recipes.errors import UserError, naming_problems
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.prompts.sources import hub_parts, open_dataset
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.data import RankingSource

SIZES_SHOWN = 7  # powers of two in a table, beside the target's whole vocabulary
NAME_WIDTH = 20  # characters of a corpus's name that a table shows


def main(command: Command) -> None:
    recipe = with_start(command.recipe, command.plan)
    files = TargetFiles(recipe.target)
    vocab_size = files.text_config.vocab_size
    size = recipe.drafter.vocab_size or vocab_size
    if size > vocab_size:
        raise UserError(f"drafter.vocab_size: {size} is more than the target's vocabulary of {vocab_size} tokens")
    if command.plan:
        print_ranking_plan(recipe, size, vocab_size)
    else:
        with alone_in(Path(recipe.output_dir)):
            choose_vocab(recipe, size, files)


def print_ranking_plan(recipe: Recipe, size: int, vocab_size: int) -> None:
    sources = recipe.data.ranking.sources
    with PlanLines() as plan:
        if not sources or ANSWERS in {source.source for source in sources}:
            plan.reads(made_by("regenerate", recipe))
        for source in sources:
            most = f", {source.max_documents:,} documents at most" if source.max_documents else ""
            plan.line("counts", f"{source.source}{most}; weight {source.weight:g}")
        check_sources(sources, look=False)
        chosen = "; where fewer are counted, the lowest other ids fill it up" if size < vocab_size else ""
        if recipe.drafter.init_from is not None:
            chosen = f", those of {recipe.drafter.init_from}"
        plan.line("tokens", f"{size:,} of the target's {vocab_size:,}{chosen}")
        plan.writes(recipe.draft_vocab_path, recipe.own_counts_path)


def choose_vocab(recipe: Recipe, size: int, files: TargetFiles) -> None:
    """Ranks by the blend of data.ranking.sources, or by the target's own answers without any. Writes the files."""
    sources = recipe.data.ranking.sources
    vocab_size, stops = files.text_config.vocab_size, set(files.stop_ids)
    template, in_answers = map(set, template_tokens(files.tokenizer))
    others = template if sources else in_answers - stops
    must_have = sorted(stops | others)
    corpora = count_corpora(recipe, files) if sources else [count_answers(recipe, files, 1)]
    blended = [corpus for corpus in corpora if corpus.weight is not None]
    counts = blend([(corpus.counts, corpus.weight or 0.0) for corpus in blended])
    if recipe.drafter.init_from is not None:
        vocab = vocab_of_start(recipe, files)
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
        "tokenizer_fingerprint": files.fingerprint,
        "counted_tokens": str(int(counts.sum())),
        "covered_share": f"{covered:.6f}",
    }
    if sources:
        metadata["corpora"] = json.dumps([corpus.facts() for corpus in corpora], ensure_ascii=False)
    done = write(recipe, vocab, metadata)
    save_token_counts(recipe.own_counts_path, counts, files.fingerprint, stops, others, corpora if sources else ())
    print(
        f"{recipe.draft_vocab_path}: {done}; {vocab.size:,} of {vocab_size:,} target tokens, "
        f"{covered:.2%} of {'the blend' if len(blended) > 1 else blended[0].source} covered"
    )


def vocab_of_start(recipe: Recipe, files: TargetFiles) -> DraftVocab:
    """The draft vocabulary of drafter.init_from. Raises UserError for no drafter, or one for another target."""
    start = Path(recipe.drafter.init_from or "")
    with naming_problems("drafter.init_from: "):
        shape, trained_for = read_drafter_config(start)
        check_identity(start, trained_for, files.identity)
        return read_drafter_vocab(start, shape)


# Counting.


def count_corpora(recipe: Recipe, files: TargetFiles) -> list[CorpusCounts]:
    """Counts of every source, in the recipe's order, then of the target's own answers if they exist.

    Raises UserError for sources that are missing or hold nothing to count.
    """
    sources = recipe.data.ranking.sources
    check_sources(sources)
    if answers_wanted := ANSWERS in {section.source for section in sources}:
        require_files(made_by("regenerate", recipe))
    tokeniser = Tokeniser(files.tokenizer, files.text_config.vocab_size)
    corpora = []
    for section in sources:
        if section.source == ANSWERS:
            corpora.append(count_answers(recipe, files, section.weight))
        else:
            corpora.append(count_corpus(section, Path(recipe.output_dir) / "ranking", tokeniser))
    if not answers_wanted and recipe.conversations_path.exists():  # only for comparison
        try:
            corpora.append(count_answers(recipe, files, None))
        except UserError as error:
            print(f"note: the coverage of the target's own answers is unknown: {'; '.join(error.problems)}")
    return corpora


def count_corpus(section: RankingSource, folder: Path, tokeniser: Tokeniser) -> CorpusCounts:
    """Counts a source that is read to its end, or takes the counts of an earlier run from `folder`.

    Their file is named by all that they depend on, which excludes the weight: another blend reuses them. Unusable
    records are kept beside it. Raises UserError if a dataset cannot be read to its end, or without a token.
    """
    depends_on = [*section.model_dump(exclude={"weight"}).values(), tokeniser.vocab_size, tokeniser.fingerprint]
    digest = hashlib.sha256(json.dumps([*depends_on, *state_of(section.source)]).encode()).hexdigest()
    words = re.sub(r"[^A-Za-z0-9]+", "-", section.source).strip("-")[-40:]
    path = folder / f"{words}-{digest[:12]}.safetensors"
    rejects = Rejects(path.with_suffix(".rejects.jsonl"))
    if path.exists():
        tensors, metadata = load_tensors(path, "counts of a corpus")
        counts, documents = tensors["counts"], int(metadata["documents"])
        rejects.counts.update(json.loads(metadata["rejected"]))
        print(f"{section.source}: counted before")
    else:
        counts, documents = torch.zeros(tokeniser.vocab_size, dtype=torch.int64), 0
        for ids, opens in tokeniser.documents(section, rejects):
            count_tokens(counts, ids)
            documents += opens
        write_tensors(path, {"counts": counts}, {"documents": str(documents), "rejected": json.dumps(rejects.counts)})
    told = f"{section.source}: {int(counts.sum()):,} tokens in {documents:,} documents; {rejects.summary()}"
    if not counts.any():
        raise UserError(f"data.ranking.sources: {told}")
    print(told)
    return CorpusCounts(section.source, counts, section.weight, documents, rejects.total)


def state_of(source: str) -> list[Any]:
    """JSON that differs if the source has changed."""
    if (files := files_of(source)) is not None:
        return [(path, Path(path).stat().st_size, Path(path).stat().st_mtime_ns) for path in files]
    info, parts = open_dataset(source).info, hub_parts(source)
    split = (info.splits or {}).get(parts[2] if parts else None)
    return [str(info.features), str(info.version), split and split.num_examples]


def count_answers(recipe: Recipe, files: TargetFiles, weight: float | None) -> CorpusCounts:
    """Counts the supervised tokens of training's rows. Raises UserError for none, or one beyond the vocabulary."""
    check, rejects = training_check(recipe), Rejects(recipe.training_rejects_path)
    leave_out = check.look if check else None
    rows = training_rows(recipe.conversations_path, files.tokenizer, longest_row(recipe, files), rejects, leave_out)
    vocab_size, ids = files.text_config.vocab_size, set[str]()
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in Bar(rows, desc="counting", unit="row"):
        ids.add(row.id)
        for start, end in row.spans:
            tokens = row.input_ids[start:end]
            if max(tokens) >= vocab_size:
                raise UserError(
                    f"data.conversations: token {max(tokens)} is outside the target's vocabulary of {vocab_size}"
                )
            count_tokens(counts, tokens)
    if check:
        check.report()
    print(f"{ANSWERS}: {int(counts.sum()):,} tokens in {len(ids):,} conversations; {rejects.summary()}")
    return CorpusCounts(ANSWERS, counts, weight, len(ids), rejects.total)


def count_tokens(counts: torch.Tensor, tokens: Sequence[int]) -> None:
    """Adds 1 to `counts` [V] for every token."""
    ids = torch.tensor(tokens, dtype=torch.int64)
    counts.index_add_(0, ids, torch.ones_like(ids))


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
    if trained := [str(folder) for folder in folders if folder.is_dir() and any(folder.iterdir())]:
        shared = torch.isin(old.target_ids, vocab.target_ids).sum()
        raise UserError(
            f"{path}: holds {old.size} draft tokens of {old.target_vocab_size}, the counts now give {vocab.size} of "
            f"{vocab.target_vocab_size}, {int(shared)} of them the same; {' and '.join(trained)} were trained with the "
            "old ones. Use another output_dir, or remove what was trained"
        )
    vocab.save(path, metadata)
    return f"replaced (it held {old.size} others, nothing was trained with them)"
