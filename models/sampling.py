"""Sampling: turns logits into one distribution, and gives the random numbers to draw from it.

    logits --temperature--> --top_k--> --top_p--> softmax --> p

`p` is computed once per position, for drawing, for accepting drafted tokens, for the residual after a rejection and for
the bonus token (`eval.decoding.accept`).

Shapes: N rows, V tokens; `...` any number of axes.
"""

import hashlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

if TYPE_CHECKING:
    from draftsmith.recipes.sections.eval import EvalSection


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, with transformers' meaning and order.

    Raises:
        ValueError: a number outside its range.
    """

    temperature: float = 0.0  # 0 is greedy and ignores the others
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: {self.temperature} must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} must be above 0 and at most 1 (off)")
        if isinstance(self.top_k, float) or self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} must be a whole number, 0 (off) or above")

    @classmethod
    def of(cls, section: "EvalSection") -> "Sampling":
        return cls(section.temperature, section.top_p, section.top_k)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """p [..., V] in float32 for logits (or log-probabilities) [..., V]; if greedy, 1 for the first best token.

        As the temperature goes to 0, tied best tokens stay equally likely.
        """
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        scores_NV = logits.float().reshape(-1, logits.shape[-1])
        warpers = LogitsProcessorList()
        if self.temperature != 1:
            # The best score becomes 0, so the division cannot overflow; float32's tiny is its smallest divisor.
            scores_NV = scores_NV - scores_NV.max(-1, keepdim=True).values
            tiny = torch.finfo(torch.float32).tiny
            warpers.append(TemperatureLogitsWarper(max(float(self.temperature), tiny)))
        if self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        scores_NV = warpers(None, scores_NV)  # type: ignore[arg-type]
        return scores_NV.softmax(-1).view(logits.shape)


GREEDY = Sampling()


def at_hand(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be read without waiting: on a CPU, and not a fake tensor of a dry run."""
    return tensor.device.type == "cpu" and type(tensor) is torch.Tensor


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """logits.argmax(-1), the first of equals; on a CPU by numpy, in a tenth of PyTorch's time."""
    if at_hand(logits) and logits.dtype in (torch.float32, torch.float64):  # numpy has no bfloat16
        return torch.as_tensor(logits.detach().numpy().argmax(-1), device=logits.device)
    return logits.argmax(-1)


def pick(weights_NV: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    """[N] tokens: the inverse of each row's distribution function at its uniform number in [0, 1), float64. Weights are
    not negative, and need not sum to 1."""
    mass_NV = weights_NV.double().cumsum(-1)  # float64: a sum over 100,000 tokens keeps its tail
    total_N = mass_NV[:, -1]
    # Below the total: rounding must not pick a token of weight 0 at the end.
    at_N = torch.minimum(uniforms_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    return torch.searchsorted(mass_NV, at_N[:, None], right=True)[:, 0]


class Draws(Protocol):
    """The randomness of one answer; tests replace it by exhaustive enumeration."""

    def events(self, chances_N: torch.Tensor) -> torch.Tensor:
        """[N] bool: independent events of these probabilities."""
        ...

    def token(self, weights_V: torch.Tensor) -> torch.Tensor:
        """A token (scalar) drawn in proportion to `weights_V`."""
        ...


class SeededDraws:
    """Draws that depend only on the seed and the answer's key, not on other answers, order or device."""

    def __init__(self, seed: int, key: Hashable):
        digest = hashlib.sha256(repr((seed, key)).encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def uniforms(self, count: int) -> torch.Tensor:
        """[count] in [0, 1), float64, on the CPU."""
        return torch.rand(count, generator=self._generator, dtype=torch.float64)

    def events(self, chances_N: torch.Tensor) -> torch.Tensor:
        return self.uniforms(len(chances_N)).to(chances_N.device) < chances_N

    def token(self, weights_V: torch.Tensor) -> torch.Tensor:
        return pick(weights_V[None], self.uniforms(1).to(weights_V.device))[0]


def drawn_tokens(weights_BV: torch.Tensor, draws: Sequence[Draws]) -> torch.Tensor:
    """[B] a token of each row by its own `Draws.token`; at once if all are seeded."""
    seeded = [draw for draw in draws if isinstance(draw, SeededDraws)]
    if len(seeded) < len(weights_BV):
        return torch.stack([draw.token(weights) for draw, weights in zip(draws, weights_BV, strict=True)])
    uniforms_B = torch.cat([draw.uniforms(1) for draw in seeded])
    return pick(weights_BV, uniforms_B.to(weights_BV.device))
