"""EAGLE-1/2: one decoder layer that continues the target's features (arXiv 2401.15077, section 3; EAGLE-2 is the same
drafter under another tree, arXiv 2406.16858). HASS trains it over several steps (arXiv 2408.15766).

    feature f_t, the target's state of position t after its final norm ---\\
    embedding of the next token -------------------------------------------[2H]--fc--> u --> layer --> f'_{t+1}
    f'_{t+1} --the target's own head, frozen--> logits over the whole vocabulary
    f'_{t+1} itself is the next step's feature, through fc with the next token

The first layer has no norm before its attention, and no norm follows the last one: outputs predict features, which are
already normed. Parameter names are those of published checkpoints. Deviations from the reference code: rotary base,
scaling and norm epsilon are the target's; drafts use the head's scaling and soft-capping, too (Gemma, Granite, Cohere).

Shapes: as in `models.feature_drafter`; F = W = H.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from draftsmith.models.drafter_base import DrafterConfig, DraftLayer, FrozenHead, layers_above
from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.models.onednn_linear import head_product
from draftsmith.models.vocab import DraftVocab


@dataclass(frozen=True)
class EagleConfig(DrafterConfig):
    kind = "eagle"
    own_head = False
    fuses = False

    fc_bias: bool = True


class EagleLayer(DraftLayer):
    """The first layer, without a norm before attention."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config, config.hidden_size)

    def enter(self, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return entry, entry


class EagleDrafter(FeatureDrafter):
    """fc and layers, with the target's frozen head, which is not part of the checkpoint."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, vocab: DraftVocab, head: FrozenHead | None):
        super().__init__(config, vocab)
        if not vocab.is_full:
            raise ValueError("EAGLE-1 drafts with the target's head over its whole vocabulary")
        weight, bias = (None, None) if head is None else (head.weight_VH, head.bias_V)  # None: it cannot give logits
        self.register_buffer("head_weight", None if weight is None else weight.detach(), persistent=False)
        self.register_buffer("head_bias", None if bias is None else bias.detach(), persistent=False)
        self.scaled = (lambda logits: logits) if head is None else head.scaled
        self.head_product = None if head is None else head.product
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.stacks = self.make_layers()

    def make_layers(self) -> Sequence[Sequence[DraftLayer]]:
        """Registers the layers and returns the stacks."""
        layers = [EagleLayer(self.config), *layers_above(self.config)]
        self.layers = nn.ModuleList(layers)
        return (layers,)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return captured.to(self.dtype)

    def entry(self, feature: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat((embedding, feature), dim=-1)).to(self.dtype)

    def head(self, rows: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        weight: torch.Tensor = self.head_weight  # type: ignore[assignment]
        bias: torch.Tensor | None = self.head_bias  # type: ignore[assignment]
        if rows is None:
            product = self.head_product or partial(functional.linear, weight=weight, bias=bias)
        else:
            product = head_product(weight[rows], None if bias is None else bias[rows])
        return lambda outputs: self.scaled(product(outputs.to(weight.dtype))).float()

    def head_loss(self, outputs: Sequence[torch.Tensor], loss: Callable[..., Any]) -> Any:
        return loss(outputs, self.head_weight, self.head_bias, self.scaled)
