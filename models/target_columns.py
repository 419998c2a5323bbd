"""The columns that a drafter makes of the target's states, before its first layer.

Column t reads the target's state of position t and the embedding of token x[t+1] (`models.alignment`). A text has a
column for each position. `models.vispec` removes most columns of a picture, and this file keeps the account: decoding
counts positions, its buffers hold columns.

Shapes: B rows, T positions, C columns that exist, F captured states, H hidden size, Q vectors of a picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from draftsmith.models.alignment import Columns, Documents


@dataclass(frozen=True)
class SeenPicture:
    """A picture's columns in its text, first <= t < end, of which only the last `kept` exist."""

    first: int
    end: int
    kept: int
    vectors: torch.Tensor  # [Q, H] made of the picture


def columns_of_picture(token: int, tokens: int, most: int) -> tuple[int, int, int]:
    """(first, end, kept) of a picture whose first token is at position `token`, of which `most` columns may stay."""
    first, end = max(0, token - 1), token - 1 + tokens
    return first, end, min(most, end - first)


# Of one text, by the position of the picture's first token.
Pictures = dict[int, SeenPicture]


def columns_within(length: int, pictures: Pictures) -> int:
    """Number of columns that exist of a text's first `length`."""
    return length - sum(max(0, min(length, each.end - each.kept) - each.first) for each in pictures.values())


@dataclass(frozen=True)
class TextColumns:
    """Columns before, ..., before + count - 1 of one text in a batch, from column `first` of row `row` on."""

    row: int
    first: int
    count: int
    before: int = 0
    # Known so far. Drafters that compress pictures add those that reach into these columns.
    pictures: Pictures = field(default_factory=dict)


@dataclass(frozen=True)
class TargetColumns:
    """What `FeatureDrafter.fuse` and `FeatureDrafter.entry` read for the columns that exist."""

    captured: torch.Tensor  # [B, C, F] the target's states
    embeddings: torch.Tensor  # [B, C, H] of the token behind each column's position
    positions: torch.Tensor  # [B, C] in the text, where removed columns count, too
    counts: Sequence[int]  # [B] columns of each row; padding stands behind them
    context: tuple[torch.Tensor, ...] = ()  # further arguments of `FeatureDrafter.entry`, [B, C, ...] each
    exists: torch.Tensor | None = None  # [B, T] bool, on the CPU; None: all T do

    def renumbered(self, columns: Columns, documents: Documents | None) -> tuple[Columns, Documents | None]:
        """Counted columns and packed documents along C instead of T.

        exists       1 1 0 0 1 1 | 1 0 1 1         two documents
        along T      0 1 2 3 4 5   6 7 8 9         counted: 5 9
        along C      0 1     2 3   4   5 6         counted: 3 6
        """
        if self.exists is None:
            return columns, documents
        along_C = self.exists.cumsum(1) - 1  # [B, T]
        index = along_C.to(columns.index.device).gather(1, columns.index)
        runs = columns.known_runs
        if runs is not None:
            left = along_C + 1 - self.exists.long()  # columns that exist to the left
            runs = tuple(
                replace(run, start=int(left[run.row, run.start]), before=int(along_C[run.row, run.before]))
                for run in runs
            )
        moved = Columns(torch.where(columns.depth > 0, index, 0), columns.depth, runs)
        if documents is None:
            return moved, None
        position, places = torch.zeros(len(along_C), max(self.counts), dtype=torch.long), []
        starts = [0] * len(along_C)
        for row, start, tokens in documents.places:
            count = int(self.exists[row, start : start + tokens].sum())
            position[row, starts[row] : starts[row] + count] = torch.arange(count)
            places.append((row, starts[row], count))
            starts[row] += count
        return moved, Documents(position.to(documents.position.device), tuple(places))
