"""ViSpec: drafters that read a picture as a few compressed tokens and one global vector (arXiv 2509.15235, section 3).

    a picture's input embeddings [n, H] --adaptor: Q + 1 learned queries, one attention pool--> c_1 ... c_Q, g
    c_1 ... c_Q   stand in place of the picture's columns, as inputs of the first layer
    g             is in every later column, drafted ones included: f' = img_fc [f ; g], then entry with f'

The border between a picture and text, for Q = 2. Column t reads f_t and the embedding of x[t+1] (`models.alignment`),
so a picture at tokens 2 to 6 has columns 1 to 5:

    position, column t   0    1    2    3    4    5    6    7    8
    token x[t]           u    u    P    P    P    P    P    u    A      A: the answer's first token, the root
    embedding of x[t+1]  u    P    P    P    P    P    u    A
    column exists        yes  -    -    -    yes  yes  yes  yes         1 to 3 are removed, with their states
    input                f'_0                c_1  c_2  f'_6 f'_7        4 and 5 are the last Q of the picture's columns
    with the vector      0                   -    -    g    g           0: no picture before; c_i enter as they are
    rotary position      0                   4    5    6    7           as in the text without compression
    can count                                          *    *           picture columns never do

Column 6 is the first that exists again: it reads the target's state at the picture's last token and the first text
token behind it. Each later picture brings a g of its own, which holds from there on. A picture with fewer than Q
columns keeps them all, with its first vectors; a picture at the very beginning has one column less, because no column
reads x[0], but the adaptor reads all of its tokens. Attention, packing, buffers and trees only see columns that exist
(`models.target_columns`).

img_fc starts as [I | 0], so a drafter that was trained on text begins as it was.

Over EAGLE-1 (the published form) c_i is the first layer's input itself: it bypasses fc. Over EAGLE-3, which nobody has
published, g enters behind fc, at the fused feature, where drafted features come back, too; c_i is the layer's embedding
and its feature, each through the layer's own norm. Position specialists (`models.poss`) may stand on it.

Deviations from the reference code: any number of pictures and rows, 0 compressed tokens, attention of the draft layer
and norms as in the base (`models.eagle`, `models.eagle3`).

Shapes: as in `models.feature_drafter`; n tokens of a picture, Q compressed tokens, A heads, D head dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn import functional

from draftsmith.models.drafter_base import DrafterConfig, FrozenHead
from draftsmith.models.eagle import EagleConfig, EagleDrafter
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.models.poss import Poss3Config, Poss3Drafter, PossConfig, PossDrafter
from draftsmith.models.prompt import DecoderInputs
from draftsmith.models.target_columns import SeenPicture, TargetColumns, TextColumns, columns_of_picture
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError


@dataclass(frozen=True)
class VisionConfig(DrafterConfig):
    """The fields that ViSpec adds to its base's config."""

    kind = "vispec"
    reads_pictures = True

    compressed_tokens: int = field(default=1, metadata={"least": 0})  # Q
    global_vector: bool = True  # False: g is 0, an ablation

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"drafter.num_attention_heads: {self.num_attention_heads} heads cannot share the adaptor's width of "
                f"{self.hidden_size} evenly; change their number"
            )


@dataclass(frozen=True)
class VispecConfig(VisionConfig, EagleConfig):
    """Over EAGLE-1's features: the published form."""

    base = "eagle"


@dataclass(frozen=True)
class Vispec3Config(VisionConfig, Eagle3Config):
    """Over EAGLE-3's fused features."""

    base = "eagle3"


@dataclass(frozen=True)
class VispecPossConfig(VispecConfig, PossConfig):
    """Over specialists of EAGLE-1's layer."""


@dataclass(frozen=True)
class VispecPoss3Config(Vispec3Config, Poss3Config):
    """Over specialists of EAGLE-3's layer."""


class VisionAdaptor(nn.Module):
    """Learned queries that attend over a picture's input embeddings; no norm, residual, MLP or positions."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        size, self.heads = config.hidden_size, config.num_attention_heads
        head_dim = size // self.heads
        self.query = nn.Parameter(torch.randn(config.compressed_tokens + 1, self.heads, head_dim) * head_dim**-0.5)
        self.k_proj = nn.Linear(size, size, bias=config.attention_bias)
        self.v_proj = nn.Linear(size, size, bias=config.attention_bias)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, rows_NH: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """[pictures, Q + 1, H] vectors of pictures with so many tokens each, one behind the other.

        One tensor, not one for each picture: ZeRO-3 counts a module's outputs, and ranks that count differently hang.
        """
        query_AQD = self.query.transpose(0, 1)
        keys, values = (
            each(rows_NH).unflatten(-1, (self.heads, -1)).transpose(0, 1).split(list(lengths), dim=1)  # [A, n, D]
            for each in (self.k_proj, self.v_proj)
        )
        pooled = [
            functional.scaled_dot_product_attention(query_AQD.to(key.dtype), key, value)
            for key, value in zip(keys, values, strict=True)
        ]
        outputs: torch.Tensor = self.o_proj(torch.stack(pooled).transpose(1, 2).flatten(2))
        return outputs.to(self.o_proj.weight.dtype)


class VisionDrafter(FeatureDrafter):
    """What ViSpec adds to a base."""

    config: VisionConfig

    def __init__(self, config: VisionConfig, vocab: DraftVocab, head: FrozenHead | None = None):
        super().__init__(config, vocab, head)  # type: ignore[call-arg]  # the base's
        size = config.hidden_size
        self.img_adaptor = VisionAdaptor(config)
        self.img_fc = nn.Linear(2 * size, size, bias=getattr(config, "fc_bias", False))
        with torch.no_grad():
            self.img_fc.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1))
            if self.img_fc.bias is not None:
                self.img_fc.bias.zero_()

    def bypass(self, vectors: torch.Tensor) -> torch.Tensor:
        """Compressed tokens [..., H] to the input [..., W] of the first layer."""
        raise NotImplementedError

    def entry_in_context(self, feature: torch.Tensor, embedding: torch.Tensor, *context: torch.Tensor) -> torch.Tensor:
        """The base's entry, behind img_fc. `embedding` is a compressed token where `context` says so: [..., H] global
        vectors and [...] bool, or () without pictures."""
        globals_, compressed = context if context else (torch.zeros_like(feature), None)
        feature = self.img_fc(torch.cat((feature, globals_.expand_as(feature)), dim=-1)).to(self.dtype)
        entered = self.entry(feature, embedding)
        if compressed is None:
            return entered
        return torch.where(compressed[..., None], self.bypass(embedding).to(entered.dtype), entered)

    def target_columns(
        self, captured: torch.Tensor, following: DecoderInputs, texts: Sequence[TextColumns]
    ) -> TargetColumns:
        self._see(following, texts)
        if not any(text.pictures for text in texts):
            read = super().target_columns(captured, following, texts)
            if not torch.is_grad_enabled():
                return read
            # Wrappers for many processes need a gradient, if 0, for the parameters that another rank's pictures use.
            [vectors] = self.img_adaptor(following.embeddings[0, :1], [1])
            nothing = (0 * vectors.sum(0)).expand_as(following.embeddings)
            return replace(read, context=(nothing, torch.zeros_like(following.positions, dtype=torch.bool)))
        exists = torch.zeros(following.positions.shape, dtype=torch.bool)
        which_global, which_vector = exists.long(), exists.long()  # 0: none
        globals_ = [following.embeddings.new_zeros(self.config.hidden_size)]
        vectors = list(globals_)
        for text in texts:
            here = slice(text.first, text.first + text.count)
            exists[text.row, here] = True
            column = torch.arange(text.before, text.before + text.count)
            for _, picture in sorted(text.pictures.items()):
                begin = picture.end - picture.kept
                exists[text.row, here] &= (column < picture.first) | (column >= begin)
                inside = (column >= begin) & (column < picture.end)
                which_vector[text.row, here] += torch.where(inside, len(vectors) + column - begin, 0)
                which_global[text.row, here] = torch.where(
                    column >= picture.end, len(globals_), which_global[text.row, here]
                )
                # Times 0 rather than left out: wrappers for many processes need a gradient for every parameter.
                globals_.append(picture.vectors[-1] * float(self.config.global_vector))
                vectors += picture.vectors[: picture.kept].unbind()
        counts = exists.sum(1).tolist()
        # Stable sort moves the columns that exist to the front of each row and keeps their order.
        order = (~exists).long().argsort(dim=1, stable=True)[:, : max(counts)]  # [B, C]
        device = following.positions.device
        which_global, which_vector = (each.gather(1, order).to(device) for each in (which_global, which_vector))
        row, order = torch.arange(len(order), device=device)[:, None], order.to(device)
        compressed = which_vector > 0
        embeddings = torch.where(
            compressed[..., None], torch.stack(vectors)[which_vector], following.embeddings[row, order]
        )
        return TargetColumns(
            captured[row, order],
            embeddings,
            following.positions[row, order],
            counts,
            (torch.stack(globals_)[which_global], compressed),
            exists,
        )

    def _see(self, following: DecoderInputs, texts: Sequence[TextColumns]) -> None:
        """Adds new pictures to their texts."""
        new: list[tuple[TextColumns, int, torch.Tensor]] = []
        for placed in following.inserts:
            for text in texts:
                token = placed.first + 1 - text.first + text.before  # position of its first token in the text
                here = placed.row == text.row and 0 <= token < text.before + text.count
                if here and token not in text.pictures and token + len(placed.rows) > 1:  # it has a column
                    new.append((text, token, placed.rows))
        if not new:
            return
        lengths = [len(rows) for _, _, rows in new]
        found = self.img_adaptor(torch.cat([rows for _, _, rows in new]), lengths)
        for (text, token, _), length, vectors in zip(new, lengths, found, strict=True):
            places = columns_of_picture(token, length, self.config.compressed_tokens)
            text.pictures[token] = SeenPicture(*places, vectors)

    def adapted(self, tensors: Mapping[str, torch.Tensor], given: DrafterConfig) -> dict[str, torch.Tensor]:
        """A text drafter gets this drafter's adaptor and projection."""
        tensors = super().adapted(tensors, given)
        if isinstance(given, VisionConfig):
            return tensors
        return {**tensors, **{name: own for name, own in self.state_dict().items() if name.startswith("img_")}}


class VispecDrafter(VisionDrafter, EagleDrafter):
    config: VispecConfig

    def bypass(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors


class Vispec3Drafter(VisionDrafter, Eagle3Drafter):
    config: Vispec3Config

    def bypass(self, vectors: torch.Tensor) -> torch.Tensor:
        return torch.cat((vectors, vectors), dim=-1)


class VispecPossDrafter(VispecDrafter, PossDrafter):
    config: VispecPossConfig


class VispecPoss3Drafter(Vispec3Drafter, Poss3Drafter):
    config: VispecPoss3Config
