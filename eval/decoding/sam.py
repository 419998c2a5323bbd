"""SAM-Decoding (arXiv 2411.10666): drafts what followed the newest tokens where they occurred before.

`SamProposer` looks in the answer's own text and in a corpus (`models.suffix_automaton`). `SamRouter` adds a drafter: by
the length of the match it decides each round who drafts, or has both drafts verified as one tree.

    match of 5 tokens or more      SAM's chain                          fused:      root
    shorter                        the drafter's tree                              /    \\
                                                                                  a      x      the drafter's a b c
    fused                          both in one tree; where they                  / \\            and SAM's a b d e
                                   begin alike they share nodes                 b   y
                                                                               / \\
                                                                              c   d
                                                                                   \\
                                                                                    e
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from draftsmith.eval.decoding.decode import count_kept
from draftsmith.eval.decoding.prompt_lookup import TextProposer
from draftsmith.models.draft_tree import Committed, DraftedBy, DraftTree, Proposer
from draftsmith.models.sampling import Draws
from draftsmith.models.suffix_automaton import DynamicAutomaton, StaticAutomaton

DYNAMIC, STATIC, DRAFTER = "sam dynamic", "sam static", "drafter"


@dataclass(frozen=True)
class SamDraft:
    """A row's tree: the tokens below the root, parents first, each with its parent's index (0 is the root)."""

    source: str
    score: int  # length of the match, less the bias
    tokens: list[int]
    parents: list[int]


NO_DRAFT = SamDraft(DYNAMIC, 0, [], [])


class SamProposer(TextProposer):
    """A `models.draft_tree.Proposer`. Its settings are those of `SamSection`, its chains and trees have at most `nodes`
    nodes.

    Args:
        alpha: a match of l tokens is followed by at most alpha * l drafted ones; None: always by as many as fit.
        static: the corpus; its drafts are trees where it knows several continuations.
        width: most children of a node, and most nodes at one depth, of a tree from the corpus; 1: chains.
        depth: of the deepest node of such a tree.
        stop_ids: nothing is drafted behind these.
    """

    def __init__(
        self,
        device: torch.device,
        nodes: int,
        alpha: float | None,
        static: StaticAutomaton | None = None,
        dynamic: bool = True,
        l_bias: int = 0,
        width: int = 8,
        depth: int | None = None,
        stop_ids: Collection[int] = (),
    ):
        super().__init__(partial(_Text, dynamic))
        self.device, self.nodes, self.alpha, self.l_bias = device, nodes, alpha, l_bias
        self.static, self.width, self.depth = static, width, depth or nodes
        self.stop_ids = frozenset(stop_ids)

    def propose(self) -> tuple[DraftTree, list[int]]:
        return self.tree(self.drafts()), [0] * len(self.texts)

    def drafts(self) -> list[SamDraft]:
        """A draft for each row, without tokens where nothing matches."""
        return [self._draft(text) for text in self.texts]

    def tree(self, drafts: Sequence[SamDraft]) -> DraftTree:
        """The rows' drafts, each below its root."""
        roots = [text.tokens[-1] for text in self.texts]
        rows = [([root, *d.tokens], [-1, *d.parents]) for root, d in zip(roots, drafts, strict=True)]
        tree = _tree(rows, self.device)
        tree.sources = [DraftedBy(draft.source) for draft in drafts]
        return tree

    def _draft(self, text: "_Text") -> SamDraft:
        own = text.automaton.matched if text.automaton is not None else 0
        if self.static is not None:
            found = self.static.longest(text.tokens)
            score = found.length - self.l_bias
            if found.length and (score > own or not own):
                tokens, parents = self.static.continuations(found, self._most(found.length), self.width, self.depth)
                if tokens or not own:  # else every occurrence ends its document
                    return SamDraft(STATIC, score, *_shallow_first(tokens, parents))
        if text.automaton is None or not own:
            return NO_DRAFT
        tokens = text.automaton.continuation(self._most(own))
        tokens = tokens[: count_kept(tokens, self.stop_ids, len(tokens))]
        return SamDraft(DYNAMIC, own, tokens, list(range(len(tokens))))

    def _most(self, matched: int) -> int:
        """Drafted tokens. The paper's n = min(max, 1 + alpha * l) counts the root."""
        return self.nodes - 1 if self.alpha is None else min(self.nodes - 1, int(self.alpha * matched))


class _Text:
    """One answer's tokens, prompt included."""

    def __init__(self, dynamic: bool):
        self.automaton = DynamicAutomaton() if dynamic else None
        self.tokens: list[int] = [] if self.automaton is None else self.automaton.text

    def extend(self, tokens: Sequence[int]) -> None:
        new = tokens[len(self.tokens) :]
        if self.automaton is None:
            self.tokens.extend(new)
        else:
            self.automaton.extend(new)


class _Spared:
    """A row's random numbers for a drafter. While its tree is to be dropped, it takes none."""

    def __init__(self, draws: Draws):
        self.draws, self.spared = draws, False

    def events(self, chances_N: torch.Tensor) -> torch.Tensor:
        return self.draws.events(chances_N)

    def token(self, weights_V: torch.Tensor) -> torch.Tensor:
        return weights_V.new_zeros((), dtype=torch.long) if self.spared else self.draws.token(weights_V)


class SamRouter:
    """SAM beside another proposer: a `models.draft_tree.Proposer`.

    The other one observes every committed token, but late: where SAM drafts for all rows, it costs nothing, and target
    states are kept until it is asked again, or until rows come or go. With several rows it drafts if one of them needs
    it; the others' trees are dropped, and take no random numbers.

    Args:
        l_threshold: SAM drafts for a row if its match, less the bias in the corpus, is at least so long.
        fuse: SAM's chain joins the other's tree, of tokens that are not drawn, instead of replacing it.
    """

    def __init__(self, sam: SamProposer, other: Proposer, l_threshold: int, fuse: bool = False):
        self.sam, self.other, self.l_threshold, self.fuse = sam, other, l_threshold, fuse
        self.capture_layers = other.capture_layers
        self.waiting: Committed | None = None  # what the other has yet to observe
        self.draws: list[_Spared] = []  # the other's, of each row, if given

    def set_rows(self, kept: Sequence[int], new: int = 0, draws: Sequence[Draws] | None = None) -> None:
        if kept:
            self._catch_up()
        self.waiting = None
        spared = [_Spared(each) for each in draws or ()]
        self.draws = [*(self.draws[row] for row in kept if self.draws), *spared]
        self.sam.set_rows(kept, new)
        self.other.set_rows(kept, new, spared or None)

    def observe(self, committed: Committed) -> None:
        self.sam.observe(committed)
        # The loop's lists of tokens grow further, while counts and features are of now.
        committed = replace(committed, tokens=[list(tokens) for tokens in committed.tokens])
        self.waiting = committed if self.waiting is None else _joined(self.waiting, committed)

    def _catch_up(self) -> None:
        if self.waiting is not None:
            self.other.observe(self.waiting)
            self.waiting = None

    def propose(self) -> tuple[DraftTree, list[int]]:
        drafts = [draft if draft.score >= self.l_threshold else NO_DRAFT for draft in self.sam.drafts()]
        if not self.fuse and all(draft.tokens for draft in drafts):
            return self.sam.tree(drafts), [0] * len(drafts)
        self._catch_up()
        for draw, draft in zip(self.draws, drafts, strict=False):
            draw.spared = not self.fuse and bool(draft.tokens)
        tree, calls = self.other.propose()
        if not any(draft.tokens for draft in drafts):
            tree.sources = [_by_drafter(tree, row) for row in range(tree.rows)]
            return tree, calls
        if self.fuse:
            return fused(tree, drafts), calls
        calls = [0 if draft.tokens else count for draft, count in zip(drafts, calls, strict=True)]
        return replaced(tree, drafts), calls


def _joined(before: Committed, after: Committed) -> Committed:
    """Both as if they had been committed at once."""
    features = after.features
    if before.features is not None and features is not None:
        pairs = zip(before.features, before.counts, features, after.counts, strict=True)
        features = pad_sequence([torch.cat((a[:n], b[:m])) for a, n, b, m in pairs], batch_first=True)
    counts = [n + m for n, m in zip(before.counts, after.counts, strict=True)]
    return replace(after, features=features, counts=counts)


def _by_drafter(tree: DraftTree, row: int) -> DraftedBy:
    return DraftedBy(DRAFTER) if tree.sources is None else replace(tree.sources[row], source=DRAFTER)


# Trees. A row is its tokens and parents, the root's own parent -1.


def _tree(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> DraftTree:
    sizes = [len(tokens) for tokens, _ in rows]
    most = max(sizes)
    # Padding continues a chain: any earlier node is a valid parent.
    padded = [[*tokens, *[tokens[0]] * (most - len(tokens))] for tokens, _ in rows]
    parents = [[*parents, *range(len(parents) - 1, most - 1)] for _, parents in rows]
    chain = all(parent == list(range(-1, most - 1)) for parent in parents)
    deepest = max(max(_depths(own[1:])) for _, own in rows)
    lengths = None if min(sizes) == most else torch.tensor(sizes, device=device)
    tokens_BN, parents_BN = torch.tensor([padded, parents], device=device)
    return DraftTree(tokens_BN, parents_BN, deepest, lengths, is_chain=chain)


def _depths(parents: Sequence[int]) -> list[int]:
    """Of a root and of the nodes below it."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths


def _shallow_first(tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """The same nodes below a root, sorted by depth."""
    depths = _depths(parents)
    order = sorted(range(1, len(depths)), key=lambda node: depths[node])
    place = {0: 0} | {node: i for i, node in enumerate(order, start=1)}
    return [tokens[node - 1] for node in order], [place[parents[node - 1]] for node in order]


def _rows_of(tree: DraftTree) -> list[tuple[list[int], list[int]]]:
    """Waits for the device."""
    sizes = [tree.nodes] * tree.rows if tree.sizes is None else tree.sizes.tolist()
    numbers = torch.stack((tree.tokens, tree.parents), dim=1).tolist()
    return [(tokens[:size], parents[:size]) for (tokens, parents), size in zip(numbers, sizes, strict=True)]


def replaced(tree: DraftTree, drafts: Sequence[SamDraft]) -> DraftTree:
    """SAM's chain in the place of the tree in rows with a draft.

    Beside drawn trees its tokens count as drawn from distributions with one token each.
    """
    rows = [
        ([tokens[0], *draft.tokens], [-1, *draft.parents]) if draft.tokens else (tokens, parents)
        for (tokens, parents), draft in zip(_rows_of(tree), drafts, strict=True)
    ]
    merged = _tree(rows, tree.tokens.device)
    if tree.drawn_from is not None:
        merged.drawn_from = functional.pad(tree.drawn_from, (0, 0, 0, merged.nodes - tree.nodes))
        for drawn_NV, draft in zip(merged.drawn_from, drafts, strict=True):
            if draft.tokens:
                drawn_NV.zero_()[range(len(draft.tokens)), draft.tokens] = 1
    merged.sources = [DraftedBy(d.source) if d.tokens else _by_drafter(tree, row) for row, d in enumerate(drafts)]
    tried = [tree.nodes] * tree.rows if tree.tried is None else tree.tried
    merged.tried = [len(draft.tokens) or most for draft, most in zip(drafts, tried, strict=True)]
    return merged


def fused(tree: DraftTree, drafts: Sequence[SamDraft]) -> DraftTree:
    """The trees with SAM's chains: a trie, in which a token that both drafted at the same place is one node.

    Raises ValueError for drawn tokens.
    """
    if tree.drawn_from is not None:
        raise ValueError("drawn tokens cannot be fused: they would get siblings that were not drawn")
    rows, sources = [], []
    for row, ((tokens, parents), draft) in enumerate(zip(_rows_of(tree), drafts, strict=True)):
        size = len(tokens)
        child: dict[tuple[int, int], int] = {}
        for node in range(1, size):
            child.setdefault((parents[node], tokens[node]), node)
        at = shared = 0
        for token in draft.tokens:
            if (at, token) not in child:
                child[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            shared += child[at, token] < size
            at = child[at, token]
        below, their_parents = _shallow_first(tokens[1:], parents[1:])
        rows.append(([tokens[0], *below], [-1, *their_parents]))
        source = _by_drafter(tree, row)
        if draft.tokens:
            source = replace(source, chain_source=draft.source, chain=tuple(draft.tokens), shared=shared)
        sources.append(source)
    merged = _tree(rows, tree.tokens.device)
    merged.sources, merged.tried = sources, tree.tried
    return merged
