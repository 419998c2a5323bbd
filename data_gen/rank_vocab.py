"""Count the supervised tokens and choose the draft vocabulary: the most frequent ones, stop tokens always inside.

    python data_gen/rank_vocab.py recipes/demo.yaml
    python data_gen/rank_vocab.py recipes/demo.yaml drafter.vocab_size=512
    python data_gen/rank_vocab.py recipes/demo.yaml --plan                    # what it would do

Reads the conversations that training reads, with the same rows left out, and writes two files into <output_dir>:
draft_vocab.safetensors (EAGLE-3's d2t and t2d) and token_counts.safetensors, by which eval.tree.vocab_size cuts any
drafter's vocabulary further while decoding (FR-Spec). What was left out stands in conversations.training_rejects.jsonl
there. A mapping never changes under a trained drafter: where checkpoints exist, another one is refused. The counts are
only a ranking and are written anew.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from draftsmith.data_gen.contamination import training_check
from draftsmith.data_gen.conversations import TrainingRow, training_rows
from draftsmith.models.chat import (
    load_config,
    load_generation_config,
    load_tokenizer,
    stop_ids,
    tokenizer_fingerprint,
)
from draftsmith.models.vocab import DraftVocab, covered_share, cut, rank, save_token_counts
from draftsmith.recipes.cli import parse_command, run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts import Rejects
from draftsmith.recipes.schema import Recipe

# Tokens gathered before they are added to the counts: a large vocabulary is not walked through for every row.
COUNTED_AT_ONCE = 1 << 20
# Sizes whose coverage is printed: so many powers of two below the target's vocabulary.
SIZES_SHOWN = 7


def main() -> None:
    command = parse_command(__doc__)
    recipe, section = command.recipe, command.recipe.target
    # Not eval.token_counts, which may name a file that somebody else counted.
    counts_path = Path(recipe.output_dir) / "token_counts.safetensors"
    vocab_size = load_config(section).get_text_config().vocab_size
    size = recipe.drafter.vocab_size or vocab_size
    if size > vocab_size:
        raise UserError(f"drafter.vocab_size: {size} is more than the target's vocabulary of {vocab_size} tokens")
    if command.plan:
        there = "" if recipe.conversations_path.exists() else ", which data_gen/regenerate.py has yet to write"
        print(f"counts the supervised tokens of {recipe.conversations_path}{there}")
        print(f"writes {size:,} of {vocab_size:,} target tokens to {recipe.draft_vocab_path}")
        print(f"writes how often each was seen to {counts_path}")
        return
    tokenizer = load_tokenizer(section)
    stops = stop_ids(tokenizer, load_generation_config(section))
    rejects = Rejects(recipe.training_rejects_path)
    check = training_check(recipe)
    leave_out = check.leave_out if check else None
    rows = training_rows(recipe.conversations_path, tokenizer, recipe.data.max_length, rejects, leave_out)
    counts = count_supervised(tqdm(rows, desc="counting", unit="row", disable=None), vocab_size)
    if check:
        check.report()
    vocab = rank(counts, size, stops)
    total, covered = int(counts.sum()), covered_share(counts, vocab)
    print(f"{total:,} supervised tokens, {int((counts > 0).sum()):,} distinct ones seen; {rejects.summary()}")
    if recipe.drafter.vocab_size is None:
        print("drafter.vocab_size is not set: the drafter proposes the target's whole vocabulary")
    print(coverage_table(counts, stops))
    fingerprint = tokenizer_fingerprint(tokenizer)
    metadata = {
        "tokenizer_fingerprint": fingerprint,
        "counted_tokens": str(total),
        "covered_share": f"{covered:.6f}",
    }
    done = write(recipe, vocab, metadata)
    save_token_counts(counts_path, counts, fingerprint, stops)
    print(
        f"{recipe.draft_vocab_path}: {done}; {vocab.size:,} of {vocab_size:,} target tokens, "
        f"{covered:.2%} of the supervised ones covered"
    )
    print(f"{counts_path}: written")


def coverage_table(counts: torch.Tensor, stops: Sequence[int]) -> str:
    """The share of the supervised tokens that the most frequent ones cover, at a few vocabulary sizes."""
    vocab_size = len(counts)
    whole = DraftVocab.full(vocab_size)
    powers = [1 << exponent for exponent in range((vocab_size - 1).bit_length())]  # below vocab_size
    sizes = [size for size in powers[-SIZES_SHOWN:] if size >= len(stops)]
    lines = ["    tokens  of the supervised ones"]
    for size in (*sizes, vocab_size):
        lines.append(f"{size:>10,}  {covered_share(counts, cut(whole, counts, size, stops)):>7.2%}")
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


if __name__ == "__main__":
    run(main)
