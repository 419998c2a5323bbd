"""LoRA of the drafter (drafter.lora; arXiv 2106.09685): trains two thin matrices beside each frozen linear layer.

    weight [out, in]  =  frozen  +  alpha / r * b a,    a [r, in] random, b [out, r] zero at the start

PyTorch's parametrisation puts the sum in the place of the weight, so every reader of a weight sees the sum. The head's
fused loss and the MLP's fused product read weights without calling a layer, so peft's layers would be passed over.
"""

import math

import torch
from torch import nn
from torch.nn.utils import parametrize

from draftsmith.models.drafter_base import Drafter
from draftsmith.recipes.errors import UserError, quoted
from draftsmith.recipes.sections.drafter import LoraSection


class LowRankSum(nn.Module):
    """weight + alpha / r * b a. The sum is float32, as the weight."""

    def __init__(self, weight: torch.Tensor, r: int, alpha: float):
        super().__init__()
        self.scale = alpha / r
        self.a = nn.Parameter(weight.new_empty(r, weight.shape[1]))
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], r))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(weight, self.b, self.a, alpha=self.scale)


def add_lora(drafter: Drafter, section: LoraSection) -> None:
    """Freezes the drafter and adds trainable matrices to its linear layers. Raises UserError if drafter.lora.modules
    names layers that it has not."""
    drafter.requires_grad_(False)
    linear = {name: module for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
    known = {name.rpartition(".")[2] for name in linear}
    if unknown := sorted(set(section.modules or ()) - known):
        raise UserError(
            f"drafter.lora.modules: this drafter has no linear layers called {quoted(unknown)}; "
            f"it has {', '.join(sorted(known))}"
        )
    for name, module in linear.items():
        if name.rpartition(".")[2] in (section.modules or known):
            low_rank = LowRankSum(module.weight, section.r, section.alpha)
            parametrize.register_parametrization(module, "weight", low_rank)


def merge_lora(drafter: Drafter) -> None:
    """Makes it an ordinary drafter of the same weights, in place. Without LoRA nothing changes."""
    for module in list(drafter.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
