"""Losses of drafters. Sums over columns, never means: the loop divides once, by the counted columns of the global
batch.

Shapes: N columns, Vd draft vocabulary.
"""

import torch
from torch.nn import functional


def soft_cross_entropy(logits_NV: torch.Tensor, teacher_NV: torch.Tensor, counted_N: torch.Tensor) -> torch.Tensor:
    """Sum over counted columns of -sum_v p_v log q_v, q = softmax(logits), in float32 (EAGLE-3; gradient q - p).

    `teacher_NV` is p over the draft vocabulary and sums to 1. Columns not counted contribute exactly zero.
    """
    log_q = functional.log_softmax(logits_NV.float(), dim=-1)
    per_column = -(teacher_NV * log_q).sum(-1)
    return torch.where(counted_N, per_column, 0.0).sum()
