"""Drafters of chains, EAGLE's and its kin: layers that read their own outputs, and decoding with them.

    captured target states --fuse--> feature_t                only where the target's states are known
    feature_t, embedding of token t+1 --entry--> [W]          shared by all layers of the drafter
    [W] --layer.enter--> input of attention, residual --attention--> layer.finish --> output
    output --logits--> distribution over the draft vocabulary
    output --feedback--> the next drafted column's feature

A *stack* is the layers that make one output. Most drafters have one; position specialists (`models.poss`) have several,
chosen by the drafted position (step 0 is the first drafted token):

    step      0  1  2  3  4  5  6 ...
    stack     0  0  1  1  2  2  2 ...        three stacks, two positions each; the last one serves all later steps

Training (`models.chain_steps`) and decoding (`FeatureDrafting`) call the same functions, but differ in the keys that a
query sees.

Shapes: B rows, T tokens, C columns, H hidden size, F captured states, W entry width, V target vocabulary, Vd draft
vocabulary, b new slots, S slots of the round.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from draftsmith.models.draft_tree import Committed, Embedder
from draftsmith.models.drafter_base import Drafter, DraftLayer
from draftsmith.models.key_values import BufferKind, KeyValues, SlotTree
from draftsmith.models.layers import grouped_attention
from draftsmith.models.prompt import DecoderInputs
from draftsmith.models.target_columns import Pictures, TargetColumns, TextColumns, columns_within
from draftsmith.models.vocab import DraftVocab, cut_head_rows


class FeatureDrafter(Drafter):
    """A drafter that reads features: the target's, and behind them its own."""

    stacks: Sequence[Sequence[DraftLayer]]  # set by subclasses; not registered with `nn.Module`

    @property
    def positions_per_stack(self) -> int:
        return 1

    def stack_of(self, step: int) -> int:
        return min(step // self.positions_per_stack, len(self.stacks) - 1)

    @property
    def draft_layers(self) -> Sequence[DraftLayer]:
        return [layer for stack in self.stacks for layer in stack]

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """Target states [..., F] to features [..., H] in the residual stream's precision."""
        raise NotImplementedError

    def entry(self, feature: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Features and the target's embeddings [..., H] to the input [..., W] of a stack's first layer."""
        raise NotImplementedError

    def entry_in_context(self, feature: torch.Tensor, embedding: torch.Tensor, *context: torch.Tensor) -> torch.Tensor:
        """`entry` with the context of each column, for drafters that know of pictures (`models.vispec`)."""
        return self.entry(feature, embedding)

    def target_columns(
        self, captured: torch.Tensor, following: DecoderInputs, texts: Sequence[TextColumns]
    ) -> TargetColumns:
        """The columns that target states [B, T, F] make of these texts, side by side in each row; in text, all do.
        `following`: the tokens behind the states, at their positions."""
        counts = [text.count for text in texts]  # for decoding, where each row is one text
        return TargetColumns(captured, following.embeddings, following.positions, counts)

    def feedback(self, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs [..., H] to the features of the columns drafted next [..., H]."""
        return outputs


class FeatureDrafting:
    """A drafter inside B answers: a `models.draft_tree.Drafting`.

    Column t of the cache holds key and value of (target feature of position t, token t+1) at position t, never of a
    drafted feature: `observe` reads accepted columns again from the target's states. The round's drafted columns stand
    behind them in the same buffers of each layer (`models.key_values`); the next round overwrites them:

        buffer   | 0 1 2 ... S-1 | slot 1  slot 2 ... |        slot 0 is column S-1; its output drafts the root's
                   committed       this round's tree           children

    Args:
        cut: draft only these tokens, with their rows of the head, and normalise over them (FR-Spec, arXiv 2502.14856).
            None: the whole draft vocabulary.
    """

    def __init__(self, drafter: FeatureDrafter, cut: DraftVocab | None = None):
        self.drafter = drafter
        self.device = drafter.device
        self.vocab = drafter.vocab if cut is None else cut.to(self.device)
        self.head = drafter.head(None if cut is None else cut_head_rows(drafter.vocab, self.vocab))
        self.capture_layers = drafter.config.capture_layers
        self.stacks = drafter.stacks
        self.first = [0, *accumulate(map(len, self.stacks))]  # buffers of stack s begin at first[s]
        self.pictures: list[Pictures] = []
        self.set_rows([])
        # Of the round that the last `observe` began.
        self.target: Embedder
        self.newest_B1: torch.Tensor  # position of the newest committed column
        self.context: tuple[torch.Tensor, ...]  # its context, which drafted columns share
        self.outputs: torch.Tensor  # [B, slots, H] outputs of the round's columns, slot 0 first
        self.slots: SlotTree
        self.stack: int  # the one that made the newest outputs
        self.drafted: list[tuple[torch.Tensor, ...]]  # of each expansion: entry [B, b, W], cos and sin [B, b, D]

    def set_rows(self, kept: Sequence[int], new: int = 0) -> None:
        if kept:
            self.columns.set_rows(kept, [0] * new)
        else:  # frees the buffers
            config = self.drafter.config
            kind = BufferKind(config.num_key_value_heads, config.head_dim, self.drafter.dtype, self.device)
            self.columns = KeyValues([(kind, kind)] * self.first[-1], [0] * new, capacity=512)
        self.pictures = [*(self.pictures[row] for row in kept), *({} for _ in range(new))]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Keeps the columns of the first lengths[b] positions. Column t depends on no token behind t + 1."""
        texts = list(zip(lengths, [*self.pictures, *[{}] * len(lengths)], strict=False))
        self.columns.rollback([columns_within(length, pictures) for length, pictures in texts])
        self.pictures = [
            {token: picture for token, picture in pictures.items() if picture.first < length}
            for length, pictures in texts
        ]

    @torch.no_grad()
    def observe(self, committed: Committed) -> None:
        """Adds committed columns from target states [B, n, F]. Only the last one's output is computed.

        Where most of [B, n] is padding, as when new prompts replace a few finished answers, keys and values of a single
        layer are computed in one row of columns without padding.
        """
        assert committed.features is not None
        drafter, columns, self.target = self.drafter, self.columns, committed.target
        each = enumerate(zip(committed.tokens, committed.counts, self.pictures, strict=True))
        texts = [TextColumns(row, 0, n, len(tokens) - 1 - n, pictures) for row, (tokens, n, pictures) in each]
        read = drafter.target_columns(committed.features, committed.inputs(drafter.dtype, self.device), texts)
        features, embeddings, positions = read.captured, read.embeddings, read.positions
        context, counts = read.context, read.counts
        rows, most = features.shape[:2]
        packed = len(self.stacks[0]) == 1 and 2 * sum(counts) < rows * most
        row_N = place_N = torch.empty(0)
        newest: Any = (slice(None), -1)  # indices of each row's newest column
        if packed:
            row_N = torch.tensor([row for row, count in enumerate(counts) for _ in range(count)], device=self.device)
            place_N = torch.tensor([place for count in counts for place in range(count)], device=self.device)
            features, embeddings, positions, *rest = (
                x[row_N, place_N][None] for x in (features, embeddings, positions, *context)
            )
            context = tuple(rest)
            newest = 0, torch.tensor(counts, device=self.device).cumsum(0) - 1
        elif rows > 1:
            newest = torch.arange(rows, device=self.device), torch.tensor(counts, device=self.device) - 1

        def write(place: int, layer: DraftLayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Writes keys and values [B, G, n, D] into the buffers `place`; returns all of them."""
            keys_values = layer.self_attn.keys_values(x, cos, sin)
            if packed:
                _, groups, _, size = keys_values[0].shape
                spread = keys_values[0].new_zeros(2, rows, groups, most, size)
                spread[:, row_N, :, place_N] = torch.stack(keys_values)[:, 0].permute(2, 0, 1, 3)
                keys_values = spread[0], spread[1]
            return columns.write(place, *keys_values)

        columns.place(0, most)
        h = drafter.entry_in_context(drafter.fuse(features), embeddings, *context)  # [B, n, W], packed [1, N, W]
        cos, sin = drafter.rotary(h, positions)
        for stack, first in zip(self.stacks[1:], self.first[1:-1], strict=True):
            write(first, stack[0], stack[0].enter(h)[0])
        *lower, last = self.stacks[0]
        for i, layer in enumerate(lower):  # the layer above needs a key of every column
            visible = torch.ones(most, most, dtype=torch.bool, device=self.device).tril().expand(rows, -1, -1)
            h = self._through(layer, i, h, cos, sin, columns.seen(visible))
        x, residual = last.enter(h)
        keys, values = write(len(lower), last, x)
        columns.commit(counts)
        x, cos, sin, residual, self.newest_B1, *rest = (
            each[newest][:, None] for each in (x, cos, sin, residual, positions, *context)
        )
        self.context = tuple(rest)
        mask = None
        if columns.even:
            keys, values = keys[:, :, : columns.lengths[0]], values[:, :, : columns.lengths[0]]
        else:  # hides columns beyond a row's own
            lengths = torch.tensor(columns.lengths, device=self.device)
            mask = (torch.arange(keys.shape[2], device=self.device) < lengths[:, None])[:, None]
        attended = grouped_attention(last.self_attn.queries(x, cos, sin), keys, values, mask)
        self.outputs = last.finish(residual, attended)
        self.slots, self.stack, self.drafted = SlotTree(rows, self.device), 0, []

    @torch.no_grad()
    def root_log_probs(self) -> torch.Tensor:
        return self._log_probs(self.outputs[:, 0])

    @torch.no_grad()
    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        rows, count = tokens.shape
        drafter, columns = self.drafter, self.columns
        before = self.slots.count
        seen_slots = self.slots.extend(parent_slots, depth)
        if seen_slots is None:
            parents = self.outputs[:, -1:]  # of a chain
        elif rows == 1:
            parents = self.outputs[0].index_select(0, parent_slots[0])[None]  # [B, b, H]
        else:
            parents = self.outputs[torch.arange(rows, device=self.device)[:, None], parent_slots]
        h = drafter.entry_in_context(drafter.feedback(parents), self.target.embed(tokens, drafter.dtype), *self.context)
        # Columns at depth d have the position of unroll step d (models.alignment).
        cos, sin = drafter.rotary(h, (self.newest_B1 + depth).expand(-1, count))
        stack = drafter.stack_of(depth)
        if stack != self.stack:
            self._hand_over(stack, before)
        if len(self.stacks) > 1:
            self.drafted.append((h, cos, sin))
        columns.place(before, count)
        mask = columns.seen(seen_slots)  # [B, b, S + slots]
        for i, layer in enumerate(self.stacks[stack], start=self.first[stack]):
            h = self._through(layer, i, h, cos, sin, mask)
        self.outputs = torch.cat((self.outputs, h), dim=1)
        return self._log_probs(h)

    def passes(self, levels: int) -> int:
        return levels

    def _through(
        self,
        layer: DraftLayer,
        place: int,
        h: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs placed columns through a layer and writes its buffers: [B, n, H]."""
        x, residual = layer.enter(h)
        keys, values = self.columns.write(place, *layer.self_attn.keys_values(x, cos, sin))
        return layer.finish(residual, grouped_attention(layer.self_attn.queries(x, cos, sin), keys, values, mask))

    def _hand_over(self, stack: int, drafted: int) -> None:
        """Changes the stack: computes the new one's keys and values for the columns drafted so far, if any."""
        self.stack = stack
        if not drafted:
            return
        h, cos, sin = (torch.cat(parts, dim=1) for parts in zip(*self.drafted, strict=True))
        self.columns.place(0, drafted)
        layer = self.stacks[stack][0]
        self.columns.write(self.first[stack], *layer.self_attn.keys_values(layer.enter(h)[0], cos, sin))

    def _log_probs(self, outputs: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.head(outputs), dim=-1)
