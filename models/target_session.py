"""The target in decoding: B conversations side by side over one key/value cache.

Shapes: B rows, T tokens, N tree nodes, P cached tokens, H hidden size, F captured states, V vocabulary; n, S, L as in
`models.key_values`.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.key_values import BufferKind, KeyValues
from draftsmith.models.prompt import Insert, PlacedInsert, Prompt

if TYPE_CHECKING:
    from draftsmith.models.target import Target


def batches_by_length(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of texts that are read together: similar lengths, at most so many tokens with padding, longest first."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i), reverse=True):
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= tokens:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def behind(decoder: nn.Module, cache: DynamicCache) -> dict[str, Any]:
    """Keyword arguments by which a decoder reads `cache` and adds to it."""
    return {_cache_argument(type(decoder)): cache, "use_cache": True}


@functools.cache
def _cache_argument(kind: type[nn.Module]) -> str:
    """Newer versions of transformers have renamed it; decoders from elsewhere may keep the old name."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


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
    """

    def __init__(self, target: "Target", capture: Sequence[int] = ()):
        self.target = target
        self.capture = tuple(capture)
        self.buffers = KeyValues([], [], 0)
        self.cache = DynamicCache()
        self._inserts: list[tuple[Insert, ...]] = []  # of each row
        self._shift_B1: torch.Tensor | None = None  # of its next positions (`models.vision`); None: 0 in all rows

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
        for number, group in enumerate(batches_by_length(lengths, at_once)):
            self.cache = DynamicCache()
            asked, longest = [Prompt.of(prompts[i]) for i in group], lengths[group[0]]
            ids = torch.tensor(
                [[*prompt, *[0] * (longest - len(prompt))] for prompt in asked], device=self.target.device
            )
            inserts = [PlacedInsert(row, each) for row, prompt in enumerate(asked) for each in prompt.inserts]
            last, states = self._forward(**self.target.decoder_arguments(ids, inserts))
            layers: list[Any] = self.cache.layers
            if number == 0 and not self.buffers.kinds:
                pairs = [(layer.keys, layer.values) for layer in layers]
                kinds = [None if k is None else (BufferKind.of(k), BufferKind.of(v)) for k, v in pairs]
                self.buffers = KeyValues(kinds, lengths, max(lengths) + room)
            elif number == 0:
                self.buffers.set_rows(range(before), lengths)
                self.buffers.reserve(max(lengths) + room)
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
        self._inserts += [Prompt.of(prompt).inserts for prompt in prompts]
        self._moved()
        padded = [functional.pad(s, (0, 0, 0, max(lengths) - len(s))) for s in captured if s is not None]
        return torch.cat(logits), torch.stack(padded) if padded else None

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
            visible_BnS: the slots of this round that each new one sees. None: one new slot, which sees all.
        """
        buffers, count, device = self.buffers, tokens_Bn.shape[1], tokens_Bn.device
        buffers.place(depths_BS.shape[1] - count, count)
        position_BS = depths_BS + buffers.positions(1)
        position_Bn = position_BS[:, -count:]
        distance = mask = None
        if self.target.kinds.window is not None:
            distance = (position_Bn[:, :, None] - buffers.key_positions(position_BS)[:, None])[:, None]
            if visible_BnS is None:
                visible_BnS = torch.ones((len(buffers.lengths), 1, depths_BS.shape[1]), dtype=torch.bool, device=device)
        if self._shift_B1 is not None:  # behind windows, which count columns
            position_Bn = position_Bn + self._shift_B1
        seen_BnL = buffers.seen(visible_BnS)
        if seen_BnL is not None:
            mask = self.target.kinds.masks(seen_BnL[:, None], distance, self.target.dtype)
        return self._forward(input_ids=tokens_Bn, attention_mask=mask, position_ids=position_Bn)

    def read(self, tokens: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Commits tokens behind each row's, at least one of each, in one forward. Returns as `append`."""
        counts, device = list(map(len, tokens)), self.target.device
        most = max(counts)
        padded = torch.tensor([[*row, *[0] * (most - len(row))] for row in tokens], device=device)
        # Padding has the position of the row's last token.
        depths_BS = torch.arange(most, device=device).expand(len(tokens), -1)
        if min(counts) < most:
            depths_BS = depths_BS.minimum(torch.tensor(counts, device=device)[:, None] - 1)
        causal = torch.ones((most, most), dtype=torch.bool, device=device).tril().expand(len(tokens), -1, -1)
        states = self.append(padded, depths_BS, None if most == 1 else causal)
        self.commit(counts)
        return states

    def commit(self, counts: Sequence[int], path_BA: torch.Tensor | None = None) -> None:
        """Keeps a path of each verified tree, the root first, and drops its other nodes (`KeyValues.commit`)."""
        self.buffers.commit(counts, path_BA)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows only, in this order."""
        self.buffers.set_rows(rows)
        self._inserts = [self._inserts[row] for row in rows]
        self._moved()

    def rollback(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[b] committed tokens of each row."""
        self.buffers.rollback(lengths)
        self._inserts = [
            tuple(each for each in inserts if each.first < length)
            for inserts, length in zip(self._inserts, lengths, strict=True)
        ]
        self._moved()

    def _moved(self) -> None:
        """Follows a change of rows, or of the beginnings that they keep of their prompts."""
        pictures = self.target.pictures
        if pictures is None or not pictures.has_axes:
            return
        shifts = [pictures.shift(*row) for row in zip(self._inserts, self.lengths, strict=True)]
        self._shift_B1 = torch.tensor(shifts, device=self.target.device)[:, None] if any(shifts) else None

    def _forward(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(final states [B, n, H], captured states [B, n, F] or None) behind the cache."""
        return self.target.run_decoder(self.capture, self.cache, **inputs)
