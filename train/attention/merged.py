"""The unroll's attention: a query sees step-0 keys of its document and later keys of its column, under one softmax.

    scores of a query     s_1 ... s_t   prefix, one kernel call       out_p, lse_p = log sum exp of its scores
                          o_1 ... o_k   own column, one number each
    merged                L = log(exp(lse_p) + sum exp(o_j)),   out = exp(lse_p - L) out_p + sum exp(o_j - L) v_j

No [T, T] or [T, k*T] matrix exists. PyTorch's kernels give their log-sum-exp no gradient, so the backward pass is
written out here. The kernels' own backward passes suffice: given the *merged* output and L instead of their own, they
return the gradients of the merged softmax for their keys. The gradient of every score is

    ds = exp(s - L) (dout . v - dout . out)

and does not depend on how the other scores were computed.

Counted columns come in *runs* of consecutive ones. A run sees all keys of its document before it, and its own keys
causally. Kernels align the causal mask at the top left, so this takes two calls, merged in the same way:

    document      0 1 2 3 4 5 6 7
    run 4 5 6     # # # # *                 # one call without a mask
                  # # # # * *               * one causal call over a square
                  # # # # * * *

Shapes: B rows, T tokens, C columns, A query heads, G key/value heads, R = A/G, D head dimension, n queries, m keys.
"""

from collections.abc import Iterator, Sequence

import torch

from draftsmith.models.alignment import Run
from draftsmith.train.attention.kernels import Kernel

Place = tuple[slice, slice, slice]  # in [B, heads, T or C, D]


def merged_attention(
    query_BACD: torch.Tensor,
    prefix_keys_BGTD: torch.Tensor,
    prefix_values_BGTD: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    runs: Sequence[Run],
    kernel: Kernel,
) -> torch.Tensor:
    """The attention's output [B, A, C, D]. It is zero for columns in no run, unless they have own keys.

    Args:
        own_keys, own_values: of each column, one [B, G, C, D] for each of the steps 1..k.
    """
    # Autocast would round scores that are needed in float32.
    with torch.autocast(query_BACD.device.type, enabled=False):
        return _Merged.apply(query_BACD, prefix_keys_BGTD, prefix_values_BGTD, runs, kernel, *own_keys, *own_values)  # type: ignore[return-value]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, keys, values, runs, kernel, *own):  # type: ignore[override]
        rows, heads, columns, size = query.shape
        groups = keys.shape[1]
        # In memory the heads of a column are adjacent, as projections write and read them.
        out = query.new_zeros(rows, columns, heads, size).transpose(1, 2)
        total = query.new_full((rows, heads, columns), float("-inf"), dtype=_precise(query))
        # Fused kernels may turn NaN into finite numbers, but a step that is not finite must be noticed.
        of_queries, broken_keys = _zero_or_nan(query), _zero_or_nan(keys).isnan().cumsum(-1)  # [B, G, T] so far
        for run in runs:
            mine = _queries(run)
            (square, _), *earlier = _calls(run)
            attended, lse = kernel.forward(query[mine], keys[square], values[square], True)
            for place, _ in earlier:
                others, its_lse = kernel.forward(query[mine], keys[place], values[place], False)
                both = torch.logaddexp(lse, its_lse)
                attended = attended * (lse - both).exp()[..., None] + others * (its_lse - both).exp()[..., None]
                lse = both
            seen = broken_keys[mine[0], :, run.before + run.end - run.first - 1]  # [1, G]
            if run.start:
                seen = seen - broken_keys[mine[0], :, run.start - 1]
            of_keys = torch.zeros_like(seen, dtype=total.dtype).masked_fill_(seen > 0, float("nan"))
            told = of_queries[mine] + of_keys.repeat_interleave(heads // groups, dim=1)[..., None]
            out[mine], total[mine] = attended + told[..., None].to(attended.dtype), lse + told.to(lse.dtype)
        own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
        if own:
            grouped = query.unflatten(1, (groups, -1))  # [B, G, R, C, D]
            scores = [_dot(grouped, key[:, :, None]).flatten(1, 2) * size**-0.5 for key in own_keys]  # [B, A, C] each
            merged = torch.stack([total, *scores]).logsumexp(0)
            sum_of = out * (total - merged).exp()[..., None]
            sum_of = sum_of.unflatten(1, (groups, -1))
            for score, value in zip(scores, own_values, strict=True):
                weight = (score - merged).exp().unflatten(1, (groups, -1))[..., None]
                sum_of = torch.addcmul(sum_of, weight, value[:, :, None].to(weight.dtype))
            out, total = sum_of.flatten(1, 2).to(query.dtype), merged
        ctx.save_for_backward(query, keys, values, out, total, *own)
        ctx.runs, ctx.kernel = runs, kernel
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        query, keys, values, out, total, *own = ctx.saved_tensors
        grad = grad.to(query.dtype)
        sums = [torch.zeros_like(each, dtype=_precise(each)) for each in (query, keys, values)]
        grad_query, grad_keys, grad_values = sums  # over several calls
        for run in ctx.runs:
            mine = _queries(run)
            for place, causal in _calls(run):
                of_query, of_keys, of_values = ctx.kernel.backward(
                    grad[mine], query[mine], keys[place], values[place], out[mine], total[mine], causal
                )
                grad_query[mine] += of_query
                grad_keys[place] += of_keys
                grad_values[place] += of_values
        grad_query, grad_keys, grad_values = (each.to(query.dtype) for each in sums)
        own_grads: list[torch.Tensor] = []
        if own:
            own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
            groups, scale = keys.shape[1], query.shape[-1] ** -0.5
            grouped, grad_grouped = (x.unflatten(1, (groups, -1)) for x in (query, grad))  # [B, G, R, C, D]
            total = total.unflatten(1, (groups, -1))  # [B, G, R, C]
            mean = _dot(grad_grouped, out.unflatten(1, (groups, -1)))
            of_query = grad_query.unflatten(1, (groups, -1))  # a view, to which own keys add their part
            of_keys, of_values = [], []
            for key, value in zip(own_keys, own_values, strict=True):
                weight = (_dot(grouped, key[:, :, None]) * scale - total).exp()
                of_score = weight * (_dot(grad_grouped, value[:, :, None]) - mean) * scale
                weight, of_score = weight[..., None].to(query.dtype), of_score[..., None].to(query.dtype)
                of_query.addcmul_(of_score, key[:, :, None])
                of_keys.append(_over_heads(of_score * grouped))
                of_values.append(_over_heads(weight * grad_grouped))
            own_grads = [*of_keys, *of_values]
        return grad_query, grad_keys, grad_values, None, None, *own_grads


def _queries(run: Run) -> Place:
    return slice(run.row, run.row + 1), slice(None), slice(run.first, run.end)


def _calls(run: Run) -> Iterator[tuple[Place, bool]]:
    """(place of the keys, whether causal) of each kernel call."""
    row = slice(run.row, run.row + 1), slice(None)
    yield (*row, slice(run.before, run.before + run.end - run.first)), True
    if run.before > run.start:
        yield (*row, slice(run.start, run.before)), False


def _zero_or_nan(states: torch.Tensor) -> torch.Tensor:
    """Zeros without the last dimension, or NaN where a number is not finite."""
    return 0 * states.sum(-1, dtype=_precise(states))


def _precise(states: torch.Tensor) -> torch.dtype:
    """The precision of sums over scores."""
    return torch.promote_types(states.dtype, torch.float32)


def _over_heads(parts_BGRCD: torch.Tensor) -> torch.Tensor:
    """Sum over the heads of a group, [B, G, C, D]."""
    # Summing a single head would take longer than its products.
    return parts_BGRCD.squeeze(2) if parts_BGRCD.shape[2] == 1 else parts_BGRCD.sum(2)


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Dot products over the last dimension."""
    return (one * other).sum(-1, dtype=_precise(one))
