"""What the config of a target says before its weights are loaded: how its layers attend, and whether it can be drafted
for at all.

Drafting needs two things of a target: a decoder that keeps keys and values, and nothing else, of every token, so that
rejected tokens can be forgotten; and a mask that says which of them a token sees. What a layer keeps is asked of
transformers itself: the cache that it would make for this config names the kind of every layer.

Shapes: Q queries, K keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from draftsmith.recipes.errors import UserError

# Layers of transformers' caches that can forget a rejected token. A dummy keeps nothing: its layer reads the keys and
# values of an earlier one.
_FULL, _SLIDING, _DUMMY = "DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"
# Families that keep a running state while transformers' cache takes their configs for ordinary ones.
_RECURRENT_FAMILIES = {"rwkv", "xlstm"}


@dataclass(frozen=True)
class AttentionKinds:
    """Which earlier tokens the layers of a target see."""

    window: int | None  # a sliding layer sees this many tokens, the asking one included; None: no layer slides
    mixed: bool  # some layers slide, others see everything

    def masks(self, seen: torch.Tensor, distance: torch.Tensor, dtype: torch.dtype) -> Any:
        """Additive masks as the decoder takes them: one, or one per kind of layer where kinds are mixed.

        A sliding layer sees key j from query i iff `seen` and position i - position j < window.

        Args:
            seen: bool [..., Q, K], what causality and the tree allow.
            distance: int [..., Q, K], position of the query minus position of the key.
        """
        if self.window is None:
            return _additive(seen, dtype)
        sliding = _additive(seen & (distance < self.window), dtype)
        if not self.mixed:
            return sliding
        return {"full_attention": _additive(seen, dtype), "sliding_attention": sliding}


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where allowed, the lowest finite number elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def attention_kinds(config: Any) -> AttentionKinds:
    """How the layers of a target with this config attend.

    Raises:
        UserError: by name, what no draft tree can be verified with: an encoder, layers that keep a running state or
            anything else but keys and values, attention in chunks, windows of several lengths.
    """
    if config.is_encoder_decoder:
        raise UserError(
            f"target.model: {config.model_type} is an encoder-decoder; drafters are trained for decoders alone"
        )
    config = config.get_text_config(decoder=True)
    name = config.model_type
    types: list[str] = list(getattr(config, "layer_types", None) or ())
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except (KeyError, AttributeError, ValueError):  # kinds of layers that transformers' cache has no word for
        layers = []
    kinds = [type(layer).__name__ for layer in layers]
    strange = {
        types[i] if i < len(types) else kind
        for i, kind in enumerate(kinds)
        if kind not in (_FULL, _SLIDING, _DUMMY) or types[i : i + 1] == ["chunked_attention"]
    }
    if not layers or name in _RECURRENT_FAMILIES:
        strange = set(types) or {"recurrent" if name in _RECURRENT_FAMILIES else "unknown"}
    if strange:
        raise UserError(
            f"target.model: {name} has {', '.join(sorted(strange))} layers; draft trees are verified by full and "
            "sliding-window attention alone: other layers keep a state that cannot be rolled back when a drafted token "
            "is rejected, or group tokens in ways not known here"
        )
    windows = {layer.sliding_window for layer, kind in zip(layers, kinds, strict=True) if kind == _SLIDING}
    if len(windows) > 1:
        raise UserError(f"target.model: {name} has windows of several lengths, {sorted(windows)}; one is known here")
    return AttentionKinds(min(windows, default=None), mixed=bool(windows) and _FULL in kinds)


def scaled_logits(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """What a family does to its logits [..., V] after the head, in its own order."""
    divisor = getattr(config, "logits_scaling", None)  # Granite
    if divisor is not None:
        # HyperCLOVA X multiplies by a value of the same name.
        logits = logits * divisor if config.model_type == "hyperclovax" else logits / divisor
    factor = getattr(config, "logit_scale", None)  # Cohere
    if factor is not None:
        logits = logits * factor
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
