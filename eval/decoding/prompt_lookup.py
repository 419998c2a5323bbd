"""Prompt lookup: the continuation of the last n-gram's latest earlier occurrence, as a chain. No model, no training.

The baseline that every trained drafter must beat. As transformers' `prompt_lookup_num_tokens`, but for the latest
occurrence in the place of the first: nearby text is likelier to be repeated.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from draftsmith.models.draft_tree import Committed, DraftTree
from draftsmith.models.sampling import Draws


class TextProposer:
    """The part of a `models.draft_tree.Proposer` that follows the answers' texts, for those that read nothing else.

    Args:
        new_text: an empty text with `tokens`, and `extend`, which adds the new ones of all tokens so far.
    """

    capture_layers: tuple[int, ...] = ()

    def __init__(self, new_text: Callable[[], Any]):
        self.new_text = new_text
        self.texts: list[Any] = []

    def set_rows(self, kept: Sequence[int], new: int = 0, draws: Sequence[Draws] | None = None) -> None:
        self.texts = [*(self.texts[row] for row in kept), *(self.new_text() for _ in range(new))]

    def observe(self, committed: Committed) -> None:
        for text, tokens in zip(self.texts, committed.tokens, strict=True):
            text.extend(tokens)


class PromptLookup(TextProposer):
    """A `models.draft_tree.Proposer`.

    Args:
        draft_tokens: most tokens of one chain.
        max_ngram: longest n-gram looked up; shorter ones follow, down to 1.
    """

    def __init__(self, draft_tokens: int, device: torch.device, max_ngram: int = 3):
        super().__init__(partial(_Text, max_ngram))
        self.draft_tokens, self.device = draft_tokens, device

    def propose(self) -> tuple[DraftTree, list[int]]:
        chains = [[text.tokens[-1], *text.continuation(self.draft_tokens)] for text in self.texts]
        return DraftTree.chains(chains, self.device), [0] * len(chains)


class _Text:
    """One answer's tokens, and where each n-gram ended."""

    def __init__(self, max_ngram: int):
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        # Of every n-gram the latest end (index of the following token), and the one before, which the text's end needs.
        self.ends: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for end in range(len(self.tokens) + 1, len(tokens) + 1):
            self.tokens.append(tokens[end - 1])
            for n in range(1, min(self.max_ngram, end) + 1):
                ngram = tuple(self.tokens[end - n : end])
                previous = self.ends.get(ngram)
                self.ends[ngram] = (end, previous[0] if previous else None)

    def continuation(self, length: int) -> list[int]:
        """At most `length` tokens that followed an earlier occurrence of the longest known n-gram at the end."""
        for n in range(min(self.max_ngram, len(self.tokens)), 0, -1):
            _, earlier = self.ends[tuple(self.tokens[-n:])]
            if earlier is not None:
                return self.tokens[earlier : earlier + length]
        return []
