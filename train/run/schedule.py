"""Which micro-batches each optimiser step reads, and its learning rate."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

BATCHES_AHEAD = 4  # micro-batches with states that are read from a store before they are asked for


@dataclass(frozen=True)
class Schedule:
    """The steps of a run.

    Micro-batches are numbered through all epochs (`train.run.batches.BatchOrder`). A step reads the next
    `ranks * micro_batches_per_rank` of them, each rank that many in a row.

    Attributes:
        rows: training rows; an epoch reads all of them.
        max_steps: optimiser steps; None: as many as `epochs` needs; the last one may be smaller.
        decay: of the learning rate, from the end of the warm-up down to zero.
        unread: micro-batches that earlier steps had room for and did not read: the run was shorter then.
    """

    rows: int
    rows_per_micro_batch: int
    micro_batches_per_rank: int
    ranks: int
    max_steps: int | None
    epochs: float
    peak_learning_rate: float
    warmup_steps: int
    decay: Literal["cosine", "linear"]
    unread: int = 0

    @property
    def micro_batches_per_step(self) -> int:
        """Of all ranks."""
        return self.ranks * self.micro_batches_per_rank

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a run that goes by epochs; None where max_steps decides: every step is full."""
        if self.max_steps is not None:
            return None
        return max(1, math.ceil(self.epochs * -(-self.rows // self.rows_per_micro_batch)))

    @cached_property
    def steps(self) -> int:
        """Optimiser steps of the run."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.micro_batches is not None
        return -(-(self.micro_batches + self.unread) // self.micro_batches_per_step)

    def numbers(self, step: int, rank: int) -> list[tuple[int, bool]]:
        """(number of the micro-batch, whether it counts) for each micro-batch of a rank in step `step` (0-based).

        Behind the last micro-batch of the run that one comes again, and counts nothing: all ranks run as many.
        """
        first = (step * self.ranks + rank) * self.micro_batches_per_rank - self.unread
        numbers = range(first, first + self.micro_batches_per_rank)
        last = math.inf if self.micro_batches is None else self.micro_batches - 1
        return [(int(min(number, last)), number <= last) for number in numbers]

    def ahead(self, step: int, rank: int) -> list[int]:
        """Numbers of the BATCHES_AHEAD or more micro-batches that a rank reads after step `step` (0-based)."""
        steps = range(step + 1, min(self.steps, step + 1 + -(-BATCHES_AHEAD // self.micro_batches_per_rank)))
        return [number for later in steps for number, counts in self.numbers(later, rank) if counts]

    def read_by(self, step: int) -> int:
        """Micro-batches that counted in the first `step` steps."""
        room = step * self.micro_batches_per_step - self.unread
        return room if self.micro_batches is None else min(room, self.micro_batches)

    def learning_rate(self, step: int) -> float:
        """Learning rate of optimiser step `step` (0-based): linear warm-up, then cosine or linear decay to zero."""
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_learning_rate * (1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done)))
