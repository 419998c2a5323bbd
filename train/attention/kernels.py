"""Attention kernels: fused ones of the device, and plain products block by block.

A kernel returns its output with the log-sum-exp of its scores. For the backward pass it takes both from the caller, who
may have merged them with those of other keys (`train.attention.merged`). Fused kernels are operators of PyTorch, or of
the package flash-attn where it is installed. They may change without notice, so each is tried on a few numbers before
it is used. Where one is missing or wrong the next is tried; plain blocks come last.

Shapes: A query heads, G key/value heads, R = A/G, D head dimension, n queries, m keys. Scores are scaled by D^-1/2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Kernel:
    """
    Attributes:
        forward: (query [1, A, n, D], keys [1, G, m, D], values, causal) to (output [1, A, n, D], log-sum-exp
            [1, A, n] in float32 or better). Causal: n = m, and query i sees keys 0..i.
        backward: (gradient of the output, query, keys, values, output, log-sum-exp, causal) to the gradients of query,
            keys and values.
    """

    name: str
    forward: Forward
    backward: Backward


# Plain products.

ELEMENTS, ELEMENTS_ELSEWHERE = 1 << 21, 1 << 27  # scores of one block, on a CPU and on devices with more memory
LEAST_ROWS = 16


def _blocks(query: torch.Tensor, keys: torch.Tensor, causal: bool):
    """(first, end, number of keys that any of its queries sees, mask) of each block of queries."""
    _, heads, count, _ = query.shape
    elements = ELEMENTS if query.device.type == "cpu" else ELEMENTS_ELSEWHERE
    size = max(LEAST_ROWS, elements // max(1, heads * keys.shape[2]))
    for first in range(0, count, size):
        end = min(first + size, count)
        seen = end if causal else keys.shape[2]
        mask = None
        if causal:
            place = torch.arange(seen, device=query.device)
            mask = place > place[first:end, None]  # [block, seen] True where the key is not seen
        yield first, end, seen, mask


def _scores(query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Scores [G, R * n, m] of queries [G, R * n, D]. Heads of a group are rows of one product, so no key is copied."""
    # Unrounded until the softmax: large scores in bfloat16 are units apart.
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(precise) @ keys.to(precise).transpose(-1, -2)
    scores *= query.shape[-1] ** -0.5
    if mask is not None:
        scores.unflatten(1, (-1, len(mask))).masked_fill_(mask, float("-inf"))
    return scores


def _blocks_forward(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool):
    _, heads, count, size = query.shape
    groups = keys.shape[1]
    out = query.new_empty(1, count, heads, size).transpose(1, 2)
    lse = query.new_empty(1, heads, count, dtype=torch.promote_types(query.dtype, torch.float32))
    for first, end, seen, mask in _blocks(query, keys, causal):
        rows = query[0, :, first:end].reshape(groups, -1, size)
        scores = _scores(rows, keys[0, :, :seen], mask)
        normaliser = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(normaliser).exp_().to(values.dtype)
        out[0, :, first:end] = (weights @ values[0, :, :seen]).view(heads, end - first, size)
        lse[0, :, first:end] = normaliser.view(heads, end - first)
    return out, lse


def _blocks_backward(grad, query, keys, values, out, lse, causal):
    _, heads, _, size = query.shape
    groups = keys.shape[1]
    of_query = torch.empty_like(query)
    of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
    mean = (grad * out).sum(-1, dtype=lse.dtype)  # [1, A, n]
    for first, end, seen, mask in _blocks(query, keys, causal):

        def rows(states: torch.Tensor, first: int = first, end: int = end) -> torch.Tensor:
            return states[0, :, first:end].reshape(groups, -1, states.shape[-1])

        q, d = rows(query), rows(grad)
        weights = _scores(q, keys[0, :, :seen], mask).sub_(rows(lse[..., None])).exp_()  # [G, R * n, m]
        of_values[0, :, :seen] += weights.to(values.dtype).transpose(-1, -2) @ d
        of_scores = (d @ values[0, :, :seen].transpose(-1, -2)).to(weights.dtype)
        of_scores = of_scores.sub_(rows(mean[..., None])).mul_(weights).mul_(size**-0.5).to(query.dtype)
        of_query[0, :, first:end] = (of_scores @ keys[0, :, :seen]).view(heads, end - first, size)
        of_keys[0, :, :seen] += of_scores.transpose(-1, -2) @ q
    return of_query, of_keys, of_values


BLOCKS = Kernel("plain blocks", _blocks_forward, _blocks_backward)


# PyTorch's fused kernels. They read grouped keys as they are: none is copied for the query heads that share it.


def _cpu_forward(query, keys, values, causal):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, causal)


def _cpu_backward(grad, query, keys, values, out, lse, causal):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, keys, values, out, lse, 0.0, causal
    )


FLASH_CPU = Kernel("the CPU's flash kernel", _cpu_forward, _cpu_backward)


def _cuda_forward(query, keys, values, causal):
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, causal)
    return out, lse


def _cuda_backward(grad, query, keys, values, out, lse, causal):
    no_dropout = torch.empty(0, dtype=torch.long, device=query.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(grad, query, keys, values, out, lse.contiguous()),
        *(None, None, query.shape[2], keys.shape[2], 0.0, causal, no_dropout, no_dropout),
    )


FLASH_CUDA = Kernel("the GPU's flash kernel", _cuda_forward, _cuda_backward)


def _for_each_head(states: torch.Tensor, heads: int) -> torch.Tensor:
    """[1, G, m, D] as [1, A, m, D]."""
    return states.repeat_interleave(heads // states.shape[1], dim=1)


def _copying_forward(query, keys, values, causal):
    heads = query.shape[1]
    return _cuda_forward(query, _for_each_head(keys, heads), _for_each_head(values, heads), causal)


def _copying_backward(grad, query, keys, values, out, lse, causal):
    heads, groups = query.shape[1], keys.shape[1]
    both = _for_each_head(keys, heads), _for_each_head(values, heads)
    of_query, *of_both = _cuda_backward(grad, query, *both, out, lse, causal)
    of_keys, of_values = (each.unflatten(1, (groups, -1)).sum(2) for each in of_both)
    return of_query, of_keys, of_values


# For builds with a kernel that needs as many key heads as query heads.
FLASH_CUDA_COPYING = Kernel("the GPU's flash kernel, keys copied for each head", _copying_forward, _copying_backward)


# The package flash-attn (2.7 and later) has newer kernels than PyTorch. Its tensors are [1, n, A, D].


def _package_forward(query, keys, values, causal):
    from flash_attn.flash_attn_interface import _flash_attn_forward  # type: ignore[import-not-found]

    states = (each.transpose(1, 2) for each in (query, keys, values))
    options = 0.0, query.shape[-1] ** -0.5, causal, -1, -1, 0.0, None  # dropout, scale, window, soft cap, slopes
    out, lse, *_ = _flash_attn_forward(*states, *options, False)
    return out.transpose(1, 2), lse


def _package_backward(grad, query, keys, values, out, lse, causal):
    from flash_attn.flash_attn_interface import _flash_attn_backward  # type: ignore[import-not-found]

    grad, out, *states = (each.transpose(1, 2) for each in (grad, out, query, keys, values))
    found = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in states]
    options = 0.0, query.shape[-1] ** -0.5, causal, -1, -1, 0.0, None
    _flash_attn_backward(grad, *states, out, lse.contiguous(), *found, *options, False)
    of_query, of_keys, of_values = (each.transpose(1, 2) for each in found)
    return of_query, of_keys, of_values


FLASH_PACKAGE = Kernel("flash-attn", _package_forward, _package_backward)


def candidates(device: str) -> list[Kernel]:
    """Fused kernels, the preferred one first."""
    if device == "cpu":
        return [FLASH_CPU]
    if device != "cuda":
        return []
    package = [FLASH_PACKAGE] if find_spec("flash_attn") is not None else []
    return [*package, FLASH_CUDA, FLASH_CUDA_COPYING]


def is_right(kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int) -> bool:
    """Whether the kernel runs here and agrees with plain blocks, on a few numbers of this precision and shape, with and
    without a causal mask, also backward from a merged log-sum-exp."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, columns: int) -> torch.Tensor:
        return torch.randn(1, heads, columns, size, generator=generator).to(device, dtype)

    # The error of whole tensors, not of elements: the gradient of a key that many heads share sums as many roundings.
    # Fused kernels in bfloat16 are right to 1.5 %; one wrong row among the 37 or 53 below would be a seventh.
    tolerance = 0.05 if dtype.itemsize < 4 else 1e-3

    def compare(mine: Sequence[torch.Tensor], its: Sequence[torch.Tensor]) -> None:
        for own, other in zip(mine, its, strict=True):
            error, size = (each.double().norm().item() for each in (own.double() - other.double(), other))
            if own.shape != other.shape or not error <= tolerance * size:  # also refuses NaN
                raise ValueError("wrong")

    try:
        with torch.autocast(device.type, enabled=False):  # it would round what plain blocks do not
            for causal in (True, False):
                query, grad = draw(heads, 37), draw(heads, 37)
                keys, values = (draw(groups, 37 if causal else 53) for _ in range(2))
                found, expected = (each.forward(query, keys, values, causal) for each in (kernel, BLOCKS))
                out, lse = expected
                compare((found[0], found[1].float()), (out, lse.float()))
                given = grad, query, keys, values, out, lse + 0.5, causal
                compare(kernel.backward(*given), BLOCKS.backward(*given))
    except (RuntimeError, TypeError, AttributeError, ImportError, ValueError):
        return False
    return True


@cache
def kernel_for(device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int) -> Kernel:
    """The device's first fused kernel that passes its trial; else plain blocks, named by the reason."""
    fused = candidates(device.type)
    for kernel in fused:
        if is_right(kernel, device, dtype, heads, groups, size):
            return kernel
    if not fused:
        return replace(BLOCKS, name=f"{BLOCKS.name} (no fused kernel is known for {device.type})")
    words = f"{dtype}, {heads} heads over {groups}, each of {size}".removeprefix("torch.")
    failed = " and ".join(kernel.name for kernel in fused)
    return replace(BLOCKS, name=f"{BLOCKS.name} ({failed} failed {'their' if fused[1:] else 'its'} trial with {words})")
