"""Draft trees, and the interfaces of proposers, which build them, and of drafters inside answers (`Drafting`).

B trees lie side by side, one for each answer in decoding. A tree of N nodes is stored flat, parents before children,
shallower nodes first. Node 0 is the root: the target's own last token, which it has not read yet.

    tokens   r a b c d e        r
    parents -1 0 0 1 1 2       / \\
    depths   0 1 1 2 2 2      a   b
                             / \\   \\
                            c   d   e

Smaller trees of a batch are padded at the end; a single tree never is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from draftsmith.models.prompt import DecoderInputs, PlacedInsert, Prompt
from draftsmith.models.sampling import Draws
from draftsmith.models.vocab import DraftVocab


@dataclass(frozen=True)
class DraftedBy:
    """Who drafted a tree, where a proposer has several sources."""

    source: str  # of all nodes but a second source's chain; "": the proposer's only one
    chain_source: str = ""
    chain: tuple[int, ...] = ()  # the second source's tokens below the root
    shared: int = 0  # first tokens of the chain that the tree has, too; they count as the tree's
    inner_accepted: tuple[int, ...] = ()  # of a hierarchy: tokens that its small model accepted, round by round

    def credited(self, accepted: Sequence[int]) -> dict[str, int]:
        """Tokens of an accepted path by their source; 0 for a source without any."""
        if not self.chain_source:
            return {self.source: len(accepted)}
        on_chain = tuple(accepted) == self.chain[: len(accepted)]
        further = max(0, len(accepted) - self.shared) if on_chain else 0
        return {self.source: len(accepted) - further, self.chain_source: further}


@dataclass(eq=False)
class DraftTree:
    """Nodes with their parents. All else is derived once, without waiting for the device."""

    tokens: torch.Tensor  # [B, N] target token ids, the root first; on padding any token
    parents: torch.Tensor  # [B, N] index of each node's parent, an earlier node, also on padding; -1 for the root
    depth: int  # an upper bound of the nodes' depth
    sizes: torch.Tensor | None = None  # [B] nodes of each tree without padding; None: there is no padding
    # [B, N, V] for drawn nodes, the distribution of each node's children; zero for nodes without one. Siblings stand in
    # the order in which they were drawn, without replacement: those behind the first from what the distribution leaves.
    # None: all nodes were chosen by rank.
    drawn_from: torch.Tensor | None = None
    is_chain: bool = False  # in all trees, each node is the child of the one before it
    sources: Sequence[DraftedBy] | None = None  # of each tree; None: the proposer has only one
    tried: Sequence[int] | None = None  # depth to which each tree was drafted, if not as deep as it is long

    @property
    def rows(self) -> int:  # B
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:  # N
        return self.tokens.shape[1]

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """[B, N, N] bool: row i marks i and its ancestors."""
        rows, nodes, device = self.rows, self.nodes, self.tokens.device
        if self.is_chain:
            return torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril().expand(rows, nodes, nodes)
        # One hop, then two, four, eight, until the deepest node reaches its root. Float products are fast.
        reach = torch.eye(nodes, device=device).repeat(rows, 1, 1)
        reach.scatter_(2, self.parents.clamp(min=0)[..., None], 1.0)
        hops = 1
        while hops < self.depth:
            reach = torch.bmm(reach, reach).clamp_(max=1)
            hops *= 2
        return reach > 0

    @cached_property
    def depths(self) -> torch.Tensor:
        """[B, N]; 0 on padding, a position that always exists."""
        if self.is_chain:
            depths = torch.arange(self.nodes, device=self.tokens.device).expand(self.rows, -1)
        else:
            depths = self.ancestors.sum(-1) - 1
        return depths if self.real is None else depths * self.real

    @cached_property
    def earlier_siblings(self) -> torch.Tensor:
        """[B, N, N] bool: row i marks the earlier siblings of i."""
        return (self.parents[:, :, None] == self.parents[:, None]).tril(diagonal=-1)

    @cached_property
    def repeated(self) -> torch.Tensor:
        """[B, N] bool: nodes with the token of an earlier sibling."""
        return (self.earlier_siblings & (self.tokens[:, :, None] == self.tokens[:, None])).any(2)

    @cached_property
    def real(self) -> torch.Tensor | None:
        """[B, N] bool, false on padding; None where there is none."""
        if self.sizes is None:
            return None
        return torch.arange(self.nodes, device=self.tokens.device) < self.sizes[:, None]

    @cached_property
    def drafted(self) -> torch.Tensor:
        """[B, N] bool: all nodes but roots and padding."""
        drafted = torch.ones_like(self.tokens, dtype=torch.bool) if self.real is None else self.real.clone()
        drafted[:, 0] = False
        return drafted

    def pruned(self, limits: Sequence[int]) -> "DraftTree":
        """Without the nodes of tree b that are deeper than limits[b]."""
        if self.depth <= min(limits):
            return self
        limits_B1 = torch.tensor(limits, device=self.tokens.device)[:, None]
        kept = self.depths <= limits_B1
        sizes = (kept if self.real is None else kept & self.real).sum(1)  # shallower nodes stand first
        nodes = int(sizes.max())
        drawn_from = self.drawn_from
        if drawn_from is not None:  # new leaves have no drawn child
            leaves = self.depths[:, :nodes] >= limits_B1
            drawn_from = drawn_from[:, :nodes].masked_fill(leaves[..., None], 0)
        return replace(
            self,
            tokens=self.tokens[:, :nodes],
            parents=self.parents[:, :nodes],
            depth=min(self.depth, max(limits)),
            sizes=None if self.rows == 1 else sizes,
            drawn_from=drawn_from,
        )

    @classmethod
    def chains(cls, tokens: Sequence[Sequence[int]], device: torch.device) -> "DraftTree":
        """Chains of tokens, each beginning with its root."""
        sizes = [len(chain) for chain in tokens]
        nodes = max(sizes)
        padded = [[*chain, *[chain[0]] * (nodes - len(chain))] for chain in tokens]
        parents = torch.arange(-1, nodes - 1, device=device).expand(len(tokens), -1)
        lengths = None if min(sizes) == nodes else torch.tensor(sizes, device=device)
        return cls(torch.tensor(padded, device=device), parents, nodes - 1, lengths, is_chain=True)


class Embedder(Protocol):
    """The part of a target that gives drafters their token embeddings."""

    embed: Callable[..., torch.Tensor]
    inputs: Callable[..., DecoderInputs]


@dataclass(frozen=True)
class Committed:
    """Newly committed tokens for a proposer: n positions of each row.

    tokens       p  p  p  a  b  r          r: the root, which the target has not read yet
    features              f  f             of the newest positions; counts is 2 here
    inputs                b  r             the token behind each, at the position of the feature
    """

    target: Embedder
    tokens: Sequence[Sequence[int]]  # all of each row so far, prompt included, the unread root last
    features: torch.Tensor | None  # [B, n, F] captured states, row b has counts[b]; None without `capture_layers`
    counts: Sequence[int]  # [B] new positions of each row
    prompts: Sequence[Prompt] = ()  # of each row, for their inserts

    def inputs(self, dtype: torch.dtype, device: torch.device) -> DecoderInputs:
        """[B, n] inputs of the token behind each position, with that position; arbitrary on padding."""
        most = max(self.counts)
        before = [len(tokens) - 1 - count for tokens, count in zip(self.tokens, self.counts, strict=True)]
        ids = [
            [*tokens[first + 1 : first + 1 + count], *[0] * (most - count)]
            for tokens, first, count in zip(self.tokens, before, self.counts, strict=True)
        ]
        inserts = [
            PlacedInsert(row, insert.at(insert.first - before[row] - 1))
            for row, prompt in enumerate(self.prompts)
            for insert in prompt.inserts
            if insert.first + insert.length > before[row] + 1
        ]
        positions = torch.arange(most, device=device) + torch.tensor(before, device=device)[:, None]
        return self.target.inputs(torch.tensor(ids, device=device), positions, inserts, dtype)


class Proposer(Protocol):
    """Proposes draft trees to the decoding loop. It observes every committed token, even of rounds by others."""

    capture_layers: tuple[int, ...]  # the target states that `observe` needs

    def set_rows(self, kept: Sequence[int], new: int = 0, draws: Sequence[Draws] | None = None) -> None:
        """Keeps these rows between rounds, in this order, and begins new answers behind them; the others are done.

        The next `observe`, which `propose` needs first, tells of all rows. `draws`: the new answers'.
        """

    def observe(self, committed: Committed) -> None:
        """Reads the tokens committed since the last call."""

    def propose(self) -> tuple[DraftTree, list[int]]:
        """Trees below the last committed tokens, and the number of forward passes for each."""
        ...


class Drafting(Protocol):
    """A drafter inside B answers. Policies grow trees from its distributions (`eval.decoding.policies`).

    Slots number the columns of this round: slot 0 is the last committed one, and `expand` adds one per token.
    """

    vocab: DraftVocab
    capture_layers: tuple[int, ...]

    def set_rows(self, kept: Sequence[int], new: int = 0) -> None:
        """As of a `Proposer`."""

    def observe(self, committed: Committed) -> None: ...

    def rollback(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[b] positions of each row, all observed, and the token behind them; the next `observe`
        may go on with other tokens.

        Raises:
            ValueError: a row has fewer positions, or there are more or fewer rows.
        """

    def root_log_probs(self) -> torch.Tensor:
        """[B, Vd] of the roots' children, from the last committed columns (slot 0)."""
        ...

    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """[B, b, Vd] of the children of `tokens` [B, b] (target ids), fed under `parent_slots` [B, b] at this depth; a
        root's children have depth 1."""
        ...

    def passes(self, levels: int) -> int:
        """Forward passes that a row's round took: one level is `root_log_probs`, each further one an `expand`."""
        ...
