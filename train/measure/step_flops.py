"""The operations that a training step cannot do without: what model FLOPs utilisation (MFU) counts.

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

Two operations a multiplication and addition; times 3 is one forward and the two products of the backward pass. Columns
are counted ones (`models.alignment`) at the steps at which they count. Padding, masked scores and what is computed
twice are left out, and so are norms, activations, softmax and the optimiser: an implementation does more than this.
With several layers the lower ones take step 0 for every token. Layers of the target that see a window are counted as if
they saw everything.
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
from draftsmith.train.run.batches import Batch


@dataclass(frozen=True)
class StepFlops:
    """Of one run.

    Args:
        stacks: which stack of layers drafts each step (`FeatureDrafter.stack_of`), one entry a step.
        detached: whether no gradient flows from a step to the one before, or none from a stack to the one before.
        size: the target's; None: its states are read, and its head alone runs.
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
        """Of what this trainee does; of the target with this text config its layers too, unless they are spared."""
        drafter = trainee.drafter
        stacks = tuple(drafter.stack_of(step) for step in range(trainee.steps))
        layers = None if states_are_read else size
        return cls(drafter.config, stacks, trainee.detach, target_config, layers, size.head_parameters)

    def of_batch(self, batch: Batch, columns: Columns) -> torch.Tensor:
        """Of one micro-batch: a scalar on its device, which nobody has to wait for."""
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
            causal_keys: over all tokens, the tokens of its document up to and with each.
            pairs: columns that count at each step. keys: what their queries see at that step, over all of them.
        """
        s = self.shape
        hidden, heads = s.hidden_size, s.num_attention_heads * s.head_dim
        groups = 2 * s.num_key_value_heads * s.head_dim  # keys and values
        width = hidden if self._reads_features else 2 * hidden
        block = 2 * heads * hidden + 6 * hidden * s.intermediate_size  # output projection and MLP
        first, upper = 2 * width * heads + block, 2 * hidden * heads + block  # and queries, of such a layer
        first_keys, upper_keys = 2 * width * groups, 2 * hidden * groups
        score, layers = 4 * heads, s.num_layers

        later = sum(pairs[1:])  # columns at steps that read a drafted feature
        entry = 4 * hidden * hidden if self._reads_features else 0
        fused = 0 if self._reads_features else 2 * hidden * hidden * len(s.capture_layers)
        total = tokens * (2 * entry + (3 if getattr(s, "fc_norm", False) else 2) * fused)
        # Step 0 gives every layer's keys to all tokens, and lets the last layer alone answer for counted columns only.
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
            if new_stack:  # which reads the chain's earlier features with its own weights
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
        """EAGLE-1's form: one captured state, which fc reads beside the embedding."""
        return (self.shape.base or self.shape.kind) == "eagle"
