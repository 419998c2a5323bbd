"""Losses of drafters on logits, each with its gradient written out. They are summed over columns, never averaged: the
loop divides once, by the counted columns of the global batch.

q = softmax(z) is the drafter's distribution and p the target's, both over the draft vocabulary. p is renormalised there
(see `train.loss.unroll.TrainingTimeTest`). alpha = sum_v min(p_v, q_v) is the probability that speculative sampling
accepts a token drawn from q (arXiv 2211.17192, section 3.3).

    name             value                                gradient in z
    soft_ce          -sum p log q                         q - p                          EAGLE-3
    forward_kl       sum p log(p / q)                     q - p
    hard_ce          -log q[argmax p]                     q - onehot
    reverse_kl       sum q log(q / p)                     q (log(q / p) - reverse_kl); p at least the smallest number
    total_variation  1 - alpha                            q (g - sum q g),  g = -1 where q < p, else 0
    log_acceptance   -log alpha                           that of total_variation / alpha    arXiv 2602.23881
    hybrid           lambda forward_kl                    the same mixture, lambda held fixed: exp(-3 alpha)
                     + (1 - lambda) total_variation                                          arXiv 2602.23881

Beside one of them: top-k cross-entropy (HASS), the rank loss (ViSpec), and feature regression (EAGLE-1).

Shapes: N columns, V draft vocabulary, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from draftsmith.recipes.sections.train import TokenObjective

HYBRID_DECAY = 3.0  # eta of lambda = exp(-eta alpha), as published


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses that are summed for each trained column. The defaults are EAGLE-3's."""

    token: float = 1.0  # of `objective`
    feature: float = 0.0  # of the distance between output and target feature, for drafters that output features
    top_k: float = 0.0  # of the cross-entropy over only the teacher's likeliest tokens, `top_k_tokens` of them
    top_k_tokens: int = 10
    objective: TokenObjective = "soft_ce"
    rank: float = 0.0  # of the rank loss over the teacher's likeliest tokens, `rank_tokens` of them
    rank_tokens: int = 10


class Lesson:
    """The targets of a chunk of teacher columns, computed once for all students that are compared with it. p_NV is
    the target's distribution over the draft vocabulary, in float32 or better."""

    def __init__(self, weights: LossWeights, p_NV: torch.Tensor):
        self.weights, self.p = weights, p_NV
        # All cross-entropies add up to one with weights t_v that need not sum to 1: value -sum t log q, gradient
        # (sum t) q - t.
        self.t: torch.Tensor | None = None
        self.unsound = 0 * p_NV.sum(-1)  # [N] NaN where the teacher is NaN, so that no loss hides it
        self.constant = self.unsound  # [N] part of the loss that does not depend on q
        if weights.token and weights.objective in ("soft_ce", "forward_kl"):
            self._teach(p_NV * weights.token if weights.token != 1 else p_NV)
            if weights.objective == "forward_kl":
                self.constant = self.unsound - weights.token * torch.special.entr(p_NV).sum(-1)
        if weights.token and weights.objective == "hard_ce":
            best = p_NV.argmax(-1, keepdim=True)
            self._teach(torch.zeros_like(p_NV).scatter_(-1, best, weights.token))
        if weights.top_k:
            p_Nk, tokens_Nk = p_NV.topk(min(weights.top_k_tokens, p_NV.shape[-1]), dim=-1)
            self._teach(torch.zeros_like(p_NV).scatter_(-1, tokens_Nk, weights.top_k * p_Nk))
        # Sum of t, [N] or a number; p sums to 1.
        self.mass = 1.0 if self.t is None or self.t is p_NV else self.t.sum(-1)
        self.ranked: torch.Tensor | None = None
        if weights.rank:
            self.ranked = p_NV.topk(min(weights.rank_tokens, p_NV.shape[-1]), dim=-1).indices  # [N, k]
        self.is_on_acceptance = bool(weights.token) and weights.objective not in ("soft_ce", "forward_kl", "hard_ce")

    def _teach(self, t_NV: torch.Tensor) -> None:
        self.t = t_NV if self.t is None else self.t + t_NV

    def learn(self, logits_MV: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Losses [M] of a student of the M columns from `first` on. Overwrites the logits with their gradient."""
        columns = slice(first, first + len(logits_MV))
        z = logits_MV
        value = self.constant[columns]
        of_acceptance = of_rank = None
        if self.is_on_acceptance or self.ranked is not None:
            z -= z.logsumexp(-1, keepdim=True) + self.unsound[columns, None]  # log q
        if self.ranked is not None:
            its_value, of_rank = rank_loss(z.gather(-1, self.ranked[columns]))
            value = value + self.weights.rank * its_value
        if self.is_on_acceptance:
            its_value, of_acceptance = _on_both(self.weights.objective, z, self.p[columns])
            value = value + self.weights.token * its_value
        if self.t is None:
            z.zero_()
        else:
            value = value + self._cross_entropies(z, columns)
        if of_acceptance is not None:
            z.add_(of_acceptance, alpha=self.weights.token)
        if self.ranked is not None and of_rank is not None:
            z.scatter_add_(-1, self.ranked[columns], self.weights.rank * of_rank)
        return value

    def _cross_entropies(self, z: torch.Tensor, columns: slice) -> torch.Tensor:
        """Value of the cross-entropies. Overwrites z, logits up to a constant in each row, with their gradient, in few
        passes: z - max, t . z, exp(z), its sum s, exp(z) (sum t) / s, - t."""
        t = self.t[columns]  # type: ignore[index]
        mass = self.mass[columns] if isinstance(self.mass, torch.Tensor) else self.mass
        z -= z.amax(-1, keepdim=True)
        taught = torch.linalg.vecdot(t, z)
        total = z.exp_().sum(-1)
        z *= (mass / total + self.unsound[columns])[:, None]
        z -= t
        return mass * total.log() - taught


def _on_both(objective: TokenObjective, log_q: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value [N] and gradient [N, V] of an objective that is not a cross-entropy."""
    q = log_q.exp()
    if objective == "log_acceptance":
        # In logarithms: a student that is far off has an alpha near 0 and must still learn.
        log_p = p.log()  # -inf where p is 0; it adds nothing
        log_alpha = torch.minimum(log_p, log_q).logsumexp(-1, keepdim=True)
        part = (log_q - log_alpha).exp().masked_fill(log_q >= log_p, 0.0)  # of alpha, where q < p
        return -log_alpha.squeeze(-1), q * part.sum(-1, keepdim=True) - part
    if objective == "reverse_kl":
        ratio = log_q - p.clamp(min=torch.finfo(p.dtype).tiny).log()
        value = torch.linalg.vecdot(q, ratio)
        return value, q * (ratio - value[:, None])
    alpha = torch.minimum(p, q).sum(-1)
    falls_short = q < p
    gradient = q * (torch.linalg.vecdot(q, falls_short.to(q.dtype))[:, None] - falls_short.to(q.dtype))
    if objective == "total_variation":
        return 1 - alpha, gradient
    share = torch.exp(-HYBRID_DECAY * alpha)
    value = share * (-torch.linalg.vecdot(p, log_q) - torch.special.entr(p).sum(-1)) + (1 - share) * (1 - alpha)
    return value, share[:, None] * (q - p) + (1 - share)[:, None] * gradient


def rank_loss(scores_Nk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The negative log-likelihood [N] of the teacher's order by Plackett-Luce (ViSpec), and its gradient [N, k]:
    -sum_i (s_i - log sum_{j >= i} exp s_j), with the student's logits s of the teacher's likeliest tokens in order.
    """
    tails = scores_Nk.flip(-1).logcumsumexp(-1).flip(-1)  # log sum_{j >= i} exp s_j
    shares = (scores_Nk + (-tails).logcumsumexp(-1)).exp()  # token j is in the tails of all i <= j
    return (tails - scores_Nk).sum(-1), shares - 1


def feature_regression(outputs_NH: torch.Tensor, features_NH: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    """Weighted sum over columns of the smooth L1 distance, averaged over the width, in float32 (EAGLE-1, arXiv
    2401.15077, section 3.2): d^2 / 2 where |d| < 1, else |d| - 1/2. A column of weight 0 may hold any finite numbers.
    """
    distance = functional.smooth_l1_loss(outputs_NH.float(), features_NH.float(), reduction="none").mean(-1)
    return torch.where(weight_N > 0, weight_N * distance, 0.0).sum()
