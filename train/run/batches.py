"""Micro-batches: which training rows they hold, in which order, and how their tokens are laid out.

The order is a pure function of (seed, epoch). One number counts micro-batches through all epochs, so a resumed run and
a run on other ranks read exactly the same micro-batches.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from draftsmith.data_gen.states.store import length_of
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.alignment import Documents
from draftsmith.models.prompt import PlacedInsert

POOL_BATCHES = 32  # micro-batches with rows that are sorted by length together


@dataclass(frozen=True)
class MicroBatch:
    """Training rows laid out as a [B, T] batch: one a row and right-padded, or packed as documents.

        collate(rows)                packed                       collate_as(rows, [[2, 0], [1]])
        a a a a a                    a a a a a b b c c c          c c c a a a a a
        b b . . .                                                 b b . . . . . .
        c c c . .

    Attributes:
        ids: [B, T] token ids; 0 in padding, which is never read.
        span: [B, T] number of the supervised span in its document; 0 outside spans. The first token of a document is
            never a chain's root, so it has 0 too. This keeps the spans of neighbouring documents apart.
        position: [B, T] position of the token in its document; 0 in padding.
        rows: indices of the training rows in layout order: row by row, left to right.
        places: (row, first column, tokens) of each training row, in that order.
        tokens_at: [N] indices of the tokens in the flattened B * T, without padding, in that order.
    """

    ids: torch.Tensor
    span: torch.Tensor
    position: torch.Tensor
    rows: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...]
    tokens_at: torch.Tensor
    inserts: tuple[PlacedInsert, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each training row, without padding."""
        return [tokens for _, _, tokens in self.places]

    @property
    def documents(self) -> Documents | None:
        """Packed documents; None if each has its own row, where a causal mask suffices."""
        return Documents(self.position, self.places) if any(start for _, start, _ in self.places) else None

    def lay_out(self, per_row: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lays out values [tokens or more, ...] of each training row, in the order of `rows`, as the ids are:
        [B, T, ...], with zeros in padding."""
        like = per_row[0]
        laid_out = torch.zeros(*self.ids.shape, *like.shape[1:], dtype=like.dtype, device=like.device)
        for (row, start, tokens), values in zip(self.places, per_row, strict=True):
            laid_out[row, start : start + tokens] = values[:tokens]
        return laid_out

    @cached_property
    def one_row(self) -> "MicroBatch":
        """The same training rows packed into a single row. The unroll reads this form whatever the target read, because
        it computes nothing for padding."""
        if len(self.ids) == 1:
            return self
        starts = list(accumulate(self.lengths, initial=0))
        places = tuple((0, start, tokens) for start, tokens in zip(starts, self.lengths, strict=False))
        ids, span, position = (self.in_one_row(each) for each in (self.ids, self.span, self.position))
        every = torch.arange(len(self.tokens_at), device=ids.device)
        inserts = tuple(
            PlacedInsert(0, placed.insert.at(start + placed.insert.first - was))
            for (_, start, _), (row, was, tokens) in zip(places, self.places, strict=True)
            for placed in self.inserts
            if placed.row == row and was <= placed.insert.first < was + tokens
        )
        return MicroBatch(ids, span, position, self.rows, places, every, inserts)

    def in_one_row(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Values laid out like the ids, [B, T, ...], in the layout of `one_row`: [1, N, ...]."""
        return values_BT if len(self.ids) == 1 else values_BT.flatten(0, 1)[self.tokens_at][None]

    def to(self, device: torch.device) -> "MicroBatch":
        names = "ids", "span", "position", "tokens_at"
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def collate(rows: Sequence[TrainingRow], packed: bool = False, indices: Sequence[int] | None = None) -> MicroBatch:
    """Lays training rows out: one a row with padding, or all packed into one row. `indices` as in `collate_as`."""
    each = range(len(rows))
    return collate_as(rows, [list(each)] if packed else [[i] for i in each], indices)


def collate_as(
    rows: Sequence[TrainingRow], layout: Sequence[Sequence[int]], indices: Sequence[int] | None = None
) -> MicroBatch:
    """Lays training rows out by `layout`: for each row of the batch, places in `rows`, left to right. `indices` are
    the rows' own, for `MicroBatch.rows`; None: 0, 1, 2, ..."""
    lengths = [[length_of(rows[i]) for i in line] for line in layout]
    shape = len(layout), max(map(sum, lengths))
    ids, span, position = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    places, inserts = [], list[PlacedInsert]()
    for b, line in enumerate(layout):
        start = 0
        for i, length in zip(line, lengths[b], strict=True):
            here = slice(start, start + length)
            ids[b, here] = torch.tensor(rows[i].input_ids[:length])
            position[b, here] = torch.arange(length)
            for span_number, (first, end) in enumerate(rows[i].spans, start=1):
                span[b, start + max(first, 1) : start + end] = span_number
            places.append((b, start, length))
            inserts += [PlacedInsert(b, each.at(start + each.first)) for each in rows[i].inserts if each.first < length]
            start += length
    order = [i if indices is None else indices[i] for line in layout for i in line]
    tokens_at = torch.cat([torch.arange(shape[1] * b + start, shape[1] * b + start + n) for b, start, n in places])
    return MicroBatch(ids, span, position, tuple(order), tuple(places), tokens_at, tuple(inserts))


def computed_tokens(order: "BatchOrder", rows: Sequence[TrainingRow], packed: bool) -> int:
    """Tokens that the target reads in the first epoch, with padding."""
    epoch = [[length_of(rows[i]) for i in order.rows(number)] for number in range(order.batches_per_epoch)]
    return sum(sum(lengths) if packed else len(lengths) * max(lengths) for lengths in epoch)


class BatchOrder:
    """Maps the number of a micro-batch to its row indices, the same on all ranks.

    Each epoch shuffles all rows, sorts them by length inside pools of POOL_BATCHES micro-batches, which saves padding,
    cuts the pools into micro-batches and shuffles those. The last micro-batch of the last pool may be smaller.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.batches_per_epoch = -(-len(lengths) // batch_size)
        self._epoch = -1
        self._batches: list[list[int]] = []

    def rows(self, number: int) -> list[int]:
        """Row indices of micro-batch `number`, counted from 0 through all epochs."""
        epoch, position = divmod(number, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self.batches_of(epoch)
        return self._batches[position]

    def batches_of(self, epoch: int) -> list[list[int]]:
        chance = random.Random(f"{self.seed}/{epoch}")
        rows = list(range(len(self.lengths)))
        chance.shuffle(rows)
        batches = [batch for pool in self.pools_of(rows) for batch in pool]
        chance.shuffle(batches)
        return batches

    def pools_of(self, rows: Sequence[int]) -> Iterator[list[list[int]]]:
        size = POOL_BATCHES * self.batch_size
        for start in range(0, len(rows), size):
            pool = sorted(rows[start : start + size], key=self.lengths.__getitem__)
            yield [pool[i : i + self.batch_size] for i in range(0, len(pool), self.batch_size)]
