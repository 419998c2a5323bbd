"""Trials of a loaded target on a few tokens: whether its decoder does what drafting needs.

Families differ in more than their configs say. So attention, embeddings, head, draft trees and packed documents are
each computed in two ways, and the target is refused (UserError) where the two differ.

Shapes: Q queries, K keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from draftsmith.models.alignment import Documents
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.families import AttentionKinds, attention_kinds
from draftsmith.models.target_attention import is_possible
from draftsmith.models.vision import EndOfForward
from draftsmith.recipes.errors import UserError, first_line

if TYPE_CHECKING:
    from draftsmith.models.target import Target

# How packed documents are kept apart: by an attention function that runs one document at a time, or by masks.
Packing = Literal["attention", "masks"]
DECODER_ERRORS = (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError)


def _check_finite(numbers: torch.Tensor, model: Any) -> None:
    """Raises UserError if what a trial computes is not finite. Names weights that are not."""
    if numbers.isfinite().all():
        return
    # Of a sharded target, this process's pieces.
    weights = {name: getattr(weight, "ds_tensor", weight) for name, weight in model.named_parameters()}
    read = {name: weight for name, weight in weights.items() if weight.element_size() > 1 and not weight.is_meta}
    bad = [name for name, weight in read.items() if not weight.isfinite().all()]
    weights_too = f", or the checkpoint is damaged: its weights are not finite ({', '.join(bad[:3])})" if bad else ""
    raise UserError(
        f"target.model: {type(model).__name__} computes numbers that are not finite in "
        f"{str(model.dtype).removeprefix('torch.')}; set target.dtype: bfloat16, or float32{weights_too}"
    )


# Trials use a window this long, and so many tokens.
TRIED_WINDOW, TRIED_TOKENS = 4, 12


@torch.no_grad()
def tried_attention(model: Any) -> AttentionKinds:
    """The attention of a loaded target's layers, with or without the window that its config names.

    A config may name a window that its family's code ignores (Llama's does); masking by it would change the model. So
    the decoder, its window shortened, reads a few tokens with its own masks and with ours.
    """
    kinds = attention_kinds(model.config)
    if kinds.window is None:
        return kinds
    decoder, name = model.get_decoder(), type(model).__name__
    device = model.get_input_embeddings().weight.device
    positions = torch.arange(TRIED_TOKENS, device=device)
    ids = positions % model.get_input_embeddings().weight.shape[0]
    distance = positions[:, None] - positions

    def read(mask: Any) -> torch.Tensor:
        inputs = {"input_ids": ids[None], "attention_mask": mask, "position_ids": positions[None], "use_cache": False}
        states = decoder(**inputs).last_hidden_state.float()
        _check_finite(states, model)
        return states

    def by_masks_of(tried: AttentionKinds) -> torch.Tensor:
        return read(tried.masks((distance >= 0)[None, None], distance, model.dtype))

    full, sliding = AttentionKinds(None, mixed=False), AttentionKinds(TRIED_WINDOW, mixed=False)
    found, moved = list[tuple[float, AttentionKinds]](), 0.0
    try:
        with shortened_window(decoder, model.config.get_text_config(decoder=True), kinds.window):
            own, unmasked = read(None), by_masks_of(full)
            moved = (by_masks_of(sliding) - unmasked).norm().item()
            found.append(((unmasked - own).norm().item(), full))
            found.append(((by_masks_of(replace(kinds, window=TRIED_WINDOW)) - own).norm().item(), kinds))
    except DECODER_ERRORS as error:
        if not found:  # otherwise it rejects masks by kind of layer, and full attention remains
            raise UserError(
                f"target.model: {name} cannot verify draft trees: {type(error).__name__}: {error}"
            ) from error
    off, best = min(found, key=lambda each: each[0])
    if not off <= 0.1 * moved:
        raise UserError(
            f"target.model: {name} masks its layers neither by the window of {kinds.window} tokens that its config "
            f"names nor without one (its states are off by {off:.3g} at best; {moved:.3g} is what a window changes), "
            "so draft trees cannot be masked as it does"
        )
    return best


@contextmanager
def shortened_window(decoder: nn.Module, config: Any, window: int | None) -> Iterator[None]:
    """Replaces windows of length `window` by `TRIED_WINDOW` in the decoder's configs and layers; None: none slides."""
    modules = list(decoder.modules())
    configs = {id(each): each for each in (config, *(getattr(module, "config", config) for module in modules))}
    holders: list[Any] = [
        each for each in (*modules, *configs.values()) if window and getattr(each, "sliding_window", None) == window
    ]
    try:
        for holder in holders:
            holder.sliding_window = TRIED_WINDOW
        yield
    finally:
        for holder in holders:
            holder.sliding_window = window


@torch.no_grad()
def embedding_scales(target: "Target") -> tuple[float, float]:
    """The scale of the decoder's input over rows of the embedding table, and the part of it that the decoder applies
    behind the embedding module. Also compares `states` and `logits` with a whole forward.
    """
    ids = torch.arange(8, device=target.device)[None] % target.vocab_size
    whole = target.model(input_ids=ids, use_cache=False).logits.float()
    _check_finite(whole, target.model)
    with target.capturing(range(target.num_layers)) as captured:
        last = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
    shapes = {tuple(states.shape) for states in captured}
    if len(captured) != target.num_layers or shapes != {(1, ids.shape[1], target.hidden_size)}:
        raise UserError(
            f"target.model: {target.name} gives its {target.num_layers} layers states of shapes {sorted(shapes)}, not "
            f"one of width {target.hidden_size} for each token; such states cannot be captured"
        )
    ours = target.logits(last)
    if not torch.allclose(whole, ours, rtol=1e-2, atol=1e-2):
        raise UserError(
            f"target.model: {target.name} changes its logits after the head in a way that is not "
            f"known here (largest difference {(whole - ours).abs().max().item():.3g})"
        )
    rows = target.embedding_table[ids[0]]
    scale = _constant_ratio(captured[0][0], rows)
    return scale, scale / _constant_ratio(target.embedding(ids[0]), rows)


def scale_without_weights(model: Any, first_layer: nn.Module) -> float:
    """The first of `embedding_scales` for a model whose parameters, but not buffers, are on the meta device."""
    embedding, read = model.get_input_embeddings(), []
    ids = torch.arange(8)[None]
    rows = torch.randn(8, embedding.weight.shape[1], generator=torch.Generator().manual_seed(0))
    embedding.weight = nn.Parameter(rows, requires_grad=False)

    def stop(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        read.append(args[0] if args else kwargs["hidden_states"])
        raise EndOfForward

    first_layer.register_forward_pre_hook(stop, with_kwargs=True)
    with suppress(EndOfForward, *DECODER_ERRORS):  # errors: it reads other parameters first
        model.get_decoder()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return _constant_ratio((read or [embedding(ids)])[0][0], rows)


def _constant_ratio(scaled: torch.Tensor, rows: torch.Tensor) -> float:
    """The number s with scaled = s * rows, both [n, H], to six digits; 1 if there is none."""
    x, y = scaled.double(), rows.double()
    scale = ((x * y).sum() / (y * y).sum()).item()
    # bfloat16 rounds single elements by up to 2^-9 of their size.
    return float(f"{scale:.6g}") if (x - scale * y).norm() < 1e-2 * x.norm() else 1.0


@torch.no_grad()
def check_trees(target: "Target") -> None:
    """Raises UserError where the decoder ignores the mask or the positions of a draft tree.

    A node's logits must not depend on its siblings or on its place among them. Rounding may change them a little,
    so the effect of siblings is compared with the largest effect of other roots. Tokens are spread over the
    vocabulary: to a trained model, neighbouring (above all special) ids may mean the same.
    """
    device, vocab = target.device, target.vocab_size
    prompt, node = [vocab * i // 7 for i in (1, 2, 3)], vocab // 3
    root, *others = [vocab * i // 8 for i in (1, 3, 5, 7)]
    siblings = [vocab * (2 * i + 1) // 60 for i in range(30)]
    parents = torch.tensor([[-1] + [0] * (len(siblings) + 1)], device=device)

    def logits_of(place: int, tokens: list[int]) -> torch.Tensor:
        session = target.session()
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
    except DECODER_ERRORS as error:
        raise UserError(
            f"target.model: {target.name} cannot verify draft trees: {type(error).__name__}: {first_line(error)}"
        ) from error
    # In bfloat16 siblings have 1 % of the roots' effect; where mask or positions are ignored, most of it.
    if not changed < 0.1 * moved.max():
        raise UserError(
            f"target.model: {target.name} does not follow the mask or the positions of a draft tree: other siblings "
            f"change a node's logits by {changed.item():.3g}, another root by {moved.max().item():.3g}"
        )


@torch.no_grad()
def working_packing(target: "Target") -> Packing:
    """The first packing method that works with this decoder.

    Each is tried with two documents, and a short window where layers slide. The effect of the first document on the
    second is compared with its effect where nothing keeps them apart. The median over tokens counts: rounding that
    sends a token to another expert changes that token entirely.
    """
    tokens, window = TRIED_TOKENS, target.kinds.window
    kinds = replace(target.kinds, window=window and TRIED_WINDOW)
    ids = target.vocab_size * torch.arange(1, 2 * tokens + 1, device=target.device)[None] // (2 * tokens + 1)
    position = torch.arange(tokens, device=target.device).repeat(2)[None]
    documents = Documents(position, ((0, 0, tokens), (0, tokens, tokens)))
    reason = ""
    with shortened_window(target.decoder, target.config, window):

        def read(ids: torch.Tensor, documents: Documents | None = None, by: Packing | None = None) -> torch.Tensor:
            return target.read(ids, documents, by, kinds)[0, -tokens:].float()  # of the last document

        alone, together = read(ids[:, tokens:]), read(ids)
        moved = (together - alone).norm(dim=-1).median().item()
        ways: tuple[Packing, ...] = ("attention", "masks") if is_possible(target.decoder) else ("masks",)
        for way in ways:
            try:
                changed = (read(ids, documents, way) - alone).norm(dim=-1).median().item()
            except DECODER_ERRORS as error:
                reason = f"cannot read packed documents: {type(error).__name__}: {first_line(error)}"
                continue
            if changed < 0.1 * moved:
                return way
            reason = (
                f"does not keep documents apart that share a row: the one before changes its neighbour's states by "
                f"{changed:.3g}, by {moved:.3g} where nothing keeps them apart"
            )
    raise UserError(f"train.packing: {target.name} {reason}; set train.packing: false")
