"""Serving engines: what each can serve, the command that serves it, and what vLLM and llama.cpp make of a folder.

    drafter --reasons---> why an engine would serve it wrongly, or not at all
    folder  --problems--> what the engine would read otherwise, where reading the folder back does not tell

`reasons` needs configs alone, so a plan comes to the same end as an export. `problems` follows the loaders of the two
engines that `make serve-check` serves: vLLM 0.32 and llama.cpp of llama-cpp-python 0.3.36. SGLang's (0.5.23) and
speculators' (0.9) sources were read; TensorRT-LLM and EAGLE's code are known from descriptions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.drafters import KINDS, kind_text, tensor_shapes
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats.eagle import WEIGHTLESS, published_states
from draftsmith.models.formats.folder import Folder
from draftsmith.models.formats.gguf_file import ARCHITECTURE, NAMES, ROPE, metadata_of
from draftsmith.models.rotation import ROTATIONS
from draftsmith.recipes.errors import quoted

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ServingEngine:
    """One engine: the folder that it reads, the command that serves it, and its limits."""

    name: str
    title: str
    serve: str  # the command that serves it; `command` fills it in
    rotations: Mapping[str, tuple[str, ...]]  # kinds (`models.rotation`) -> the settings that it reads
    format: Literal["eagle", "speculators", "gguf"] = "eagle"
    one_layer: bool = False
    biased: tuple[type[DrafterConfig], ...] = ()  # kinds whose q, k and v may have a bias
    fc_bias: bool = True  # whether EAGLE-1's fc may have one
    norms: bool = True  # whether it has EAGLE-3.1's fc_norm and norm_output
    # The captured states and the target's number of layers that it serves, and what it does with others.
    states: tuple[Callable[[list[int], int], bool], str] = (lambda states, layers: True, "")
    # A drafter reads the target's table, unscaled, or the file's own where there is one; or what the target's module
    # makes of tokens, which families scale or not.
    embeddings: Literal["target's table", "file's table", "target's module"] = "target's table"
    loader: Callable[[dict[str, Any], Tensors, DrafterConfig], Iterator[str]] | None = None

    def architecture(self, shape: DrafterConfig) -> str | None:
        """What config.json calls a drafter of this kind; None: the engine serves none."""
        return KINDS[type(shape)].engines.get(self.name)

    def command(self, shape: DrafterConfig, target: str, folder: str) -> str:
        """How to serve the drafter in a folder; with llama.cpp, `target` may be a GGUF."""
        method = shape.kind
        gguf = target if target.endswith(".gguf") else "target.gguf"
        use = " --use_eagle3" * (method == "eagle3")
        return self.serve.format(
            target=target, folder=folder, method=method, METHOD=method.upper(), use_eagle3=use, gguf=gguf
        )

    def reasons(self, shape: DrafterConfig, target: Mapping[str, Any]) -> list[str]:
        """Why the engine cannot serve this drafter; empty: it can."""
        if self.architecture(shape) is None:
            return [f"{self.title} has no loader for {kind_text(shape)}"]
        reasons = [*self._scale_reasons(shape), *self._rotation_reasons(shape.rope_parameters)]
        if shape.hidden_act != "silu":
            reasons.append(f"knows silu alone, the drafter has {shape.hidden_act}")
        if self.one_layer and shape.num_layers > 1:
            reasons.append(f"is known to serve one layer, the drafter has {shape.num_layers}")
        if shape.attention_bias and type(shape) not in self.biased:
            reasons.append(f"serves no bias in q, k, v of {kind_text(shape)}; train with drafter.attention_bias=false")
        if isinstance(shape, EagleConfig) and shape.fc_bias and not self.fc_bias:
            reasons.append(f"serves no bias in fc of {kind_text(shape)}; train with drafter.fc_bias=false")
        if isinstance(shape, Eagle3Config):
            states, layers = list(shape.capture_layers), int(target["num_layers"])
            if (shape.fc_norm or shape.norm_output) and not self.norms:
                reasons.append("knows neither fc_norm nor norm_output")
            if max(states) >= layers:
                reasons.append(f"captures states before the target's final norm, the drafter reads {layers}, after it")
            serves, otherwise = self.states
            if not serves(states, layers):
                published = published_states(layers)
                reasons.append(otherwise.format(states=states, count=len(states), layers=layers, published=published))
        return [f"{self.title} {reason}" for reason in reasons]

    def _scale_reasons(self, shape: DrafterConfig) -> Iterator[str]:
        """For a target that scales its embeddings, which `exporting.unscaled` makes up for."""
        if shape.embedding_scale == 1:
            return
        scale = f"the target scales its embeddings by {shape.embedding_scale:g}"
        if self.embeddings == "target's module":
            yield f"embeds by the target's own module, which is scaled in some families alone; {scale}"
        elif self.embeddings == "target's table" and isinstance(shape, Eagle3Config) and shape.fc_norm:
            yield (
                f"gives a drafter the unscaled table, for which no drafter with fc_norm can be rewritten; {scale}: "
                "train with drafter.fc_norm=false"
            )

    def _rotation_reasons(self, rope: Mapping[str, Any]) -> Iterator[str]:
        kind = rope["rope_type"]
        if kind not in self.rotations:
            known = " and ".join(key for key in self.rotations if key != "default") or "none"
            yield f"is known to serve {known} of the rotary scalings, the drafter has {kind}"
        elif unread := sorted(rope.keys() - {"rope_type", "rope_theta", *self.rotations[kind]}):
            yield f"does not read {', '.join(unread)} of a {kind} rotation"


def problems(engine: ServingEngine, found: Folder, shape: DrafterConfig) -> list[str]:
    """How the engine's loader would read another drafter than `shape` from this folder, or GGUF."""
    return [] if engine.loader is None else sorted(engine.loader(found.config, found.tensors, shape))


def _other_values(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    for key, value in wanted.items():
        if config.get(key) != value:
            yield f"{key} is {quoted(config.get(key))}, the drafter needs {quoted(value)}"


def _other_tensors(tensors: Tensors, wanted: Mapping[str, list[int]]) -> Iterator[str]:
    """Missing and unknown names, and other sizes."""
    yield from (f"{name} is missing" for name in wanted.keys() - tensors.keys())
    yield from (f"{name} is unknown" for name in tensors.keys() - wanted.keys())
    for name in wanted.keys() & tensors.keys():
        if (sizes := list(tensors[name].shape)) != wanted[name]:
            yield f"{name} is {sizes}, it wants {wanted[name]}"


def _asked(shape: DrafterConfig) -> dict[str, list[int]]:
    """Our names and sizes of the tensors that engines read: all but t2d, and d2t iff the draft vocabulary is cut."""
    wanted = {name: sizes for name, sizes in tensor_shapes(shape).items() if name not in WEIGHTLESS}
    return wanted | ({"d2t": [shape.draft_vocab_size]} if shape.draft_vocab_size < shape.vocab_size else {})


def _vllm_loader(config: dict[str, Any], tensors: Tensors, shape: DrafterConfig) -> Iterator[str]:
    """It refuses unknown names, leaves missing tensors random, and builds a tied head or a quantised layer if told."""
    plain = {"model_type": "llama", "tie_word_embeddings": False, "attention_bias": shape.attention_bias}
    plain |= {"architectures": [ENGINES["vllm"].architecture(shape)], "quantization_config": None}
    yield from _other_values(config, plain)
    for name, tensor in tensors.items():
        if name not in WEIGHTLESS and str(tensor.dtype) != f"torch.{config.get('dtype')}":
            yield f"dtype is {quoted(config.get('dtype'))}, and {name} would be rounded from {tensor.dtype}"
    wanted = _asked(shape)
    if shape.attention_bias:  # which covers o_proj, too
        weights = [name for name in wanted if name.endswith(".o_proj.weight")]
        wanted |= {name.replace(".weight", ".bias"): [shape.hidden_size] for name in weights}
    # It skips t2d, takes a table of embeddings where there is one, and never uses hidden_norm above the first layer.
    skipped = {"t2d", "embed_tokens.weight", *(f"layers.{i}.hidden_norm.weight" for i in range(1, shape.num_layers))}
    yield from _other_tensors({name: tensors[name] for name in tensors.keys() - skipped}, wanted)


def _llama_cpp_loader(config: dict[str, Any], tensors: Tensors, shape: DrafterConfig) -> Iterator[str]:
    """`config` is the metadata of drafter.gguf (`formats.gguf_file`), whose decimals are rounded to float32."""
    wanted = {
        key: float(np.float32(value)) if isinstance(value, float) else value
        for key, value in metadata_of(shape).items()
    }
    yield from _other_values(config, {"architectures": [ARCHITECTURE], **wanted})
    tokens = config.get("tokenizer.ggml.tokens")  # which go before vocab_size
    if tokens is not None and len(tokens) != shape.vocab_size:
        yield f"it has {len(tokens):,} tokens, the drafter needs {shape.vocab_size:,}"
    names = {NAMES.get(name, name): sizes for name, sizes in _asked(shape).items()}
    yield from _other_tensors(tensors, names | ({ROPE: [shape.head_dim // 2]} if ROPE in tensors else {}))
    for name, tensor in tensors.items():
        dtype = torch.int64 if name == "d2t" else torch.float32 if tensor.ndim == 1 else tensors["fc.weight"].dtype
        if tensor.dtype != dtype:
            yield f"{name} is of type {tensor.dtype}, it wants {dtype}"


# It also serves speculators' format.
_VLLM_SERVE = (
    "vllm serve {target} --speculative-config "
    """'{{"method": "{method}", "model": "{folder}", "num_speculative_tokens": 4}}'"""
)
_WITH_TRUNCATE = ROTATIONS | {"yarn": (*ROTATIONS["yarn"], "truncate")}

ENGINES = {
    engine.name: engine
    for engine in (
        ServingEngine(
            "vllm",
            "vLLM",
            serve=_VLLM_SERVE,
            rotations=_WITH_TRUNCATE,
            biased=(Eagle3Config,),  # in EAGLE-1, it wants a bias of o_proj, too, for which the file has no place
            fc_bias=False,
            embeddings="file's table",
            loader=_vllm_loader,
        ),
        ServingEngine(
            "sglang",
            "SGLang",
            serve="python -m sglang.launch_server --model-path {target} --speculative-algorithm {METHOD} "
            "--speculative-draft-model-path {folder} --speculative-num-steps 4 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 5",
            rotations=_WITH_TRUNCATE,
            states=(lambda states, layers: len(states) > 1, "skips fc where one target state is captured"),
        ),
        ServingEngine(
            "tensorrt-llm",
            "TensorRT-LLM",
            serve="trtllm-serve {target} --extra_llm_api_options <(echo 'speculative_config: "
            "{{decoding_type: Eagle3, max_draft_len: 4, speculative_model: {folder}}}')",
            rotations=ROTATIONS,
            one_layer=True,
            states=(
                lambda states, layers: layers > 5,
                "captures states of targets of 6 layers or more, not of {layers}",
            ),
            embeddings="target's module",
        ),
        ServingEngine(
            "eagle",
            "EAGLE's code",
            serve="python -m eagle.evaluation.gen_ea_answer_llama3chat --base-model-path {target} "
            "--ea-model-path {folder}{use_eagle3}",
            rotations={"default": ()},  # it drops the base where there is scaling
            one_layer=True,
            norms=False,
            states=(
                lambda states, layers: states == published_states(layers),
                "always captures states {published}, the drafter reads {states}",
            ),
        ),
        ServingEngine(
            "speculators",
            "speculators",
            serve=_VLLM_SERVE,
            rotations=_WITH_TRUNCATE,
            format="speculators",
            embeddings="file's table",
        ),
        ServingEngine(
            "llama.cpp",
            "llama.cpp",
            serve="llama-server -m {gguf} -md {folder}/drafter.gguf --spec-type draft-eagle3 --spec-draft-n-max 4 "
            "--spec-draft-p-min 0",
            # For yarn it scales states, too.
            rotations={kind: settings for kind, settings in ROTATIONS.items() if kind != "yarn"},
            format="gguf",
            one_layer=True,
            norms=False,
            states=(
                lambda states, layers: len(states) == 3,
                "captures exactly 3 of the target's states, the drafter reads {count}",
            ),
            loader=_llama_cpp_loader,
        ),
    )
}
