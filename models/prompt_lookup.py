"""Prompt lookup: the continuation of the last n-gram's latest earlier occurrence, as a chain. No model, no training.

The bar that every trained drafter must clear. Follows transformers' `prompt_lookup_num_tokens` in spirit (longest
n-gram first); deviation: the latest occurrence is taken, not the first, for nearby text is likelier to be repeated.
"""

from collections.abc import Sequence

import torch

from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.sampling import Draws


class PromptLookup:
    """A `models.draft_tree.Proposer`.

    Args:
        draft_tokens: most tokens of one chain.
        max_ngram: longest n-gram looked for; shorter ones follow down to 1.
    """

    reads_features = False

    def __init__(self, draft_tokens: int, device: torch.device, max_ngram: int = 3):
        self.draft_tokens, self.device, self.max_ngram = draft_tokens, device, max_ngram
        self.reset()

    def reset(self, draws: Draws | None = None) -> None:
        self.tokens: list[int] = []
        # The latest end (index of the following token) of every n-gram, and the one before that: the last n-gram's own
        # occurrence has nothing behind it.
        self.ends: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def observe(self, tokens: Sequence[int], features: torch.Tensor | None) -> None:
        for end in range(len(self.tokens) + 1, len(tokens) + 1):
            self.tokens.append(tokens[end - 1])
            for n in range(1, min(self.max_ngram, end) + 1):
                ngram = tuple(self.tokens[end - n : end])
                previous = self.ends.get(ngram)
                self.ends[ngram] = (end, previous[0] if previous else None)

    def propose(self, root: int) -> tuple[DraftTree, int]:
        for n in range(min(self.max_ngram, len(self.tokens)), 0, -1):
            _, earlier = self.ends[tuple(self.tokens[-n:])]
            if earlier is not None:
                continuation = self.tokens[earlier : earlier + self.draft_tokens]
                return DraftTree.chain([root, *continuation], self.device), 0
        return DraftTree.root_only(root, self.device), 0
