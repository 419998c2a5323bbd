"""The target model: loads it, captures its hidden states, verifies draft trees with it, keeps its cache.

A target is any `AutoModelForCausalLM` with a list of decoder layers. It has three uses:

- `states`: one causal pass over padded rows, for training;
- `TargetSession.prefill` / `verify` / `commit`: decoding, one forward over a whole draft tree;
- `logits`: the head over chosen positions only.

Prompts are `models.prompt.Prompt`. Only `Target.inputs` turns them into what the layers and the drafters read.

Shapes: B rows, T tokens, N tree nodes, P cached tokens, H hidden size, F = captured layers * H, V vocabulary;
n, S, A as in `models.key_values`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from draftsmith.models.alignment import Documents
from draftsmith.models.chat import first_line, load_config
from draftsmith.models.document_attention import document_attention, is_possible
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.families import (
    TRIED_TOKENS,
    TRIED_WINDOW,
    AttentionKinds,
    scaled_logits,
    shortened_window,
    tried_attention,
)
from draftsmith.models.feature_drafter import FrozenHead
from draftsmith.models.key_values import KeyValues, Kind
from draftsmith.models.prompt import DecoderInputs, EmbeddingInsert, Insert, PlacedInsert, Prompt
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, short
from draftsmith.recipes.schema import TargetSection


def load_causal_lm(section: TargetSection, device: str | None = None) -> Any:
    """The model in evaluation mode, all parameters frozen, on `device` (None: the section's).

    Raises:
        UserError: nothing loadable there, an unsupported family (`families.attention_kinds`), missing weights, or
            only pickled weights (only safetensors are read).
    """
    return read_causal_lm(section).to(device_name(device or section.device))


def device_name(wanted: str) -> str:
    """`wanted`, or for `auto` the accelerator if there is one, else the CPU."""
    if wanted != "auto":
        return wanted
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"


def read_causal_lm(section: TargetSection) -> Any:
    """Like `load_causal_lm`, on the CPU or wherever transformers puts the weights."""
    load_config(section)  # raises for unsupported configs before any weight is read
    try:
        with _our_bars():
            result: Any = AutoModelForCausalLM.from_pretrained(
                section.model,
                revision=section.revision,
                dtype=section.dtype if section.dtype == "auto" else getattr(torch, section.dtype),
                trust_remote_code=section.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(_why_not_loaded(section, error)) from error
    loaded, report = result
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"target.model: {section.model!r} lacks {len(missing)} of its tensors ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}), which would start as random numbers; is it a causal LM's "
            "checkpoint, whole and with its head?"
        )
    return loaded.eval().requires_grad_(False)


@contextmanager
def _our_bars() -> Iterator[None]:
    """Shows transformers' progress bars in the style of `recipes.command.progress`."""

    def bar(factory: Any, args: Any, settings: Any) -> Any:
        if not logging.is_progress_bar_enabled():
            return factory(*args, **settings)
        return Bar(*args, **{"unit": "tensor", "leave": False, **settings})

    # Older releases have no such hook and keep their own bars.
    set_hook = getattr(logging, "set_tqdm_hook", lambda hook: None)
    before = set_hook(bar)
    try:
        yield
    finally:
        set_hook(before)


def _why_not_loaded(section: TargetSection, error: Exception) -> str:
    pickled = sorted(path.name for path in Path(section.model).glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"target.model: {section.model!r} holds pickled weights only ({pickled[0]}); reading those can run code, "
            "so safetensors are the one format read here. If you trust the file, load it with transformers once and "
            "write it anew with save_pretrained"
        )
    reason = first_line(error)
    if reason.startswith("Unrecognized configuration class"):
        reason = f"transformers has no causal LM of family {load_config(section).model_type}"
    return f"target.model: cannot load {section.model!r} as a causal LM: {reason}"


def checked_capture_layers(layers: Sequence[int] | None, num_layers: int, final: bool = False) -> tuple[int, ...]:
    """`layers`, or the defaults where None.

    Args:
        final: also allow state L, the output of the final norm (EAGLE-1's feature).

    Raises:
        UserError: not ascending and distinct, or outside 0 to L-1.
    """
    if layers is None:
        return default_capture_layers(num_layers)
    if list(layers) != sorted(set(layers)) or not layers or layers[0] < 0 or layers[-1] >= num_layers + final:
        raise UserError(
            f"drafter.capture_layers: {short(list(layers))} must be ascending and distinct, "
            f"between 0 and {num_layers - 1} for this target of {num_layers} layers"
        )
    return tuple(layers)


def default_capture_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's (2, L//2, L-3), in `hidden_states` numbering: state i is the input of layer i, state 0 the embedding.

    Raises:
        UserError: below 7 layers the three collide (L = 4, 5, 6 give two or one distinct states).
    """
    if num_layers < 7:
        raise UserError(
            f"drafter.capture_layers: the default (2, L//2, L-3) collides for a target of {num_layers} layers; "
            f"name distinct layers between 0 and {num_layers - 1}, for example [0, {num_layers // 2}, {num_layers - 1}]"
        )
    return (2, num_layers // 2, num_layers - 3)


# How packed documents are kept apart: by an attention function that runs one document at a time, or by masks.
Packing = Literal["attention", "masks"]


class _AllCaptured(Exception):
    """Ends a forward early, once all wanted states are captured."""


@dataclass(frozen=True)
class TargetStates:
    """Hidden states from one pass of the target."""

    captured: torch.Tensor  # [B, T, F] states of the captured layers, concatenated low to high
    last: torch.Tensor  # [B, T, H] after the final norm: what the head reads


class Target:
    """A loaded causal LM with capture hooks.

    The constructor tries embeddings, head and draft trees on a few tokens. It raises UserError where the model computes
    them differently from this file.

    Args:
        model: returned by `load_causal_lm`.
        capture_layers: see `checked_capture_layers`.
    """

    def __init__(self, model: Any, capture_layers: Sequence[int] | None = None):
        self.model = model
        self.name = type(model).__name__
        self.config = model.config.get_text_config(decoder=True)
        self.kinds = tried_attention(model)
        self.decoder = model.get_decoder()
        self.layers = decoder_layers(self.decoder, self.config, self.name)
        self.num_layers = len(self.layers)
        self.head: nn.Module = model.get_output_embeddings()
        self.embedding: nn.Module = model.get_input_embeddings()
        self.hidden_size: int = self.config.hidden_size
        if self.head is None or self.embedding_table.shape[1] != self.hidden_size:
            raise UserError(f"target.model: {self.name} has no head, or embeddings of another width than its layers")
        self.vocab_size: int = self.head.weight.shape[0]  # type: ignore[union-attr]
        self.capture_layers = checked_capture_layers(capture_layers, self.num_layers, final=True)
        # The decoder multiplies rows of `embedding_table` by this before its first layer; 1 where it does more.
        self.embedding_scale = self._try_embedding_and_head()
        # The embedding module may apply part of that scale; the decoder applies the rest.
        ids = torch.arange(8, device=self.device) % self.vocab_size
        with torch.no_grad():
            of_module = _constant_ratio(self.embedding(ids), self.embedding_table[ids])
        self._scale_behind_embedding = self.embedding_scale / of_module
        self._try_tree()
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

    @property
    def frozen_head(self) -> FrozenHead:
        """The head, for drafters without their own."""
        return FrozenHead(self.head_weight, getattr(self.head, "bias", None), partial(scaled_logits, self.config))

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Head, scaling and soft-capping over final states [..., H]: float32 logits [..., V]."""
        return scaled_logits(self.config, self.head(last)).float()

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
        embeddings = self.embed(ids, dtype)
        for placed in inserts:
            first, length = placed.insert.first, placed.insert.length
            begin, end = max(0, first), min(first + length, ids.shape[1])
            rows = self.read_insert(placed.insert)[begin - first : end - first]
            embeddings[placed.row, begin:end] = rows.to(embeddings.dtype) * self._scale_behind_embedding
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
        return DecoderInputs(embeddings, positions)

    @torch.no_grad()
    def embed(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[..., H] scaled embeddings of text tokens, the first layer's input, in `dtype` or the target's."""
        rows = functional.embedding(ids, self.embedding_table).to(dtype or self.dtype)
        return rows if self.embedding_scale == 1 else rows * self.embedding_scale

    def read_insert(self, insert: Insert) -> torch.Tensor:
        """[n, H] embeddings that replace the insert's tokens, in the scale of `get_input_embeddings()(ids)`.

        Raises:
            UserError: this target cannot read such an insert.
        """
        if not isinstance(insert, EmbeddingInsert) or insert.rows.shape[1] != self.hidden_size:
            raise UserError(f"target.model: {self.name} reads text, and embeddings {self.hidden_size} wide")
        return insert.rows.to(self.device)

    def _asked(self, ids: torch.Tensor, inserts: Sequence[PlacedInsert]) -> dict[str, torch.Tensor]:
        """The decoder's keyword arguments. Ids where there is no insert: some families use them elsewhere, too."""
        if not inserts:
            return {"input_ids": ids}
        embeddings = self.embedding(ids).clone()
        for placed in inserts:
            first, end = placed.insert.first, placed.insert.first + placed.insert.length
            embeddings[placed.row, first:end] = self.read_insert(placed.insert).to(embeddings.dtype)
        return {"inputs_embeds": embeddings}

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
            inserts: embeddings that replace tokens.

        Raises:
            UserError: this decoder does not keep packed documents apart.
        """
        if documents is not None:
            self.try_documents()
        with self._capturing(self.capture_layers if capture is None else capture) as captured:
            last = self._read(input_ids_BT, documents, self._packing, self.kinds, inserts)
        return TargetStates(_side_by_side(captured) if captured else last[..., :0], last)

    def _read(
        self,
        input_ids_BT: torch.Tensor,
        documents: Documents | None,
        packing: Packing | None,
        kinds: AttentionKinds,
        inserts: Sequence[PlacedInsert] = (),
    ) -> torch.Tensor:
        """Final states [B, T, H].

        Documents are kept apart by our own attention function or masks, after a trial that the decoder follows them.
        transformers can derive masks from position_ids, but which families support restarting positions changes from
        release to release. Masks serve families with their own attention formulas:

            document     a a a b b          sees      a . . . .
            position     0 1 2 0 1                    a a . . .
                                                      a a a . .
                                                      . . . b .
                                                      . . . b b
        """
        inputs: dict[str, Any] = self._asked(input_ids_BT, inserts) | {"use_cache": False}
        if documents is None:
            return self.decoder(**inputs).last_hidden_state
        inputs["position_ids"] = documents.position
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
        with self._capturing(capture, end_there=True) as captured, suppress(_AllCaptured):
            self.decoder(**self._asked(input_ids_BT, inserts), use_cache=False)
        return _side_by_side(captured)

    def uneven_passes(self) -> AbstractContextManager[None]:
        """A context for forwards that some processes of a run make more often than others. It does nothing here: each
        process has a whole target. `train.run.sharded_target` overrides it."""
        return nullcontext()

    def session(self, capture: Sequence[int] = ()) -> "TargetSession":
        """New conversations with an empty cache. Their forwards return the states of the `capture` layers."""
        return TargetSession(self, capture)

    @contextmanager
    def _capturing(self, layers: Sequence[int], end_there: bool = False) -> Iterator[list[torch.Tensor]]:
        """Collects the inputs of `layers` during one forward; for layer L, the decoder's output.

        Args:
            end_there: raise `_AllCaptured` in the forward once all are captured.
        """
        captured: list[torch.Tensor] = []

        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            captured.append(args[0] if args else kwargs["hidden_states"])
            if end_there and len(captured) == len(layers):
                raise _AllCaptured

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
    def _try_embedding_and_head(self) -> float:
        """Compares `states` and `logits` with a whole forward; returns the embeddings' scale.

        Raises:
            UserError: they differ.
        """
        ids = torch.arange(8, device=self.device)[None] % self.vocab_size
        whole = self.model(input_ids=ids, use_cache=False).logits.float()
        with self._capturing(range(self.num_layers)) as captured:
            last = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        shapes = {tuple(states.shape) for states in captured}
        if len(captured) != self.num_layers or shapes != {(1, ids.shape[1], self.hidden_size)}:
            raise UserError(
                f"target.model: {self.name} gives its {self.num_layers} layers states of shapes {sorted(shapes)}, not "
                f"one of width {self.hidden_size} for each token; such states cannot be captured"
            )
        ours = self.logits(last)
        if not torch.allclose(whole, ours, rtol=1e-2, atol=1e-2):
            raise UserError(
                f"target.model: {self.name} changes its logits after the head in a way that is not "
                f"known here (largest difference {(whole - ours).abs().max().item():.3g})"
            )
        return _constant_ratio(captured[0][0], self.embedding_table[ids[0]])

    @torch.no_grad()
    def _try_tree(self) -> None:
        """Raises UserError where the decoder ignores the mask or the positions of a draft tree.

        A node's logits must not depend on its siblings or on its place among them. Rounding may change them a little,
        so the effect of siblings is compared with the effect of other roots. Tokens are spread over the vocabulary and
        the root with the largest effect counts: to a trained model, neighbouring (above all special) ids may mean the
        same.
        """
        device, vocab = self.device, self.vocab_size
        prompt, node = [vocab * i // 7 for i in (1, 2, 3)], vocab // 3
        root, *others = [vocab * i // 8 for i in (1, 3, 5, 7)]
        siblings = [vocab * (2 * i + 1) // 60 for i in range(30)]
        parents = torch.tensor([[-1] + [0] * (len(siblings) + 1)], device=device)

        def logits_of(place: int, tokens: list[int]) -> torch.Tensor:
            session = self.session()
            session.prefill([prompt])
            tree = DraftTree(torch.tensor([tokens], device=device), parents, depth=1)
            logits_BNV, _ = session.verify(tree)
            layers: list[Any] = session.cache.layers
            held = {layer.keys.shape[2] for layer in layers if layer.keys is not None}
            if held != {3 + len(tokens)}:
                raise ValueError(f"its cache holds keys of {sorted(held)} tokens after {3 + len(tokens)}")
            return logits_BNV[0, place]

        try:
            wanted = logits_of(1, [root, node, *siblings])
            changed = (logits_of(len(siblings) + 1, [root, *siblings, node]) - wanted).abs().max()
            moved = torch.stack([(logits_of(1, [other, node, *siblings]) - wanted).abs().max() for other in others])
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            raise UserError(
                f"target.model: {self.name} cannot verify draft trees: {type(error).__name__}: {first_line(error)}"
            ) from error
        # In bfloat16 siblings have 1 % of the roots' effect; where mask or positions are ignored, most of it.
        if not changed < 0.1 * moved.max():
            raise UserError(
                f"target.model: {self.name} does not follow the mask or the positions of a draft tree: other siblings "
                f"change a node's logits by {changed.item():.3g}, another root by {moved.max().item():.3g}"
            )

    @torch.no_grad()
    def try_documents(self) -> None:
        """Finds out, once, how this decoder keeps packed documents apart.

        Raises:
            UserError: it does not.
        """
        if self._packing is None:
            self._packing = self._working_packing()

    def _working_packing(self) -> Packing:
        """The first packing method that works with this decoder.

        Each method is tried with two documents, and a short window where layers slide. The effect of the first
        document on the second is compared with its effect where nothing keeps them apart. The median over tokens
        counts: rounding that sends a token to another expert changes that token entirely.

        Raises:
            UserError: none works.
        """
        tokens, kinds, window = TRIED_TOKENS, self.kinds, self.kinds.window
        ids = self.vocab_size * torch.arange(1, 2 * tokens + 1, device=self.device)[None] // (2 * tokens + 1)
        position = torch.arange(tokens, device=self.device).repeat(2)[None]
        documents = Documents(position, ((0, 0, tokens), (0, tokens, tokens)))
        if window is not None:
            kinds = replace(kinds, window=TRIED_WINDOW)
        reason = ""
        with nullcontext() if window is None else shortened_window(self.decoder, self.config, window):

            def read(ids: torch.Tensor, documents: Documents | None = None, by: Packing | None = None) -> torch.Tensor:
                return self._read(ids, documents, by, kinds)[0, -tokens:].float()  # of the last document

            alone, together = read(ids[:, tokens:]), read(ids)
            moved = (together - alone).norm(dim=-1).median().item()
            ways: tuple[Packing, ...] = ("attention", "masks") if is_possible(self.decoder) else ("masks",)
            for way in ways:
                try:
                    changed = (read(ids, documents, way) - alone).norm(dim=-1).median().item()
                except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
                    reason = f"cannot read packed documents: {type(error).__name__}: {first_line(error)}"
                    continue
                if changed < 0.1 * moved:
                    return way
                reason = (
                    f"does not keep documents apart that share a row: the one before changes its neighbour's states by "
                    f"{changed:.3g}, by {moved:.3g} where nothing keeps them apart"
                )
        raise UserError(f"train.packing: {self.name} {reason}; set train.packing: false")


def _side_by_side(captured: list[torch.Tensor]) -> torch.Tensor:
    return captured[0] if len(captured) == 1 else torch.cat(captured, dim=-1)


def decoder_layers(decoder: nn.Module, config: Any, name: str) -> nn.ModuleList:
    """The decoder's list of layers, by the count in its text config: families name it layers, h or blocks."""
    count = config.num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        raise UserError(f"target.model: {name} has no list of its {count} decoder layers to capture states from")
    return lists[0]


def _constant_ratio(scaled: torch.Tensor, rows: torch.Tensor) -> float:
    """The number s with scaled = s * rows, both [n, H], to six digits; 1 if there is none."""
    x, y = scaled.double(), rows.double()
    scale = ((x * y).sum() / (y * y).sum()).item()
    # bfloat16 rounds single elements by up to 2^-9 of their size.
    return float(f"{scale:.6g}") if (x - scale * y).norm() < 1e-2 * x.norm() else 1.0


def groups_of(lengths: Sequence[int], at_once: int) -> list[list[int]]:
    """Groups of prompt indices by similar length, at most `at_once` padded tokens each; 0: every prompt alone."""
    if not at_once:
        return [[i] for i in range(len(lengths))]
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= at_once:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class _BufferedLayer(DynamicLayer):
    """A transformers cache layer that writes into `KeyValues`."""

    def __init__(self, buffers: KeyValues, index: int):
        super().__init__()
        self.buffers, self.index = buffers, index
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = self.buffers.write(self.index, key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.buffers.end - self.buffers.count  # without the tokens of this forward

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.buffers.end, 0


class TargetSession:
    """B conversations side by side, with a key/value cache that holds exactly their committed tokens.

    A round is `verify` (writes the trees' nodes behind the cache) then `commit` (keeps one path each, drops the rest).

    Args:
        capture: `prefill` and `verify` return the states of these layers.
    """

    def __init__(self, target: Target, capture: Sequence[int] = ()):
        self.target = target
        self.capture = tuple(capture)
        self.buffers = KeyValues([], [], 0)
        self.cache = DynamicCache()

    @property
    def lengths(self) -> list[int]:
        """Number of committed tokens of each row."""
        return self.buffers.lengths

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], room: int = 256, at_once: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Adds the prompts as new rows.

        Args:
            room: columns to reserve behind the longest prompt; the buffers grow when needed.
            at_once: most padded prompt tokens in one pass. 0: one prompt a pass, which keeps even the rounding of an
                answer independent of its neighbours.

        Returns:
            logits [B, V] after each last token; captured states [B, T, F] of all tokens, right-padded, or None.
        """
        lengths, before = [len(prompt) for prompt in prompts], len(self.lengths)
        logits: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
        captured: list[torch.Tensor | None] = [None] * len(prompts)
        for number, group in enumerate(groups_of(lengths, at_once)):
            self.cache = DynamicCache()
            last, states = self._forward(**self._asked_in_a_group([Prompt.of(prompts[i]) for i in group]))
            layers: list[Any] = self.cache.layers
            if number == 0 and self.buffers.kinds:
                self.buffers.admit(lengths)
                self.buffers.reserve(max(lengths) + room)
            elif number == 0:
                kinds = [None if at.keys is None else (Kind.of(at.keys), Kind.of(at.values)) for at in layers]
                self.buffers = KeyValues(kinds, lengths, max(lengths) + room)
            for place, i in enumerate(group):
                logits[i] = self.target.logits(last[place : place + 1, lengths[i] - 1])
                captured[i] = None if states is None else states[place, : lengths[i]]
                for index, layer in enumerate(layers):
                    if layer.keys is not None:
                        keys, values = (each[place : place + 1, :, : lengths[i]] for each in (layer.keys, layer.values))
                        self.buffers.fill(before + i, index, keys, values)
        buffered: list[Any] = [
            DynamicLayer() if kinds is None else _BufferedLayer(self.buffers, index)
            for index, kinds in enumerate(self.buffers.kinds)
        ]
        self.cache = DynamicCache()
        self.cache.layers = buffered
        longest = max(lengths)
        padded = [functional.pad(s, (0, 0, 0, longest - len(s))) for s in captured if s is not None]
        return torch.cat(logits), torch.stack(padded) if padded else None

    def _asked_in_a_group(self, prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        """The decoder's arguments for right-padded prompts; causal attention hides the padding."""
        longest = max(map(len, prompts))
        ids = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        inserts = [PlacedInsert(row, each) for row, prompt in enumerate(prompts) for each in prompt.inserts]
        return self.target._asked(torch.tensor(ids, device=self.target.device), inserts)

    @torch.no_grad()
    def verify(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One forward over all nodes: (logits [B, N, V], captured states [B, N, F] or None); arbitrary at padding.

        Node i has position P + depth(i) and sees the P committed tokens, its ancestors and itself:

            cache (P)         nodes (N)       root r, children a b, c child of a
            1 1 1 1 1 1   r   1 0 0 0
            1 1 1 1 1 1   a   1 1 0 0
            1 1 1 1 1 1   b   1 0 1 0
            1 1 1 1 1 1   c   1 1 0 1

        Layers with a sliding window see only those closer than the window. The cache still holds every token, which
        lets windows roll back.
        """
        last, captured = self.append(tree.tokens, tree.depths, None if tree.nodes == 1 else tree.ancestors)
        return self.target.logits(last), captured

    @torch.no_grad()
    def append(
        self, tokens_Bn: torch.Tensor, depths_BS: torch.Tensor, visible_BnS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One forward over n new slots behind the committed tokens: (final states [B, n, H], captured ones or None).

        Args:
            depths_BS: distance of each slot of this round from the first uncommitted position, new slots last.
            visible_BnS: the slots of this round that each new one sees, itself included. None: one new slot, which sees
                all.
        """
        buffers, count, device = self.buffers, tokens_Bn.shape[1], tokens_Bn.device
        buffers.place(depths_BS.shape[1] - count, count)
        if len(buffers.lengths) == 1:
            position_BS = depths_BS + buffers.lengths[0]
        else:
            position_BS = depths_BS + buffers.positions(1, depths_BS.device)
        position_Bn = position_BS[:, -count:]
        distance = mask = None
        if self.target.kinds.window is not None:
            distance = (position_Bn[:, :, None] - buffers.key_positions(position_BS)[:, None])[:, None]
            if visible_BnS is None:
                visible_BnS = torch.ones((len(buffers.lengths), 1, depths_BS.shape[1]), dtype=torch.bool, device=device)
        seen_BnL = buffers.seen(visible_BnS)
        if seen_BnL is not None:
            mask = self.target.kinds.masks(seen_BnL[:, None], distance, self.target.dtype)
        return self._forward(input_ids=tokens_Bn, attention_mask=mask, position_ids=position_Bn)

    def commit(self, counts: Sequence[int], path_BA: torch.Tensor | None = None) -> None:
        """Keeps the first counts[b] nodes of path_BA[b] (ascending, the root first) and drops the others.

        Args:
            path_BA: None: each path is nodes 0, 1, 2, ..., as in a chain.
        """
        self.buffers.commit(counts, path_BA)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows only, in this order."""
        self.buffers.keep(rows)

    def rollback(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[b] committed tokens of each row."""
        self.buffers.rollback(lengths)

    def _forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(final states [B, n, H], captured states [B, n, F] or None) behind the cache."""
        with self.target._capturing(self.capture) if self.capture else nullcontext([]) as captured:
            output = self.target.decoder(**inputs, past_key_values=self.cache, use_cache=True)
        return output.last_hidden_state, _side_by_side(captured) if self.capture else None
