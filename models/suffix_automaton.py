"""Where did this text occur before, and what followed? The structures of SAM-Decoding (arXiv 2411.10666).

Both answer for the longest suffix of a text that occurs elsewhere:

    text         c a b d a b            the longest suffix that occurred earlier is "a b"; what followed it: d
    corpus       . a b d . x a b e .    its occurrences end at two places; what followed them: d and e

`DynamicAutomaton`: the answer's own text, growing token by token. A suffix automaton, amortised O(1) per token.

`StaticAutomaton`: a corpus that does not change. Deviation: the paper moves a state through a second suffix automaton,
of about 400 bytes a token in Python. Here the corpus is sorted once, by the text *before* each position, read backwards
(a suffix array of the mirrored corpus). A binary search finds what the automaton's state tells, the longest suffix of a
text with all its occurrences, in two flat, memory-mapped arrays of 6 to 8 bytes a token, without a state to roll back
or to keep in step with a batch:

    position     0 1 2 3 4 5 6 7 8 9    `tokens`; a dot is the separator at every document's ends
    token        . a b d . x a b e .
    text before, read backwards         of 2: b a .   of 7: b a x .   of 3: d b a .
    `order`      1 6 2 7 3 8 5          sorted by it: the occurrences of "a b" stand side by side (2 7)

Documents end before and after a stop token's end, so neither a match nor a continuation crosses one.
"""

import heapq
import itertools
import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from draftsmith.models.chat import FINGERPRINT_COVERS
from draftsmith.models.vocab import open_tensors
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write

FORM = "1"  # of the file
SAMPLED = 128  # occurrences whose continuations are looked at, spread evenly; a tree has fewer nodes
FIRST_WINDOW = 32  # tokens of the context that a look-up begins with
MOST_TOKENS = 2**31 - 1  # positions are int32


class DynamicAutomaton:
    """A suffix automaton of one text, and the longest suffix of the text that occurred in it before (`matched` tokens).

    A state stands for the substrings that end at the same places; it has the longest one's length, the end of the
    first occurrence, an edge for each token that may follow, and a link to the state of the next shorter suffix. State
    0 is the empty text.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.edges: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [-1]
        self._whole = 0  # state of the whole text
        self._state, self.matched = 0, 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._transfer(token)  # before the text has the token, or its suffix would match itself
            self._append(token)

    def _transfer(self, token: int) -> None:
        edges, link, length = self.edges, self.link, self.length
        state, matched = self._state, self.matched
        while state and matched <= length[link[state]]:  # a clone has taken over the shorter substrings
            state = link[state]
        while state and token not in edges[state]:
            state = link[state]
            matched = length[state]
        after = edges[state].get(token)
        self._state, self.matched = (0, 0) if after is None else (after, matched + 1)

    def _append(self, token: int) -> None:
        edges, link, length = self.edges, self.link, self.length
        new, at = self._state_of({}, length[self._whole] + 1, len(self.text)), self._whole
        self.text.append(token)
        self._whole = new
        while at >= 0 and token not in edges[at]:
            edges[at][token] = new
            at = link[at]
        if at < 0:
            link[new] = 0
            return
        after = edges[at][token]
        if length[after] == length[at] + 1:
            link[new] = after
            return
        clone = self._state_of(dict(edges[after]), length[at] + 1, self.end[after])
        link[clone] = link[after]
        link[after] = link[new] = clone
        while at >= 0 and edges[at].get(token) == after:
            edges[at][token] = clone
            at = link[at]

    def _state_of(self, edges: dict[int, int], length: int, end: int) -> int:
        self.edges.append(edges)
        self.link.append(0)
        self.length.append(length)
        self.end.append(end)
        return len(self.edges) - 1

    @property
    def matched_end(self) -> int:
        """Index of the last token of the first occurrence of that suffix; -1 if nothing is matched."""
        return self.end[self._state] if self.matched else -1

    def continuation(self, count: int) -> list[int]:
        """`count` tokens that followed the first occurrence.

        Where fewer follow, the text is a loop ("a b a b a"), and they are repeated. Deviation: the paper looks for a
        shorter suffix with more tokens behind it, or drafts a shorter chain.
        """
        if not self.matched:
            return []
        first = self.matched_end + 1
        period = len(self.text) - first
        return [self.text[first + i % period] for i in range(count)]


@dataclass(frozen=True)
class Match:
    """The longest suffix of a text in a corpus: its length, and the interval of its occurrences in `order`."""

    length: int
    first: int = 0
    end: int = 0

    @property
    def occurrences(self) -> int:
        return self.end - self.first


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class StaticAutomaton:
    """A sorted corpus.

    Args:
        tokens: [n] with a separator before, between and behind the documents.
        order: [n - separators] positions of the tokens, sorted by the text that ends there, read backwards.
        separator: greater than every token.
    """

    def __init__(self, tokens: np.ndarray, order: np.ndarray, separator: int):
        self.tokens, self.order, self.separator = tokens, order, separator

    @classmethod
    def of_documents(cls, tokens: np.ndarray, separator: int) -> "StaticAutomaton":
        """Sorts a corpus as `corpus_tokens` makes it."""
        return cls(tokens, sorted_positions(tokens, separator), separator)

    # Look-ups.

    def longest(self, context: Sequence[int]) -> Match:
        """The longest suffix of `context` in the corpus, by a binary search for the last few tokens, and for more where
        all of them match."""
        window = FIRST_WINDOW
        while True:
            found = self._longest(list(context[: -window - 1 : -1]))
            if found.length < window or window >= len(context):
                return found
            window *= 8

    def _longest(self, sought: list[int]) -> Match:
        """`sought`: the context, read backwards. No entry is smaller or greater for what stands before its document,
        because `sought` has no separator."""
        at = bisect_left(self.order, sought, key=partial(self._before, most=len(sought)))
        nearest = [self._before(position, len(sought)) for position in self.order[max(0, at - 1) : at + 1].tolist()]
        length = max((common_length(sought, text) for text in nearest), default=0)
        if not length:
            return Match(0)
        prefix, key = sought[:length], partial(self._before, most=length)
        return Match(length, bisect_left(self.order, prefix, key=key), bisect_right(self.order, prefix, key=key))

    def _before(self, position: int, most: int) -> list[int]:
        """The last tokens up to a position, read backwards."""
        return self.tokens[max(0, position + 1 - most) : position + 1][::-1].tolist()

    def continuations(self, match: Match, most: int, width: int, depth: int) -> tuple[list[int], list[int]]:
        """(tokens, parents) of the `most` likeliest nodes below the matched text, parents first; 0 is the root, which
        is not among them.

        A node's probability is the share of the occurrences that its whole path follows. Ties go to the shallower node,
        then to the one found first. Deviation: of more than `SAMPLED` occurrences, it looks at so many.

        Args:
            width: most nodes of one depth, and most children of one node.
            depth: of the deepest node.
        """
        entries = np.arange(match.first, match.end)
        if match.occurrences > SAMPLED:
            entries = match.first + np.arange(SAMPLED) * match.occurrences // SAMPLED
        positions: list[int] = self.order[entries].tolist()
        found_tokens: list[int] = []
        found_parents: list[int] = []
        at_depth: Counter[int] = Counter()
        heap: list[tuple[int, int, int, int, int, list[int]]] = []
        parent, level, number = 0, 0, 0
        while True:
            if level < depth:
                for token, ends in self._following(positions)[:width]:
                    number += 1  # so that no lists are compared
                    heapq.heappush(heap, (-len(ends), level + 1, number, token, parent, ends))
            while heap and at_depth[heap[0][1]] == width:
                heapq.heappop(heap)
            if not heap or len(found_tokens) == most:
                return found_tokens, found_parents
            _, level, _, token, parent, positions = heapq.heappop(heap)
            at_depth[level] += 1
            found_tokens.append(token)
            found_parents.append(parent)
            parent = len(found_tokens)

    def _following(self, positions: list[int]) -> list[tuple[int, list[int]]]:
        """(token, its positions) of what follows these positions, the most frequent first."""
        groups: dict[int, list[int]] = {}
        for position in positions:
            token = self.tokens.item(position + 1)
            if token != self.separator:
                groups.setdefault(token, []).append(position + 1)
        return sorted(groups.items(), key=lambda group: -len(group[1]))

    # Files.

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + self.order.nbytes

    def save(self, path: Path, fingerprint: str, facts: dict[str, Any]) -> None:
        """Writes safetensors, atomically; `facts` (JSON) tell readers of the file what the corpus is."""
        metadata = {
            "form": FORM,
            "tokenizer_fingerprint": fingerprint,
            "separator": str(self.separator),
            "corpus": json.dumps(facts, ensure_ascii=False),
        }
        atomic_write(path, save({"tokens": self.tokens, "order": self.order}, metadata))

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> "StaticAutomaton":
        """Maps a file into memory. Raises UserError: no such file, no automaton, or one of another tokenizer."""
        with open_tensors(path, "file; run `draftsmith build-sam` first") as file:
            metadata = file.metadata() or {}
            if metadata.get("form") != FORM or {"tokens", "order"} - set(file.keys()):
                raise UserError(f"{path}: not an automaton; `draftsmith build-sam` writes one")
            # The tensors are views of the mapped file: nothing is read before it is looked at.
            tokens, order = (file.get_tensor(name).numpy() for name in ("tokens", "order"))
        if (there := metadata.get("tokenizer_fingerprint", "none")) != fingerprint:
            raise UserError(
                f"{path}: built with another tokenizer: fingerprint {there[:16]} there, {fingerprint[:16]} here (a "
                f"fingerprint covers {FINGERPRINT_COVERS}); run `draftsmith build-sam` for this target"
            )
        return cls(tokens, order, int(metadata["separator"]))


# Building.


def corpus_tokens(documents: Sequence[np.ndarray], separator: int) -> np.ndarray:
    """The documents with separators, in the smallest type that holds them."""
    kind = np.uint16 if separator < 2**16 else np.int32
    sizes = np.array([len(document) + 1 for document in documents], dtype=np.int64)
    tokens = np.full(1 + sizes.sum(), separator, dtype=kind)
    inside = np.ones(len(tokens), dtype=bool)
    inside[np.concatenate(([0], sizes.cumsum()))] = False
    if documents:
        tokens[inside] = np.concatenate(documents)
    return tokens


def sorted_positions(tokens: np.ndarray, separator: int) -> np.ndarray:
    """[n - separators] int32 positions of the tokens, sorted by the text that ends there, read backwards.

    Prefix doubling (Manber and Myers 1990): positions that share their last h tokens share a rank; sorting by the pair
    of a rank and that of the position h before doubles h. Only positions that still share a rank are sorted again
    (Larsson and Sadakane 2007). Every separator has a rank of its own: texts are compared within their document.
    """
    mirrored = tokens[::-1]
    separators = mirrored == separator
    symbols = mirrored.astype(np.int64)
    symbols[separators] = separator + np.arange(separators.sum())
    bits = int(symbols.max()).bit_length()
    known = max(1, 63 // bits)  # h: tokens that fit into one integer
    keys = symbols.copy()
    for ahead in range(1, known):
        keys <<= bits
        keys[:-ahead] |= symbols[ahead:]
    del symbols
    order = np.argsort(keys)
    slots = np.arange(len(keys))  # places in `order` that are not decided yet: all
    ranks = np.empty(len(keys), dtype=np.int64)
    sorted_keys = keys[order]
    while True:
        opens = np.ones(len(slots), dtype=bool)
        np.not_equal(sorted_keys[1:], sorted_keys[:-1], out=opens[1:])
        # A rank is the first place of those that share it, so it never changes for those that are decided.
        ranks[order[slots]] = np.maximum.accumulate(np.where(opens, slots, 0))
        alone = opens.copy()
        alone[:-1] &= opens[1:]
        slots = slots[~alone]
        if not len(slots):
            break
        # No separator is among the last h tokens of these, or their rank would be their own: h more exist.
        undecided = order[slots]
        keys = (ranks[undecided] << 32) | ranks[undecided + known]
        by_key = np.argsort(keys)
        sorted_keys = keys[by_key]
        order[slots] = undecided[by_key]
        known *= 2
    order = order[: len(order) - int(separators.sum())]  # separators are the greatest symbols
    return (len(tokens) - 1 - order).astype(np.int32)
