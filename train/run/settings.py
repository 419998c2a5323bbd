"""From a recipe's train section to the trainee: losses and unroll know no recipe."""

import torch

from draftsmith.models.drafter_base import Drafter
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.loss.losses import LossWeights
from draftsmith.train.loss.unroll import TrainingTimeTest


def loss_weights(section: TrainSection) -> LossWeights:
    return LossWeights(
        token=section.token_loss,
        feature=section.feature_loss,
        top_k=section.top_k_loss,
        objective=section.token_objective,
        rank=section.rank_loss,
    )


def trainee_of(section: TrainSection, drafter: Drafter) -> TrainingTimeTest:
    """The drafter with its unroll and loss."""
    return TrainingTimeTest(
        drafter,
        section.ttt_steps,
        section.step_weight,
        section.gradient_checkpointing,
        loss_weights(section),
        section.detach_features,
    )


def uses_bf16(section: TrainSection) -> bool:
    """Whether products are in bfloat16.

    `auto` is bf16 on accelerators that compute it natively and float32 on CPUs: there bf16 gains little at best
    (LOG.md), and float32 gives nearly the same losses on every machine.
    """
    if section.mixed_precision != "auto":
        return section.mixed_precision == "bf16"
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
