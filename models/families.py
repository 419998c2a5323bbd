"""The attention of a target's layers, and whether drafting supports it: by its config before the weights are loaded
(`attention_kinds`), and by trying its decoder afterwards (`tried_attention`).

Drafting needs a decoder that keeps only keys and values of tokens, so rejected ones can be dropped, and that follows a
mask. transformers' cache for a config names the kind of every layer.

Shapes: Q queries, K keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from draftsmith.recipes.errors import UserError

# Cache layers of transformers that can drop rejected tokens. A dummy is empty: its layer reads an earlier one's keys.
_FULL, _SLIDING, _DUMMY = "DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"
# Families with a running state that transformers' cache does not show.
_RECURRENT_FAMILIES = {"rwkv", "xlstm"}


@dataclass(frozen=True)
class AttentionKinds:
    """The windows of a target's layers."""

    window: int | None  # a sliding layer sees this many tokens, the query included; None: no layer slides
    mixed: bool  # some layers slide, others see everything

    def masks(self, seen: torch.Tensor, distance: torch.Tensor | None, dtype: torch.dtype) -> Any:
        """Additive masks for the decoder: one, or one per kind of layer if they are mixed.

        A sliding layer sees key j from query i iff `seen` and position i - position j < window.

        Args:
            seen: bool [..., Q, K], allowed by causality and the tree.
            distance: int [..., Q, K], position of the query minus position of the key; needed where there is a window.
        """
        if self.window is None:
            return _additive(seen, dtype)
        assert distance is not None
        sliding = _additive(seen & (distance < self.window), dtype)
        if not self.mixed:
            return sliding
        return {"full_attention": _additive(seen, dtype), "sliding_attention": sliding}


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where allowed, the lowest finite number elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


def attention_kinds(config: Any) -> AttentionKinds:
    """The attention of a target's layers by its config; `tried_attention` checks the decoder.

    Raises:
        UserError: draft trees cannot be verified: an encoder, layers that keep more than keys and values, attention in
            chunks, windows of several lengths.
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
    except (KeyError, AttributeError, ValueError):  # kinds of layers that transformers' cache does not know
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


# Trials use a window this long, and so many tokens.
TRIED_WINDOW, TRIED_TOKENS = 4, 12


@torch.no_grad()
def tried_attention(model: Any) -> AttentionKinds:
    """The attention of a loaded target's layers, with or without the window that its config names.

    A config may name a window that its family's code ignores (Llama's does); masking by it would change the model. So
    the decoder, its window shortened, reads a few tokens with its own masks and with ours.

    Raises:
        UserError: as `attention_kinds`; or the decoder's own masks match neither.
    """
    kinds = attention_kinds(model.config)
    if kinds.window is None:
        return kinds
    decoder, name = model.get_decoder(), type(model).__name__
    device = model.get_input_embeddings().weight.device
    positions = torch.arange(TRIED_TOKENS, device=device)
    ids = positions % model.get_input_embeddings().weight.shape[0]
    distance = positions[:, None] - positions

    def read(mask: Any) -> torch.Tensor:
        inputs = {"input_ids": ids[None], "attention_mask": mask, "position_ids": positions[None], "use_cache": False}
        return decoder(**inputs).last_hidden_state.float()

    def by_masks_of(tried: AttentionKinds) -> torch.Tensor:
        return read(tried.masks((distance >= 0)[None, None], distance, model.dtype))

    full, sliding = AttentionKinds(None, mixed=False), AttentionKinds(TRIED_WINDOW, mixed=False)
    found: list[tuple[float, AttentionKinds]] = []
    moved = 0.0
    try:
        with shortened_window(decoder, model.config.get_text_config(decoder=True), kinds.window):
            own, unmasked = read(None), by_masks_of(full)
            moved = (by_masks_of(sliding) - unmasked).norm().item()
            found.append(((unmasked - own).norm().item(), full))
            found.append(((by_masks_of(replace(kinds, window=TRIED_WINDOW)) - own).norm().item(), kinds))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
        if not found:  # otherwise it rejects masks by kind of layer, and full attention remains
            raise UserError(
                f"target.model: {name} cannot verify draft trees: {type(error).__name__}: {error}"
            ) from error
    off, best = min(found, key=lambda each: each[0])
    if not off <= 0.1 * moved:
        raise UserError(
            f"target.model: {name} masks its layers neither by the window of {kinds.window} tokens that its config "
            f"names nor without one (its states are off by {off:.3g} at best; {moved:.3g} is what a window changes), "
            "so draft trees cannot be masked as it does"
        )
    return best


@contextmanager
def shortened_window(decoder: nn.Module, config: Any, window: int) -> Iterator[None]:
    """Replaces windows of length `window` by `TRIED_WINDOW` in the decoder's configs and layers."""
    modules = list(decoder.modules())
    configs = {id(each): each for each in (config, *(getattr(module, "config", config) for module in modules))}
    holders: list[Any] = [
        each for each in (*modules, *configs.values()) if getattr(each, "sliding_window", None) == window
    ]
    try:
        for holder in holders:
            holder.sliding_window = TRIED_WINDOW
        yield
    finally:
        for holder in holders:
            holder.sliding_window = window


def layer_configs(config: Any) -> list[Any]:
    """The text config of each layer. They differ in Gemma 4: layers with full attention have wider heads."""
    # Older releases of transformers have one config for all layers.
    return list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)


def scaled_logits(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., V] after the scaling and soft-capping of their family."""
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
