"""The EAGLE format, which most engines read, as in published EAGLE and EAGLE-3 checkpoints; and speculators'.

    ours                       EAGLE-3                         EAGLE-1/2, HASS
    midlayer.*, layers.1.*     midlayer.* (or layers.0.*)      layers.0.*, layers.1.*
    fc, norm, lm_head          the same                        fc alone; norm and head are the target's
    d2t, t2d                   iff the draft vocabulary is smaller than the target's
    the target's embeddings    left out: engines take the target's

Captured states are counted in two ways. State k of `hidden_states` is the input of layer k, so it is the output of
layer k - 1:

    hidden_states      0          1          2          3        eagle_aux_hidden_state_layer_ids (vLLM, llama.cpp)
                  embedding -> layer 0 -> layer 1 -> layer 2
    layer outputs                 0          1          2        eagle_config's list of that name (SGLang, TensorRT-LLM)

A config says both. Rotary base and scaling stand in the spellings of transformers 4 (rope_theta, rope_scaling) and 5
(rope_parameters).

Speculators' config.json has the decoder's config under transformer_layer_config, and how to propose, for which
verifier, under speculators_config; model.safetensors has layers.0.* for midlayer.*, and the target's embeddings. Its
versions differ in defaults, so every key is written out: vLLM takes norm_before_residual as true where it is absent.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field

from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.rotation import checked_rotation
from draftsmith.recipes.errors import quoted

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
WEIGHTLESS = ("d2t", "t2d")
SPECULATORS_VERSION = "0.9.0"  # of the package that was followed
SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "vocab_size", "max_position_embeddings", "rms_norm_eps"),
)
LAYER_KEYS = (*SHAPE_KEYS, "rope_parameters", "attention_bias", "mlp_bias", "tie_word_embeddings", "model_type")
OWN_KEYS = (
    *("dtype", "draft_vocab_size", "target_hidden_size", AUX_IDS),
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)


def eagle_config(shape: DrafterConfig, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a drafter in this format. It holds no null: engines read a null as a value."""
    rope, values = shape.rope_parameters, shape.to_dict() | {"num_hidden_layers": shape.num_layers}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        **{key: values[key] for key in SHAPE_KEYS},
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "attention_bias": shape.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    if scaling["rope_type"] != "default":
        config["rope_scaling"] = scaling
    if isinstance(shape, EagleConfig):
        return config | {"bias": shape.fc_bias}
    assert isinstance(shape, Eagle3Config)
    states = list(shape.capture_layers)
    return config | {
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        "bias": False,  # of fc
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "num_aux_hidden_states": len(states),
        AUX_IDS: states,
        "eagle_config": {
            "use_aux_hidden_state": True,
            AUX_IDS: [state - 1 for state in states],
            "norm_before_fc": False,
            "next_layer_regular": True,
        },
    }


def speculators_config(
    shape: DrafterConfig, dtype: torch.dtype, verifier: str, architectures: list[str]
) -> dict[str, Any]:
    """config.json of an EAGLE-3 drafter in the speculators format, with name and architectures of its target."""
    plain = eagle_config(shape, "Eagle3DraftModel", dtype)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": plain["architectures"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        **{key: plain[key] for key in OWN_KEYS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": {key: plain[key] for key in LAYER_KEYS},
    }


Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
One = Annotated[float, Field(ge=1, le=1)]
Number = Annotated[float, Field(gt=0, lt=1e30)]
States = Annotated[list[int], Field(min_length=1)]


class _Nested(BaseModel, strict=True):
    eagle_aux_hidden_state_layer_ids: States | None = None
    use_aux_hidden_state: Literal[True] | None = None
    norm_before_fc: Literal[False] | None = None


class _Keys(BaseModel, strict=True):
    """What a foreign config says. Keys that are not listed here change nothing; another value than that of a key with
    a single one changes the arithmetic in a way that no drafter here has."""

    norm_before_residual: Literal[False] = False
    norm_before_fc: Literal[False] = False
    mlp_bias: Literal[False] = False
    use_aux_hidden_state: Literal[True] = True
    parallel_drafting: Literal[False] = False
    logit_scale: One = 1.0
    partial_rotary_factor: One = 1.0
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    num_hidden_layers: Size = 1
    vocab_size: Size | None = None
    draft_vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    rms_norm_eps: Number = 1e-6
    hidden_act: str = "silu"
    rope_theta: Number | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] = {}
    bias: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    eagle_aux_hidden_state_layer_ids: States | None = None
    eagle_config: _Nested = _Nested()

    def rotation(self, positions: int) -> dict[str, Any]:
        """In transformers 5's spelling. Published EAGLE configs without a base mean 10000."""
        given, scaling, theta = self.rope_parameters, self.rope_scaling, self.rope_theta
        if given is not None and (
            (theta is not None and given.get("rope_theta", theta) != theta)
            or (scaling and _scaling_of(given) != _scaling_of(scaling))
        ):
            raise ValueError(
                f"rope_parameters is {quoted(given)}, rope_theta {theta} and rope_scaling {quoted(scaling)}; which was "
                "it trained with?"
            )
        rope = dict(scaling if given is None else given)
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope.setdefault("rope_theta", theta or 10000.0)
        return checked_rotation(rope, positions)


def read_config(config: Mapping[str, Any], target: Any, names: Mapping[str, Any]) -> DrafterConfig:
    """The shape of a published drafter, in either format. Raises ValueError for what no drafter here has.

    Args:
        config: its config.json; target: the target's text config, for what the file leaves to it.
        names: its tensors, which decide between EAGLE-1 and EAGLE-3 and about biases.
    """
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        layer, kind = config.get("transformer_layer_config"), config.get("speculators_model_type", "eagle3")
        if kind != "eagle3" or not isinstance(layer, dict):
            raise ValueError(f"a speculators model of type {quoted(kind)}; only eagle3 is known here")
        own = {key: value for key, value in config.items() if key != "vocab_size"}
        config = {"norm_before_residual": True} | layer | own  # the package's default, which no drafter here has
    keys = _Keys.model_validate({key: value for key, value in config.items() if value is not None})
    vocab_size = keys.vocab_size or target.vocab_size
    positions = keys.max_position_embeddings or target.max_position_embeddings
    biased = any(name.endswith("q_proj.bias") for name in names)
    common: dict[str, Any] = {
        "hidden_size": keys.hidden_size,
        "intermediate_size": keys.intermediate_size,
        "num_attention_heads": keys.num_attention_heads,
        "num_key_value_heads": keys.num_key_value_heads or keys.num_attention_heads,
        "head_dim": keys.head_dim or keys.hidden_size // keys.num_attention_heads,
        "vocab_size": vocab_size,
        "rms_norm_eps": float(keys.rms_norm_eps),
        "max_position_embeddings": positions,
        "hidden_act": keys.hidden_act,
        "rope_parameters": keys.rotation(positions),
        "num_layers": keys.num_hidden_layers,
        "attention_bias": biased,
    }
    if "lm_head.weight" in names and ("norm.weight" in names or "d2t" in names):
        if keys.bias and not biased:
            raise ValueError("bias is true, and none of its tensors is a bias")
        return Eagle3Config(
            **common,
            draft_vocab_size=keys.draft_vocab_size or vocab_size,
            capture_layers=_captured_states(keys, target.num_hidden_layers),
            fc_norm=keys.fc_norm or any(name.startswith("fc_norm.") for name in names),
            norm_output=keys.norm_output,
        )
    if "fc.weight" not in names:
        raise ValueError("its tensors are those of no drafter known here (EAGLE, EAGLE-3)")
    return EagleConfig(
        **common,
        draft_vocab_size=vocab_size,
        capture_layers=(target.num_hidden_layers,),
        fc_bias="fc.bias" in names,
    )


def _captured_states(keys: _Keys, layers: int) -> tuple[int, ...]:
    """The captured states in `hidden_states` numbering, from both spellings or the published default."""
    top, inner = keys.eagle_aux_hidden_state_layer_ids, keys.eagle_config.eagle_aux_hidden_state_layer_ids
    if top is not None and inner is not None and top != [each + 1 for each in inner]:
        raise ValueError(
            f"{AUX_IDS} {top} and eagle_config's {inner} name different states: the first counts hidden_states, the "
            "second layer outputs, one less"
        )
    states = top if top is not None else [each + 1 for each in inner] if inner else published_states(layers)
    if states != sorted(set(states)) or states[0] < 0 or states[-1] >= layers:
        raise ValueError(f"captured states {states} must ascend within 0 to {layers - 1}, the target's layers")
    return tuple(states)


def published_states(layers: int) -> list[int]:
    """The states that EAGLE-3's authors capture of a target with so many layers, in `hidden_states` numbering."""
    return [2, layers // 2, layers - 3]


def _scaling_of(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Kind and settings of a rotary scaling, without the base, by transformers 5's names."""
    kept = {"rope_type" if key == "type" else key: value for key, value in rope.items() if value is not None}
    kept.pop("rope_theta", None)
    return {"rope_type": "default"} | kept


def our_names(shape: DrafterConfig, names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name in the file, our name) of the tensors that a drafter consists of; the target's own are left out."""
    for name in names:
        ours = name.removeprefix("model.")
        if ours == "embed_tokens.weight" or (not shape.own_head and ours in ("lm_head.weight", *WEIGHTLESS)):
            continue
        for old, new in (("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1"), ("aux_norm_high", "fc_norm.2")):
            ours = ours.replace(old, new)
        if shape.own_head:
            ours = ours.replace("layers.0.", "midlayer.")
            if ours.startswith("layers."):  # SGLang's name of the norm before attention
                ours = ours.replace(".hidden_norm.", ".input_layernorm.")
        yield name, ours
