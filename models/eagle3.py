"""EAGLE-3: one decoder layer that drafts from fused target states (arXiv 2503.01840, section 3).

    captured target states [h_low; h_mid; h_high]_t --fc--> g_t        only where the target's states are known
    feature (g_t, or the layer's own last output a) --hidden_norm------\\
    embedding of the next token --input_layernorm-----------------------[2H]--> attention --+-> MLP --+--> a
    feature, un-normed -----------------------------------------------------residual--------/---------/
    a --norm--> lm_head --> logits over the draft vocabulary;  a itself is the next step's feature

Parameter names are those of published EAGLE-3 checkpoints. Deviations from the reference code: the rotary base, its
scaling and the norm epsilon come from the target (the reference trains with base 10000 whatever the target has);
whether a feature comes from the target is said by the caller, not guessed from its width.

Shapes: B rows, T tokens, C columns, H hidden size, F = captured layers * H, Vd draft vocabulary, S cached columns.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from draftsmith.models.families import layer_configs
from draftsmith.models.key_values import KeyValues, Kind, SlotTree
from draftsmith.models.layers import Attention, GatedMLP, grouped_attention, rotary
from draftsmith.models.vocab import DraftVocab, rows_of
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that fixes the shape of an EAGLE-3 drafter; stored in its config.json."""

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
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    embedding_scale: float = 1.0  # the target's (`Target.embedding_scale`): rows of its table are multiplied with it

    def __post_init__(self) -> None:
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
    ) -> "Eagle3Config":
        """The shape that fits a target; what is None is taken from it.

        Args:
            config: the target's text config; vocab_size: rows of its head.
        """
        # Where layers differ, those that see everything are the model for the drafter, which does, too.
        types = getattr(config, "layer_types", None) or []
        layer = layer_configs(config)[types.index("full_attention") if "full_attention" in types else 0]
        heads = num_attention_heads or layer.num_attention_heads
        width = intermediate_size or getattr(layer, "intermediate_size", None)
        if width is None:
            raise UserError(
                "drafter.intermediate_size: the target's config names no width of its MLPs; give one, for example "
                f"{4 * config.hidden_size}"
            )
        rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
        if "rope_type" not in rope:  # one set per attention type: the drafter's attention is full
            rope = rope.get("full_attention") or next(iter(rope.values()))
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
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(rope),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"capture_layers": list(self.capture_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Eagle3Config":
        shape: dict[str, Any] = {**values, "capture_layers": tuple(values["capture_layers"])}
        return cls(**shape)


class Eagle3Layer(nn.Module):
    """The decoder layer, with one norm for the feature and one for the embedding."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size = config.hidden_size
        self.hidden_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = Attention(
            2 * size, size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(size, config.intermediate_size, config.hidden_act)

    def attention_input(self, feature: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """[..., 2H]: the normed embedding first, the normed feature second."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(feature)), dim=-1)

    def finish(self, feature: torch.Tensor, attended_BACD: torch.Tensor) -> torch.Tensor:
        """Attention output and MLP on the residual stream, which starts from the un-normed feature: [B, C, H]."""
        residual = feature + self.self_attn.output(attended_BACD)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Drafter(nn.Module):
    """The trainable drafter. `embed_tokens` is the target's table, frozen and not part of the checkpoint."""

    def __init__(self, config: Eagle3Config, vocab: DraftVocab, embedding_VH: torch.Tensor):
        super().__init__()
        if (vocab.size, vocab.target_vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise ValueError(
                f"draft vocabulary of {vocab.size} over {vocab.target_vocab_size} tokens, "
                f"config says {config.draft_vocab_size} over {config.vocab_size}"
            )
        self.config = config
        self._vocab = vocab
        self.register_buffer("embed_tokens", embedding_VH.detach(), persistent=False)
        self.register_buffer("d2t", vocab.d2t.clone())
        self.register_buffer("t2d", vocab.t2d.clone())
        self.fc = nn.Linear(config.hidden_size * len(config.capture_layers), config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = rotary(config.rope_parameters, config.head_dim, config.max_position_embeddings)

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocabulary, on the drafter's device."""
        device = self.fc.weight.device
        if self._vocab.target_ids.device != device:
            self._vocab = self._vocab.to(device)
        return self._vocab

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """Target states [..., F] to features [..., H], in the precision of the residual stream."""
        return self.fc(captured.to(self.fc.weight.dtype)).to(self.norm.weight.dtype)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Target token ids [...] to embeddings [..., H], scaled as the target scales them."""
        rows = functional.embedding(tokens, self.embed_tokens).to(self.norm.weight.dtype)  # type: ignore[arg-type]
        return rows if self.config.embedding_scale == 1 else rows * self.config.embedding_scale

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Layer outputs [..., H] to float32 logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(self.norm(outputs)).float()


class Eagle3Drafting:
    """An EAGLE-3 drafter inside B answers: a `models.draft_tree.Drafting`.

    Column t of the cache holds key and value of (target feature of position t, token t+1) at position t, never of a
    drafted feature: accepted columns are read again from the target's states (`observe`). Drafted columns of the round
    stand behind them in the same buffers (`models.key_values`) and are overwritten by the next round:

        buffer   | 0 1 2 ... S-1 | slot 1  slot 2 ... |        slot 0 is column S-1, whose output drafts the root's
        children
                   committed       this round's tree

    Args:
        cut: FR-Spec (arXiv 2502.14856): draft these tokens alone, by their rows of the drafter's head; probabilities
            are those among them. None: all that the drafter knows.
    """

    def __init__(self, drafter: Eagle3Drafter, cut: DraftVocab | None = None):
        self.drafter = drafter
        self.vocab = drafter.vocab if cut is None else cut.to(drafter.fc.weight.device)
        self.head_rows = None if cut is None else drafter.lm_head.weight[rows_of(drafter.vocab, self.vocab)].detach()
        self.capture_layers = drafter.config.capture_layers
        self.device = drafter.fc.weight.device
        self.reset(0)

    def reset(self, rows: int) -> None:
        config = self.drafter.config
        kind = Kind(config.num_key_value_heads, config.head_dim, self.drafter.norm.weight.dtype, self.device)
        self.columns = KeyValues([(kind, kind)], [0] * rows, capacity=512)
        self.outputs = torch.empty(0)  # [B, slots, H] outputs of the round's columns, slot 0 first
        self.slots = SlotTree(0, self.device)

    def keep(self, rows: Sequence[int]) -> None:
        self.columns.keep(rows)
        if len(self.outputs):  # none yet where an answer ended with its first token
            self.outputs = self.outputs[torch.tensor(rows, device=self.device)]

    @torch.no_grad()
    def observe(self, committed: Sequence[Sequence[int]], features: torch.Tensor | None, counts: Sequence[int]) -> None:
        """New columns from target states [B, n, F]; only the last one's output is needed, the others leave
        key and value."""
        assert features is not None
        drafter, attention, columns = self.drafter, self.drafter.midlayer.self_attn, self.columns
        rows, most = len(counts), features.shape[1]
        read = [
            [*tokens[done + 1 : done + 1 + count], *[0] * (most - count)]
            for tokens, done, count in zip(committed, columns.lengths, counts, strict=True)
        ]
        columns.place(0, most)
        feature = drafter.fuse(features)  # [B, n, H]
        x = drafter.midlayer.attention_input(feature, drafter.embed(torch.tensor(read, device=self.device)))
        cos, sin = drafter.rotary(x, columns.positions(most, self.device))
        keys, values = columns.write(0, *attention.keys_values(x, cos, sin))
        columns.commit(counts)
        if rows > 1:
            each = torch.arange(rows, device=self.device)
            last = torch.tensor(counts, device=self.device) - 1
            x, cos, sin, feature = (states[each, last][:, None] for states in (x, cos, sin, feature))  # [B, 1, ...]
        else:
            x, cos, sin, feature = (states[:, -1:] for states in (x, cos, sin, feature))
        mask = None  # row b sees its own columns alone; the others' may reach farther
        if not columns.even:
            lengths = torch.tensor(columns.lengths, device=self.device)
            mask = (torch.arange(keys.shape[2], device=self.device) < lengths[:, None])[:, None]
        else:
            keys, values = keys[:, :, : columns.lengths[0]], values[:, :, : columns.lengths[0]]
        attended = grouped_attention(attention.queries(x, cos, sin), keys, values, mask)
        self.outputs = drafter.midlayer.finish(feature, attended)
        self.slots = SlotTree(rows, self.device)

    @torch.no_grad()
    def root_log_probs(self) -> torch.Tensor:
        return self._log_probs(self.outputs[:, 0])

    @torch.no_grad()
    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        rows, count = tokens.shape
        drafter, attention, columns = self.drafter, self.drafter.midlayer.self_attn, self.columns
        before = self.slots.count
        seen_slots = self.slots.extend(parent_slots, depth)
        if seen_slots is None:
            feature = self.outputs[:, -1:]  # of a chain
        elif rows == 1:
            feature = self.outputs[0].index_select(0, parent_slots[0])[None]  # [B, b, H]
        else:
            feature = self.outputs[torch.arange(rows, device=self.device)[:, None], parent_slots]
        x = drafter.midlayer.attention_input(feature, drafter.embed(tokens))
        columns.place(before, count)
        # The tree's columns at depth d stand at position S-1+d: the column of unroll step d (models.alignment).
        position = columns.positions(1, self.device, depth - 1)
        cos, sin = drafter.rotary(x, position.expand(-1, count))
        keys, values = columns.write(0, *attention.keys_values(x, cos, sin))

        mask = columns.seen(seen_slots)  # [B, b, S + slots]
        attended = grouped_attention(attention.queries(x, cos, sin), keys, values, mask)
        outputs = drafter.midlayer.finish(feature, attended)  # [B, b, H]
        self.outputs = torch.cat((self.outputs, outputs), dim=1)
        return self._log_probs(outputs)

    def _log_probs(self, outputs: torch.Tensor) -> torch.Tensor:
        """Layer outputs [..., H] to log-probabilities [..., Vd]."""
        if self.head_rows is None:
            logits = self.drafter.logits(outputs)
        else:
            logits = functional.linear(self.drafter.norm(outputs), self.head_rows).float()
        return functional.log_softmax(logits, dim=-1)
