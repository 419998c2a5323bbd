"""The target's likeliest tokens at the columns of training rows, kept from one epoch to the next.

The loss leaves out columns whose likeliest token cannot be drafted. To know it takes logits of the target's whole
vocabulary; everything else reads those of the draft vocabulary. On a CPU the whole head of 49,152 tokens took half of
the training of a drafter with 8,192 (LOG.md, 2026-11-29). Target and rows do not change: it is multiplied once a row.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from draftsmith.models.alignment import Columns
from draftsmith.models.families import scaled_logits
from draftsmith.models.onednn_linear import head_product
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.loss.head_loss import Teacher
from draftsmith.train.run.batches import MicroBatch

NOT_SEEN = -2  # by the loss; -1 is a token that cannot be drafted


class LikeliestTokens:
    """Of the rows seen so far, 4 bytes for each column that counts."""

    def __init__(self, drafted_logits: Callable[[torch.Tensor], torch.Tensor]):
        self.drafted_logits = drafted_logits
        self._by_row: dict[int, torch.Tensor] = {}

    @classmethod
    def of(cls, target: Target, vocab: DraftVocab) -> "LikeliestTokens | None":
        """None if they save nothing, or if the head is more than a float32 matrix: in lower precision a token may be
        the likeliest in one batch and not in another."""
        head = target.head
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
            return None
        if vocab.is_full or target.dtype != torch.float32:
            return None
        ids = vocab.target_ids.to(target.device)
        product = head_product(head.weight.detach()[ids], None if head.bias is None else head.bias.detach()[ids])
        return cls(lambda states: scaled_logits(target.config, product(states)).float())

    def informed(self, teacher: Teacher, rows: tuple[int, ...]) -> Teacher:
        """The teacher of these rows, one behind another, with what is known of them."""
        known = [self._by_row[row] for row in rows if row in self._by_row]
        if len(known) == len(rows):
            best, knows = torch.cat(known)[None].long(), True
        else:
            best, knows = torch.full(teacher.states.shape[:2], NOT_SEEN, device=teacher.states.device), False
        return replace(teacher, drafted_logits=self.drafted_logits, best=best, knows_best=knows)

    def keep(self, teacher: Teacher, batch: MicroBatch, columns: Columns) -> None:
        """After the loss of a micro-batch's `one_row` with that teacher."""
        if teacher.best is None or teacher.knows_best or bool((teacher.best == NOT_SEEN).any()):
            return
        runs = columns.runs(batch.documents)
        counts = [sum(run.end - run.first for run in runs if run.start == start) for _, start, _ in batch.places]
        for row, best in zip(batch.rows, teacher.best[0].split(counts), strict=True):
            self._by_row[row] = best.int()
