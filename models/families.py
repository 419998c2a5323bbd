"""The attention of a target's layers by its config, and whether drafting supports it.

Drafting needs a decoder that keeps only keys and values of tokens, so rejected ones can be dropped, and that follows a
mask. transformers' cache for a config names the kind of every layer; `models.target_trials` tries the loaded decoder.

Shapes: Q queries, K keys.
"""

from dataclasses import dataclass
from itertools import zip_longest
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

        Args:
            seen: bool [..., Q, K], allowed by causality and the tree.
            distance: int [..., Q, K], position of the query minus position of the key; needed where there is a window.
        """

        def additive(allowed: torch.Tensor) -> torch.Tensor:
            empty = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            return empty.masked_fill_(~allowed, torch.finfo(dtype).min)

        if self.window is None:
            return additive(seen)
        assert distance is not None
        sliding = additive(seen & (distance < self.window))
        return {"full_attention": additive(seen), "sliding_attention": sliding} if self.mixed else sliding


def usable_positions(config: Any) -> int:
    """How many tokens a decoder of this text config reads: to max_position_embeddings, or where rotations change."""
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
    by_length = ("factor", "mscale")  # of the frequencies, and PhiMoE's of the states
    borders = [
        int(rope["original_max_position_embeddings"])
        for rope in rotations(config)
        if rope["rope_type"] == "longrope" and any(rope.get(f"long_{x}") != rope.get(f"short_{x}") for x in by_length)
    ]
    return min(borders, default=None)


def rotations(config: Any) -> list[dict[str, Any]]:
    """Rotary parameters of a text config: one set, or one for each type of attention that rotates."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if each]


def attention_kinds(config: Any) -> AttentionKinds:
    """The attention of a target's layers by its config. Raises UserError if draft trees cannot be verified."""
    if config.is_encoder_decoder:
        raise UserError(
            f"target.model: {config.model_type} is an encoder-decoder; drafters are trained for decoders alone"
        )
    config = config.get_text_config(decoder=True)
    name, types = config.model_type, list(getattr(config, "layer_types", None) or ())
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except (KeyError, AttributeError, ValueError, RuntimeError):  # layers that transformers' cache does not know
        layers = []
    kinds = [type(layer).__name__ for layer in layers]
    strange = {
        named or kind
        for kind, named in zip_longest(kinds, types[: len(kinds)])
        if kind not in (_FULL, _SLIDING, _DUMMY) or named == "chunked_attention"
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


def scaled_logits(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Logits [..., V] after the scaling and soft-capping of their family."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        # HyperCLOVA X multiplies by a value of the same name.
        logits = logits * divisor if config.model_type == "hyperclovax" else logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits
