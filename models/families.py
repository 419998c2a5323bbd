"""The attention of a target's layers by its config, and whether drafting supports it. Once the weights are loaded,
`models.target_trials` tries the decoder.

Drafting needs a decoder that keeps only keys and values of tokens, so rejected ones can be dropped, and that follows a
mask. transformers' cache for a config names the kind of every layer.

Shapes: Q queries, K keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.base import MOST_COUNTED

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


def usable_positions(config: Any) -> int:
    """How many tokens a decoder of this text config reads, as it was trained to and each alike.

    Learnt positions end at max_position_embeddings. Rotations go on, but nobody trained the model on them, and
    `dynamic` ones begin to change there. `longrope` ones change earlier (`changing_rotation`).
    """
    # Families without such a key (BLOOM, MPT) bias attention by distance, at any length.
    most = getattr(config, "max_position_embeddings", None) or MOST_COUNTED
    return min(most, changing_rotation(config) or most)


def positions_text(config: Any) -> str:
    """`usable_positions`, for messages: where they end before max_position_embeddings, with the reason."""
    usable = usable_positions(config)
    reason = " (behind them its longrope rotation changes for all tokens)" * (usable == changing_rotation(config))
    return f"{usable:,} positions{reason}"


def changing_rotation(config: Any) -> int | None:
    """The length, in tokens, behind which the target rotates all tokens by other frequencies; None: it never does.

    transformers takes the frequencies of a whole forward from its last position, and leaves cached keys as they are. A
    row's states would then depend on longer rows beside it, and a token's on drafted ones behind it.
    """
    borders = [
        int(rope["original_max_position_embeddings"])
        for rope in rotations(config)
        if rope["rope_type"] == "longrope" and any(rope.get(f"long_{x}") != rope.get(f"short_{x}") for x in _BY_LENGTH)
    ]
    return min(borders, default=None)


_BY_LENGTH = ("factor", "mscale")  # of the frequencies, and PhiMoE's of the states


def rotations(config: Any) -> list[dict[str, Any]]:
    """Rotary parameters of a text config: one set, or one for each type of attention that rotates."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if each]


def attention_kinds(config: Any) -> AttentionKinds:
    """The attention of a target's layers by its config; `target_trials.tried_attention` checks the decoder.

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
    except (KeyError, AttributeError, ValueError, RuntimeError):  # layers that transformers' cache does not know
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


def auto_class(config: Any) -> Any:
    """transformers' class that loads a target with this config: the causal LM's, if there is one.

    Emu3's causal LM is a part of its whole model, with other names in a checkpoint of its own.
    """
    text_only = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    text_only &= not hasattr(config, "vq_config")
    return AutoModelForCausalLM if text_only else AutoModelForImageTextToText


def layer_configs(config: Any) -> list[Any]:
    """The text config of each layer. They differ in Gemma 4: layers with full attention have wider heads."""
    return list(config.per_layer_config)


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
