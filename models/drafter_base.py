"""What all drafters share: the shape in their config.json, decoder layers, and how training and decoding ask them.

`models.drafters.KINDS` lists the kinds. A kind is trained by its `Steps` and drafts by its
`models.draft_tree.Drafting`.

Shapes: B rows, T tokens, C columns, A query heads, G key/value heads, D head dimension, H hidden size, F captured
states, V target vocabulary, Vd draft vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import Self

from draftsmith.models.families import rotations, usable_positions
from draftsmith.models.layers import Attention, GatedMLP, RmsNorm, rotary
from draftsmith.models.rotation import PLAIN, drafters_rotation
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter, as stored in its config.json."""

    kind: ClassVar[str]
    base: ClassVar[str | None] = None  # the kind that position specialists and vision-aware drafters extend
    own_head: ClassVar[bool]  # whether the head is trained, or the target's
    fuses: ClassVar[bool] = True  # whether it reads states that its recipe chooses, or the target's last one
    reads_pictures: ClassVar[bool] = False  # whether it makes columns of its own of a picture

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # Vd
    capture_layers: tuple[int, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    hidden_act: str = "silu"
    rope_parameters: dict[str, Any] = field(default_factory=PLAIN.copy)  # `models.rotation`
    embedding_scale: float = 1.0  # the target's (`Target.embedding_scale`)
    num_layers: int = 1
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata.get("least", 1)
            if isinstance(value, float) and not 0 < value < math.inf:
                raise UserError(f"drafter.{each.name}: {value} is not a number above 0")
            if type(value) is int and value < least:
                raise UserError(f"drafter.{each.name}: {value} is less than {least}")
        if min(self.capture_layers, default=0) < 0:
            raise UserError(f"drafter.capture_layers: {list(self.capture_layers)} has a negative layer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"drafter.num_attention_heads: {self.num_attention_heads} query heads cannot share "
                f"{self.num_key_value_heads} key/value heads evenly; change one of the two"
            )

    @classmethod
    def for_target(
        cls,
        config: Any,
        vocab_size: int,
        capture_layers: tuple[int, ...],
        draft_vocab_size: int,
        num_attention_heads: int | None = None,
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        **own: Any,
    ) -> Self:
        """The shape that fits a target; arguments that are None take the value of `config`, its text config."""
        # Where layers differ, the drafter takes after one with full attention, which it has, too.
        types = getattr(config, "layer_types", None) or []
        layer = config.per_layer_config[types.index("full_attention") if "full_attention" in types else 0]
        heads = num_attention_heads or layer.num_attention_heads
        width = intermediate_size or getattr(layer, "intermediate_size", None)
        if width is None:
            raise UserError(
                "drafter.intermediate_size: the target's config names no width of its MLPs; give one, for example "
                f"{4 * config.hidden_size}"
            )
        positions = usable_positions(config)
        # Of one set for each type of attention, the drafter takes that of its own type, full attention.
        rope = (getattr(config, "rope_parameters", None) or {}).get("full_attention")
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=width,
            num_attention_heads=heads,
            num_key_value_heads=num_key_value_heads or getattr(layer, "num_key_value_heads", None) or heads,
            head_dim=getattr(layer, "head_dim", None) or config.hidden_size // layer.num_attention_heads,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            capture_layers=capture_layers,
            rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
            max_position_embeddings=positions,
            rope_parameters=drafters_rotation(rope or next(iter(rotations(config)), PLAIN), positions),
            **own,
        )

    @property
    def cached_layers(self) -> int:
        """Number of layers with keys and values."""
        return self.num_layers

    @property
    def column_bytes(self) -> int:
        """Of a column's keys and values in float32."""
        return 2 * 4 * self.num_key_value_heads * self.head_dim * self.cached_layers

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"capture_layers": list(self.capture_layers)}


class DraftLayer(nn.Module):
    """A decoder layer with attention over inputs of width `input_size`, which `enter` prepares."""

    def __init__(self, config: DrafterConfig, input_size: int):
        super().__init__()
        size = config.hidden_size
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.self_attn = Attention(input_size, size, heads, groups, config.head_dim, config.attention_bias)
        self.post_attention_layernorm = RmsNorm(size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(size, config.intermediate_size, config.hidden_act)

    def enter(self, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(input of attention [..., input_size], residual stream [..., H])."""
        raise NotImplementedError

    def finish(self, residual: torch.Tensor, attended_BACD: torch.Tensor) -> torch.Tensor:
        """Attention output and MLP on the residual stream: [B, C, H]."""
        residual = residual + self.self_attn.output(attended_BACD)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class UpperLayer(DraftLayer):
    """An ordinary pre-norm decoder layer, above the first one of a stack."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config, config.hidden_size)
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)

    def enter(self, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.input_layernorm(entry), entry


@dataclass(frozen=True)
class FrozenHead:
    """The target's head, for drafters that output the target's features."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    scaled: Callable[[torch.Tensor], torch.Tensor]  # the family's scaling of logits (`families.scaled_logits`)
    product: nn.Module | None = None  # a faster one, in decoding


def layers_above(config: DrafterConfig) -> Iterator[UpperLayer]:
    """New layers of a stack, from the second on."""
    return (UpperLayer(config) for _ in range(config.num_layers - 1))


class Drafter(nn.Module):
    """A trainable drafter. It reads tokens as the target's embeddings (`models.prompt.DecoderInputs`)."""

    def __init__(self, config: DrafterConfig, vocab: DraftVocab):
        super().__init__()
        if (vocab.size, vocab.target_vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise ValueError(
                f"draft vocabulary of {vocab.size} over {vocab.target_vocab_size} tokens, "
                f"config says {config.draft_vocab_size} over {config.vocab_size}"
            )
        self.config = config
        # The product with the whole head where decoding has a faster one (`LoadedModels`).
        self.head_product: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._vocab = vocab
        self.register_buffer("d2t", vocab.d2t.clone())
        self.register_buffer("t2d", vocab.t2d.clone())
        self.rotary = rotary(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return self.draft_layers[0].post_attention_layernorm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream."""
        return self.draft_layers[0].post_attention_layernorm.weight.dtype

    def round_weights(self, dtype: torch.dtype) -> None:
        """Rounds the weights. Unlike `to`, it leaves the rotary frequencies alone, which far positions need in full."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary, on the drafter's device."""
        if self._vocab.target_ids.device != self.device:
            self._vocab = self._vocab.to(self.device)
        return self._vocab

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs [..., H] to float32 logits over the draft vocabulary [..., Vd]."""
        return self.head(None)(outputs)

    def head(self, rows: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """`logits` for the draft ids `rows` [n] only. None: all ids."""
        raise NotImplementedError

    def head_loss(self, outputs: Sequence[torch.Tensor], loss: Callable[..., Any]) -> Any:
        """`loss(read, weight, bias, scaled)` (`train.loss.head_loss`) over outputs [B, C, H] of each step, for losses
        that never hold all logits at once."""
        raise NotImplementedError

    def adapted(self, tensors: Mapping[str, torch.Tensor], given: DrafterConfig) -> dict[str, torch.Tensor]:
        """A checkpoint of a drafter of shape `given`, from which this one may start, as one of this drafter."""
        return dict(tensors)


# Attention over a causal prefix and keys of the same column: `train.attention.merged.merged_attention`.
Attend = Callable[..., torch.Tensor]
# How a kind computes the outputs of every drafted position, for training: as `models.chain_steps.chain_steps`.
Steps = Callable[..., Iterator[torch.Tensor]]
