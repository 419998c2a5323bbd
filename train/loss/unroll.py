"""Training-time test: the drafter's outputs at every draft position, and their loss against the target.

`models.alignment` defines what each column reads and predicts at each step, a drafter's kind how it is computed
(`models.drafters.KINDS`): those that draft one token after another read their own outputs for K steps
(`models.chain_steps`), as when they draft. K = 1 is EAGLE-1. The papers of HASS and PosS keep targets in place and
shift features to the right; seen from the chain's root, theirs is the same unroll. Tokens are the data's at every step,
never the drafter's guesses (those lowered acceptance from 5.0 to 4.44 in one reproduction).

Shapes: B rows, T tokens, F captured states, C counted columns, H hidden size, K steps.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from draftsmith.models.alignment import Columns, Documents
from draftsmith.models.drafter_base import Drafter, DrafterConfig
from draftsmith.models.drafters import KINDS
from draftsmith.models.layers import product_dtype
from draftsmith.models.prompt import DecoderInputs
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.sections.train import Detach, StepWeight
from draftsmith.train.attention.kernels import Kernel, kernel_for
from draftsmith.train.attention.merged import merged_attention
from draftsmith.train.loss.head_loss import HeadLoss, Teacher
from draftsmith.train.loss.losses import LossWeights, feature_regression
from draftsmith.train.loss.step_weights import acceptance_weights, fixed_weights

NOISE_TOKENS = 512  # feature noise has the requested width in rows of this many tokens


def kernel_of(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel of a drafter's attention, with products in this precision."""
    kind = torch.device(device.type)  # one trial for `cuda` and `cuda:0`
    return kernel_for(kind, dtype, config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def unroll(
    drafter: Drafter,
    captured_BTF: torch.Tensor,
    inputs_BT: DecoderInputs,
    columns: Columns,
    steps: int,
    gradient_checkpointing: bool = False,
    detach: Detach = False,
    documents: Documents | None = None,
    kernel: Kernel | None = None,
) -> Iterator[torch.Tensor]:
    """Outputs [B, C, H] of steps 0 to `steps` - 1, as the drafter's kind computes them (`models.drafter_base.Steps`).

    Args:
        kernel: of attention; None: the best for the device.
    """
    if kernel is None:
        kernel = kernel_of(drafter.config, drafter.device, product_dtype(drafter.device, drafter.dtype))
    attend = partial(merged_attention, kernel=kernel)
    how = attend, gradient_checkpointing, detach, documents
    return KINDS[type(drafter.config)].steps(drafter, captured_BTF, inputs_BT, columns, steps, *how)


def add_noise(
    captured_BTF: torch.Tensor,
    width: float,
    lengths: Sequence[int],
    draws: Sequence[str],
    documents: Documents | None = None,
) -> torch.Tensor:
    """captured + (u - 1/2) * width * 512 / length of the training row, u uniform on [0, 1): feature noise (EAGLE-1,
    arXiv 2401.15077, section 3.2). Padding stays as it is.

    Args:
        lengths: tokens of each training row without padding.
        draws: names the random numbers of each row: they are the same in any batch and after a resumption.
        documents: places of the rows; None: row i begins row i of the batch.
    """
    places = documents.places if documents is not None else [(i, 0, length) for i, length in enumerate(lengths)]
    noisy = captured_BTF.float() if captured_BTF.dtype != torch.float64 else captured_BTF
    noisy = noisy.clone()
    for (row, start, length), draw in zip(places, draws, strict=True):
        seed = int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "big")
        generator = torch.Generator(device=captured_BTF.device).manual_seed(seed)
        u = torch.rand(length, captured_BTF.shape[2], generator=generator, device=captured_BTF.device)
        noisy[row, start : start + length] += (u - 0.5) * (width * NOISE_TOKENS / length)
    return noisy.to(captured_BTF.dtype)


@torch.no_grad()
def teacher_of(
    target: Target, last_BTH: torch.Tensor, ids_BT: torch.Tensor, columns: Columns, vocab: DraftVocab
) -> Teacher:
    """The teacher of the counted columns: the target at position t+1 of each."""
    label_drafted = vocab.to_draft(columns.gather(ids_BT, 2)) >= 0
    return Teacher(columns.gather(last_BTH, 1), target.logits, label_drafted)


class UnrollSums(NamedTuple):
    """Sums over one micro-batch. They are added over micro-batches and ranks before any division.

    A tuple, because ZeRO-3 finds no tensors in other results of a forward pass, and warns.
    """

    loss: torch.Tensor  # scalar, with gradient: sum over trained columns and steps of losses times `step_weights`
    columns: torch.Tensor  # scalar: columns that count at step 0, the loss's denominator
    reached: torch.Tensor  # [K] columns that a chain can reach at step k
    correct: torch.Tensor  # [K] of those, columns where drafter and target agree on the likeliest token
    trained: torch.Tensor  # [K] columns with a loss at step k


class TrainingTimeTest(nn.Module):
    """The drafter with its unroll and loss as one module: wrappers for many processes need a single forward.

    Among the columns that count (`models.alignment`), step k
    - *reaches* a column if the k tokens drafted before, x[t+2] ... x[t+1+k], are all in the draft vocabulary: no chain
      gets past a token that cannot be drafted;
    - *trains* on a reached column if the target's likeliest token is in the draft vocabulary too (as EAGLE-3 does).
      Elsewhere the restricted teacher would teach a token that greedy verification always rejects.
    Accuracy is over reached columns; a likeliest token outside the draft vocabulary is a miss, as in decoding.
    """

    def __init__(
        self,
        drafter: Drafter,
        steps: int,
        step_weight: StepWeight,
        gradient_checkpointing: bool = False,
        weights: LossWeights | None = None,
        detach: Detach = False,
        kernel: Kernel | None = None,
    ):
        super().__init__()
        self.drafter, self.steps = drafter, steps
        self.step_weight: StepWeight = step_weight
        self.weights, self.kernel = weights or LossWeights(), kernel
        self.gradient_checkpointing, self.detach = gradient_checkpointing, detach
        self.logits_at_once: int | None = None  # of a chunk in the head's pass; None: by device
        self.bf16 = False  # products in bfloat16
        self.caches_casts = True  # bfloat16 weights; off where weights are freed after use

    def forward(
        self,
        captured_BTF: torch.Tensor,
        inputs_BT: DecoderInputs,
        columns: Columns,
        teacher: Teacher,
        documents: Documents | None = None,
    ) -> UnrollSums:
        # Inside forward, because DeepSpeed switches off the caller's autocast.
        device = captured_BTF.device.type
        products = (
            torch.autocast(device, torch.bfloat16, cache_enabled=self.caches_casts) if self.bf16 else nullcontext()
        )
        # Sums of frozen weights and LoRA are computed once. Checkpointing must find the same work in both passes.
        sums = nullcontext() if self.gradient_checkpointing else parametrize.cached()
        with products, sums:
            return self._sums(captured_BTF, inputs_BT, columns, teacher, documents)

    def _sums(
        self,
        captured_BTF: torch.Tensor,
        inputs_BT: DecoderInputs,
        columns: Columns,
        teacher: Teacher,
        documents: Documents | None,
    ) -> UnrollSums:
        how: Any = self.gradient_checkpointing, self.detach, documents, self.kernel
        fixed = fixed_weights(self.step_weight, self.steps)
        # Before the unroll: a copy to the device waits for work that was queued before it.
        weights_KBC = torch.tensor(fixed or [1.0] * self.steps, device=captured_BTF.device)[:, None, None]
        outputs = list(unroll(self.drafter, captured_BTF, inputs_BT, columns, self.steps, *how))
        reached_KBC = self._reached(columns, teacher)
        head_loss = HeadLoss(teacher, self.drafter.vocab, reached_KBC, self.weights, weights_KBC, self.logits_at_once)
        if fixed is None:
            weights_KBC = acceptance_weights(*self.drafter.head_loss(outputs, head_loss.acceptance))
            head_loss = replace(head_loss, step_weights=weights_KBC)
        loss, correct, trained_KBC = self.drafter.head_loss(outputs, head_loss)
        if self.weights.feature:
            weights_KBC = weights_KBC * trained_KBC
            for step, output_BCH in enumerate(outputs):
                # The last columns would need a teacher beyond their row. They do not count.
                inside = max(0, output_BCH.shape[1] - step)
                pairs = output_BCH[:, :inside], teacher.states[:, step:], weights_KBC[step, :, :inside]
                distance = feature_regression(*(each.flatten(0, 1) for each in pairs))
                loss = loss + self.weights.feature * distance
        return UnrollSums(
            loss=loss,
            columns=columns.counted(0).sum(),
            reached=reached_KBC.sum((1, 2)),
            correct=correct,
            trained=trained_KBC.sum((1, 2)),
        )

    def _reached(self, columns: Columns, teacher: Teacher) -> torch.Tensor:
        """[K, B, C] whether a chain can reach the column at each step."""
        width = columns.index.shape[1]
        reachable, reached = torch.ones_like(teacher.label_drafted), []
        for step in range(self.steps):
            reached.append(columns.counted(step) & reachable)
            drafted_next = torch.zeros_like(reachable)
            drafted_next[:, : max(0, width - step)] = teacher.label_drafted[:, step:]
            reachable = reachable & drafted_next
        return torch.stack(reached)


def simulated_tau(accuracy: list[float]) -> float:
    """1 + sum_k prod_{i <= k} accuracy_i: the tau of a chain of K tokens if its steps were independent."""
    tau, survival = 1.0, 1.0
    for value in accuracy:
        survival *= value
        tau += survival
    return tau
