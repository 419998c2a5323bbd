"""From training rows to micro-batches: which rows stand together, in which order, on which rank.

The order is a pure function of (seed, epoch), and a micro-batch is named by one number that counts through all epochs,
so that a resumed run and a run on other ranks read exactly the same batches.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.models.alignment import Documents


@dataclass(frozen=True)
class Batch:
    """Training rows laid out in rows of a batch: one a row and right-padded, or as documents one behind the other.

        collate(rows)                packed                       collate_as(rows, [[2, 0], [1]])
        a a a a a                    a a a a a b b c c c          c c c a a a a a
        b b . . .                                                 b b . . . . . .
        c c c . .

    Attributes:
        ids: [B, T] 0 in padding, which nothing ever looks at.
        span: [B, T] 0 outside supervised spans, else the number of the span in its document. 0 at the first token of
            each document, too, which no chain has for a root: so the spans of neighbours never touch.
        document: [B, T] 0 in padding, else the number of the document in its row, from 1.
        position: [B, T] of each token in its document; 0 in padding.
        rows: which training rows stand here, in the order of the layout: row by row, along each row.
        places: (row, first column, tokens) of each of them, in that order.
        tokens_at: [N] where the tokens stand in B * T, padding left out, in that order.
    """

    ids: torch.Tensor
    span: torch.Tensor
    document: torch.Tensor
    position: torch.Tensor
    rows: tuple[int, ...]
    places: tuple[tuple[int, int, int], ...]
    tokens_at: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each training row, without padding."""
        return [tokens for _, _, tokens in self.places]

    @property
    def tokens(self) -> int:
        """Without padding."""
        return sum(self.lengths)

    @property
    def documents(self) -> Documents | None:
        """What keeps documents apart; None: each has a row to itself, and the order of columns is all that it takes."""
        return Documents(self.position, self.places) if any(start for _, start, _ in self.places) else None

    def lay_out(self, per_row: Sequence[torch.Tensor]) -> torch.Tensor:
        """What each training row brings, [tokens, ...] in the order of `rows`, as the ids are laid out: [B, T, ...].

        Zeros in padding. What a training row brings for tokens behind those of this batch is cut, as its ids are.
        """
        like = per_row[0]
        laid_out = torch.zeros(*self.ids.shape, *like.shape[1:], dtype=like.dtype, device=like.device)
        for (row, start, tokens), values in zip(self.places, per_row, strict=True):
            if len(values) < tokens:
                raise ValueError(f"a training row of {tokens} tokens brings {len(values)} values")
            laid_out[row, start : start + tokens] = values[:tokens]
        return laid_out

    @cached_property
    def one_row(self) -> "Batch":
        """The same training rows one behind the other in a single row, as `collate` packs them: so the unroll reads
        them, which has no use for padding, however the target read them."""
        if len(self.ids) == 1:
            return self
        starts = list(accumulate(self.lengths, initial=0))
        places = tuple((0, start, tokens) for start, tokens in zip(starts, self.lengths, strict=False))
        ids, span, position = (self.in_one_row(each) for each in (self.ids, self.span, self.position))
        every = torch.arange(self.tokens, device=ids.device)
        return Batch(ids, span, (position == 0).cumsum(1), position, self.rows, places, every)

    def in_one_row(self, values_BT: torch.Tensor) -> torch.Tensor:
        """What is laid out as the ids are, [B, T, ...], as those of `one_row` are: [1, N, ...]."""
        return values_BT if len(self.ids) == 1 else values_BT.flatten(0, 1)[self.tokens_at][None]

    def to(self, device: torch.device) -> "Batch":
        names = "ids", "span", "document", "position", "tokens_at"
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def collate(rows: Sequence[TrainingRow], packed: bool = False, indices: Sequence[int] | None = None) -> Batch:
    """All rows of a micro-batch: padded, one a row; or packed, all in one row without padding.

    Args:
        indices: the numbers of these rows, for `Batch.rows`; None: 0, 1, 2, ...
    """
    each = range(len(rows))
    return collate_as(rows, [list(each)] if packed else [[i] for i in each], indices)


def collate_as(
    rows: Sequence[TrainingRow], layout: Sequence[Sequence[int]], indices: Sequence[int] | None = None
) -> Batch:
    """`layout`: places in `rows` of those that stand in each row of the batch, in their order."""
    lengths = [[counted_length(rows[i]) for i in line] for line in layout]
    shape = len(layout), max(map(sum, lengths))
    ids, span, document, position = (torch.zeros(shape, dtype=torch.long) for _ in range(4))
    places = []
    for b, line in enumerate(layout):
        start = 0
        for number, (i, length) in enumerate(zip(line, lengths[b], strict=True), start=1):
            here = slice(start, start + length)
            ids[b, here] = torch.tensor(rows[i].input_ids[:length])
            document[b, here] = number
            position[b, here] = torch.arange(length)
            for span_number, (first, end) in enumerate(rows[i].spans, start=1):
                span[b, start + max(first, 1) : start + end] = span_number
            places.append((b, start, length))
            start += length
    order = [i if indices is None else indices[i] for line in layout for i in line]
    tokens_at = torch.cat([torch.arange(shape[1] * b + start, shape[1] * b + start + n) for b, start, n in places])
    return Batch(ids, span, document, position, tuple(order), tuple(places), tokens_at)


def counted_length(row: TrainingRow) -> int:
    """Tokens of a row up to the end of its last span: behind it nothing counts, so nothing is computed."""
    return max((end for _, end in row.spans), default=1)


@dataclass(frozen=True)
class Efficiency:
    """What the micro-batches of an epoch lay out for the target: of all tokens that are computed those that are no
    padding, and the columns that count, where the drafter learns something."""

    tokens: int
    columns: int
    computed: int

    def in_words(self) -> str:
        return (
            f"{self.tokens / self.computed:.1%} of the tokens that the target reads are no padding, "
            f"{self.columns / self.computed:.1%} count"
        )


def efficiency(order: "BatchOrder", rows: Sequence[TrainingRow], packed: bool) -> Efficiency:
    """Of the first epoch."""
    tokens = columns = computed = 0
    for number in range(order.batches_per_epoch):
        batch = [rows[i] for i in order.rows(number)]
        lengths = [counted_length(row) for row in batch]
        tokens += sum(lengths)
        columns += sum(end - max(first, 1) - 1 for row in batch for first, end in row.spans if end > max(first, 1))
        computed += sum(lengths) if packed else len(lengths) * max(lengths)
    return Efficiency(tokens, columns, computed)


class BatchOrder:
    """Micro-batch number -> row indices, for all ranks alike.

    Rows of similar length stand together (less padding): each epoch shuffles all rows, sorts by length inside pools of
    32 micro-batches, cuts micro-batches and shuffles those. Every row is read once an epoch; the last micro-batch of an
    epoch may be smaller.
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
            self._epoch, self._batches = epoch, self._cut(epoch)
        return self._batches[position]

    def _cut(self, epoch: int) -> list[list[int]]:
        order = random.Random(f"{self.seed}/{epoch}")
        rows = list(range(len(self.lengths)))
        order.shuffle(rows)
        pool = 32 * self.batch_size
        batches = []
        for start in range(0, len(rows), pool):
            pooled = sorted(rows[start : start + pool], key=self.lengths.__getitem__)
            batches += [pooled[i : i + self.batch_size] for i in range(0, len(pooled), self.batch_size)]
        order.shuffle(batches)
        return batches
