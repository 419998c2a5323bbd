"""From a recipe's train section to the trainee: losses and unroll know no recipe."""

import torch

from draftsmith.models.drafter_base import Drafter
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.loss.losses import LossWeights
from draftsmith.train.loss.unroll import TrainingTimeTest


def trainee_of(section: TrainSection, drafter: Drafter) -> TrainingTimeTest:
    """The drafter with its unroll and loss."""
    weights = LossWeights(
        token=section.token_loss,
        feature=section.feature_loss,
        top_k=section.top_k_loss,
        objective=section.token_objective,
        rank=section.rank_loss,
    )
    unroll = section.ttt_steps, section.step_weight, section.gradient_checkpointing
    return TrainingTimeTest(drafter, *unroll, weights, section.detach_features)


def uses_bf16(section: TrainSection) -> bool:
    """Whether products are in bfloat16. `auto`: on accelerators that compute it natively; on CPUs it gains little at
    best (LOG.md)."""
    if section.mixed_precision != "auto":
        return section.mixed_precision == "bf16"
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
