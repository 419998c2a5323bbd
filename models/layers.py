"""The drafters' building blocks: rotary positions, grouped-query attention parts, gated MLP.

Attention is split into its projections (`queries`, `keys_values`, `output`): training and decoding share them and
differ in the keys that a query sees.

Shapes: B rows, C columns, A query heads, G key/value heads, D head dimension, W input width, H hidden size.
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN, SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def rotary(rope_parameters: dict[str, Any], head_dim: int, max_position_embeddings: int) -> LlamaRotaryEmbedding:
    """Rotary tables of whole heads (`models.rotation`)."""
    shape: dict[str, Any] = {"hidden_size": head_dim, "num_attention_heads": 1, "head_dim": head_dim}
    # A copy, which transformers completes.
    given = dict(rope_parameters)
    config = LlamaConfig(**shape, max_position_embeddings=max_position_embeddings, rope_parameters=given)
    return LlamaRotaryEmbedding(config)


def rotate(states_BACD: torch.Tensor, cos_BCD: torch.Tensor, sin_BCD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of queries or keys in their precision, half-split layout (Llama's), equal halves of cos, sin."""
    if not torch.is_grad_enabled():
        return _turned(states_BACD, cos_BCD[:, None], sin_BCD[:, None], 1)
    return _Rotate.apply(states_BACD, cos_BCD[:, None], sin_BCD[:, None])  # type: ignore[return-value]


class _Rotate(torch.autograd.Function):
    """first cos - second sin, second cos + first sin; in half of autograd's time."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _turned(states, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, way: Literal[1, -1]) -> torch.Tensor:
    """`states` rotated by the angle, or (-1) back."""
    half = states.shape[-1] // 2
    turned = states * cos
    turned[..., :half].addcmul_(states[..., half:], sin[..., :half], value=-way)
    turned[..., half:].addcmul_(states[..., :half], sin[..., half:], value=way)
    return turned.to(states.dtype)


def grouped_attention(
    query_BACD: torch.Tensor,
    keys_BGLD: torch.Tensor,
    values_BGLD: torch.Tensor,
    mask_BCL: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of A query heads over G key/value heads of L columns: [B, A, C, D].

    The heads of a group become further queries of its key head, so no key is copied.

    Args:
        mask_BCL: true where seen, or added to the scores.
        scale: of the scores; None: 1 / sqrt(D).
    """
    heads, columns = query_BACD.shape[1:3]
    groups = keys_BGLD.shape[1]
    shared = heads // groups
    query = query_BACD.reshape(len(query_BACD), groups, shared * columns, -1)
    mask = None if mask_BCL is None else mask_BCL.repeat(1, shared, 1)[:, None]  # [B, 1, shared * C, L]
    attended = functional.scaled_dot_product_attention(query, keys_BGLD, values_BGLD, attn_mask=mask, scale=scale)
    return attended.reshape(
        *query_BACD.shape[:3], -1
    )  # a GPU's kernels put the heads innermost, which no view can undo


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The precision of products of `dtype`: autocast's if it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def for_products(x: torch.Tensor) -> torch.Tensor:
    """`x` in autocast's precision, for inputs of several products: each would otherwise cast and keep its own copy."""
    return x.to(product_dtype(x.device, x.dtype))


class _RmsNorm(torch.autograd.Function):
    """x / sqrt(mean x^2 + eps) * weight. Backward recomputes x / sqrt(...), which autograd would keep beside x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # type: ignore[override]
        scale = (torch.linalg.vecdot(x, x)[..., None] / x.shape[-1] + eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight
        along = torch.linalg.vecdot(grad, normed)[..., None] / x.shape[-1]  # stretching x changes nothing
        return grad.sub_(normed.mul_(along)).mul_(scale), of_weight, None


class RmsNorm(nn.RMSNorm):
    """PyTorch's RMSNorm, with our own gradient on a CPU, where PyTorch's keeps every intermediate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_trained = torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        if not is_trained:
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _RmsNorm.apply(x, self.weight, eps)  # type: ignore[return-value]


class Attention(nn.Module):
    """Projections of grouped-query attention from inputs of width W; `bias`: for queries, keys and values."""

    def __init__(
        self, input_size: int, hidden_size: int, heads: int, key_value_heads: int, head_dim: int, bias: bool = False
    ):
        super().__init__()
        self.heads, self.key_value_heads, self.head_dim = heads, key_value_heads, head_dim
        self.q_proj = nn.Linear(input_size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)

    def queries(self, x_BCW: torch.Tensor, cos_BCD: torch.Tensor, sin_BCD: torch.Tensor) -> torch.Tensor:
        """[B, A, C, D], rotated."""
        return rotate(self._split(self.q_proj(x_BCW), self.heads), cos_BCD, sin_BCD)

    def keys_values(
        self, x_BCW: torch.Tensor, cos_BCD: torch.Tensor, sin_BCD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (rotated) and values, each [B, G, C, D]."""
        keys = rotate(self._split(self.k_proj(x_BCW), self.key_value_heads), cos_BCD, sin_BCD)
        return keys, self._split(self.v_proj(x_BCW), self.key_value_heads)

    def output(self, attended_BACD: torch.Tensor) -> torch.Tensor:
        return self.o_proj(attended_BACD.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)  # [B, heads, C, D]


class _GatedProduct(torch.autograd.Function):
    """(silu(gate) * up) weight^T. Backward recomputes silu(gate) and its product with up, which autograd would keep."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up, weight)
        return functional.linear(functional.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        activated, of_weight = functional.silu(gate), None
        if ctx.needs_input_grad[2]:
            of_weight = (grad.flatten(0, -2).T @ (activated * up).flatten(0, -2)).to(weight.dtype)
        of_product = grad @ weight.to(grad.dtype)
        of_up = activated.mul_(of_product)
        return torch.ops.aten.silu_backward(of_product.mul_(up), gate), of_up, of_weight


class _Down(nn.Linear):
    """A module of its own, because wrappers gather a sharded weight when its module is called."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor, activation: nn.Module) -> torch.Tensor:  # type: ignore[override]
        if torch.is_grad_enabled() and isinstance(activation, (nn.SiLU, SiLUActivation)):
            return _GatedProduct.apply(gate, up, self.weight)  # type: ignore[return-value]
        return super().forward(activation(gate) * up)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = _Down(intermediate_size, hidden_size, bias=False)
        self.activation = ACT2FN[activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = for_products(x)
        return self.down_proj(self.gate_proj(x), self.up_proj(x), self.activation)
