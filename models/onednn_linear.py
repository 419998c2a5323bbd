"""Weights of linear layers as oneDNN wants them: faster products of few rows on a CPU.

PyTorch's product rearranges a weight for its kernel at each call, which for the few tokens of a verification takes as
long as the product itself. Here it is done once, when the model is loaded. Training has the target's head so, too.

Plain decoding, of one row, must not pay for that, or drafting would seem to gain more than it does. So in float32 the
layout depends on the layer's size (LOG.md, 2026-11-26 and 2026-11-29, has the times):

    weights             one row by                      more rows by
    up to 2**18         PyTorch's product               oneDNN, a layout for 16 rows
    up to 2**20         oneDNN, a layout for one row;   oneDNN, a layout for 16 rows
                        on Intel PyTorch's product
    more                oneDNN, a layout for one row    the same
    more, a head        oneDNN, a layout for 16 rows    the same

PyTorch's product is that of Intel's library, whose fast kernels for one row other makers' CPUs do not get. The first
two sizes keep their weights twice. One row of a large head is as fast by either layout, and its own weights stay for
the embedding that shares them. In bfloat16 the layout for 16 rows is the fastest for all. The operations are private
ones of torch; where they are missing or give other numbers, layers stay as they are.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

from draftsmith.models.sizes import hardware

ROWS = 16  # of a verification
SMALL, LARGE = 2**18, 2**20  # weights of a layer
PROBE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # relative


class BlockedLinear(nn.Module):
    """A linear layer in inference."""

    blocked: torch.Tensor
    single: torch.Tensor | None  # for one row: a weight, or a layout of it
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, head: bool = False):
        super().__init__()
        weight = weight.detach()
        size = weight.numel() if weight.dtype == torch.float32 else 0
        self.register_buffer("blocked", _blocked(weight, 1 if size > LARGE and not head else ROWS), persistent=False)
        single = None
        if 0 < size <= LARGE:
            single = weight if size <= SMALL or on_intel() else _blocked(weight, 1)
        self.register_buffer("single", single, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """For its dtype, which some routers ask for; the layout is oneDNN's own."""
        return self.blocked

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        layout = self.blocked
        if self.single is not None and states.numel() == states.shape[-1]:
            if not self.single.is_mkldnn:
                return functional.linear(states, self.single, self.bias)
            layout = self.single
        return torch.ops.mkldnn._linear_pointwise(states, layout, self.bias, "none", [], "")


def block_linears(module: nn.Module) -> None:
    """Replaces the linear layers inside a module that lies on a CPU, one after another, in place."""
    for name, layer in list(module.named_modules()):
        if _is_plain(layer):
            module.set_submodule(name, BlockedLinear(layer.weight, layer.bias))


def blocked_head(head: nn.Module) -> nn.Module | None:
    """The product of a plain head on a CPU."""
    return BlockedLinear(head.weight, head.bias, head=True) if _is_plain(head) else None


def head_product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with a head's weight [V, H], for decoding: of a layout of its own on a CPU."""
    if _fits(weight):
        return BlockedLinear(weight, bias, head=True)
    return partial(functional.linear, weight=weight.detach(), bias=bias)


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear layer of a CPU: a subclass, of the layer or (in quantised checkpoints) of its weight, may
    compute something else."""
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and _fits(layer.weight)


def _fits(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and able(weight.dtype)


@cache
def on_intel() -> bool:
    return "Intel" in hardware(torch.device("cpu"))


@cache
def able(dtype: torch.dtype) -> bool:
    """Whether the operations work here for this precision."""
    if dtype not in PROBE_ERROR or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, states = (torch.randn(n, 40, generator=generator).to(dtype) for n in (24, 3))
    try:
        found = torch.ops.mkldnn._linear_pointwise(states, _blocked(weight, ROWS), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    expected = functional.linear(states.double(), weight.double())
    return float((found - expected).abs().max()) <= PROBE_ERROR[dtype] * float(expected.abs().max())


def _blocked(weight: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
