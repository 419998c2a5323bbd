"""Which share of each corpus a vocabulary of each size covers, by the ranking that several of them were blended to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from draftsmith.models.vocab import CorpusCounts, DraftVocab, covered_share, cut
from draftsmith.recipes.files.atomic import atomic_write

# Sizes that a table shows: so many powers of two below the target's vocabulary, and the vocabulary itself.
SIZES_SHOWN = 7
COLUMN = 20  # characters of a corpus's name that a table shows


class Coverage:
    """Which share of each corpus the most frequent tokens of the ranking cover.

    Args:
        sizes: of the vocabulary, the target's own last.
        shares: by column, one for each size.
    """

    def __init__(self, sizes: list[int], shares: dict[str, list[float]]):
        self.sizes, self.shares = sizes, shares

    @classmethod
    def of(cls, corpora: Sequence[CorpusCounts], counts: torch.Tensor, must_have: Sequence[int]) -> "Coverage":
        """Columns: the blend where there is one, then each corpus, by the ranking that `counts` is."""
        whole = DraftVocab.full(len(counts))
        sizes = sizes_below(len(counts), len(must_have))
        columns = {corpus.source: corpus.counts for corpus in corpora}
        if sum(corpus.weight is not None for corpus in corpora) > 1:
            columns = {"blend": counts} | columns
        vocabs = [cut(whole, counts, size, must_have) for size in sizes]
        return cls(sizes, {name: [covered_share(of, vocab) for vocab in vocabs] for name, of in columns.items()})

    def table(self) -> str:
        """Its last rows, for people."""
        names = [name if len(name) <= COLUMN else f"..{name[2 - COLUMN :]}" for name in self.shares]
        lines = ["    tokens" + "".join(f"  {name:>{COLUMN}}" for name in names)]
        for row in range(max(0, len(self.sizes) - SIZES_SHOWN - 1), len(self.sizes)):
            shares = "".join(f"  {column[row]:>{COLUMN}.2%}" for column in self.shares.values())
            lines.append(f"{self.sizes[row]:>10,}{shares}")
        return "\n".join(lines)

    def write(
        self, path: Path, corpora: Sequence[Mapping[str, object]], always_inside: Sequence[Mapping[str, object]]
    ) -> None:
        """As JSON; the file is complete or not there."""
        content = {
            "corpora": list(corpora),
            "always_inside": list(always_inside),
            "sizes": self.sizes,
            "covered_share": {name: [round(share, 6) for share in column] for name, column in self.shares.items()},
        }
        atomic_write(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def sizes_below(vocab_size: int, least: int) -> list[int]:
    """Powers of two from `least` to below the vocabulary, and the vocabulary itself."""
    powers = [1 << exponent for exponent in range((vocab_size - 1).bit_length())]
    return [*(power for power in powers if power >= least), vocab_size]
