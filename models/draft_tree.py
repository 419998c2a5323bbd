"""Draft trees: what a proposer hands to the target, and the two kinds of proposer.

A tree of N nodes is stored flat, parents before children, shallower nodes first. Node 0 is the root: the last token
that the target itself produced, which the target has not read yet.

    tokens   r a b c d e        r
    parents -1 0 0 1 1 2       / \\
    depths   0 1 1 2 2 2      a   b
                             / \\   \\
                            c   d   e
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from draftsmith.models.sampling import Draws
from draftsmith.models.vocab import DraftVocab


class DraftTree:
    """Nodes with their parents; everything else is derived once.

    Args:
        tokens: [N] target token ids, the root first.
        parents: [N] index of each node's parent, -1 for the root; a parent stands before its children.
        drawn_from: [N, V] the distribution that the child of each node was drawn from, for chains that were drawn and
            not chosen; the last row, which has no child, is zero. None: all nodes were chosen by rank.
    """

    def __init__(self, tokens: torch.Tensor, parents: torch.Tensor, drawn_from: torch.Tensor | None = None):
        self.tokens = tokens
        self.parents = parents
        self.drawn_from = drawn_from
        # [N, N] row i marks i and its ancestors. One hop a level, for all nodes at once: as many steps as the tree is
        # deep.
        self.ancestors = torch.eye(len(tokens), dtype=torch.bool, device=tokens.device)
        self.depths = torch.zeros_like(parents)  # [N]
        nodes = torch.arange(len(tokens), device=tokens.device)
        above = parents
        while bool((alive := above >= 0).any()):
            self.ancestors[nodes[alive], above[alive]] = True
            self.depths += alive
            above = torch.where(alive, parents[above.clamp(min=0)], -1)

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root_only(cls, token: int, device: torch.device) -> "DraftTree":
        """No draft at all: a round of plain decoding."""
        return cls.chain([token], device)

    @classmethod
    def chain(cls, tokens: Sequence[int], device: torch.device) -> "DraftTree":
        """Each token the child of the one before it."""
        return cls(torch.tensor(tokens, device=device), torch.arange(-1, len(tokens) - 1, device=device))


class Proposer(Protocol):
    """What the decoding loop needs. It is told of every committed token, also of rounds it did not draft."""

    reads_features: bool  # whether `observe` needs the target's states; where not, nobody pays for them

    def reset(self, draws: Draws | None = None) -> None:
        """Forgets everything: a new conversation begins. `draws` are its random numbers, for proposers that sample."""

    def observe(self, tokens: Sequence[int], features: torch.Tensor | None) -> None:
        """`tokens` are all committed tokens so far, the unread root last; `features` [n, F] the target's captured
        states of those positions that were verified since the last call (all but the root have one by now)."""

    def propose(self, root: int) -> tuple[DraftTree, int]:
        """A tree below `root`, and how many drafter calls it took."""
        ...


class Drafting(Protocol):
    """A drafter inside one conversation: distributions for a policy to grow a tree from (`eval.policies`).

    Slots number the columns drafted in this round: slot 0 is the last committed column, every `expand` adds one slot a
    token, in order.
    """

    vocab: DraftVocab

    def reset(self) -> None: ...

    def observe(self, tokens: Sequence[int], features: torch.Tensor) -> None: ...

    def root_log_probs(self) -> torch.Tensor:
        """[Vd] of the root's children, from the last committed column (slot 0)."""
        ...

    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        """Feeds `tokens` [b] (target ids, nodes of this depth; the root's children have depth 1) under `parent_slots`
        [b] and returns [b, Vd], the log-probabilities of their children."""
        ...
