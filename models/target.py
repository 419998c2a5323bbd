"""The target model: any causal LM of transformers with a list of decoder layers. `models.target_files` loads it.

It has three uses:

- `states`: one causal pass over padded rows, for training;
- `session`: decoding, one forward over a whole draft tree (`models.target_session`);
- `logits`: the head over chosen positions only.

Shapes: B rows, T tokens, H hidden size, F = captured layers * H, V vocabulary, n tokens of an insert.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache

from draftsmith.models.alignment import Documents
from draftsmith.models.drafter_base import FrozenHead
from draftsmith.models.families import AttentionKinds, scaled_logits
from draftsmith.models.prompt import DecoderInputs, EmbeddingInsert, Insert, PlacedInsert, PlacedRows
from draftsmith.models.target_attention import document_attention
from draftsmith.models.target_session import TargetSession, behind
from draftsmith.models.target_trials import Packing, check_trees, embedding_scales, tried_attention, working_packing
from draftsmith.models.vision import SUPPORTED, EndOfForward, PictureInsert, PictureReader, is_vision_language
from draftsmith.recipes.errors import UserError, first_line, quoted


def device_name(wanted: str) -> str:
    """`wanted`, or for `auto` the accelerator if there is one, else the CPU. Raises UserError if not usable here."""
    if wanted == "auto":
        return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    try:
        torch.empty(1, device=wanted).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # by kind of device, and by build
        raise UserError(
            f"target.device: {wanted!r} cannot be used here ({first_line(error)}); write auto, cpu, or an "
            "accelerator of this machine such as cuda:0"
        ) from None
    return wanted


def checked_capture_layers(layers: Sequence[int] | None, num_layers: int, final: bool = False) -> tuple[int, ...]:
    """`layers`, or the defaults where None. Raises UserError unless ascending, distinct and within 0 to L-1.

    `final` also allows state L, the output of the final norm (EAGLE-1's feature).
    """
    if layers is None:
        return default_capture_layers(num_layers)
    if list(layers) != sorted(set(layers)) or not layers or layers[0] < 0 or layers[-1] >= num_layers + final:
        raise UserError(
            f"drafter.capture_layers: {quoted(list(layers))} must be ascending and distinct, "
            f"between 0 and {num_layers - 1} for this target of {num_layers} layers"
        )
    return tuple(layers)


def default_capture_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's (2, L//2, L-3), in `hidden_states` numbering: state i is the input of layer i, state 0 the embedding.

    Raises UserError below 7 layers, where the three collide or do not ascend.
    """
    if num_layers < 7:
        raise UserError(
            f"drafter.capture_layers: a target of {num_layers} layers is too shallow for the default (2, L//2, L-3); "
            f"name the states to read, ascending, for example {shallow_capture_layers(num_layers)}"
        )
    return (2, num_layers // 2, num_layers - 3)


def shallow_capture_layers(num_layers: int) -> list[int]:
    """States for a target without a default: the last, a middle and a low one; all if there are at most three."""
    return sorted({int(num_layers > 3), num_layers // 2, num_layers - 1})


@dataclass(frozen=True)
class TargetStates:
    """Hidden states from one pass of the target."""

    captured: torch.Tensor  # [B, T, F] states of the captured layers, concatenated low to high
    last: torch.Tensor  # [B, T, H] after the final norm: what the head reads


class Target:
    """A causal LM, as `TargetFiles.load_model` returns it, with capture hooks.

    The constructor tries embeddings, head and draft trees on a few tokens. It raises UserError where the model computes
    them differently from this file.
    """

    head_product: nn.Module | None = None  # the head's product where a faster one was made (`onednn_linear`)

    def __init__(self, model: Any, capture_layers: Sequence[int] | None = None):
        self.model = model
        self.name = type(model).__name__
        self.config = model.config.get_text_config(decoder=True)
        self.kinds = tried_attention(model)
        self.decoder = model.get_decoder()
        self.layers = decoder_layers(model)
        self.num_layers = len(self.layers)
        # None: it reads text only.
        self.pictures = PictureReader(model) if is_vision_language(model.config) else None
        self.head: nn.Module = model.get_output_embeddings()
        self.embedding: nn.Module = model.get_input_embeddings()
        self.hidden_size: int = self.config.hidden_size
        if self.head is None or self.embedding_table.shape[1] != self.hidden_size:
            raise UserError(f"target.model: {self.name} has no head, or embeddings of another width than its layers")
        self.vocab_size: int = self.head.weight.shape[0]  # type: ignore[union-attr]
        self.capture_layers = checked_capture_layers(capture_layers, self.num_layers, final=True)
        # The decoder multiplies rows of `embedding_table` by this before its first layer; 1 where it does more.
        self.embedding_scale, self.scale_behind_embedding = embedding_scales(self)  # type: ignore[arg-type]
        check_trees(self)  # type: ignore[arg-type]
        self._packing: Packing | None = None  # unknown until `try_documents`

    @property
    def device(self) -> torch.device:
        return self.head.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype  # type: ignore[return-value]

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, H]"""
        return self.head.weight  # type: ignore[return-value]

    @property
    def embedding_table(self) -> torch.Tensor:
        """[V, H] the input embeddings; drafters share them."""
        return self.embedding.weight  # type: ignore[return-value]

    @cached_property
    def vision_digest(self) -> str | None:
        """Of the parameters before the decoder of a vision-language model; None: it reads text only."""
        if self.pictures is None:
            return None
        text = {id(parameter) for part in (self.decoder, self.head) for parameter in part.parameters()}
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            if id(parameter) not in text:
                found.update(tensor_digest(torch.atleast_1d(parameter), 64).encode())
        return found.hexdigest()

    @property
    def frozen_head(self) -> FrozenHead:
        """The head, for drafters without their own."""
        bias, scaled = getattr(self.head, "bias", None), partial(scaled_logits, self.config)
        return FrozenHead(self.head_weight, bias, scaled, self.head_product)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Head, scaling and soft-capping over final states [..., H]: float32 logits [..., V]."""
        return scaled_logits(self.config, (self.head_product or self.head)(last)).float()

    @torch.no_grad()
    def inputs(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        inserts: Sequence[PlacedInsert] = (),
        dtype: torch.dtype | None = None,
    ) -> DecoderInputs:
        """The input of the first layer for these tokens. Drafters read it, too.

        Args:
            ids: [B, T], with placeholders at inserts.
            positions: [B, T] of each token in its text; None: 0, 1, 2, ... along each row.
            inserts: parts before the first or after the last column are cut off.
            dtype: of the embeddings, also while scaling; None: the target's.
        """
        embeddings, whole = self.embed(ids, dtype), list[PlacedRows]()
        for placed in inserts:
            if (rows := self._insert(placed, embeddings, self.scale_behind_embedding)) is not None:
                whole.append(PlacedRows(placed.row, placed.insert.first, rows))
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        return DecoderInputs(embeddings, positions, tuple(whole))

    @torch.no_grad()
    def embed(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[..., H] scaled embeddings of text tokens, the first layer's input, in `dtype` or the target's."""
        rows = functional.embedding(ids, self.embedding_table).to(dtype or self.dtype)
        return rows if self.embedding_scale == 1 else rows * self.embedding_scale

    def read_insert(self, insert: Insert) -> torch.Tensor:
        """[n, H] embeddings that replace the insert's tokens, in the scale of `get_input_embeddings()(ids)`."""
        if isinstance(insert, PictureInsert):
            if self.pictures is None:
                raise UserError(
                    f"target.model: {self.name} reads text, but a prompt holds a picture; name a vision-language "
                    f"target ({SUPPORTED}), or leave prompts with pictures out"
                )
            return self.pictures.read(insert).embeddings
        if not isinstance(insert, EmbeddingInsert) or insert.rows.shape[1] != self.hidden_size:
            raise UserError(f"target.model: {self.name} reads text, and embeddings {self.hidden_size} wide")
        return insert.rows.to(self.device)

    def _insert(self, placed: PlacedInsert, embeddings_BTH: torch.Tensor, scale: float) -> torch.Tensor | None:
        """Writes an insert's embeddings in place. Returns all of them [n, H]; None: no part is inside."""
        first, length = placed.insert.first, placed.insert.length
        begin, end = max(0, first), min(first + length, embeddings_BTH.shape[1])
        if begin >= end:
            return None
        rows = self.read_insert(placed.insert).to(embeddings_BTH.dtype) * scale
        embeddings_BTH[placed.row, begin:end] = rows[begin - first : end - first]
        return rows

    def decoder_arguments(
        self, ids: torch.Tensor, inserts: Sequence[PlacedInsert], documents: Documents | None = None
    ) -> dict[str, Any]:
        """The decoder's keyword arguments for texts from their beginning.

        Ids where there is no insert: some families use them elsewhere, too. Positions where the decoder's own, 0, 1, 2,
        ... along each row, are wrong. What deeper layers read of pictures, in the families that have it.
        """
        arguments: dict[str, Any] = {} if documents is None else {"position_ids": documents.position}
        if not inserts:
            return {"input_ids": ids} | arguments
        embeddings = self.embedding(ids).clone()
        for placed in inserts:
            self._insert(placed, embeddings, scale=1.0)
        if self.pictures is not None:
            arguments |= self.pictures.deeper(ids, inserts)
            if self.pictures.has_axes:
                arguments["position_ids"] = self._rotary_positions(ids, inserts, documents)
        return {"inputs_embeds": embeddings} | arguments

    def _rotary_positions(
        self, ids_BT: torch.Tensor, inserts: Sequence[PlacedInsert], documents: Documents | None
    ) -> torch.Tensor:
        """[3, B, T] positions of M-RoPE."""
        assert self.pictures is not None
        rows, tokens = ids_BT.shape
        columns = torch.arange(tokens, device=ids_BT.device).expand(rows, -1)
        places = [(row, 0, tokens) for row in range(rows)]
        if documents is not None:
            columns, places = documents.position, documents.places
        ends = [
            next(s + n for row, s, n in places if row == placed.row and s <= placed.insert.first < s + n)
            for placed in inserts
        ]
        return self.pictures.positions(columns, inserts, ends)

    @torch.no_grad()
    def states(
        self,
        input_ids_BT: torch.Tensor,
        capture: Sequence[int] | None = None,
        documents: Documents | None = None,
        inserts: Sequence[PlacedInsert] = (),
    ) -> TargetStates:
        """One causal pass over right-padded rows. Padding comes last, so no counted position sees it.

        Args:
            capture: layers to capture, possibly none; None: the target's `capture_layers`.
            documents: packed documents, each read as if it were alone; None: every row is one document.
        """
        if documents is not None:
            self.try_documents()
        with self.capturing(self.capture_layers if capture is None else capture) as captured:
            last = self.read(input_ids_BT, documents, self._packing, self.kinds, inserts)
        return TargetStates(side_by_side(captured) if captured else last[..., :0], last)

    def read(
        self,
        input_ids_BT: torch.Tensor,
        documents: Documents | None,
        packing: Packing | None,
        kinds: AttentionKinds,
        inserts: Sequence[PlacedInsert] = (),
    ) -> torch.Tensor:
        """Final states [B, T, H].

        Documents are kept apart by our own attention function (`models.target_attention` draws what they see) or, in
        families with their own attention formulas, by masks. transformers can derive masks from position_ids, but which
        families support restarting positions changes from release to release.
        """
        inputs: dict[str, Any] = self.decoder_arguments(input_ids_BT, inserts, documents) | {"use_cache": False}
        if documents is None:
            return self.decoder(**inputs).last_hidden_state
        if packing == "attention":
            with document_attention(self.decoder, documents):
                return self.decoder(**inputs).last_hidden_state
        column = torch.arange(input_ids_BT.shape[1], dtype=torch.int32, device=input_ids_BT.device)
        distance = column[:, None] - column  # [T, T] columns apart are positions apart within a document
        seen = (distance >= 0) & (column >= documents.first()[..., None])  # [B, T, T]
        inputs["attention_mask"] = kinds.masks(seen[:, None], distance, self.dtype)
        return self.decoder(**inputs).last_hidden_state

    @torch.no_grad()
    def captured_states(
        self, input_ids_BT: torch.Tensor, capture: Sequence[int], inserts: Sequence[PlacedInsert] = ()
    ) -> torch.Tensor:
        """[B, T, F] states of these layers, one or more, as in `states`; later layers are not computed."""
        with self.capturing(capture, end_there=True) as captured, suppress(EndOfForward):
            self.decoder(**self.decoder_arguments(input_ids_BT, inserts), use_cache=False)
        return side_by_side(captured)

    def run_decoder(
        self, capture: Sequence[int], cache: DynamicCache, **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One forward behind `cache`: (final states [B, T, H], captured [B, T, F] or None if `capture` is empty)."""
        with self.capturing(capture) as captured:
            last = self.decoder(**inputs, **behind(self.decoder, cache)).last_hidden_state
        return last, side_by_side(captured) if captured else None

    def uneven_passes(self) -> AbstractContextManager[None]:
        """A context for forwards that some processes of a run make more often than others, for sharded targets."""
        return nullcontext()

    def session(self, capture: Sequence[int] = ()) -> TargetSession:
        """New conversations with an empty cache. Their forwards return the states of the `capture` layers."""
        return TargetSession(self, capture)  # type: ignore[arg-type]

    @contextmanager
    def capturing(self, layers: Sequence[int], end_there: bool = False) -> Iterator[list[torch.Tensor]]:
        """Collects the inputs of `layers` during one forward; for layer L, the decoder's output.

        With `end_there`, the forward ends with `EndOfForward` once all are captured.
        """
        captured: list[torch.Tensor] = []

        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            captured.append(args[0] if args else kwargs["hidden_states"])
            if end_there and len(captured) == len(layers):
                raise EndOfForward

        def final_hook(_module: nn.Module, _args: tuple, output: Any) -> None:
            captured.append(output.last_hidden_state)

        handles = [
            self.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
            if layer < self.num_layers
            else self.decoder.register_forward_hook(final_hook)
            for layer in layers
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def try_documents(self) -> None:
        """Finds out, once, how this decoder keeps packed documents apart. Raises UserError if it does not."""
        if self._packing is None:
            self._packing = working_packing(self)  # type: ignore[arg-type]


def side_by_side(captured: list[torch.Tensor]) -> torch.Tensor:
    return captured[0] if len(captured) == 1 else torch.cat(captured, dim=-1)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder's list of layers, by the count in its text config: families name it layers, h or blocks."""
    count, children = model.config.get_text_config(decoder=True).num_hidden_layers, model.get_decoder().children()
    lists = [child for child in children if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        name = type(model).__name__
        raise UserError(f"target.model: {name} has no list of its {count} decoder layers to capture states from")
    return lists[0]


def tensor_digest(tensor: torch.Tensor, rows: int = 4096) -> str:
    """sha256 over at most `rows` evenly spaced rows of a matrix, in bfloat16: equal for every precision of loading."""
    chosen = torch.linspace(0, len(tensor) - 1, min(rows, len(tensor)), dtype=torch.float64).round().long()
    values = tensor.detach()[chosen.to(tensor.device)].to(torch.bfloat16).cpu().contiguous()
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
