"""PosS: position specialists, one decoder layer for every few draft positions (arXiv 2506.03566, section 3).

Specialist i // n drafts position i, and the last one all that follow:

    drafted position    0   1   2   3   4   5   6 ...
    specialist (n = 2)  0   0   1   1   2   2   2 ...       PosS-2 with three specialists

Specialists share the rest: fc, embeddings and head of EAGLE-1 (the published form, trained like HASS), or fc, norm and
head of EAGLE-3. They pass on features, but not keys and values: each computes its own, from the target's features for
the text and from earlier specialists' features for the chain.

    column              t-1      t        t+1      t+2                chain below root x[t+1], n = 1
    feature             f[t-1]   f[t]     a_0      a_1
    read by specialist  0 1 2    0 1 2    1 2      2                  through its own k and v

Gradients (`train.detach_features`): over EAGLE-1 every drafted feature is detached, over EAGLE-3 only at a change of
specialists, so a specialist learns from its own positions only. `false` detaches nothing, like the published version
over EAGLE-3. Defects of the reference code are not repeated: masked scores in the softmax, a first round that always
uses specialist 0, and drafted features that outlive their prompt.

Shapes: as in `models.feature_drafter`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from draftsmith.models.drafter_base import DrafterConfig, DraftLayer
from draftsmith.models.eagle import EagleConfig, EagleDrafter, EagleLayer
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Layer
from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class SpecialistsConfig(DrafterConfig):
    """The fields that position specialists add to their base's config."""

    kind = "poss"

    positions_per_specialist: int = 1  # n
    specialists: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers != 1:
            raise UserError(f"drafter.num_layers: {self.num_layers}, but a position specialist is a single layer")

    @property
    def cached_layers(self) -> int:
        return self.specialists


@dataclass(frozen=True)
class PossConfig(SpecialistsConfig, EagleConfig):
    """Specialists over EAGLE-1's features: the published form."""

    base = "eagle"


@dataclass(frozen=True)
class Poss3Config(SpecialistsConfig, Eagle3Config):
    """Specialists over EAGLE-3's fused features."""

    base = "eagle3"


class Specialists(FeatureDrafter):
    """A stack of one layer for each specialist."""

    config: SpecialistsConfig
    layer_class: type[EagleLayer] | type[Eagle3Layer]

    def make_layers(self) -> Sequence[Sequence[DraftLayer]]:
        layers = [self.layer_class(self.config) for _ in range(self.config.specialists)]
        self.specialists = nn.ModuleList(layers)
        return [[layer] for layer in layers]

    @property
    def positions_per_stack(self) -> int:
        return self.config.positions_per_specialist

    def adapted(self, tensors: Mapping[str, torch.Tensor], given: DrafterConfig) -> dict[str, torch.Tensor]:
        """Of a single-layer drafter, each specialist gets a copy of that layer."""
        tensors = super().adapted(tensors, given)
        if isinstance(given, SpecialistsConfig):
            return tensors
        first = "midlayer." if self.config.base == "eagle3" else "layers.0."
        result: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name.startswith(first):
                own = name.removeprefix(first)
                result |= {f"specialists.{i}.{own}": tensor.clone() for i in range(self.config.specialists)}
            else:
                result[name] = tensor
        return result


class PossDrafter(Specialists, EagleDrafter):
    config: PossConfig
    layer_class = EagleLayer


class Poss3Drafter(Specialists, Eagle3Drafter):
    config: Poss3Config
    layer_class = Eagle3Layer
