"""When drafting stops: rules for chains and for beam searches (`eval.decoding.policies`), for B rows side by side.

A rule looks at what a draft call gave and says which rows need no further one. Its answer has to reach the host: each
test waits for the device once. A NaN always stops.

Shapes: B rows, b nodes that were expanded, K nodes of the next beam, Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from draftsmith.models.c2t import entropy


class Calls:
    """Which rows go on, and how many draft calls each has made."""

    def __init__(self, rows: int, most: int):
        self.of_row = [most] * rows
        self.stopped_B: torch.Tensor | None = None
        self.going = [True] * rows

    def stop(self, stopping_B: torch.Tensor, call: int) -> bool:
        """Stops rows after this call; is none left? Waits for the device, once."""
        self.stopped_B = stopping_B if self.stopped_B is None else self.stopped_B | stopping_B
        for row, stopped in enumerate(self.stopped_B.tolist()):
            if stopped and self.going[row]:
                self.going[row], self.of_row[row] = False, call
        return not any(self.going)


@dataclass(frozen=True)
class Svip:
    """Ends a chain behind a token that was uncertain (arXiv 2411.18462).

    The chance that a token drawn from q is accepted is at least 1 - sqrt(c H(q)), by Pinsker's inequality with the
    cross-entropy taken as a multiple of H. The chain ends once that is below 1 - h: iff c H > h^2. The uncertain token
    is kept: it has been paid for. Deviation: the paper's text folds c into h; the published code has c = 0.15, h = 0.3,
    which stops above 0.6 nats.
    """

    c: float = 0.15
    h: float = 0.3

    def stops(self, log_probs: torch.Tensor) -> torch.Tensor:
        """[B] bool, by the distributions [B, Vd] that the last tokens were drawn from; a NaN stops."""
        return ~(self.c * entropy(log_probs) <= self.h * self.h)


class Stop(Protocol):
    """When a beam search ends."""

    def stops(
        self, call: int, values_Bb: torch.Tensor, log_probs: torch.Tensor, beam_BK: torch.Tensor
    ) -> torch.Tensor | None:
        """[B] bool: no further call for this row. None: nothing is tested after this call.

        Args:
            call: how many calls were made, this one included.
            values_Bb: of the nodes that this call expanded.
            log_probs: [B, b, Vd] what it gave.
            beam_BK: values of the nodes that the next call would expand.
        """
        ...


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
        if self.at != "every" and call not in self.at:
            return None
        return ~(beam_BK.logsumexp(-1) >= self.threshold)


@dataclass(frozen=True)
class SvipTree:
    """SVIP's rule on a beam, ours: the paper reports EAGLE-2 with SVIP, but neither it nor its code says how.

    The bound is the chain's, in expectation. Let P_i be the values of the nodes that the last call expanded, and q_i
    the distributions it gave. If the target's path runs through one of them, it runs through node i with probability
    w_i = P_i / sum P by the drafter's own belief, and a token drawn there is accepted with a chance of at least
    1 - sqrt(c H(q_i)). Drafting ends once the expected bound is below 1 - h:

        stop  iff  sum_i w_i sqrt(c H(q_i)) > h

    The square root stands inside the mean: the root of the mean entropy would be a looser bound. A beam of one node
    gives exactly the chain's rule. As there, the children that were just proposed stay candidates for the tree.
    """

    c: float = 0.15
    h: float = 0.3

    def stops(
        self, call: int, values_Bb: torch.Tensor, log_probs: torch.Tensor, beam_BK: torch.Tensor
    ) -> torch.Tensor | None:
        # Entropies of nearly certain distributions may round to just below zero.
        uncertainty = (self.c * entropy(log_probs).clamp(min=0)).sqrt()
        return ~((values_Bb.softmax(-1) * uncertainty).sum(-1) <= self.h)
