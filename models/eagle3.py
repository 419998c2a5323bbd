"""EAGLE-3: one decoder layer that drafts from fused target states (arXiv 2503.01840, section 3).

    captured target states [h_low; h_mid; h_high]_t --fc--> g_t        only where the target's states are known
    feature (g_t, or the layer's own last output a) --hidden_norm------\\
    embedding of the next token --input_layernorm-----------------------[2H]--> attention --+-> MLP --+--> a
    feature, un-normed -----------------------------------------------------residual--------/---------/
    a --norm--> lm_head --> logits over the draft vocabulary;  a itself is the next step's feature

Two flags of EAGLE-3.1, known to engines: `fc_norm`, an RMSNorm for each captured state before fc, and `norm_output`,
norm(a) instead of a as the next step's feature. Further layers are ordinary decoder layers; a is the last one's output.

Parameter names are those of published EAGLE-3 checkpoints. Deviation from the reference code: rotary base, scaling and
norm epsilon are the target's (the reference always trains with base 10000).

Shapes: as in `models.feature_drafter`; F = captured layers * H, W = 2H.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftsmith.models.drafter_base import DrafterConfig, DraftLayer, FrozenHead, layers_above
from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.models.layers import RmsNorm
from draftsmith.models.onednn_linear import head_product
from draftsmith.models.vocab import DraftVocab


@dataclass(frozen=True)
class Eagle3Config(DrafterConfig):
    kind = "eagle3"
    own_head = True

    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Layer(DraftLayer):
    """The first layer, with one norm for the feature and one for the embedding."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)

    def enter(self, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([normed embedding; normed feature], un-normed feature)."""
        embedding, feature = entry.chunk(2, dim=-1)
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), dim=-1), feature


class Head(nn.Linear):
    """Logits of outputs, or a loss over outputs and weight. Wrappers gather a sharded weight when this is called."""

    def forward(self, *outputs: torch.Tensor, loss: Callable[..., Any] | None = None) -> Any:
        return loss(outputs, self.weight) if loss is not None else super().forward(*outputs)


class Eagle3Drafter(FeatureDrafter):
    """fc, layers, norm and a trainable head over the draft vocabulary; ignores the target's head."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, vocab: DraftVocab, head: FrozenHead | None = None):
        super().__init__(config, vocab)
        size, captured = config.hidden_size, len(config.capture_layers)
        self.fc = nn.Linear(size * captured, size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(size, eps=config.rms_norm_eps) for _ in range(captured))
        self.stacks = self.make_layers()
        self.norm = RmsNorm(size, eps=config.rms_norm_eps)
        self.lm_head = Head(size, config.draft_vocab_size, bias=False)

    def make_layers(self) -> Sequence[Sequence[DraftLayer]]:
        self.midlayer = Eagle3Layer(self.config)
        above = list(layers_above(self.config))
        # Engines call the first layer layers.0 or midlayer and count on from it.
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(above, start=1)})
        return ([self.midlayer, *above],)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        captured = captured.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            states = captured.split(self.config.hidden_size, dim=-1)
            captured = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(captured).to(self.dtype)

    def entry(self, feature: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return torch.cat((embedding, feature), dim=-1)

    def head(self, rows: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        product = (self.head_product or self.lm_head) if rows is None else head_product(self.lm_head.weight[rows])
        return lambda outputs: product(self.norm(outputs)).float()

    def head_loss(self, outputs: Sequence[torch.Tensor], loss: Callable[..., Any]) -> Any:
        return self.lm_head(*(self.norm(each) for each in outputs), loss=loss)

    def feedback(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.norm(outputs) if self.config.norm_output else outputs
