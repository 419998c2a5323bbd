"""Which micro-batches each optimiser step reads, and its learning rate."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from draftsmith.recipes.sections.train import TrainSection

BATCHES_AHEAD = 4  # micro-batches with states that are read from a store before they are asked for


@dataclass(frozen=True)
class Schedule:
    """The steps of a run. Each reads the next `micro_batches_per_step` micro-batches (`train.run.batches.BatchOrder`),
    each rank gradient_accumulation_steps in a row. Of a run that goes by epochs the last step may be smaller.

    Attributes:
        rows: training rows; an epoch reads all of them.
        unread: micro-batches that earlier steps had room for and did not read: the run was shorter then.
    """

    section: TrainSection
    rows: int
    ranks: int
    unread: int = 0

    @property
    def micro_batches_per_step(self) -> int:
        return self.ranks * self.section.gradient_accumulation_steps

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a run that goes by epochs; None where max_steps decides: every step is full."""
        if self.section.max_steps is not None:
            return None
        return max(1, math.ceil((self.section.epochs or 1) * -(-self.rows // self.section.batch_size)))

    @cached_property
    def steps(self) -> int:
        if self.section.max_steps is not None:
            return self.section.max_steps
        assert self.micro_batches is not None
        return -(-(self.micro_batches + self.unread) // self.micro_batches_per_step)

    def numbers(self, step: int, rank: int) -> list[tuple[int, bool]]:
        """(number of the micro-batch, whether it counts) for each micro-batch of a rank in step `step` (0-based).

        Behind the last micro-batch of the run that one comes again, and counts nothing: all ranks run as many.
        """
        count = self.section.gradient_accumulation_steps
        first = (step * self.ranks + rank) * count - self.unread
        last = math.inf if self.micro_batches is None else self.micro_batches - 1
        return [(int(min(number, last)), number <= last) for number in range(first, first + count)]

    def ahead(self, step: int, rank: int) -> list[int]:
        """Numbers of the BATCHES_AHEAD or more micro-batches that a rank reads after step `step` (0-based)."""
        ahead = -(-BATCHES_AHEAD // self.section.gradient_accumulation_steps)
        steps = range(step + 1, min(self.steps, step + 1 + ahead))
        return [number for later in steps for number, counts in self.numbers(later, rank) if counts]

    def read_by(self, step: int) -> int:
        """Micro-batches that counted in the first `step` steps."""
        room = step * self.micro_batches_per_step - self.unread
        return room if self.micro_batches is None else min(room, self.micro_batches)

    def learning_rate(self, step: int) -> float:
        """Learning rate of optimiser step `step` (0-based): linear warm-up, then cosine or linear decay to zero."""
        peak, warmup = self.section.learning_rate, self.section.warmup_steps
        if step < warmup:
            return peak * (step + 1) / warmup
        done = (step - warmup) / max(1, self.steps - warmup)
        return peak * (1 - done if self.section.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    def resumed(self, step: int, micro_batches: int) -> "Schedule":
        """The same run behind a checkpoint of `step` steps, which read `micro_batches`."""
        return replace(self, unread=step * self.micro_batches_per_step - micro_batches)

    def jump(self, step: int, steps: int) -> str | None:
        """A note on the learning rate, which jumps if a run that is resumed after `step` steps was to have another
        number of `steps`."""
        if steps == self.steps or not 0 < step < self.steps:
            return None
        before = replace(self, section=self.section.model_copy(update={"max_steps": steps}))
        return (
            f"note: the run was to have {steps:,} steps. From step {step + 1:,} on, its learning rate is that of a "
            f"decay over {self.steps:,} steps: {self.learning_rate(step):.2g}, after "
            f"{before.learning_rate(step - 1):.2g} in step {step:,}"
        )
