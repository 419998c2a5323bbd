"""Pictures in a target's prompt: their embeddings, and their places in M-RoPE.

A picture covers placeholder tokens, so it has two kinds of positions. Drafters, caches, masks and windows count
columns. Rotary embeddings of the families with M-RoPE (Qwen2.5-VL) have three axes, on which a picture of h x w tokens
covers h rows and w columns, and only max(h, w) positions:

    token     U   <   P   P   P   P   P   P   >   H        a picture of 2 x 3 tokens
    column    0   1   2   3   4   5   6   7   8   9
    time      0   1   2   2   2   2   2   2   5   6        text behind it is shifted by max(2, 3) - 6 = -3 positions
    height    0   1   2   2   2   3   3   3   5   6
    width     0   1   2   3   4   2   3   4   5   6

Other families (LLaVA) count columns everywhere. `rope_deltas`, which a model keeps for the prompt that it read last, is
not read here: the shift follows from a row's pictures.

Qwen3-VL also adds a picture to the states behind its first layers (DeepStack, Meng et al. 2024, arXiv 2406.04334):

    column            U   <   P   P   P   P   P   P   >   H
    layer 0 reads     t   t   e   e   e   e   e   e   t   t        e: embeddings
    behind layer 0            +d0 +d0 +d0 +d0 +d0 +d0              d: `deeper`, from deeper layers of the tower
    behind layer 1            +d1 +d1 +d1 +d1 +d1 +d1
    behind layer 2            +d2 +d2 +d2 +d2 +d2 +d2

Drafters read e alone; d reaches them in the target's states. All of it is the family's own: its whole model reads the
picture alone up to the input of its decoder, where it is caught.

Shapes: B rows, T tokens, n tokens of a picture, H hidden size, D layers that add a picture.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from draftsmith.models.prompt import Insert, PlacedInsert
from draftsmith.recipes.errors import UserError

SUPPORTED = "LLaVA-1.5, LLaVA-NeXT, Qwen2.5-VL and Qwen3-VL"
HELD_BYTES = 256 * 2**20  # of embeddings that a target holds for pictures it read last


@dataclass(frozen=True, eq=False)
class PictureInsert(Insert):
    """A picture in place of its placeholder tokens."""

    tokens: int  # placeholders, as many as the target's embeddings of it
    content: str  # sha256 of the picture and of the processor's settings
    pixels: Callable[[], Mapping[str, torch.Tensor]]  # reads the picture: what the processor makes of it

    @property
    def length(self) -> int:
        return self.tokens

    @cached_property
    def digest(self) -> str:
        return self.content


@dataclass(frozen=True)
class PictureStates:
    """A picture as the decoder reads it."""

    embeddings: torch.Tensor  # [n, H] in the scale of `get_input_embeddings()(ids)`
    offsets: torch.Tensor | None  # [3, n] positions behind that of its first token; None: columns
    deeper: torch.Tensor | None  # [D, n, H] added to the states behind layers 0 to D-1; None: nothing is

    @property
    def nbytes(self) -> int:
        return self.embeddings.nbytes + (0 if self.deeper is None else self.deeper.nbytes)


class EndOfForward(Exception):
    """Raised by a hook that needs nothing behind it."""


def is_vision_language(config: Any) -> bool:
    """Whether a model with this config has a vision part and a placeholder token for pictures."""
    return hasattr(config, "vision_config") and isinstance(getattr(config, "image_token_id", None), int)


class PictureReader:
    """The vision part of a target. It reads each picture once, as long as the target holds it (`HELD_BYTES`)."""

    def __init__(self, model: Any):
        self.whole: Any = model.base_model
        self.decoder: nn.Module = model.get_decoder()
        self.name = type(model).__name__
        self.placeholder: int = model.config.image_token_id
        self.has_axes = hasattr(self.whole, "get_rope_index")  # M-RoPE
        self._held: OrderedDict[str, PictureStates] = OrderedDict()

    def read(self, picture: PictureInsert) -> PictureStates:
        """The picture as the decoder reads it. Raises UserError if it has another number of embeddings than tokens."""
        states = self._held.pop(picture.digest, None)
        if states is None:
            states = self._read(picture)
        if len(states.embeddings) != picture.length:
            raise self._wrong_count(picture)
        self._held[picture.digest] = states
        while len(self._held) > 1 and sum(held.nbytes for held in self._held.values()) > HELD_BYTES:
            self._held.popitem(last=False)
        return states

    @torch.no_grad()
    def _read(self, picture: PictureInsert) -> PictureStates:
        table: torch.Tensor = self.whole.get_input_embeddings().weight
        inputs: dict[str, Any] = {
            name: values.to(table.device, table.dtype if values.is_floating_point() else None)
            for name, values in picture.pixels().items()
        }
        inputs["input_ids"] = torch.full((1, picture.length), self.placeholder, device=table.device)
        if self.has_axes:
            inputs["mm_token_type_ids"] = torch.ones_like(inputs["input_ids"])
        caught: dict[str, Any] = {}

        def catch(_module: nn.Module, _args: tuple, given: dict[str, Any]) -> None:
            caught.update(given)
            raise EndOfForward

        # Before other hooks, which expect a pass of the decoder; with_kwargs: families name what they give.
        handle = self.decoder.register_forward_pre_hook(catch, prepend=True, with_kwargs=True)
        try:
            self.whole(**inputs, use_cache=False)
        except EndOfForward:
            pass
        except ValueError as error:  # transformers counts placeholders and embeddings
            raise self._wrong_count(picture) from error
        finally:
            handle.remove()
        offsets = caught["position_ids"][:, 0].clone() if self.has_axes else None
        deeper = caught.get("deepstack_visual_embeds")
        return PictureStates(
            caught["inputs_embeds"][0].clone(), offsets, torch.stack(tuple(deeper)) if deeper else None
        )

    def _wrong_count(self, picture: PictureInsert) -> UserError:
        return UserError(
            f"target.model: {self.name} makes another number of embeddings of a picture than the {picture.length} "
            "placeholders that its prompt has for it; is the prompt another target's, or the processor's config "
            "(preprocessor_config.json) another model's?"
        )

    def deeper(self, ids_BT: torch.Tensor, pictures: Sequence[PlacedInsert]) -> dict[str, Any]:
        """The decoder's arguments for what it adds to the states behind its first layers: empty if that is nothing."""
        seen_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        added: list[torch.Tensor] = []  # in the order of `seen_BT`'s columns, row by row
        for placed in sorted(pictures, key=lambda each: (each.row, each.insert.first)):
            states = self.read(placed.insert) if isinstance(placed.insert, PictureInsert) else None
            if states is not None and states.deeper is not None:
                first = placed.insert.first
                added.append(states.deeper[:, : max(0, ids_BT.shape[1] - first)])
                seen_BT[placed.row, first : first + states.deeper.shape[1]] = True
        return {"visual_pos_masks": seen_BT, "deepstack_visual_embeds": [*torch.cat(added, dim=1)]} if added else {}

    def positions(
        self, columns_BT: torch.Tensor, pictures: Sequence[PlacedInsert], ends: Sequence[int]
    ) -> torch.Tensor:
        """[3, B, T] positions of rotary embeddings for tokens in these columns of their texts.

        Args:
            pictures: in the order of their columns; other inserts count columns.
            ends: for each picture, the first column behind the text that it stands in.
        """
        positions = columns_BT.expand(3, -1, -1).clone()
        for placed, end in zip(pictures, ends, strict=True):
            row, first = placed.row, placed.insert.first
            if not isinstance(placed.insert, PictureInsert) or first >= end:
                continue
            offsets = self._offsets(placed.insert)[:, : end - first].to(positions.device)
            behind = first + offsets.shape[1]
            positions[:, row, first:behind] = positions[:, row, first : first + 1] + offsets
            positions[:, row, behind:end] += _shift(offsets)
        return positions

    def shift(self, inserts: Sequence[Insert], length: int) -> int:
        """How far the positions of text are shifted behind the first `length` tokens of a prompt with these inserts."""
        pictures = [each for each in inserts if isinstance(each, PictureInsert) and each.first < length]
        if any(each.first + each.length > length for each in pictures):
            raise ValueError(f"token {length} is inside a picture, which has no position for text behind a part of it")
        return sum(_shift(self._offsets(each)) for each in pictures)

    def _offsets(self, picture: PictureInsert) -> torch.Tensor:
        offsets = self.read(picture).offsets
        assert offsets is not None  # only families with axes are asked
        return offsets


def _shift(offsets_3n: torch.Tensor) -> int:
    """The position behind a picture, over that of text as long."""
    return int(offsets_3n.max()) + 1 - offsets_3n.shape[1]
