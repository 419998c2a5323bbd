"""The unroll's attention against its definition, by every kernel; and which kernel is taken."""

import functools
from collections.abc import Sequence

import pytest
import torch

from draftsmith.models.alignment import Columns, Documents, Run, columns_of, runs_of_documents
from draftsmith.train.attention import kernels as attention_kernels
from draftsmith.train.attention.kernels import BLOCKS, FLASH_CPU, Kernel, is_right, kernel_for
from draftsmith.train.attention.merged import merged_attention
from tests.thinning import pairwise

CPU = torch.device("cpu")
KERNELS = [BLOCKS, FLASH_CPU]
by_each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
HEADS, SIZE = 4, 8
# Two rows: three documents and padding; one document. Spans of several lengths, one of a single counted column.
PLACES = ((0, 0, 9), (0, 9, 4), (0, 13, 6), (1, 0, 20))
SPANS = [[0, 0, 1, 1, 0, 0, 2, 2, 2, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0], [0, *[1] * 9, 0, 0, *[2] * 8, 0]]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, SIZE, generator=generator, dtype=dtype) for shape in shapes]


def documents() -> Documents:
    position = torch.zeros(2, 21, dtype=torch.long)
    for row, start, length in PLACES:
        position[row, start : start + length] = torch.arange(length)
    return Documents(position, PLACES)


def by_definition(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    columns: Columns,
    start_of: Sequence[Sequence[int]],
) -> torch.Tensor:
    """Query by query: a softmax over the keys of its document up to its column, and its own."""
    shared = query.shape[1] // keys.shape[1]
    out = torch.zeros_like(query)
    for b, c in (columns.depth > 0).nonzero().tolist():
        t = int(columns.index[b, c])
        seen = range(start_of[b][t], t + 1)
        for head in range(query.shape[1]):
            g = head // shared
            looked_at = [keys[b, g, j] for j in seen] + [each[b, g, c] for each in own_keys]
            taken = [values[b, g, j] for j in seen] + [each[b, g, c] for each in own_values]
            scores = torch.stack([query[b, head, c] @ key for key in looked_at]) * SIZE**-0.5
            out[b, head, c] = torch.softmax(scores, 0) @ torch.stack(taken)
    return out


@pytest.mark.parametrize(
    ("kernel", "groups", "steps", "elements"), pairwise(KERNELS, [1, 2, 4], [0, 1, 3], [1, 1 << 21])
)
def test_merged_attention_equals_its_definition_in_value_and_gradient(
    kernel: Kernel, groups: int, steps: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "ELEMENTS", elements)
    monkeypatch.setattr(attention_kernels, "LEAST_ROWS", 2)
    columns, laid_out = columns_of(torch.tensor(SPANS), 4), documents()
    runs = columns.runs(laid_out)
    assert sorted(run.end - run.first for run in runs) == [1, 2, 2, 4, 7, 8]
    asking, own_ones = (2, HEADS, columns.index.shape[1]), (2, groups, columns.index.shape[1])
    towards, *leaves = drawn(asking, asking, *[(2, groups, 21)] * 2, *[own_ones] * 2 * steps)
    for leaf in leaves:
        leaf.requires_grad_()
    query, keys, values, *own = leaves
    given = query, keys, values, own[:steps], own[steps:]
    out, expected = merged_attention(*given, runs, kernel), by_definition(*given, columns, laid_out.first().tolist())
    close(*(each.transpose(1, 2)[columns.depth > 0] for each in (out, expected)))
    towards = towards * (columns.depth > 0)[:, None, :, None]  # what does not count is asked nothing
    found, wanted = (torch.autograd.grad(each, leaves, towards) for each in (out, expected))
    close(found, wanted)


@by_each_kernel
def test_where_every_token_asks(kernel: Kernel) -> None:
    """The lower ones of several layers: documents are runs, padding asks nothing."""
    query, keys, values = drawn(*((2, heads, 21) for heads in (4, 2, 2)))
    laid_out = documents()
    every = Columns(torch.arange(21).expand(2, -1), torch.ones(2, 21, dtype=torch.long))
    every.depth[0, 19:] = every.depth[1, 20:] = 0
    whole = Columns(every.index, torch.ones_like(every.depth))
    for shared, columns, start_of in ((laid_out, every, laid_out.first().tolist()), (None, whole, [[0] * 21] * 2)):
        out = merged_attention(query, keys, values, [], [], runs_of_documents(shared, 2, 21), kernel)
        close(out, by_definition(query, keys, values, [], [], columns, start_of))


@by_each_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(kernel: Kernel, bad: float) -> None:
    """A fused kernel answers a query of NaN with finite numbers."""
    query, keys, values = drawn(*((1, heads, 6) for heads in (4, 2, 2)), dtype=torch.float32)
    runs = [Run(0, 0, 3, 0, 3)]
    for spoilt in (query, keys):
        spoilt[0, 1, 2, 3] = bad
        out = merged_attention(query[:, :, :3], keys, values, [], [], runs, kernel)
        assert not torch.isfinite(out).all()
        spoilt[0, 1, 2, 3] = 1.0
    assert torch.isfinite(merged_attention(query[:, :, :3], keys, values, [], [], runs, kernel)).all()


def test_a_broken_key_is_told_to_those_who_see_it_alone() -> None:
    """Two documents of four tokens, a run of two columns in each: 1 and 2, 5 and 6."""
    query, keys, values = (torch.ones(1, 2, columns, SIZE) for columns in (4, 8, 8))
    runs = [Run(0, 0, 2, 0, 1), Run(0, 2, 4, 4, 5)]
    for broken, who in ((0, [0, 1]), (2, [0, 1]), (3, []), (4, [2, 3]), (5, [2, 3]), (7, [])):
        spoilt = keys.clone()
        spoilt[0, 1, broken, 3] = float("nan")
        out = merged_attention(query, spoilt, values, [], [], runs, BLOCKS)
        told = out[0, 1].isnan().any(-1).nonzero().flatten().tolist()
        assert set(told) == set(who), broken
        assert torch.isfinite(out[0, 0]).all()  # another head


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_fused_kernel_of_this_device_is_right(dtype: torch.dtype) -> None:
    assert is_right(FLASH_CPU, CPU, dtype, 4, 2, 64) and kernel_for(CPU, dtype, 4, 2, 64) is FLASH_CPU


def test_a_kernel_that_is_missing_or_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    def off_by_one(query, keys, values, causal):
        return BLOCKS.forward(query, keys.roll(1, 2), values, causal)

    def forgets_what_was_merged(grad, query, keys, values, out, lse, causal):
        return BLOCKS.backward(grad, query, keys, values, out, BLOCKS.forward(query, keys, values, causal)[1], causal)

    wrong = [
        Kernel("missing", missing, missing),  # type: ignore[arg-type]
        Kernel("wrong forward", off_by_one, BLOCKS.backward),
        Kernel("wrong backward", BLOCKS.forward, forgets_what_was_merged),
    ]
    for kernel in wrong:
        assert not is_right(kernel, CPU, torch.float32, 4, 2, 16)
        monkeypatch.setattr(attention_kernels, "FLASH_CPU", kernel)
        kernel_for.cache_clear()
        taken = kernel_for(CPU, torch.float32, 4, 2, 16)
        assert taken.forward is BLOCKS.forward and taken.backward is BLOCKS.backward
    kernel_for.cache_clear()


def test_keys_that_are_copied_for_each_head_are_summed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "_cuda_forward", BLOCKS.forward)
    monkeypatch.setattr(attention_kernels, "_cuda_backward", BLOCKS.backward)
    assert is_right(attention_kernels.FLASH_CUDA_COPYING, CPU, torch.float32, 6, 2, 16)


@by_each_kernel
def test_autocast_does_not_round_scores(kernel: Kernel) -> None:
    """Inside autocast as without it, to the bit: large scores rounded to bfloat16 are units apart."""
    shapes = [(1, 4, 9), *((1, 2, width) for width in (12, 12, 9, 9))]
    leaves = [(4 * each).bfloat16().requires_grad_() for each in drawn(*shapes, dtype=torch.float32)]
    query, keys, values, own_key, own_value = leaves
    runs = [Run(0, 0, 9, 0, 3)]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = merged_attention(query, keys, values, [own_key], [own_value], runs, kernel)
        found.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):  # and the trial compares with what is not rounded
        rounded = Kernel(
            "rounded", lambda q, k, v, causal: BLOCKS.forward(q, k.bfloat16().float(), v, causal), kernel.backward
        )
        assert is_right(kernel, CPU, torch.float32, 4, 2, 16) and not is_right(rounded, CPU, torch.float32, 4, 2, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_fused_kernel_of_a_gpu_is_right(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    assert is_right(attention_kernels.FLASH_CUDA_COPYING, device, dtype, heads=32, groups=8, size=128)
    assert kernel_for(device, dtype, 32, 8, 128) is not attention_kernels.FLASH_CUDA_COPYING
