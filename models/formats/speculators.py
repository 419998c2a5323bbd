"""The speculators format, which vLLM serves by itself: an EAGLE-3 drafter with the verifier's name inside.

    config.json       speculators_model_type, speculators_config (how to propose, for which verifier), the decoder's
                      config under transformer_layer_config
    model.safetensors layers.0.*, fc, norm, lm_head, embed_tokens; d2t and t2d iff the draft vocabulary is smaller

Published versions of the package differ in defaults, so every key is written out: vLLM takes norm_before_residual as
true where it is absent, for this format alone.
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats import eagle
from draftsmith.recipes.errors import quoted

VERSION = "0.9.0"  # of the package that was followed
LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "model_type"),
)
OWN_KEYS = (
    *("dtype", "draft_vocab_size", "target_hidden_size", eagle.AUX_IDS),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config or "transformer_layer_config" in config


def speculators_config(
    shape: Eagle3Config, dtype: torch.dtype, verifier: str, architectures: list[str]
) -> dict[str, Any]:
    """config.json in this format.

    Args:
        verifier: Hub id or folder of the target; architectures: the target's.
    """
    plain = eagle.eagle_config(shape, "Eagle3DraftModel", dtype)
    layer = {key: plain[key] for key in LAYER_KEYS if key in plain}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        **{key: plain[key] for key in OWN_KEYS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": layer,
    }


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The EAGLE format's keys of a config in this format."""
    layer = config.get("transformer_layer_config")
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3" or not isinstance(layer, dict):
        raise eagle.Contradiction(f"a speculators model of type {quoted(kind)}; only eagle3 is known here")
    own = {key: value for key, value in config.items() if key not in ("transformer_layer_config", "vocab_size")}
    missing = {"norm_before_residual": True}  # the package's default, which no drafter here has
    return missing | dict(layer) | own


def names_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the EAGLE format by the names of this one, which knows no midlayer."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
