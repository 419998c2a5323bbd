"""The target's precision (target.quantization): weights in few bits, quantised when the target is loaded.

Only the linear layers of the decoder's blocks are quantised (as in SpecMQuant, arXiv 2505.22179). Experts that a family
stores as one three-dimensional parameter are no linear layers.

    8 bits, one scale for each row (output) of a weight W [out, in]:

        scale = max |W| / 127                       code = round(W / scale), -127 to 127
                                                    W ~ code * scale

    4 bits, scale and zero for each group of g inputs of a row:

        scale = (max W - min W) / 15
        zero  = min W + 8 * scale                   code = round((W - zero) / scale) + 8, 0 to 15
                                                    W ~ (code - 8) * scale + zero

Scales and zeros are rounded to bfloat16, as the kernels store them, before the codes are computed.

On a CPU the products are those of PyTorch's own kernels, with activations in bfloat16: private operations of torch,
which `check_quantization` tries before any weight is loaded. LOG.md has them beside torchao's, which are no faster.
`fake` replaces each weight by its quantised value, in the model's own dtype: the precision's effect without its speed,
on any device.

How a kernel rounds depends on the number of rows, so greedy answers of int8 and int4 targets may differ from plain
decoding's. Fake ones are ordinary models.
"""

import platform
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.sections.target import QuantizationSection

# From so many rows on, int8 weights are cast to bfloat16 for an ordinary product: 46 ms instead of 54 for 16 rows of a
# target of 107 M parameters, 97 instead of 168 for 60 (LOG.md).
CAST_ROWS = 16
ROW_BLOCK = 16  # inputs: with another multiple torch 2.13's int8 kernel reads beyond the weight and may crash
OUT_BLOCK = 16  # outputs that the int4 kernel packs together
PROBE_ERROR = 0.02  # relative; bfloat16 rounds by 0.004


def precision_name(precision: QuantizationSection | None) -> str | None:
    """The precision in names and a target's identity, such as "int4, groups of 64"; None: as loaded."""
    if precision is None:
        return None
    name = "int8" if precision.bits == 8 else f"int4, groups of {precision.group_size}"
    return f"fake {name}" if precision.fake else name


# The arithmetic.


def quantized_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [out, in] int8, scales [out] bfloat16) of 8 bits."""
    rows = weight.float()
    scales = _rounded(rows.abs().amax(1) / 127)
    return (rows / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales.bfloat16()


def quantized_groups(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [out, in] int32, scales and zeros [out, in / size] bfloat16) of 4 bits."""
    groups = weight.float().unflatten(1, (-1, size))  # [out, in / size, size]
    low, high = groups.aminmax(dim=-1)
    scales = _rounded((high - low) / 15)
    zeros = (low + 8 * scales).bfloat16()
    codes = ((groups - zeros.float()[..., None]) / scales[..., None]).round().add(8).clamp(0, 15)
    return codes.flatten(1).int(), scales.bfloat16(), zeros


def _rounded(scales: torch.Tensor) -> torch.Tensor:
    """As bfloat16 holds them, and never 0: rows and groups of equal weights have no range."""
    return scales.clamp(min=torch.finfo(torch.bfloat16).tiny).bfloat16().float()


def fake_quantized(weight: torch.Tensor, precision: QuantizationSection) -> torch.Tensor:
    """The weight that the codes stand for, in the weight's dtype."""
    if precision.bits == 8:
        codes, scales = quantized_rows(weight)
        return (codes.float() * scales.float()[:, None]).to(weight.dtype)
    codes, scales, zeros = quantized_groups(weight, precision.group_size)
    groups = (codes.float() - 8).unflatten(1, (-1, precision.group_size))
    return (groups * scales.float()[..., None] + zeros.float()[..., None]).flatten(1).to(weight.dtype)


# The layers.


class _QuantizedLinear(nn.Module):
    """A linear layer in inference. Its weight is buffers; activations are bfloat16."""

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().bfloat16())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result = self.product(states.reshape(-1, self.in_features).contiguous())
        result = result.view(*states.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out]"""
        raise NotImplementedError


class Int8Linear(_QuantizedLinear):
    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        codes, scales = quantized_rows(linear.weight.detach())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) >= CAST_ROWS:
            return functional.linear(rows, self.codes.to(rows.dtype)) * self.scales
        return torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scales)


class Int4Linear(_QuantizedLinear):
    packed: torch.Tensor
    scales_and_zeros: torch.Tensor  # [in / group, out, 2]

    def __init__(self, linear: nn.Linear, group_size: int):
        super().__init__(linear)
        self.group_size = group_size
        codes, scales, zeros = quantized_groups(linear.weight.detach(), group_size)
        self.register_buffer("packed", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
        self.register_buffer("scales_and_zeros", torch.stack((scales.T, zeros.T), dim=-1).contiguous())

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group_size, self.scales_and_zeros)


def quantize_layers(layers: nn.ModuleList, precision: QuantizationSection) -> None:
    """Quantises the linear layers of a decoder's blocks, one after another, in place."""
    for name, linear in Bar(_linears(layers).items(), desc="quantising", unit="layer", leave=False):
        if precision.fake:
            linear.weight.data = fake_quantized(linear.weight.data, precision)
        elif precision.bits == 8:
            layers.set_submodule(name, Int8Linear(linear))
        else:
            layers.set_submodule(name, Int4Linear(linear, precision.group_size))


def _linears(layers: nn.ModuleList) -> dict[str, nn.Linear]:
    return {name: module for name, module in layers.named_modules() if isinstance(module, nn.Linear)}


def quantized_bytes(layers: nn.ModuleList, precision: QuantizationSection) -> tuple[int, int]:
    """(weights of the linear layers, bytes that they take when quantised by a kernel, without biases): both exact."""
    weights = scales = 0
    for linear in _linears(layers).values():
        weights += linear.weight.numel()
        scales += 2 * linear.out_features if precision.bits == 8 else 4 * linear.weight.numel() // precision.group_size
    return weights, weights * precision.bits // 8 + scales


# Checks before any weight is loaded.


def check_quantization(precision: QuantizationSection, config: Any, layers: nn.ModuleList, device: str) -> None:
    """Raises UserError: the checkpoint is quantised already, a layer's shape does not fit, or there is no kernel here.

    Args:
        config: the target's whole config.
        layers: its decoder's blocks; those of a model on torch's meta device will do.
    """
    already = getattr(config, "quantization_config", None)
    if already is not None:
        settings = already if isinstance(already, dict) else already.to_dict()
        raise UserError(
            f"target.quantization: the checkpoint is quantised already ({settings.get('quant_method', 'unknown')}); "
            "transformers loads it as it is: leave target.quantization out, or name the plain checkpoint"
        )
    found = _linears(layers)
    if not found:
        raise UserError(
            f"target.quantization: the blocks of family {config.model_type} hold no linear layers of torch, and only "
            "those are quantised; leave target.quantization out"
        )
    for name, linear in found.items():
        if problem := _misfit(f"layers.{name}", linear, precision):
            raise UserError(f"target.quantization: {problem}")
    if not precision.fake:
        if torch.device(device).type != "cpu":
            raise UserError(
                f"target.quantization: {precision_name(precision)} needs kernels for {device}, and those here are for "
                "CPUs: set target.device=cpu, or name a quantised checkpoint (GPTQ, AWQ, bitsandbytes, torchao) as "
                "target.model, which transformers loads with its own kernels; or take {fake: true}"
            )
        _check_kernel(precision.bits)


def _misfit(name: str, linear: nn.Linear, precision: QuantizationSection) -> str | None:
    """Why this layer cannot be quantised; None: it can."""
    inputs, outputs, size = linear.in_features, linear.out_features, precision.group_size
    if precision.bits == 4 and inputs % size:
        fitting = [each for each in (128, 64, 32) if inputs % each == 0]
        advice = f"set group_size to {fitting[0]}" if fitting else "no group size fits it: take 8 bits"
        return f"group_size {size} does not divide the {inputs:,} inputs of {name}: {advice}"
    if precision.bits == 4 and not precision.fake and outputs % OUT_BLOCK:
        return f"the int4 kernel packs {OUT_BLOCK} outputs together, and {name} has {outputs:,}: take int8, or fake"
    if precision.bits == 8 and not precision.fake and inputs % ROW_BLOCK:
        return f"the int8 kernel reads {ROW_BLOCK} inputs at a time, and {name} has {inputs:,}: take fake"
    return None


@cache
def _check_kernel(bits: int) -> None:
    """Tries a small product. Raises UserError if this machine or this torch cannot do it, or does it wrongly."""

    def refused(why: str) -> UserError:
        advice = "take target.quantization={fake: true}, another machine, or leave target.quantization out"
        return UserError(f"target.quantization: int{bits}: {why}; {advice}")

    cpu = torch.backends.cpu.get_cpu_capability()
    if platform.machine().lower() in ("x86_64", "amd64") and cpu in ("DEFAULT", "NO AVX"):
        raise refused(f"PyTorch's kernels need AVX2 or AVX-512, and it finds neither on this CPU (capability {cpu})")
    linear = nn.Linear(64, 32, bias=False)
    states = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    precision = QuantizationSection(bits=8 if bits == 8 else 4)
    try:
        with torch.no_grad():
            there = (Int8Linear(linear) if bits == 8 else Int4Linear(linear, precision.group_size))(states).float()
            here = functional.linear(states.float(), fake_quantized(linear.weight.data, precision))
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        raise refused(f"torch {torch.__version__} has no kernel for this machine: {first_line(error)}") from None
    if not torch.allclose(there, here, rtol=0, atol=PROBE_ERROR * float(here.abs().max())):
        raise refused(f"the kernel of torch {torch.__version__} gives wrong products on this machine")
