"""From a recipe's train section to the trainee and the schedule: losses, unroll and schedule know no recipe."""

import torch

from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.recipes.schema import TrainSection
from draftsmith.train.attention.kernels import BLOCKS
from draftsmith.train.loss.losses import LossWeights
from draftsmith.train.loss.unroll import TrainingTimeTest
from draftsmith.train.run.schedule import Schedule


def loss_weights(section: TrainSection) -> LossWeights:
    return LossWeights(
        token=section.token_loss,
        feature=section.feature_loss,
        top_k=section.top_k_loss,
        top_k_tokens=section.top_k_tokens,
        objective=section.token_objective,
        rank=section.rank_loss,
        rank_tokens=section.rank_tokens,
    )


def trainee_of(section: TrainSection, drafter: FeatureDrafter) -> TrainingTimeTest:
    """The drafter with its unroll and loss."""
    return TrainingTimeTest(
        drafter,
        section.ttt_steps,
        section.step_weight,
        section.gradient_checkpointing,
        loss_weights(section),
        section.detach_features,
        BLOCKS if section.attention == "blocks" else None,
        section.unroll == "passes",
    )


def schedule_of(section: TrainSection, rows: int, ranks: int) -> Schedule:
    return Schedule(
        rows=rows,
        rows_per_micro_batch=section.batch_size,
        micro_batches_per_rank=section.gradient_accumulation_steps,
        ranks=ranks,
        max_steps=section.max_steps,
        epochs=section.epochs or 1,
        peak_learning_rate=section.learning_rate,
        warmup_steps=section.warmup_steps,
        decay=section.schedule,
    )


def uses_bf16(section: TrainSection) -> bool:
    """Whether products are in bfloat16.

    `auto` is bf16 on accelerators that compute it natively and float32 on CPUs: there bf16 gains little at best
    (docs/log.md), and float32 gives nearly the same losses on every machine.
    """
    if section.mixed_precision != "auto":
        return section.mixed_precision == "bf16"
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
