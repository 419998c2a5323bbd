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

A multiplication with its addition counts as two operations. "3 times" is the forward product and two products of the
backward pass. Columns are the counted ones (`models.alignment`), at the steps at which they count. Padding, masked
scores, recomputation, norms, activations, softmax and the optimiser are left out, so an implementation does more than
this. With several layers the lower ones run step 0 for every token. Sliding-window layers of the target are counted
with full attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.models.alignment import Columns
from draftsmith.models.costs import TargetSize, attention_shapes
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.recipes.schema import Detach
from draftsmith.train.loss.unroll import TrainingTimeTest
from draftsmith.train.run.batches import MicroBatch


@dataclass(frozen=True)
class StepFlops:
    """Counts the operations of one run's micro-batches.

    Attributes:
        stacks: the stack of layers that drafts each step (`FeatureDrafter.stack_of`).
        detached: whether gradients stop at every step, or where the stack changes.
        size: the target's; None: its states are read from a store, and only its head runs.
        head_parameters: of the target's head.
    """

    shape: DrafterConfig
    stacks: tuple[int, ...]
    detached: Detach
    target_config: Any
    size: TargetSize | None
    head_parameters: int

    @classmethod
    def of(cls, trainee: TrainingTimeTest, target_config: Any, size: TargetSize, states_are_read: bool) -> "StepFlops":
        """
        Args:
            target_config: the target's text config.
            states_are_read: from a store; the target's layers do not run.
        """
        drafter = trainee.drafter
        stacks = tuple(drafter.stack_of(step) for step in range(trainee.steps))
        layers = None if states_are_read else size
        return cls(drafter.config, stacks, trainee.detach, target_config, layers, size.head_parameters)

    def of_batch(self, batch: MicroBatch, columns: Columns) -> torch.Tensor:
        """The operations of one micro-batch: a scalar on its device, without waiting for it."""
        position = columns.gather(batch.position)
        counted = [columns.counted(step) for step in range(len(self.stacks))]
        return self.of_counts(
            tokens=batch.tokens,
            causal_keys=sum(length * (length + 1) // 2 for length in batch.lengths),
            pairs=[c.sum().float() for c in counted],
            keys=[((position + 1 + step) * c).sum().float() for step, c in enumerate(counted)],
        )

    def of_counts(self, tokens: int, causal_keys: Any, pairs: Sequence[Any], keys: Sequence[Any]) -> Any:
        """
        Args:
            causal_keys: keys that causal attention reads, summed over all tokens.
            pairs: columns that count at each step.
            keys: keys that their queries see at each step, summed over these columns.
        """
        s = self.shape
        hidden, heads = s.hidden_size, s.num_attention_heads * s.head_dim
        groups = 2 * s.num_key_value_heads * s.head_dim  # keys and values
        width = hidden if self._reads_features else 2 * hidden
        block = 2 * heads * hidden + 6 * hidden * s.intermediate_size  # output projection and MLP
        first, upper = 2 * width * heads + block, 2 * hidden * heads + block  # with queries: first and upper layers
        first_keys, upper_keys = 2 * width * groups, 2 * hidden * groups
        score, layers = 4 * heads, s.num_layers

        later = sum(pairs[1:])  # columns at steps that read a drafted feature
        entry = 4 * hidden * hidden if self._reads_features else 0
        fused = 0 if self._reads_features else 2 * hidden * hidden * len(s.capture_layers)
        total = tokens * (2 * entry + (3 if getattr(s, "fc_norm", False) else 2) * fused)
        # Step 0 makes keys of every layer for all tokens. Only the last layer runs on counted columns alone.
        of_tokens = tokens * (len(set(self.stacks)) * first_keys + (layers - 1) * upper_keys)
        if layers > 1:
            of_tokens += tokens * (first + (layers - 2) * upper) + (layers - 1) * causal_keys * score
        top = upper if layers > 1 else first
        of_columns = pairs[0] * top + keys[0] * score
        of_columns += (
            later * (first + first_keys + (layers - 1) * (upper + upper_keys)) + layers * sum(keys[1:]) * score
        )
        for step in range(1, len(self.stacks)):
            new_stack = self.stacks[step] != self.stacks[step - 1]
            cut = self.detached is True or (new_stack and bool(self.detached))
            total += (2 if cut else 3) * pairs[step] * entry
            if new_stack:  # it reads the chain's earlier features with its own weights
                of_columns += (step - 1) * pairs[step] * first_keys
                total += (2 if cut else 3) * (step - 1) * pairs[step] * entry
        total += 3 * (of_tokens + of_columns)
        head = 2 * hidden * s.draft_vocab_size
        return total + (3 if s.own_head else 2) * head * sum(pairs) + self._of_target(tokens, causal_keys, pairs[0])

    def _of_target(self, tokens: int, causal_keys: int, columns: Any) -> Any:
        head = 2 * self.head_parameters * columns
        if self.size is None:
            return head
        scores = sum(4 * heads * head_dim for heads, _, head_dim in attention_shapes(self.target_config))
        return head + 2 * self.size.active_parameters * tokens + scores * causal_keys

    @property
    def _reads_features(self) -> bool:
        """Whether the drafter has EAGLE-1's form: fc reads one captured state beside the embedding."""
        return (self.shape.base or self.shape.kind) == "eagle"
