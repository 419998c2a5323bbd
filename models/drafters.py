"""The only list of drafter kinds: how each is built, trained and drafts, and who serves it."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from draftsmith.models import vispec
from draftsmith.models.chain_steps import chain_steps
from draftsmith.models.draft_tree import Drafting
from draftsmith.models.drafter_base import Drafter, DrafterConfig, FrozenHead, Steps
from draftsmith.models.eagle import EagleConfig, EagleDrafter
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.poss import Poss3Config, Poss3Drafter, PossConfig, PossDrafter, SpecialistsConfig
from draftsmith.models.target import checked_capture_layers
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.drafter import DrafterSection


@dataclass(frozen=True)
class Kind:
    """What the project knows of a kind of drafter, besides its config."""

    module: Callable[[Any, DraftVocab, FrozenHead | None], Drafter]
    steps: Steps  # how training computes its outputs
    drafting: Callable[[Any, DraftVocab | None], Drafting]  # inside answers, from a part of its vocabulary
    # By the name of each engine that serves it (`models.formats.engines`), the architecture in config.json.
    engines: Mapping[str, str] = field(default_factory=dict)


_EAGLE3_ENGINES = {
    **dict.fromkeys(("vllm", "sglang", "tensorrt-llm", "eagle"), "LlamaForCausalLMEagle3"),
    "speculators": "Eagle3DraftModel",
    "llama.cpp": "eagle3",
}
_EAGLE_ENGINES = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "eagle": "LlamaForCausalLM"}

KINDS: dict[type[DrafterConfig], Kind] = {
    Eagle3Config: Kind(Eagle3Drafter, chain_steps, FeatureDrafting, _EAGLE3_ENGINES),
    EagleConfig: Kind(EagleDrafter, chain_steps, FeatureDrafting, _EAGLE_ENGINES),
    PossConfig: Kind(PossDrafter, chain_steps, FeatureDrafting),
    Poss3Config: Kind(Poss3Drafter, chain_steps, FeatureDrafting),
    vispec.VispecConfig: Kind(vispec.VispecDrafter, chain_steps, FeatureDrafting),
    vispec.Vispec3Config: Kind(vispec.Vispec3Drafter, chain_steps, FeatureDrafting),
    vispec.VispecPossConfig: Kind(vispec.VispecPossDrafter, chain_steps, FeatureDrafting),
    vispec.VispecPoss3Config: Kind(vispec.VispecPoss3Drafter, chain_steps, FeatureDrafting),
}


def config_class(kind: Any, base: Any = None, own: Container[str] = ()) -> type[DrafterConfig] | None:
    """The config class of a kind (and, for position specialists and ViSpec, of their base); None: unknown. ViSpec has
    specialists if they are among the names of its `own` fields."""
    specialised = kind == "poss" or (kind == "vispec" and "specialists" in own)
    wanted = kind, base, specialised
    return next((c for c in KINDS if (c.kind, c.base, issubclass(c, SpecialistsConfig)) == wanted), None)


def known_kinds() -> str:
    names = [config.kind + f" over {config.base}" * (config.base is not None) for config in KINDS]
    return ", ".join(dict.fromkeys(names))


def kind_text(config: DrafterConfig) -> str:
    """A kind's name in text: eagle3.1 (with its two norms), poss-2 (two positions a specialist), vispec over eagle3."""
    normed = isinstance(config, Eagle3Config) and config.fc_norm and config.norm_output
    return kind_name(config.kind, config.base, getattr(config, "positions_per_specialist", None), normed)


def kind_name(kind: str, base: str | None, positions: int | None, normed: bool) -> str:
    """The same from a recipe's values. Over EAGLE-1, the published form of PosS and ViSpec, the base is not named."""
    over = f" over {base}" * (kind in ("poss", "vispec") and base != "eagle")
    specialists = "" if positions is None else f"-{positions}" if kind == "poss" else f" with poss-{positions}"
    return kind + specialists + over + ".1" * normed


def build_drafter(config: DrafterConfig, vocab: DraftVocab, head: FrozenHead | None) -> Drafter:
    """A drafter of this shape with random weights. `head`: the target's; None for kinds with their own."""
    return KINDS[type(config)].module(config, vocab, head)


def drafting_of(drafter: Drafter, cut: DraftVocab | None = None) -> Drafting:
    """The drafter inside answers; `cut` is as in `FeatureDrafting`."""
    return KINDS[type(drafter.config)].drafting(drafter, cut)


def trainable_parameters(config: DrafterConfig) -> int:
    """The exact number of trained parameters, from the module on the meta device."""
    return sum(p.numel() for p in on_meta(config).parameters())


def tensor_shapes(config: DrafterConfig, vocab: DraftVocab | None = None) -> dict[str, list[int]]:
    """Names and shapes of a checkpoint's tensors, without allocating them."""
    return {name: list(tensor.shape) for name, tensor in on_meta(config, vocab).state_dict().items()}


def on_meta(config: DrafterConfig, vocab: DraftVocab | None = None) -> Drafter:
    """A drafter of this shape without weights."""
    vocab = vocab or DraftVocab(torch.arange(config.draft_vocab_size), config.vocab_size)
    with torch.device("meta"):
        return build_drafter(config, vocab, None)


def config_of(section: DrafterSection) -> type[DrafterConfig]:
    """The config class of a recipe's drafter."""
    kind = config_class(section.kind, section.over, {"specialists"} if section.specialised else ())
    assert kind is not None
    return kind


def states_read(section: DrafterSection, layers: int) -> tuple[int, ...]:
    """The target states that a recipe's drafter reads, or UserError for states that so many layers do not have."""
    if not config_of(section).fuses:
        return (layers,)
    return checked_capture_layers(section.capture_layers, layers)


def drafter_shape(section: DrafterSection, target_config: Any) -> DrafterConfig:
    """The shape of a recipe's drafter, for a target with this text config. Raises UserError where they do not fit."""
    vocab_size = target_config.vocab_size
    states = states_read(section, target_config.num_hidden_layers)
    if section.vocab_size is not None and section.vocab_size > vocab_size:
        raise UserError(
            f"drafter.vocab_size: {section.vocab_size} is more than the target's vocabulary of {vocab_size} tokens"
        )
    kind = config_of(section)
    names = {each.name for each in fields(kind)}
    own = ("num_layers", "attention_bias", "fc_bias", "fc_norm", "norm_output", "compressed_tokens", "global_vector")
    wanted: dict[str, Any] = {key: value for key in own if (value := getattr(section, key)) is not None}
    wanted |= {"positions_per_specialist": section.positions, "specialists": section.specialist_count}
    return kind.for_target(
        target_config,
        vocab_size,
        states,
        section.vocab_size or vocab_size,
        num_attention_heads=section.num_attention_heads,
        num_key_value_heads=section.num_key_value_heads,
        intermediate_size=section.intermediate_size,
        **{key: value for key, value in wanted.items() if key in names},
    )
