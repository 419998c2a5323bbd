"""Serving engines: what each can serve, by what name, and the command that serves it.

`ServingEngine.reasons` needs configs alone, so a plan comes to the same end as an export. `make serve-check` serves by
vLLM 0.32 and llama.cpp (llama-cpp-python 0.3.36). The sources of SGLang 0.5.23 and speculators 0.9 were read;
TensorRT-LLM and EAGLE's code are known from descriptions.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.drafters import KINDS, kind_text
from draftsmith.models.eagle import EagleConfig
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats.eagle_format import published_states
from draftsmith.models.rotation import ROTATIONS


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

    def architecture(self, shape: DrafterConfig) -> str | None:
        """What config.json calls a drafter of this kind; None: the engine serves none."""
        return KINDS[type(shape)].engines.get(self.name)

    def command(self, shape: DrafterConfig, target: str, folder: str) -> str:
        """How to serve the drafter in a folder; with llama.cpp, `target` may be a GGUF."""
        return self.serve.format(
            target=shlex.quote(target),
            folder=folder if folder.startswith("$(") else shlex.quote(folder),
            method=shape.kind,
            METHOD=shape.kind.upper(),
            use_eagle3=" --use_eagle3" * (shape.kind == "eagle3"),
            gguf=shlex.quote(target) if target.endswith(".gguf") else "target.gguf",
        )

    def reasons(self, shape: DrafterConfig, target: Mapping[str, Any]) -> list[str]:
        """Why the engine cannot serve this drafter; empty: it can."""
        if self.architecture(shape) is None:
            return [f"{self.title} has no loader for {kind_text(shape)}"]
        return [f"{self.title} {reason}" for reason in self._reasons(shape, int(target["num_layers"]))]

    def _reasons(self, shape: DrafterConfig, layers: int) -> Iterator[str]:
        if shape.embedding_scale != 1:  # `exporting.unscaled` makes up for it where the engine reads a table
            scale = f"the target scales its embeddings by {shape.embedding_scale:g}"
            if self.embeddings == "target's module":
                yield f"embeds by the target's own module, which is scaled in some families alone; {scale}"
            elif self.embeddings == "target's table" and isinstance(shape, Eagle3Config) and shape.fc_norm:
                yield (
                    f"gives a drafter the unscaled table, for which no drafter with fc_norm can be rewritten; {scale}: "
                    "train with drafter.fc_norm=false"
                )
        rope, kind = shape.rope_parameters, shape.rope_parameters["rope_type"]
        if kind not in self.rotations:
            known = " and ".join(key for key in self.rotations if key != "default") or "none"
            yield f"is known to serve {known} of the rotary scalings, the drafter has {kind}"
        elif unread := sorted(rope.keys() - {"rope_type", "rope_theta", *self.rotations[kind]}):
            yield f"does not read {', '.join(unread)} of a {kind} rotation"
        if shape.hidden_act != "silu":
            yield f"knows silu alone, the drafter has {shape.hidden_act}"
        if self.one_layer and shape.num_layers > 1:
            yield f"is known to serve one layer, the drafter has {shape.num_layers}"
        if shape.attention_bias and type(shape) not in self.biased:
            yield f"serves no bias in q, k, v of {kind_text(shape)}; train with drafter.attention_bias=false"
        if isinstance(shape, EagleConfig) and shape.fc_bias and not self.fc_bias:
            yield f"serves no bias in fc of {kind_text(shape)}; train with drafter.fc_bias=false"
        if isinstance(shape, Eagle3Config):
            states = list(shape.capture_layers)
            if (shape.fc_norm or shape.norm_output) and not self.norms:
                yield "knows neither fc_norm nor norm_output"
            if max(states) >= layers:
                yield f"captures states before the target's final norm, the drafter reads {layers}, after it"
            serves, otherwise = self.states
            if not serves(states, layers):
                published = published_states(layers)
                yield otherwise.format(states=states, count=len(states), layers=layers, published=published)


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
        ),
    )
}
