"""The target model: load it, read its inner states, verify draft trees with it, keep its cache true.

A target is any `AutoModelForCausalLM` whose decoder is a list of layers. Three things are asked of it:

- `states`: one causal pass over padded rows, for training;
- `TargetSession.prefill` / `verify` / `commit`: decoding, one forward over a whole draft tree;
- `logits`: the head over chosen positions only.

Shapes: B rows, T tokens, N tree nodes, P cached tokens, H hidden size, F = captured layers * H, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from draftsmith.models.draft_tree import DraftTree
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection

# Layers that keep a running state instead of keys and values cannot forget rejected tokens.
_RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "recurrent", "conv", "short_conv", "rwkv"}


def load_causal_lm(section: TargetSection, device: str | None = None) -> Any:
    """The model in evaluation mode, all parameters frozen, on `device` (None: where the section says).

    Raises:
        UserError: nothing loadable there, or only pickled weights (safetensors are the one format read).
    """
    device = device or section.device
    if device == "auto":
        device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            section.model,
            revision=section.revision,
            dtype=section.dtype if section.dtype == "auto" else getattr(torch, section.dtype),
            trust_remote_code=section.trust_remote_code,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"target.model: cannot load {section.model!r} as a causal LM: {str(error).splitlines()[0]}"
        ) from error
    return loaded.to(device).eval().requires_grad_(False)


def checked_capture_layers(layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """`layers`, or the default ones where None.

    Raises:
        UserError: not ascending and distinct, or outside 0 to L-1 (state L has passed the final norm).
    """
    if layers is None:
        return default_capture_layers(num_layers)
    if list(layers) != sorted(set(layers)) or not layers or layers[0] < 0 or layers[-1] >= num_layers:
        raise UserError(
            f"drafter.capture_layers: {list(layers)} must be ascending and distinct, "
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


@dataclass(frozen=True)
class TargetStates:
    """What one pass of the target leaves behind."""

    captured: torch.Tensor  # [B, T, F] states of the captured layers, concatenated low to high
    last: torch.Tensor  # [B, T, H] after the final norm: what the head reads


class Target:
    """A loaded causal LM with its capture hooks.

    Args:
        model: what `load_causal_lm` returned.
        capture_layers: see `checked_capture_layers`.
    """

    def __init__(self, model: Any, capture_layers: Sequence[int] | None = None):
        self.model = model
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        if not isinstance(getattr(self.decoder, "layers", None), nn.ModuleList):
            raise UserError(
                f"target.model: {type(model).__name__} has no list of decoder layers to capture states from"
            )
        self.num_layers = len(self.decoder.layers)
        self.head: nn.Module = model.get_output_embeddings()
        self.embedding: nn.Module = model.get_input_embeddings()
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.head.weight.shape[0]  # type: ignore[union-attr]
        self.capture_layers = checked_capture_layers(capture_layers, self.num_layers)
        self._refuse_recurrent_layers()
        self._check_head()

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
        """[V, H] the input embeddings, which drafters share."""
        return self.embedding.weight  # type: ignore[return-value]

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Head and soft-capping over final states [..., H]: float32 logits [..., V]."""
        logits = self.head(last)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()

    @torch.no_grad()
    def states(self, input_ids_BT: torch.Tensor) -> TargetStates:
        """One causal pass over right-padded rows. Padding comes last, so no counted position ever sees it."""
        with self._capturing() as captured:
            last = self.decoder(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        return TargetStates(torch.cat(captured, dim=-1), last)

    def session(self, capture: bool = True) -> "TargetSession":
        """A fresh conversation with an empty cache; without `capture` no states are kept (nor paid for)."""
        return TargetSession(self, capture)

    @contextmanager
    def _capturing(self) -> Iterator[list[torch.Tensor]]:
        """Collects the inputs of the captured layers during one forward; keeps nothing else alive."""
        captured: list[torch.Tensor] = []

        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            captured.append(args[0] if args else kwargs["hidden_states"])

        handles = [
            self.decoder.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
            for layer in self.capture_layers
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def _refuse_recurrent_layers(self) -> None:
        recurrent = _RECURRENT_LAYER_TYPES.intersection(getattr(self.config, "layer_types", None) or ())
        if recurrent:
            raise UserError(
                f"target.model: {type(self.model).__name__} has {', '.join(sorted(recurrent))} layers, whose state "
                "cannot be rolled back when a drafted token is rejected; it cannot be verified with draft trees"
            )

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some families scale logits in their own forward: refuse what `logits` does not reproduce."""
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        whole = self.model(input_ids=ids, use_cache=False).logits.float()
        ours = self.logits(self.decoder(input_ids=ids, use_cache=False).last_hidden_state)
        if not torch.allclose(whole, ours, rtol=1e-2, atol=1e-2):
            raise UserError(
                f"target.model: {type(self.model).__name__} changes its logits after the head in a way that is not "
                f"known here (largest difference {(whole - ours).abs().max().item():.3g})"
            )


class TargetSession:
    """One conversation: a key/value cache that holds exactly the committed tokens.

    A round is `verify` (writes the tree's nodes behind the cache) then `commit` (keeps one path, drops the rest).
    """

    def __init__(self, target: Target, capture: bool):
        self.target = target
        self.capture = capture
        self.cache = DynamicCache()
        self.length = 0  # committed tokens
        self._window = _smallest_sliding_window(target.config)

    @torch.no_grad()
    def prefill(self, prompt_ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Reads the prompt: (logits [V] after its last token, captured states [T, F] of all its tokens or None)."""
        self._refuse_beyond_window(len(prompt_ids_T))
        last, captured = self._forward(input_ids=prompt_ids_T[None])
        self.length = len(prompt_ids_T)
        return self.target.logits(last[-1]), captured

    @torch.no_grad()
    def verify(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One forward over all nodes: (logits [N, V], captured states [N, F] or None).

        Node i stands at position P + depth(i) and sees the P committed tokens, its ancestors and itself:

            cache (P)         nodes (N)       root r, children a b, c child of a
            1 1 1 1 1 1   r   1 0 0 0
            1 1 1 1 1 1   a   1 1 0 0
            1 1 1 1 1 1   b   1 0 1 0
            1 1 1 1 1 1   c   1 1 0 1
        """
        nodes = len(tree)
        self._refuse_beyond_window(self.length + nodes)
        mask = None
        if nodes > 1:
            blocked_NN = ~tree.ancestors
            mask = torch.zeros(1, 1, nodes, self.length + nodes, dtype=self.target.dtype, device=self.target.device)
            mask[0, 0, :, self.length :].masked_fill_(blocked_NN, torch.finfo(self.target.dtype).min)
        last, captured = self._forward(
            input_ids=tree.tokens[None], attention_mask=mask, position_ids=(self.length + tree.depths)[None]
        )
        return self.target.logits(last), captured

    def commit(self, path: torch.Tensor) -> None:
        """Keeps the nodes of `path` (ascending node indices, root first) and forgets the others.

        A node never stands before its own depth, so rows move left only; they are gathered before they are written.
        """
        first, kept = self.length, len(path)
        rows = first + path
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)  # [1, heads, P + N, head_dim]
                if states.shape[2] != first + kept:
                    states[:, :, first : first + kept] = states[:, :, rows]
                    setattr(layer, name, states[:, :, : first + kept])
        self.length += kept

    def _forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(final states [n, H], captured states [n, F] or None) of one row behind the cache."""
        with self.target._capturing() if self.capture else nullcontext([]) as captured:
            output = self.target.decoder(**inputs, past_key_values=self.cache, use_cache=True)
        return output.last_hidden_state[0], torch.cat(captured, dim=-1)[0] if self.capture else None

    def _refuse_beyond_window(self, length: int) -> None:
        if self._window is not None and length > self._window:
            raise UserError(
                f"target.model: {length} tokens exceed the sliding window of {self._window} tokens, beyond which a "
                "draft tree cannot be verified or rolled back; shorten the prompts or eval.max_new_tokens"
            )


def _smallest_sliding_window(config: Any) -> int | None:
    """Tokens of the window where any layer slides, else None."""
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    return window if types is None or "sliding_attention" in types else None
