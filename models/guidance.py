"""Classifier-free guidance as a part of the target's law (target.guidance; Ho and Salimans 2022, arXiv 2207.12598).

Image models read a text twice: with its condition (the caption), and with a null token in the place of each of the
condition's tokens. Their next-token logits are combined:

    conditional      c    <bos>  a       red     seven   <image>  17  3  40        logits = u + scale (c - u)
    unconditional    u    <bos>  <null>  <null>  <null>  <image>  17  3  40

All words give way, those of the chat template, too. Both texts are equally long, so one draft tree, one acceptance and
one length serve both. The head is linear, so it is the final states that are combined: what the head reads, training's
teacher and EAGLE-1's feature (state L) are those of the guided law. Other states are the conditional text's.

The unconditional text's keys and values are further heads of the same tokens in the cache, so whatever keeps, drops or
moves cached tokens knows nothing of them:

    keys   [2B, heads, T, D]  in the decoder       [B, 2 heads, T, D]  in the cache

Shapes: B rows, T tokens, H hidden size, D of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from draftsmith.models.alignment import Documents
from draftsmith.models.prompt import PlacedInsert
from draftsmith.models.target import Target, TargetStates


class GuidedTarget(Target):
    """A target that reads every text twice. A `scale` of 1 is no guidance, 0 ignores the condition."""

    def __init__(
        self, model: Any, unconditional_V: torch.Tensor, scale: float, capture_layers: Sequence[int] | None = None
    ):
        self.scale = scale
        self.unconditional_V = unconditional_V.to(model.get_output_embeddings().weight.device)
        super().__init__(model, capture_layers)

    def _guided(self, conditional: torch.Tensor, unconditional: torch.Tensor) -> torch.Tensor:
        wide = unconditional.float()
        return (wide + self.scale * (conditional.float() - wide)).to(conditional.dtype)

    def _with_guided_end(self, captured: torch.Tensor, capture: Sequence[int], last: torch.Tensor) -> torch.Tensor:
        """The captured states with the guided final state, if state L is among them."""
        if self.num_layers not in capture:
            return captured
        return torch.cat((captured[..., : -self.hidden_size], last), dim=-1)

    def run_decoder(
        self, capture: Sequence[int], cache: DynamicCache, **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = inputs.pop("input_ids")
        rows, fresh, twins = len(ids), not cache.layers, DynamicCache()
        twins.layers = [_TwinLayer(layer) for layer in cache.layers]  # type: ignore[arg-type]
        both = {name: _twice(value) for name, value in inputs.items()}
        ids = torch.cat((ids, self.unconditional_V[ids]))
        last, captured = super().run_decoder(capture, twins, input_ids=ids, **both)
        if fresh:
            layers: list[Any] = twins.layers
            for layer in layers:
                layer.keys, layer.values = _as_heads(layer.keys), _as_heads(layer.values)
            cache.layers = layers
        last = self._guided(last[:rows], last[rows:])
        return last, None if captured is None else self._with_guided_end(captured[:rows], capture, last)

    @torch.no_grad()
    def states(
        self,
        input_ids_BT: torch.Tensor,
        capture: Sequence[int] | None = None,
        documents: Documents | None = None,
        inserts: Sequence[PlacedInsert] = (),
    ) -> TargetStates:
        layers = self.capture_layers if capture is None else capture
        conditional = super().states(input_ids_BT, layers, documents, inserts)
        unconditional = super().states(self.unconditional_V[input_ids_BT], (), documents, inserts)
        last = self._guided(conditional.last, unconditional.last)
        return TargetStates(self._with_guided_end(conditional.captured, layers, last), last)

    def captured_states(
        self, input_ids_BT: torch.Tensor, capture: Sequence[int], inserts: Sequence[PlacedInsert] = ()
    ) -> torch.Tensor:
        if self.num_layers in capture:
            return self.states(input_ids_BT, capture, None, inserts).captured
        return super().captured_states(input_ids_BT, capture, inserts)


class _TwinLayer(DynamicLayer):
    """A cache layer for 2B rows over one for B rows with twice the heads."""

    def __init__(self, inner: DynamicLayer):
        super().__init__()
        self.inner = inner
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.inner.update(_as_heads(key_states), _as_heads(value_states), *args, **kwargs)
        return _as_rows(keys), _as_rows(values)

    def get_seq_length(self) -> int:
        return self.inner.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.inner.get_mask_sizes(query_length)


def _as_heads(states: torch.Tensor) -> torch.Tensor:
    """[2B, heads, T, D] -> [B, 2 heads, T, D]"""
    return torch.cat(states.chunk(2), dim=1)


def _as_rows(states: torch.Tensor) -> torch.Tensor:
    """[B, 2 heads, T, D] -> [2B, heads, T, D]"""
    return torch.cat(states.chunk(2, dim=1))


def _twice(value: Any) -> Any:
    """A decoder's argument for both texts. Masks may be one for each kind of layer."""
    if isinstance(value, dict):
        return {name: _twice(each) for name, each in value.items()}
    return torch.cat((value, value)) if isinstance(value, torch.Tensor) else value
