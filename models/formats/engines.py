"""Serving engines: what each can serve, how each reads an exported folder, and the command that serves it.

    drafter --refusals--> reasons why an engine would serve it wrongly, or not at all
    folder  --loaded----> what the engine's loader makes of config.json and the tensors' names and shapes
    both    --problems--> every difference between the two

Loaders are followed rule by rule: the names that they rename, skip, require, or silently leave random. An engine that
would not complain about a missing tensor or an unknown name gets a complaint here. Sources that were read: vLLM 0.32,
SGLang 0.5.23, speculators 0.9 and llama.cpp of llama-cpp-python 0.3.36. TensorRT-LLM's loader and EAGLE's own code are
followed from descriptions of them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from draftsmith.models.drafters import kind_text
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.models.formats import speculators
from draftsmith.models.formats.eagle import AUX_IDS, WEIGHTLESS, scaling_of
from draftsmith.models.formats.folder import FLOATS, TensorInfo
from draftsmith.models.rotation import KINDS
from draftsmith.recipes.errors import short

Sizes = dict[str, list[int]]


@dataclass(frozen=True)
class Loaded:
    """A folder as an engine reads it."""

    values: dict[
        str, Any
    ]  # by the names of `DrafterConfig`; `_fixed`: key -> (what the engine takes, what drafters have)
    wanted: Sizes  # the engine's parameters, by the file's names after its renames
    renamed: dict[str, str]  # name in the file -> name for the engine; skipped tensors are absent


@dataclass(frozen=True)
class ServingEngine:
    """One engine and format."""

    name: str
    title: str
    architectures: dict[type[DrafterConfig], str]  # of the kinds that it serves
    refusals: Callable[[DrafterConfig, int], list[str]]
    load: Callable[[dict[str, Any], Mapping[str, TensorInfo], Mapping[str, Any]], Loaded]
    command: Callable[[DrafterConfig, str, str], str]  # of drafter, target and folder
    raises_on_unknown: bool  # else it drops unknown tensors without a word
    rotations: Mapping[str, tuple[str, ...]]  # kinds (`models.rotation`) -> the settings that it reads
    raises_on_missing: bool = False  # else it leaves them random
    # A drafter reads the target's table, unscaled, or the file's own where there is one; or what the target's module
    # makes of tokens, which families scale or not.
    embeddings: Literal["target's table", "file's table", "target's module"] = "target's table"

    def reasons(self, shape: DrafterConfig, target: Mapping[str, Any]) -> list[str]:
        """Why the engine cannot serve this drafter; empty: it can."""
        if type(shape) not in self.architectures:
            return [f"{self.title} has no loader for {kind_text(shape)}"]
        reasons = []
        if shape.embedding_scale != 1:  # `exporting.unscaled` makes up for it
            scaled = f"the target scales its embeddings by {shape.embedding_scale:g}, and {self.title} "
            if self.embeddings == "target's module":
                reasons.append(f"{scaled}embeds by the target's own module, which is scaled in some families alone")
            elif self.embeddings == "target's table" and isinstance(shape, Eagle3Config) and shape.fc_norm:
                reasons.append(
                    f"{scaled}gives a drafter the unscaled table, for which no drafter with fc_norm can be rewritten; "
                    "train with drafter.fc_norm=false"
                )
        if shape.hidden_act != "silu":
            reasons.append(f"{self.title} knows silu alone, the drafter has {shape.hidden_act}")
        reasons += self._rotation_reasons(shape.rope_parameters)
        layers = int(target["num_layers"])
        if isinstance(shape, Eagle3Config) and max(shape.capture_layers) >= layers:
            reasons.append(
                f"{self.title} captures states before the target's final norm, the drafter reads {layers}, after it"
            )
        return reasons + self.refusals(shape, layers)

    def _rotation_reasons(self, rope: Mapping[str, Any]) -> list[str]:
        kind = rope["rope_type"]
        if kind not in self.rotations:
            known = " and ".join([key for key in self.rotations if key != "default"]) or "none"
            return [f"{self.title}'s rotary scaling has been followed for {known}, the drafter has {kind}"]
        unread = sorted(rope.keys() - {"rope_type", "rope_theta", *self.rotations[kind]})
        return [f"{self.title} does not read {', '.join(unread)} of a {kind} rotation"] if unread else []


def problems(
    engine: ServingEngine,
    config: dict[str, Any],
    tensors: Mapping[str, TensorInfo],
    shape: DrafterConfig,
    target: Mapping[str, Any],
) -> list[str]:
    """Every way in which the engine would serve another drafter than `shape` from this folder."""
    found = [f"{key} is null; engines take a null for a value" for key in _nulls(config)]
    architecture = engine.architectures[type(shape)]
    if config.get("architectures") != [architecture]:
        found.append(f"architectures is {short(config.get('architectures'))}, {engine.title} wants ['{architecture}']")
    found += _unlike_llama(config, tensors)
    if any("num_hidden_layers" in each for each in found):
        return found
    try:
        loaded = engine.load(config, tensors, target)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [*found, f"{engine.title} cannot read config.json: {type(error).__name__} {error}"]
    for each in fields(shape):
        want, have = getattr(shape, each.name), loaded.values.get(each.name, getattr(shape, each.name))
        if (list(want) if isinstance(want, tuple) else want) != (list(have) if isinstance(have, tuple) else have):
            found.append(f"{each.name}: {engine.title} takes {short(have)}, the drafter was trained with {short(want)}")
    for key, (have, want) in loaded.values.get("_fixed", {}).items():
        if have != want:
            found.append(f"{key}: {engine.title} takes {short(have)}, the drafter was trained with {short(want)}")
    arrived = {new: (old, tensors[old]) for old, new in loaded.renamed.items()}
    found += [
        f"{name} is missing; {engine.title} would "
        + ("fail" if engine.raises_on_missing or name.startswith("d2t") else "leave it random")
        for name in loaded.wanted.keys() - arrived.keys()
    ]
    for new, (old, info) in arrived.items():
        if new not in loaded.wanted:
            found.append(f"{old}: {engine.title} {'refuses' if engine.raises_on_unknown else 'ignores'} this name")
        elif info.sizes != loaded.wanted[new]:
            found.append(f"{old} is {info.sizes}, {engine.title} wants {loaded.wanted[new]}")
        elif info.dtype not in (kinds := {"d2t": ("I64",), "t2d": ("BOOL",)}.get(new, FLOATS)):
            found.append(f"{old} is of type {info.dtype}, {engine.title} wants {' or '.join(kinds)}")
    return sorted(found)


_WHOLE = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
    "num_aux_hidden_states",
)
# What engines that parse a Llama config would do otherwise, or would do in another class.
_PLAIN = {"model_type": "llama", "mlp_bias": False, "partial_rotary_factor": 1.0, "tie_word_embeddings": False}
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _unlike_llama(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """What in a config does not describe these tensors, or not a plain Llama layer."""
    layer = config.get("transformer_layer_config", config)  # speculators'
    if not isinstance(layer, dict):
        yield f"transformer_layer_config is {short(layer)}, not an object"
        return
    for key, wanted in _PLAIN.items():
        if (have := layer.get(key, wanted)) != wanted:
            yield f"{key} is {short(have)}, the drafter was trained with {wanted}"
    if "quantization_config" in config:
        yield "quantization_config: the tensors are not quantised"
    if "dtype" in config:
        wanted = _DTYPES.get(str(config["dtype"]))
        other = [name for name, info in tensors.items() if name not in WEIGHTLESS and info.dtype != wanted]
        if other:
            yield f"dtype is {short(config['dtype'])}, but {other[0]} is {tensors[other[0]].dtype}; engines would round"
    lists = {AUX_IDS: config.get(AUX_IDS)}
    if isinstance(nested := config.get("eagle_config"), dict):
        lists[f"eagle_config.{AUX_IDS}"] = nested.get(AUX_IDS)
    for key, value in [*((key, {**config, **layer}.get(key)) for key in _WHOLE), *lists.items()]:
        for each in value if isinstance(value, list) else [value]:
            if each is not None and type(each) is not int:
                yield f"{key} is {short(value)}, not whole numbers"
    count = layer.get("num_hidden_layers")
    if type(count) is int and count > len(tensors):
        yield f"num_hidden_layers is {count:,}, more than there are tensors"


def _nulls(config: Any, before: str = "") -> Iterator[str]:
    if isinstance(config, dict):
        for key, value in config.items():
            if value is None:
                yield f"{before}{key}"
            yield from _nulls(value, f"{before}{key}.")


# How engines build the two families. Sizes are those of the files, so q, k, v and gate, up stand alone.


def _layer(config: Mapping[str, Any], name: str, entry: int, norms: tuple[str, ...], bias: tuple[str, ...]) -> Sizes:
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], _head_dim(config)
    groups = config.get("num_key_value_heads", heads)
    rows = {"q": heads * dim, "k": groups * dim, "v": groups * dim, "o": hidden}
    columns = {"q": entry, "k": entry, "v": entry, "o": heads * dim}
    sizes = {f"{name}.self_attn.{each}_proj.weight": [rows[each], columns[each]] for each in rows}
    sizes |= {f"{name}.self_attn.{each}_proj.bias": [rows[each]] for each in bias}
    sizes |= {f"{name}.mlp.{each}_proj.weight": [config["intermediate_size"], hidden] for each in ("gate", "up")}
    sizes[f"{name}.mlp.down_proj.weight"] = [hidden, config["intermediate_size"]]
    return sizes | {f"{name}.{norm}.weight": [hidden] for norm in (*norms, "post_attention_layernorm")}


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    """What all engines take from the Llama config that they parse."""
    rope = config.get("rope_parameters")
    if rope is None:
        rope = {"rope_type": "default", **config.get("rope_scaling", {}), "rope_theta": config["rope_theta"]}
    elif "rope_theta" in config and rope["rope_theta"] != config["rope_theta"]:
        raise ValueError(f"rope_theta is {config['rope_theta']}, rope_parameters says {rope['rope_theta']}")
    elif config.get("rope_scaling") and scaling_of(config["rope_scaling"]) != scaling_of(rope):
        raise ValueError(f"rope_scaling is {config['rope_scaling']}, rope_parameters says {rope}")
    return {
        **{key: config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")},
        "num_layers": config["num_hidden_layers"],
        "num_key_value_heads": config.get("num_key_value_heads", config["num_attention_heads"]),
        "head_dim": _head_dim(config),
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"],
        "hidden_act": config["hidden_act"],
        "rope_parameters": rope,
    }


def _eagle3(
    config: dict[str, Any], target: Mapping[str, Any], states: list[int], upper: tuple[str, ...], bias: tuple[str, ...]
) -> tuple[dict[str, Any], Sizes]:
    """(values, parameters) of an EAGLE-3 drafter.

    Args:
        states: captured, in `hidden_states` numbering.
        upper: norms of the layers above the first; bias: projections with one.
    """
    hidden, above = config["hidden_size"], range(1, config["num_hidden_layers"])
    draft = config.get("draft_vocab_size", config["vocab_size"])
    wide = config.get("target_hidden_size", hidden)
    count = config.get("num_aux_hidden_states") or len(states)
    wanted = {"fc.weight": [hidden, count * wide], "norm.weight": [hidden], "lm_head.weight": [draft, hidden]}
    wanted |= _layer(config, "layers.0", 2 * hidden, ("hidden_norm", "input_layernorm"), bias)
    for i in above:
        wanted |= _layer(config, f"layers.{i}", hidden, upper, bias)
    if config.get("fc_norm"):
        wanted |= {f"fc_norm.{i}.weight": [wide] for i in range(count)}
    nested = config.get("eagle_config", {})
    if before_fc := nested.get("norm_before_fc", config.get("norm_before_fc", False)):
        wanted["input_norm.weight"] = [count * wide]
    if draft != target["vocab_size"]:
        wanted["d2t"] = [draft]
    values = _common(config) | {
        "draft_vocab_size": draft,
        "capture_layers": states,
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
        "attention_bias": bool(bias),
        "_fixed": {"norm_before_fc": (bool(before_fc), False)},
    }
    return values, wanted


def _eagle(config: dict[str, Any], fc_bias: bool, bias: tuple[str, ...]) -> tuple[dict[str, Any], Sizes]:
    hidden = config["hidden_size"]
    wanted = {"fc.weight": [hidden, 2 * hidden]} | ({"fc.bias": [hidden]} if fc_bias else {})
    for i in range(config["num_hidden_layers"]):
        wanted |= _layer(config, f"layers.{i}", hidden, ("input_layernorm",) if i else (), bias)
    return _common(config) | {"fc_bias": fc_bias, "attention_bias": bool(bias)}, wanted


def _renamed(tensors: Mapping[str, Any], *, skip: tuple[str, ...], embedding: bool = True) -> dict[str, str]:
    """Names for the engine, without tensors that it skips; a table of embeddings may be there or not."""
    kept = [name for name in tensors if not any(part in name for part in skip)]
    if embedding:
        kept = [name for name in kept if name != "embed_tokens.weight"]
    return {name: name.replace("midlayer.", "layers.0.") for name in kept}


def _default_states(target: Mapping[str, Any]) -> list[int]:
    return [2, target["num_layers"] // 2, target["num_layers"] - 3]


# vLLM.


def _vllm_load(config: dict[str, Any], tensors: Mapping[str, TensorInfo], target: Mapping[str, Any]) -> Loaded:
    # attention_bias covers o_proj, too, whose parameter a file without it would leave unset.
    bias = tuple("qkvo" if config.get("attention_bias") or config.get("bias") else "")
    if config["architectures"][0] == _VLLM[EagleConfig]:
        values, wanted = _eagle(config, False, bias)
        return Loaded(values, wanted, _renamed(tensors, skip=()))
    states = list(config.get(AUX_IDS) or _default_states(target))
    # Layers above the first have a hidden_norm, which they never use.
    values, wanted = _eagle3(config, target, states, ("input_layernorm",), bias)
    unused = {f"layers.{i}.hidden_norm.weight" for i in range(1, config["num_hidden_layers"])}
    values["_fixed"]["norm_before_residual"] = (config.get("norm_before_residual", False), False)
    values["_fixed"]["logit_scale"] = (config.get("logit_scale", 1.0), 1.0)
    values["_fixed"]["use_aux_hidden_state"] = (
        config.get("eagle_config", {}).get("use_aux_hidden_state", True),
        True,
    )
    renamed = {old: new for old, new in _renamed(tensors, skip=("t2d",)).items() if new not in unused}
    return Loaded(values, wanted, renamed)


def _vllm_refusals(shape: DrafterConfig, layers: int) -> list[str]:
    if isinstance(shape, EagleConfig):
        if shape.fc_bias:
            return ["vLLM's EAGLE-1 has no bias in fc; train with drafter.fc_bias=false"]
        if shape.attention_bias:
            return ["vLLM reads a bias of o_proj with those of q, k, v, which EAGLE-1's file has no place for"]
    return []


def _vllm_command(shape: DrafterConfig, target: str, folder: str) -> str:
    method = "eagle3" if isinstance(shape, Eagle3Config) else "eagle"
    speculative = f'{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": 4}}'
    return f"vllm serve {target} --speculative-config '{speculative}'"


_VLLM: dict[type[DrafterConfig], str] = {Eagle3Config: "LlamaForCausalLMEagle3", EagleConfig: "EagleLlamaForCausalLM"}


# SGLang.


def _sglang_load(config: dict[str, Any], tensors: Mapping[str, TensorInfo], target: Mapping[str, Any]) -> Loaded:
    if config["tie_word_embeddings"]:
        raise ValueError("tie_word_embeddings is true, so the head would be the embedding table")
    if config["architectures"][0] == _SGLANG[EagleConfig]:
        values, wanted = _eagle(config, True, ())  # fc always has a bias; zeros, where the drafter has none
        del values["fc_bias"]
        return Loaded(values, wanted, _renamed(tensors, skip=("lm_head",)))
    outputs = config.get("eagle_config", {}).get(AUX_IDS)
    states = [each + 1 for each in outputs] if outputs else _default_states(target)
    # Layers above the first norm their input with hidden_norm; their input_layernorm is loaded and never used.
    values, wanted = _eagle3(config | {"draft_vocab_size": config["draft_vocab_size"]}, target, states, _UPPER, ())
    values["_fixed"]["norm_before_residual"] = (False, config.get("norm_before_residual", False))
    values["_fixed"]["bias"] = (config.get("bias", False), False)
    return Loaded(values, wanted, _renamed(tensors, skip=("t2d",)))


def _sglang_refusals(shape: DrafterConfig, layers: int) -> list[str]:
    reasons = []
    if shape.attention_bias:
        reasons.append("SGLang's drafters have no bias in q, k, v; train with drafter.attention_bias=false")
    if isinstance(shape, Eagle3Config) and len(shape.capture_layers) == 1:
        reasons.append("SGLang skips fc where one target state is captured")
    return reasons


def _sglang_command(shape: DrafterConfig, target: str, folder: str) -> str:
    algorithm = "EAGLE3" if isinstance(shape, Eagle3Config) else "EAGLE"
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {folder} --speculative-num-steps 4 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 5"
    )


_UPPER = ("hidden_norm", "input_layernorm")
_SGLANG: dict[type[DrafterConfig], str] = {Eagle3Config: "LlamaForCausalLMEagle3", EagleConfig: "LlamaForCausalLMEagle"}


# TensorRT-LLM.


def _tensorrt_load(config: dict[str, Any], tensors: Mapping[str, TensorInfo], target: Mapping[str, Any]) -> Loaded:
    outputs = config.get("eagle_config", {}).get(AUX_IDS)
    states = [each + 1 for each in outputs] if outputs else _default_states(target)
    values, wanted = _eagle3(config, target, states, ("input_layernorm",), ())
    values["_fixed"]["norm_before_residual"] = (False, config.get("norm_before_residual", False))
    return Loaded(values, wanted, _renamed(tensors, skip=("t2d",)))


def _tensorrt_refusals(shape: DrafterConfig, layers: int) -> list[str]:
    reasons = []
    if shape.num_layers > 1:
        reasons.append("TensorRT-LLM's loader has not been followed for more than one layer")
    if shape.attention_bias:
        reasons.append("TensorRT-LLM's loader has not been followed with a bias in q, k, v")
    if layers <= 5:
        reasons.append(f"TensorRT-LLM captures states of targets with more than 5 layers, this one has {layers}")
    return reasons


def _tensorrt_command(shape: DrafterConfig, target: str, folder: str) -> str:
    return (
        f"trtllm-serve {target} --extra_llm_api_options <(echo 'speculative_config: "
        f"{{decoding_type: Eagle3, max_draft_len: 4, speculative_model: {folder}}}')"
    )


# EAGLE's reference code.


def _reference_load(config: dict[str, Any], tensors: Mapping[str, TensorInfo], target: Mapping[str, Any]) -> Loaded:
    config = {"max_position_embeddings": 2048} | config
    if config["architectures"][0] == _REFERENCE[EagleConfig]:
        values, wanted = _eagle(config, config.get("bias", True), tuple("qkv" if config.get("qkv_bias") else ""))
        return Loaded(values, wanted, _renamed(tensors, skip=()))
    values, wanted = _eagle3(config | {"fc_norm": False, "norm_output": False}, target, _default_states(target), (), ())
    if "d2t" in wanted:
        wanted["t2d"] = [config["vocab_size"]]
    return Loaded(values, wanted, _renamed(tensors, skip=()))


def _reference_refusals(shape: DrafterConfig, layers: int) -> list[str]:
    reasons = []
    if shape.num_layers > 1 or shape.attention_bias:
        reasons.append("EAGLE's code has one layer without a bias in q, k, v")
    if isinstance(shape, Eagle3Config):
        if shape.fc_norm or shape.norm_output:
            reasons.append("EAGLE's code knows neither fc_norm nor norm_output")
        if list(shape.capture_layers) != [2, layers // 2, layers - 3]:
            reasons.append(
                f"EAGLE's code always captures states {[2, layers // 2, layers - 3]}, the drafter reads "
                f"{list(shape.capture_layers)}"
            )
    return reasons


def _reference_command(shape: DrafterConfig, target: str, folder: str) -> str:
    use = isinstance(shape, Eagle3Config)
    return (
        f"python -m eagle.evaluation.gen_ea_answer_llama3chat --base-model-path {target} --ea-model-path {folder}"
        + " --use_eagle3" * use
    )


_REFERENCE: dict[type[DrafterConfig], str] = {Eagle3Config: "LlamaForCausalLMEagle3", EagleConfig: "LlamaForCausalLM"}


# The speculators package, whose format vLLM serves by itself.


def _speculators_load(config: dict[str, Any], tensors: Mapping[str, TensorInfo], target: Mapping[str, Any]) -> Loaded:
    plain = speculators.plain_config(config)
    states = list(config.get(AUX_IDS) or _default_states(target))
    values, wanted = _eagle3(
        plain, target, states, ("input_layernorm",), tuple("qkv" if plain.get("attention_bias") else "")
    )
    values["_fixed"]["norm_before_residual"] = (plain["norm_before_residual"], False)
    verifier = config["speculators_config"]["verifier"]
    values["_fixed"]["speculators_config.verifier.name_or_path"] = (verifier["name_or_path"], target["model"])
    if "d2t" in wanted:
        wanted["t2d"] = [plain["vocab_size"]]
    wanted["embed_tokens.weight"] = [plain["vocab_size"], plain["hidden_size"]]
    return Loaded(values, wanted, _renamed(tensors, skip=(), embedding=False))


def _speculators_refusals(shape: DrafterConfig, layers: int) -> list[str]:
    return ["speculators' layers have a bias of o_proj with those of q, k, v"] if shape.attention_bias else []


def _speculators_command(shape: DrafterConfig, target: str, folder: str) -> str:
    if Path(target).exists():  # vLLM takes the verifier of such a folder from the Hub alone
        return _vllm_command(shape, target, folder)
    return f"vllm serve {folder}"


# llama.cpp. Its folder holds drafter.gguf (`formats.gguf_file`): `config` is the file's metadata.


def _llama_cpp_load(config: dict[str, Any], tensors: Mapping[str, TensorInfo], target: Mapping[str, Any]) -> Loaded:
    def key(name: str, default: Any = None) -> Any:
        return config[f"eagle3.{name}"] if default is None else config.get(f"eagle3.{name}", default)

    hidden, heads, inner = key("embedding_length"), key("attention.head_count"), key("feed_forward_length")
    groups, dim = key("attention.head_count_kv", heads), key("attention.key_length", hidden // heads)
    states = key("target_layers")
    if len(states) != 3:
        raise ValueError(f"target_layers has {len(states)} entries, not 3")
    named = config["tokenizer.ggml.model"] != "none"
    vocab = len(config["tokenizer.ggml.tokens"]) if named else key("vocab_size")
    draft = tensors["d2t"].sizes[0] if "d2t" in tensors else vocab
    layer = {
        "attn_norm": [hidden],  # of the embedding
        "attn_norm_2": [hidden],  # of the feature
        "attn_q": [heads * dim, 2 * hidden],
        "attn_k": [groups * dim, 2 * hidden],
        "attn_v": [groups * dim, 2 * hidden],
        "attn_output": [hidden, heads * dim],
        "ffn_norm": [hidden],
        "ffn_gate": [inner, hidden],
        "ffn_up": [inner, hidden],
        "ffn_down": [hidden, inner],
    }
    wanted: Sizes = {
        "fc.weight": [hidden, 3 * key("target_hidden_size")],
        "output_norm.weight": [hidden],
        "output.weight": [draft, hidden],
        **{f"blk.0.{name}.weight": sizes for name, sizes in layer.items()},
        **({"d2t": [draft]} if "d2t" in tensors else {}),
        **({"rope_freqs.weight": [dim // 2]} if "rope_freqs.weight" in tensors else {}),
    }
    values = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": dim,
        "vocab_size": vocab,
        "draft_vocab_size": draft,
        "capture_layers": states,
        "rms_norm_eps": _decimal(key("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": key("context_length"),
        "num_layers": key("block_count"),
        "fc_norm": False,
        "norm_output": False,
        "attention_bias": False,
        "_fixed": {
            "target_hidden_size": (key("target_hidden_size"), target["hidden_size"]),
            "attention.value_length": (key("attention.value_length", hidden // heads), dim),
            "rope.dimension_count": (key("rope.dimension_count", dim), dim),
            "rope.scaling.factor": (key("rope.scaling.factor", 1.0), 1.0),  # scaling is in rope_freqs
            "norm_before_residual": (key("norm_before_residual", False), False),
            "norm_before_fc": (key("norm_before_fc", False), False),
        },
    }
    values["_fixed"] |= {f"type of {name}": (info.dtype, "F32") for name, info in tensors.items() if "norm" in name}
    return Loaded(values, wanted, {name: name for name in tensors})


def _decimal(single: float) -> float:
    """The shortest decimal number that float32 rounds to this one: files hold 9.99999997e-07 for 1e-06."""
    return float(str(np.float32(single)))


def _llama_cpp_refusals(shape: DrafterConfig, layers: int) -> list[str]:
    reasons = []
    if len(shape.capture_layers) != 3:
        reasons.append(
            f"llama.cpp captures exactly 3 of the target's states, the drafter reads {len(shape.capture_layers)}"
        )
    if shape.num_layers > 1:
        reasons.append(f"llama.cpp's EAGLE-3 has one layer, the drafter {shape.num_layers}")
    if shape.attention_bias:
        reasons.append("llama.cpp's EAGLE-3 has no bias in q, k, v; train with drafter.attention_bias=false")
    if isinstance(shape, Eagle3Config) and (shape.fc_norm or shape.norm_output):
        reasons.append("llama.cpp's EAGLE-3 knows neither fc_norm nor norm_output")
    return reasons


def _llama_cpp_command(shape: DrafterConfig, target: str, folder: str) -> str:
    file = target if target.endswith(".gguf") else "target.gguf"
    return (
        f"llama-server -m {file} -md {folder}/drafter.gguf --spec-type draft-eagle3 --spec-draft-n-max 4 "
        "--spec-draft-p-min 0"
    )


# EAGLE's code drops the base where there is scaling.
_PLAIN_ONLY = {"default": KINDS["default"]}
_BY_FREQUENCY = {kind: settings for kind, settings in KINDS.items() if kind != "yarn"}  # yarn scales the states, too
_WITH_TRUNCATE = KINDS | {"yarn": (*KINDS["yarn"], "truncate")}

ENGINES = {
    engine.name: engine
    for engine in (
        ServingEngine(
            "vllm",
            "vLLM",
            _VLLM,
            _vllm_refusals,
            _vllm_load,
            _vllm_command,
            True,
            _WITH_TRUNCATE,
            embeddings="file's table",
        ),
        ServingEngine(
            "sglang", "SGLang", _SGLANG, _sglang_refusals, _sglang_load, _sglang_command, False, _WITH_TRUNCATE
        ),
        ServingEngine(
            "tensorrt-llm",
            "TensorRT-LLM",
            {Eagle3Config: "LlamaForCausalLMEagle3"},
            _tensorrt_refusals,
            _tensorrt_load,
            _tensorrt_command,
            True,
            KINDS,
            embeddings="target's module",
        ),
        ServingEngine(
            "eagle",
            "EAGLE's code",
            _REFERENCE,
            _reference_refusals,
            _reference_load,
            _reference_command,
            False,
            _PLAIN_ONLY,
        ),
        ServingEngine(
            "speculators",
            "speculators",
            {Eagle3Config: "Eagle3DraftModel"},
            _speculators_refusals,
            _speculators_load,
            _speculators_command,
            False,
            _WITH_TRUNCATE,
            embeddings="file's table",
        ),
        ServingEngine(
            "llama.cpp",
            "llama.cpp",
            {Eagle3Config: "eagle3"},
            _llama_cpp_refusals,
            _llama_cpp_load,
            _llama_cpp_command,
            True,
            _BY_FREQUENCY,
            True,
        ),
    )
}
