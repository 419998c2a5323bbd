"""From training rows to micro-batches: which rows stand together, in which order, on which rank.

The order is a pure function of (seed, epoch), and a micro-batch is named by one number that counts through all epochs,
so that a resumed run and a run on other ranks read exactly the same batches.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.data_gen.conversations import TrainingRow


@dataclass(frozen=True)
class Batch:
    """Rows right-padded to the longest. span is 0 outside supervised spans, else the number of the span in its row."""

    ids: torch.Tensor  # [B, T]
    span: torch.Tensor  # [B, T]
    lengths: list[int]  # tokens of each row, without padding

    @property
    def tokens(self) -> int:
        """Without padding."""
        return sum(self.lengths)

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.ids.to(device), self.span.to(device), self.lengths)


def collate(rows: Sequence[TrainingRow]) -> Batch:
    """Pads with token 0, which nothing ever looks at. What follows a row's last span is cut: nothing counts there."""
    lengths = [max((end for _, end in row.spans), default=1) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    span = torch.zeros_like(ids)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[i, :length] = torch.tensor(row.input_ids[:length])
        for number, (start, end) in enumerate(row.spans, start=1):
            span[i, start:end] = number
    return Batch(ids, span, lengths)


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
