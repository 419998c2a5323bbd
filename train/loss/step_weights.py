"""Weights of the unroll steps' losses.

    0.8           0.8**k at step k                                                                  EAGLE-3
    [1, 0.8, ..]  one number a step
    acceptance    the gain in decoding, column by column:  w_k = sum_{j >= k} prod_{l <= j} a_l     D-PACE

Decoding keeps a chain up to its first rejected token. Let a_l be the probability that the token of step l is accepted,
given that all tokens before it were. The expected number of accepted tokens of the chain that starts in a column is

    E = a_0 + a_0 a_1 + a_0 a_1 a_2 + ...            dE / d log a_k = the terms that hold a_k = w_k

so `log_acceptance` with these weights, held constant, trains E itself. For other objectives the weights say which steps
matter. The source is arXiv 2605.18810, for blocks that are drafted in parallel. Here each counted column is a chain,
drafted as in decoding, so the sum is exact for p and q over the draft vocabulary, where p is renormalised.

An untrained drafter is hardly ever accepted: with all a_l near 0 nothing would count. So a_l is raised to
FLOOR + (1 - FLOOR) a_l. Where the target's likeliest token cannot be drafted, a_l is 0 and the chain ends.

Shapes: B rows, C counted columns, K steps.
"""

import torch

from draftsmith.recipes.sections.train import StepWeight

FLOOR = 0.1


def fixed_weights(weight: StepWeight, steps: int) -> list[float] | None:
    """Weights of steps 0 to `steps` - 1; None: they depend on the drafter."""
    if isinstance(weight, str):
        return None
    return weight if isinstance(weight, list) else [weight**step for step in range(steps)]


def acceptance_weights(alpha_KBC: torch.Tensor, goes_on_KBC: torch.Tensor, floor: float = FLOOR) -> torch.Tensor:
    """Weights [K, B, C], without gradient.

    Args:
        alpha_KBC: probability that each step's token is accepted.
        goes_on_KBC: whether a chain can reach the step and get its likeliest token right.
    """
    a_KBC = torch.where(goes_on_KBC, floor + (1 - floor) * alpha_KBC, 0.0).detach()
    terms_KBC = a_KBC.cumprod(0)  # prod_{l <= j} a_l
    return terms_KBC.flip(0).cumsum(0).flip(0)
