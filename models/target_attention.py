"""A target's attention where transformers' own does more than it must: over draft trees and over packed documents.

**Trees.** Where a mask is given, transformers copies each key head for all its query heads, in every layer of every
verification. `attend_grouped` makes the query heads of a group further queries of one key head instead.

**Documents.** Each is read by itself, with the kernel that it would use alone. transformers calls a registered
attention function like flash attention: without a mask, and with the window's length in sliding layers. So no [T, T]
tensor is made for a row of T tokens, and nothing is computed between two documents:

    document     a a a b b          computed    a
                                                a a
                                                a a a
                                                      b
                                                      b b

Shapes: B rows, A query heads, G key/value heads, T tokens, N nodes, L cached and new columns, D head dimension.
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
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from draftsmith.models.alignment import Documents
from draftsmith.models.layers import grouped_attention

_TREES, _DOCUMENTS = "draftsmith_trees", "draftsmith_documents"


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
    return {config._attn_implementation for config in _configs(decoder)} in ({"sdpa"}, {_TREES})


def attend_grouped(decoder: nn.Module) -> None:
    """From now on, passes with a mask copy no keys, if all layers use PyTorch's attention."""
    if is_possible(decoder):
        AttentionInterface.register(_TREES, _grouped)
        AttentionMaskInterface.register(_TREES, sdpa_mask)
        for config in _configs(decoder):
            config._attn_implementation = _TREES


def _grouped(
    module: nn.Module,
    query_BAND: torch.Tensor,
    key_BGLD: torch.Tensor,
    value_BGLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """[B, N, A, D] attended values."""
    alike = query_BAND.shape[1] == key_BGLD.shape[1] or others.get("position_bias") is not None
    if attention_mask is None or attention_mask.shape[1] > 1 or alike:
        return sdpa_attention_forward(
            module, query_BAND, key_BGLD, value_BGLD, attention_mask, scaling=scaling, **others
        )
    attended = grouped_attention(query_BAND, key_BGLD, value_BGLD, attention_mask[:, 0], scaling)
    return attended.transpose(1, 2).contiguous(), None


@contextmanager
def document_attention(decoder: nn.Module, documents: Documents) -> Iterator[None]:
    """While active, the decoder, called without a mask, keeps these documents apart."""
    AttentionInterface.register(_DOCUMENTS, _attention)
    token = _READING.set(_Reading(documents))
    configs = [(config, config._attn_implementation) for config in _configs(decoder)]
    try:
        for config, _ in configs:
            config._attn_implementation = _DOCUMENTS
        yield
    finally:
        for config, before in configs:
            config._attn_implementation = before
        _READING.reset(token)


def _configs(decoder: nn.Module) -> list[Any]:
    configs = (getattr(module, "config", None) for module in decoder.modules())
    return list({id(each): each for each in configs if hasattr(each, "_attn_implementation")}.values())
