"""When drafting stops: rules for chains and for beam searches (`eval.decoding.policies`), for B rows side by side.

A rule reads the result of a draft call and decides which rows need no further call. Each test waits for the device
once. A NaN always stops.

Shapes: B rows, b nodes that were expanded, K nodes of the next beam, Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from draftsmith.models.c2t import entropy


class Calls:
    """Which rows are still drafting, and how many draft calls each has made."""

    def __init__(self, rows: int, most: int):
        self.of_row = [most] * rows
        self.stopped_B: torch.Tensor | None = None
        self.going = [True] * rows

    def stop(self, stopping_B: torch.Tensor, call: int) -> bool:
        """Stops rows after this call. Returns whether all have stopped. Waits for the device once."""
        self.stopped_B = stopping_B if self.stopped_B is None else self.stopped_B | stopping_B
        for row, stopped in enumerate(self.stopped_B.tolist()):
            if stopped and self.going[row]:
                self.going[row], self.of_row[row] = False, call
        return not any(self.going)


@dataclass(frozen=True)
class Svip:
    """Ends a chain after an uncertain token (arXiv 2411.18462).

    A token drawn from q is accepted with probability at least 1 - sqrt(c H(q)), by Pinsker's inequality with the
    cross-entropy taken as a multiple of H. The chain ends once that is below 1 - h: iff c H > h^2. The uncertain token
    is kept, because it is already drafted. The defaults are the published code's; the paper's text folds c into h.
    """

    c: float = 0.15
    h: float = 0.3

    def stops(self, log_probs: torch.Tensor) -> torch.Tensor:
        """[B] bool, from the last tokens' distributions [B, Vd]; a NaN stops."""
        return ~(self.c * entropy(log_probs) <= self.h * self.h)


@dataclass(frozen=True)
class Ddd:
    """DDD (arXiv 2409.00142): ends the beam search once the beam's total probability is below e^threshold.

    Args:
        at: draft calls after which the beam is tested.
    """

    threshold: float = -0.3
    at: tuple[int, ...] | Literal["every"] = (5, 7, 9)

    def stops(
        self, call: int, values_Bb: torch.Tensor, log_probs: torch.Tensor, beam_BK: torch.Tensor
    ) -> torch.Tensor | None:
        """[B] bool: no further call for this row. None: no test after this call.

        Args:
            call: number of calls so far, of which the last one expanded nodes of `values_Bb` and gave `log_probs`
                [B, b, Vd].
            beam_BK: values of the nodes that the next call would expand.
        """
        if self.at != "every" and call not in self.at:
            return None
        return ~(beam_BK.logsumexp(-1) >= self.threshold)


@dataclass(frozen=True)
class SvipTree:
    """SVIP's rule on a beam. The rule is ours: the paper reports EAGLE-2 with SVIP, but does not say how.

    The bound is the chain's, in expectation. Let P_i be the values of the nodes that the last call expanded, and q_i
    the resulting distributions. If the target's path runs through one of them, it runs through node i with probability
    w_i = P_i / sum P by the drafter's own belief. Drafting ends once the expected bound is below 1 - h:

        stop  iff  sum_i w_i sqrt(c H(q_i)) > h

    A beam of one node gives the chain's rule. As there, the children just proposed remain candidates for the tree.
    """

    c: float = 0.15
    h: float = 0.3

    def stops(self, call: int, values_Bb: torch.Tensor, log_probs: torch.Tensor, beam_BK: torch.Tensor) -> torch.Tensor:
        """As `Ddd.stops`."""
        # Entropies of nearly certain distributions may round to just below zero.
        uncertainty = (self.c * entropy(log_probs).clamp(min=0)).sqrt()
        return ~((values_Bb.softmax(-1) * uncertainty).sum(-1) <= self.h)
