"""Where training has the target's states from: the target itself, or a store that data_gen/capture.py wrote.

Shapes: B rows, T tokens, F captured states, H hidden size.
"""

from typing import Protocol

import torch

from draftsmith.models.target import Target
from draftsmith.train.run.batches import Batch, BatchOrder


class StateSource(Protocol):
    """What the loop asks for a micro-batch's states."""

    def of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(captured [B, T, F], last [B, T, H]), where `last` may be zero for tokens that are no column's teacher."""
        ...

    def ordered(self, order: BatchOrder, ranks: int, micro_batches_per_step: int) -> BatchOrder:
        """The order in which this source is read: `order`, or one that it is read faster in.

        Args:
            ranks: of a step's micro-batches, each rank has `micro_batches_per_step` in a row.
        """
        ...


class OnlineStates:
    """The target runs on every micro-batch."""

    def __init__(self, target: Target):
        self.target = target

    def of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.target.states(batch.ids, documents=batch.documents)
        return states.captured, states.last

    def ordered(self, order: BatchOrder, ranks: int, micro_batches_per_step: int) -> BatchOrder:
        return order
