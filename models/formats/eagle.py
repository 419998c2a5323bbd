"""The EAGLE format, which most engines read: config keys and tensor names of published EAGLE and EAGLE-3 checkpoints.

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

A config says both, and `read_config` refuses one whose lists contradict each other. Rotary base and scaling stand in
the spellings of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.activations import ACT2FN

from draftsmith.models.eagle import EagleConfig
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.models.rotation import checked_rotation
from draftsmith.recipes.errors import short

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
# Keys for which another value than this one changes the arithmetic in a way that no drafter here has.
FIXED = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "mlp_bias": False,
    "use_aux_hidden_state": True,
    "logit_scale": 1.0,
    "parallel_drafting": False,
    "partial_rotary_factor": 1.0,
}
WEIGHTLESS = ("d2t", "t2d")


def eagle_config(shape: DrafterConfig, architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a drafter in this format. It holds no null: engines read a null as a value."""
    rope = shape.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.hidden_act,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
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


def tensors_of(shape: DrafterConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A drafter's tensors by the names of this format, which are ours."""
    whole = shape.draft_vocab_size == shape.vocab_size
    return {name: tensor for name, tensor in tensors.items() if not (whole and name in WEIGHTLESS)}


class Contradiction(ValueError):
    """What cannot be read in a foreign config; the message names the key."""


def read_config(config: Mapping[str, Any], target: Any, names: Mapping[str, Any]) -> DrafterConfig:
    """The shape of a published drafter.

    Args:
        config: its config.json; target: the target's text config, for what the file leaves to it.
        names: its tensors, which decide between EAGLE-1 and EAGLE-3 and about biases.

    Raises:
        Contradiction: an unknown kind, a key of another type, or arithmetic that no drafter here has.
    """
    reader = _Reader(config)
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise Contradiction(f"eagle_config is {short(nested)}, not an object")
    for key, wanted in FIXED.items():
        for where, values in (("", config), ("eagle_config.", nested)):
            if (given := values.get(key)) not in (None, wanted):
                raise Contradiction(f"{where}{key} is {short(given)}; drafters here know {wanted} alone")
    if strange := [name for name in names if ".q_norm." in name or ".k_norm." in name or name == "mask_hidden"]:
        raise Contradiction(f"it has {strange[0]}, which drafters here do not know")
    vocab_size = reader.whole("vocab_size", target.vocab_size)
    heads = reader.whole("num_attention_heads")
    hidden = reader.whole("hidden_size")
    positions = reader.whole("max_position_embeddings", target.max_position_embeddings)
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": reader.whole("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.whole("num_key_value_heads", heads),
        "head_dim": reader.whole("head_dim", hidden // heads),
        "vocab_size": vocab_size,
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": positions,
        "hidden_act": reader.activation(),
        "rope_parameters": reader.rope(positions),
        "num_layers": reader.whole("num_hidden_layers", 1),
        "attention_bias": any(name.endswith("q_proj.bias") for name in names),
    }
    if "lm_head.weight" in names and ("norm.weight" in names or "d2t" in names):
        if reader.flag("bias") and not common["attention_bias"]:
            raise Contradiction("bias is true, and none of its tensors is a bias")
        return Eagle3Config(
            **common,
            draft_vocab_size=reader.whole("draft_vocab_size", vocab_size),
            capture_layers=captured_states(config, nested, target.num_hidden_layers),
            fc_norm=reader.flag("fc_norm") or any(name.startswith("fc_norm.") for name in names),
            norm_output=reader.flag("norm_output"),
        )
    if "fc.weight" not in names:
        raise Contradiction("its tensors are those of no drafter known here (EAGLE, EAGLE-3)")
    return EagleConfig(
        **common,
        draft_vocab_size=vocab_size,
        capture_layers=(target.num_hidden_layers,),
        fc_bias="fc.bias" in names,
    )


def published_states(layers: int) -> list[int]:
    """The states that EAGLE-3's authors capture of a target with so many layers, in `hidden_states` numbering."""
    return [2, layers // 2, layers - 3]


def captured_states(config: Mapping[str, Any], nested: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The captured states in `hidden_states` numbering, from both spellings or the published default."""
    top, inner = config.get(AUX_IDS), nested.get(AUX_IDS)
    for where, ids in ((AUX_IDS, top), (f"eagle_config.{AUX_IDS}", inner)):
        if ids is not None and not (isinstance(ids, list) and ids and all(type(each) is int for each in ids)):
            raise Contradiction(f"{where} is {short(ids)}, not a list of whole numbers")
    if top is not None and inner is not None and top != [each + 1 for each in inner]:
        raise Contradiction(
            f"{AUX_IDS} {top} and eagle_config's {inner} name different states: the first counts hidden_states, the "
            "second layer outputs, one less"
        )
    states = top if top is not None else [each + 1 for each in inner] if inner else published_states(layers)
    if states != sorted(set(states)) or states[0] < 0 or states[-1] >= layers:
        raise Contradiction(f"captured states {states} must ascend within 0 to {layers - 1}, the target's layers")
    return tuple(states)


class _Reader:
    """Typed access to a foreign config; nulls count as absent."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= 2**31 - 1:
            raise Contradiction(f"{key} is {short(value)}, not a whole number above 0")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise Contradiction(f"{key} is {short(value)}, not a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key, False)
        if type(value) is not bool:
            raise Contradiction(f"{key} is {short(value)}, neither true nor false")
        return value

    def activation(self) -> str:
        value = self._get("hidden_act", "silu")
        if not isinstance(value, str) or value not in ACT2FN:
            raise Contradiction(f"hidden_act is {short(value)}, not the name of an activation")
        return value

    def rope(self, positions: int) -> dict[str, Any]:
        """In transformers 5's spelling. Published EAGLE configs without a base mean 10000.

        Args:
            positions: the drafter's max_position_embeddings.
        """
        given = self._get("rope_parameters", None)
        scaling = self._get("rope_scaling", {})
        for key, value in (("rope_parameters", given), ("rope_scaling", scaling)):
            if value is not None and not isinstance(value, dict):
                raise Contradiction(f"{key} is {short(value)}, not an object")
        theta = self._get("rope_theta", None)
        if given is not None and theta is not None and given.get("rope_theta", theta) != theta:
            raise Contradiction(
                f"rope_theta is {short(theta)}, rope_parameters says {short(given['rope_theta'])}; which base was it "
                "trained with?"
            )
        if given is not None and scaling and scaling_of(given) != scaling_of(scaling):
            raise Contradiction(
                f"rope_scaling is {short(scaling)}, rope_parameters says {short(given)}; which was it trained with?"
            )
        rope = dict(given if given is not None else scaling or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope.setdefault("rope_theta", self.number("rope_theta", 10000.0))
        try:
            return checked_rotation(rope, positions)
        except ValueError as error:
            raise Contradiction(f"rotary embedding: {error}") from None

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value


def scaling_of(rope: Mapping[str, Any]) -> dict[str, Any]:
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
