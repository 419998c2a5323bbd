"""The operations that a training step needs: what model FLOPs utilisation (MFU) counts.

    what                                      for                               times
    the target's layers                       every token                       1 (no gradient; 0 from a store)
    the target's head: the teacher            every column                      1
    fc of the captured states (EAGLE-3)       every token                       2 (its input needs no gradient),
                                                                                3 behind fc_norm
    fc of feature and embedding (EAGLE-1)     every token,                      2
                                              then column and step              3, 2 where detached
    keys and values                           every token and stack of layers,  3
                                              then column and step
    queries, output, MLP                      column and step                   3
    scores and weighted values                each key that a query sees        3
    the drafter's head; the target's, frozen  column and step                   3; 2
    ViSpec: img_fc; fc of EAGLE-1 behind it   every token with a column,        3
                                              then column and step
            keys and values of the adaptor    every token of a picture          2
            its scores, values and output     every query of a picture          3

A multiplication with its addition counts as two operations. "3 times" is the forward product and two products of the
backward pass. Columns are the counted ones (`models.alignment`), at the steps at which they count. Padding, masked
scores, recomputation, norms, activations, softmax and the optimiser are left out, so an implementation does more than
this. With several layers the lower ones run step 0 for every token. Whole passes (`train.unroll: passes`) run
everything but the heads for every token at every step. Sliding-window layers of the target are counted
with full attention. A vision-language target's tower is left out: it runs once for each picture, not for its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.models.alignment import Columns
from draftsmith.models.costs import TargetSize, attention_shapes
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.models.target_columns import columns_of_picture
from draftsmith.models.vispec import VisionConfig
from draftsmith.train.loss.unroll import TrainingTimeTest
from draftsmith.train.run.batches import MicroBatch


@dataclass(frozen=True)
class PictureCounts:
    """Pictures of a micro-batch that a ViSpec drafter compresses (`models.target_columns`).

    Attributes:
        tokens: of all pictures.
        removed: columns that do not exist; compressed: those that are compressed tokens.
        causal_keys: as in `StepFlops.of_counts`, of the columns that exist.
    """

    pictures: int = 0
    tokens: int = 0
    removed: int = 0
    compressed: int = 0
    causal_keys: int = 0


NO_PICTURES = PictureCounts()


@dataclass(frozen=True)
class StepFlops:
    """Counts the operations of one run's micro-batches.

    Attributes:
        target_config: the target's text config.
        size: the target's.
        states_are_read: from a store; the target's layers do not run, only its head.
    """

    trainee: TrainingTimeTest
    target_config: Any
    size: TargetSize
    states_are_read: bool

    @property
    def shape(self) -> DrafterConfig:
        return self.trainee.drafter.config

    def pictures_in(self, batch: MicroBatch) -> tuple[PictureCounts, torch.Tensor | int]:
        """(a batch's pictures for a ViSpec drafter; [B, T] or 0: columns removed of the document so far)."""
        if not isinstance(self.shape, VisionConfig) or not batch.inserts:
            return NO_PICTURES, 0
        removed = torch.zeros(batch.ids.shape, dtype=torch.long)
        compressed = kept_keys = 0
        for row, start, tokens in batch.places:
            here = removed[row, start : start + tokens]
            for placed in batch.inserts:
                if placed.row == row and start <= placed.insert.first < start + tokens:
                    of_picture = placed.insert.first - start, placed.insert.length, self.shape.compressed_tokens
                    first, end, kept = columns_of_picture(*of_picture)
                    here[first : end - kept] = 1
                    compressed += kept
            left = tokens - int(here.sum())
            kept_keys += left * (left + 1) // 2
            here.copy_(here.cumsum(0))
        gone = sum(int(removed[row, start + tokens - 1]) for row, start, tokens in batch.places)
        lengths = [placed.insert.length for placed in batch.inserts]
        return PictureCounts(len(lengths), sum(lengths), gone, compressed, kept_keys), removed.to(batch.ids.device)

    def of_batch(self, batch: MicroBatch, columns: Columns) -> torch.Tensor:
        """The operations of one micro-batch: a scalar on its device, without waiting for it."""
        pictures, removed = self.pictures_in(batch)
        position = columns.gather(batch.position - removed)
        counted = [columns.counted(step) for step in range(self.trainee.steps)]
        return self.of_counts(
            tokens=batch.tokens,
            causal_keys=sum(length * (length + 1) // 2 for length in batch.lengths),
            pairs=[c.sum().float() for c in counted],
            keys=[((position + 1 + step) * c).sum().float() for step, c in enumerate(counted)],
            pictures=pictures,
        )

    def of_counts(
        self,
        tokens: int,
        causal_keys: Any,
        pairs: Sequence[Any],
        keys: Sequence[Any],
        pictures: PictureCounts = NO_PICTURES,
    ) -> Any:
        """
        Args:
            causal_keys: keys that causal attention reads, summed over all tokens.
            pairs: columns that count at each step.
            keys: keys that their queries see at each step, summed over these columns.
        """
        s, of_target = self.shape, self._of_target(tokens, causal_keys, pairs[0])
        detach, whole_passes = self.trainee.detach, self.trainee.whole_passes
        stacks = [self.trainee.drafter.stack_of(step) for step in range(self.trainee.steps)]
        if pictures.pictures:
            tokens, causal_keys = tokens - pictures.removed, pictures.causal_keys
        hidden, heads = s.hidden_size, s.num_attention_heads * s.head_dim
        groups = 2 * s.num_key_value_heads * s.head_dim  # keys and values
        width = hidden if self._reads_features else 2 * hidden
        block = 2 * heads * hidden + 6 * hidden * s.intermediate_size  # output projection and MLP
        first, upper = 2 * width * heads + block, 2 * hidden * heads + block  # with queries: first and upper layers
        first_keys, upper_keys = 2 * width * groups, 2 * hidden * groups
        score, layers = 4 * heads, s.num_layers

        later = pairs[1:]  # columns that read a drafted feature at each step
        if whole_passes:
            later = [tokens - pictures.compressed] * len(later)
        entry = 4 * hidden * hidden if self._reads_features else 0
        fused = 0 if self._reads_features else 2 * hidden * hidden * len(s.capture_layers)
        seeing = isinstance(s, VisionConfig)
        total = (tokens - pictures.compressed) * (
            (3 if seeing else 2) * entry + (3 if getattr(s, "fc_norm", False) else 2) * fused
        )
        if seeing:
            total += 3 * 4 * hidden * hidden * (tokens - pictures.compressed + sum(later))
            total += pictures.tokens * (2 * 4 * hidden * hidden + 3 * 4 * hidden * (s.compressed_tokens + 1))
            total += pictures.pictures * (s.compressed_tokens + 1) * 3 * 2 * hidden * hidden
        # Step 0 makes keys of every layer for all tokens. Only the last layer runs on counted columns alone.
        of_tokens = tokens * (len(set(stacks)) * first_keys + (layers - 1) * upper_keys)
        if layers > 1:
            of_tokens += tokens * (first + (layers - 2) * upper) + (layers - 1) * causal_keys * score
        top = upper if layers > 1 else first
        of_columns = pairs[0] * top + keys[0] * score
        whole = first + first_keys + (layers - 1) * (upper + upper_keys)
        of_columns += sum(later) * whole + layers * sum(keys[1:]) * score
        if whole_passes:
            of_tokens, of_columns = len(pairs) * (tokens * whole + layers * causal_keys * score), 0
        for step in range(1, len(stacks)):
            new_stack = stacks[step] != stacks[step - 1]
            # Behind img_fc, the global vector's gradient is always wanted.
            cut = not seeing and (detach is True or (new_stack and bool(detach)))
            total += (2 if cut else 3) * later[step - 1] * entry
            if new_stack:  # it reads the chain's earlier features with its own weights
                of_columns += (step - 1) * pairs[step] * first_keys
                total += (2 if cut else 3) * (step - 1) * pairs[step] * entry
                total += 3 * 4 * hidden * hidden * (step - 1) * pairs[step] if seeing else 0
        total += 3 * (of_tokens + of_columns)
        head = 2 * hidden * s.draft_vocab_size
        return total + (3 if s.own_head else 2) * head * sum(pairs) + of_target

    def _of_target(self, tokens: int, causal_keys: int, columns: Any) -> Any:
        head = 2 * self.size.head_parameters * columns
        if self.states_are_read:
            return head
        scores = sum(4 * heads * head_dim for heads, _, head_dim in attention_shapes(self.target_config))
        return head + 2 * self.size.active_parameters * tokens + scores * causal_keys

    @property
    def _reads_features(self) -> bool:
        """Whether the drafter has EAGLE-1's form: fc reads one captured state beside the embedding."""
        return (self.shape.base or self.shape.kind) == "eagle"
