"""Losses of drafters. Sums over columns, never means: the loop divides once, by the counted columns of the global
batch.

Shapes: N columns, Vd draft vocabulary, H hidden size.
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


def top_k_cross_entropy(
    logits_NV: torch.Tensor, teacher_NV: torch.Tensor, counted_N: torch.Tensor, k: int
) -> torch.Tensor:
    """Sum over counted columns of -sum over the teacher's k likeliest tokens of p_v log q_v, in float32 (HASS, arXiv
    2408.15766, section 3.1). p is not renormalised; q is over all tokens. Gradient: (sum of these p) q - (these p).
    """
    log_q = functional.log_softmax(logits_NV.float(), dim=-1)
    p_Nk, tokens_Nk = teacher_NV.topk(min(k, teacher_NV.shape[-1]), dim=-1)
    per_column = -(p_Nk * log_q.gather(-1, tokens_Nk)).sum(-1)
    return torch.where(counted_N, per_column, 0.0).sum()


def feature_regression(outputs_NH: torch.Tensor, features_NH: torch.Tensor, counted_N: torch.Tensor) -> torch.Tensor:
    """Sum over counted columns of the smooth L1 distance, averaged over the width, in float32 (EAGLE-1, arXiv
    2401.15077, section 3.2): d^2 / 2 where |d| < 1, else |d| - 1/2.
    """
    distance = functional.smooth_l1_loss(outputs_NH.float(), features_NH.float(), reduction="none").mean(-1)
    return torch.where(counted_N, distance, 0.0).sum()
