"""A target's attention over packed documents: each by itself, with the kernel that it would use alone.

transformers calls a registered attention function like flash attention: without a mask, and with the window's length in
sliding layers. So no [T, T] tensor is made for a row of T tokens, and nothing is computed between two documents:

    document     a a a b b          computed    a
                                                a a
                                                a a a
                                                      b
                                                      b b

Shapes: B rows, A query heads, G key/value heads, T tokens, D head dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from draftsmith.models.alignment import Documents

_NAME = "draftsmith_documents"


@dataclass(frozen=True)
class _Reading:
    """The documents of the current forward, and its masks."""

    documents: Documents
    masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by tokens and window

    def mask(self, tokens: int, window: int | None) -> torch.Tensor | None:
        """[1, 1, tokens, tokens] true where a token is seen; None: plain causal."""
        if window is None or tokens <= window:
            return None
        if (tokens, window) not in self.masks:
            column = torch.arange(tokens, device=self.documents.position.device)
            distance = column[:, None] - column
            self.masks[tokens, window] = ((distance >= 0) & (distance < window))[None, None]
        return self.masks[tokens, window]


_READING: ContextVar[_Reading] = ContextVar("_READING")


def _attention(
    module: nn.Module,
    query_BATD: torch.Tensor,
    key_BGTD: torch.Tensor,
    value_BGTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[B, T, A, D] attended values, zeros in padding."""
    if attention_mask is not None:
        raise ValueError("document attention takes no mask")
    reading = _READING.get()
    rows, heads, tokens, _ = query_BATD.shape
    attended = query_BATD.new_zeros(rows, tokens, heads, value_BGTD.shape[3])
    for row, start, length in reading.documents.places:
        here = slice(row, row + 1), slice(None), slice(start, start + length)
        mask = reading.mask(length, sliding_window)
        found, _ = sdpa_attention_forward(module, query_BATD[here], key_BGTD[here], value_BGTD[here], mask, **others)
        attended[row, start : start + length] = found[0]
    return attended, None


def is_possible(decoder: nn.Module) -> bool:
    """Whether all layers use PyTorch's attention: others (soft caps, sinks) have their own formulas."""
    return {config._attn_implementation for config in _configs(decoder)} == {"sdpa"}


@contextmanager
def document_attention(decoder: nn.Module, documents: Documents) -> Iterator[None]:
    """While active, the decoder, called without a mask, keeps these documents apart."""
    AttentionInterface.register(_NAME, _attention)
    token = _READING.set(_Reading(documents))
    configs = [(config, config._attn_implementation) for config in _configs(decoder)]
    try:
        for config, _ in configs:
            config._attn_implementation = _NAME
        yield
    finally:
        for config, before in configs:
            config._attn_implementation = before
        _READING.reset(token)


def _configs(decoder: nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in decoder.modules())
    return list({id(each): each for each in configs if hasattr(each, "_attn_implementation")}.values())
