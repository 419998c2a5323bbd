"""How much the loss of each unroll step counts.

    0.8           0.8**k at step k                                                                  EAGLE-3
    [1, 0.8, ..]  one number a step
    acceptance    what decoding gains, column by column:  w_k = sum_{j >= k} prod_{l <= j} a_l      D-PACE

Decoding keeps a chain up to its first rejected token. With a_l the chance that the token of step l is accepted, where
all before it were, the expected number of accepted tokens of the chain that begins in a column is

    E = a_0 + a_0 a_1 + a_0 a_1 a_2 + ...            dE / d log a_k = the terms that hold a_k = w_k

so that -log a_k, weighted by w_k as a constant, has the gradient of -E: `log_acceptance` with these weights trains E
itself. For other objectives they say which steps still matter, and which ones no chain gets to (arXiv 2605.18810, for
blocks that are drafted in parallel; here each counted column is a chain, drafted as in decoding, so the sum is exact:
of p and q over the draft vocabulary, that is, where p is renormalised and a_l a little too high).

What an untrained drafter proposes is hardly ever accepted: with all a_l near 0 nothing would count. So a_l is raised to
FLOOR + (1 - FLOOR) a_l. Where the target's likeliest token cannot be drafted the chain ends, as in decoding: a_l is 0
there, and no step from there on counts.

Shapes: B rows, C counted columns, K steps.
"""

import torch

from draftsmith.recipes.schema import StepWeight

FLOOR = 0.1


def fixed_weights(weight: StepWeight, steps: int) -> list[float] | None:
    """Of steps 0 to `steps` - 1; None: they hang on the drafter.

    Raises:
        ValueError: a list of another length.
    """
    if weight == "acceptance":
        return None
    if isinstance(weight, list):
        if len(weight) != steps:
            raise ValueError(f"{len(weight)} step weights for {steps} unroll steps")
        return weight
    assert not isinstance(weight, str)
    return [weight**step for step in range(steps)]


def acceptance_weights(alpha_KBC: torch.Tensor, goes_on_KBC: torch.Tensor, floor: float = FLOOR) -> torch.Tensor:
    """[K, B, C] without gradient.

    Args:
        alpha_KBC: chance that each step's token is accepted.
        goes_on_KBC: whether a chain can reach the step and get its likeliest token right.
    """
    a_KBC = torch.where(goes_on_KBC, floor + (1 - floor) * alpha_KBC, 0.0).detach()
    terms_KBC = a_KBC.cumprod(0)  # prod_{l <= j} a_l
    return terms_KBC.flip(0).cumsum(0).flip(0)
