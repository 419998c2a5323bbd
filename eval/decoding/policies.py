"""How draft trees grow: policies over any `models.draft_tree.Drafting`, for B answers side by side.

A policy grows trees below B roots, target token ids on the drafter's device: it asks the drafter for log-probabilities
and decides which nodes to expand, which to keep and when to stop. The first draft call reads the newly committed tokens
and drafts the root's children. Policies that sample take the random numbers of each row.

    Chain       one token after the other; with `Svip` until a token is uncertain
    StaticTree  the same ranks every round
    Eagle2      the best nodes of a beam search; with `Ddd` or `SvipTree` until the beam is not worth another call
    C2T         nodes that a classifier expects to be accepted

A node's value is the logarithm of the product of draft probabilities along its path (temperature 1, over the draft
vocabulary). When the final nodes are chosen, ties go to the earlier one, which is never the deeper one, so they are
always connected. A NaN counts as the lowest value.

A batch grows until its last row stops, but each row gets the tree and the number of calls that it would get alone.

Shapes: B rows, b nodes that are expanded in one call, K children of each, T drafted nodes of all calls, S slots,
N nodes of the final trees, Vd draft vocabulary, V target vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch.nn import functional

from draftsmith.eval.decoding.stopping import Calls, Ddd, Svip, SvipTree
from draftsmith.models.c2t import C2tClassifier, node_features
from draftsmith.models.draft_tree import Committed, Drafting, DraftTree
from draftsmith.models.sampling import GREEDY, Draws, Sampling, drawn_tokens
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.sections.eval import TreeSection

Grown = tuple[DraftTree, list[int]]  # a tree for each row, and the number of levels that were drafted for it


@dataclass(frozen=True)
class Chain:
    """One token after the other: `draft_tokens` of them, in as many calls, or fewer by `stop`.

    Args:
        sampling: how tokens are drawn from the drafter's distribution. Any way is lossless; the target's own
            temperature, top-k and top-p bring the two closest. Greedy takes the likeliest tokens.
    """

    draft_tokens: int
    stop: Svip | None = None
    sampling: Sampling = GREEDY

    def grow(self, drafting: Drafting, roots_B: torch.Tensor, draws: Sequence[Draws] | None = None) -> Grown:
        draws = draws or ()
        rows, device, vocab = len(roots_B), roots_B.device, drafting.vocab
        slots_BN = torch.arange(self.draft_tokens, device=device).expand(rows, -1)  # depth d is fed below slot d - 1
        tokens, drawn_from = [roots_B[:, None]], []
        calls, nothing = Calls(rows, self.draft_tokens), torch.zeros((), dtype=torch.long, device=device)
        log_probs = drafting.root_log_probs()  # [B, Vd]
        for call in range(1, self.draft_tokens + 1):
            if self.sampling.greedy:
                drafted_B = log_probs.max(-1).indices  # argmax, but several times faster on a CPU
            else:
                drawn_from.append(_draft_law(self.sampling, log_probs))
                each = zip(draws, drawn_from[-1], calls.going, strict=True)  # stopped rows take no random numbers
                drafted_B = torch.stack([draw.token(q_V) if goes else nothing for draw, q_V, goes in each])
            tokens.append(vocab.to_target(drafted_B)[:, None])
            if call == self.draft_tokens or (self.stop and calls.stop(self.stop.stops(log_probs), call)):
                break
            log_probs = drafting.expand(slots_BN[:, call - 1 : call], tokens[-1], call)[:, 0]
        longest = len(tokens) - 1
        drawn = None if self.sampling.greedy else functional.pad(torch.stack(drawn_from, dim=1), (0, 0, 0, 1))
        sizes = None
        if min(calls.of_row) < longest:
            sizes = torch.tensor(calls.of_row, device=device) + 1
            if drawn is not None:
                past_end = torch.arange(longest + 1, device=device) >= sizes[:, None] - 1
                drawn = drawn.masked_fill(past_end[..., None], 0)
        tree = DraftTree(
            torch.cat(tokens, dim=1),
            torch.arange(-1, longest, device=device).expand(rows, -1),
            longest,
            sizes,
            None if drawn is None else _over_target_vocab(drawn, vocab),
            is_chain=True,
        )
        return tree, calls.of_row


RARE = 1e-30  # probability of tokens that the drafter would never draw, where it has fewer than are to be drawn


def _draft_law(sampling: Sampling, log_probs: torch.Tensor) -> torch.Tensor:
    """[..., Vd] the distribution that tokens are drawn from; uniform in place of one with a NaN or without a token."""
    q = sampling.probabilities(log_probs)
    return torch.where(q.sum(-1, keepdim=True) > 0.5, q, 1 / q.shape[-1])


def _over_target_vocab(drawn_BNV: torch.Tensor, vocab: DraftVocab) -> torch.Tensor:
    """Distributions over the draft vocabulary as `DraftTree.drawn_from`."""
    if vocab.is_full:
        return drawn_BNV
    drawn_from = drawn_BNV.new_zeros(*drawn_BNV.shape[:-1], vocab.target_vocab_size)
    return drawn_from.index_copy_(2, vocab.target_ids, drawn_BNV)


@dataclass(frozen=True)
class _Level:
    """One draft call of a static tree, as indices on one device."""

    width: int  # children proposed per expanded node
    children: list[int]  # [b] of each expanded node
    chosen: torch.Tensor  # [n] the level's nodes among all proposed ones
    expanded: torch.Tensor  # [b] the nodes that have children; the next call expands them
    slots: torch.Tensor  # [1, b] slots of their parents


@dataclass(frozen=True)
class StaticTree:
    """The same tree every round: each node is the child of a fixed rank (EAGLE-1, arXiv 2401.15077, figure 7).

    Args:
        paths: each node below the root as the child ranks that lead to it, 0 the likeliest, with its parent among
            them. Ranks beyond the draft vocabulary are left out, with all nodes below them.
        sampling: how children are drawn from the drafter's distribution, without replacement; a child's rank is then
            its turn, and its elder siblings are among the paths (LANTERN++, arXiv 2502.06352). Greedy takes the
            likeliest.
    """

    paths: tuple[tuple[int, ...], ...]
    sampling: Sampling = GREEDY

    def grow(self, drafting: Drafting, roots_B: torch.Tensor, draws: Sequence[Draws] | None = None) -> Grown:
        draws = draws or ()
        rows, vocab = len(roots_B), drafting.vocab
        log_probs = drafting.root_log_probs()[:, None]  # [B, b, Vd]
        levels, parents, inner = _static_levels(self.paths, log_probs.shape[-1], log_probs.device)
        tokens, drawn_from = [roots_B[:, None]], []
        for call, level in enumerate(levels, start=1):
            if self.sampling.greedy:
                drafted = top_tokens(log_probs, level.width)[1]
            else:
                q_BbV = _draft_law(self.sampling, log_probs)
                enough = (q_BbV > 0).sum(-1, keepdim=True) >= level.width
                drawn_from.append(torch.where(enough, q_BbV, q_BbV.clamp(min=RARE)))
                drafted = _without_replacement(drawn_from[-1], level, draws)
            tokens.append(vocab.to_target(drafted.flatten(1).index_select(1, level.chosen)))
            if call < len(levels):
                fed = tokens[-1].index_select(1, level.expanded)
                log_probs = drafting.expand(level.slots.expand(rows, -1), fed, call)
        drawn = None
        if drawn_from:
            drawn = drawn_from[0].new_zeros(rows, parents.shape[0], log_probs.shape[-1])
            drawn.index_copy_(1, inner, torch.cat(drawn_from, dim=1))
            drawn = _over_target_vocab(drawn, vocab)
        tree = DraftTree(torch.cat(tokens, dim=1), parents.expand(rows, -1), len(levels), drawn_from=drawn)
        return tree, [len(levels)] * rows


def _without_replacement(q_BbV: torch.Tensor, level: _Level, draws: Sequence[Draws]) -> torch.Tensor:
    """[B, b, width] draft ids: the children of each expanded node in the order in which they were drawn."""
    left = q_BbV.clone()
    drafted = torch.zeros(*q_BbV.shape[:-1], level.width, dtype=torch.long, device=q_BbV.device)
    for node, children in enumerate(level.children):
        for turn in range(children):
            token = drawn_tokens(left[:, node], draws)
            drafted[:, node, turn] = token
            left[:, node].scatter_(1, token[:, None], 0)
    return drafted


@lru_cache(maxsize=64)
def _static_levels(
    paths: Sequence[tuple[int, ...]], vocab_size: int, device: torch.device
) -> tuple[list[_Level], torch.Tensor, torch.Tensor]:
    """(levels, [N] parents, nodes with children) of a static tree."""
    paths = sorted((path for path in paths if max(path) < vocab_size), key=lambda path: (len(path), path))
    node = {path: i for i, path in enumerate([(), *paths])}
    inner = {path[:-1] for path in paths}
    slot: dict[tuple[int, ...], int] = {(): 0}  # of every node that is expanded
    levels: list[_Level] = []
    expanded: list[tuple[int, ...]] = [()]
    for depth in range(1, max(map(len, paths), default=0) + 1):
        here = [path for path in paths if len(path) == depth]
        width = 1 + max(path[-1] for path in here)
        children = [sum(path[:-1] == parent for path in here) for parent in expanded]
        chosen = [expanded.index(path[:-1]) * width + path[-1] for path in here]
        expanded = [path for path in here if path in inner]
        for path in expanded:
            slot[path] = len(slot)
        levels.append(
            _Level(
                width,
                children,
                torch.tensor(chosen, device=device),
                torch.tensor([here.index(path) for path in expanded], dtype=torch.long, device=device),
                torch.tensor([[slot[path[:-1]] for path in expanded]], dtype=torch.long, device=device),
            )
        )
    parents = [-1, *(node[path[:-1]] for path in paths)]
    return levels, torch.tensor(parents, device=device), torch.tensor(sorted(set(parents[1:])), device=device)


BLOCK = 128  # tokens
LARGE = 8192  # draft tokens from which the detour pays; measured on a CPU


def top_tokens(log_probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`log_probs.topk(count)` [..., Vd]. A NaN is the greatest; the order of ties is undefined.

    On a CPU and over a large vocabulary it is several times faster to find the `count` blocks with the greatest maxima
    first: the likeliest tokens lie in these, or in the rest after the last block.
    """
    size = log_probs.shape[-1]
    blocks = size // BLOCK
    if log_probs.device.type != "cpu" or size < LARGE or count > blocks // 2:
        return log_probs.topk(count)
    best = log_probs[..., : blocks * BLOCK].unflatten(-1, (blocks, BLOCK)).amax(-1).topk(count, sorted=False).indices
    tokens = (best[..., None] * BLOCK + torch.arange(BLOCK)).flatten(-2)
    if size % BLOCK:
        rest = torch.arange(blocks * BLOCK, size).expand(*tokens.shape[:-1], -1)
        tokens = torch.cat((tokens, rest), dim=-1)
    values, chosen = log_probs.gather(-1, tokens).topk(count)
    return values, tokens.gather(-1, chosen)


def _children(values_Bb: torch.Tensor, log_probs: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, draft ids) of each node's `width` likeliest children, the likeliest first; both [B, b, width].
    NaNs come first and get the lowest value."""
    best, drafted = top_tokens(log_probs, width)
    best = best.clamp_(max=0).nan_to_num_(nan=-math.inf, neginf=-math.inf)
    return values_Bb[..., None] + best, drafted


def _best_nodes(
    drafting: Drafting,
    roots_B: torch.Tensor,
    values_BT: torch.Tensor,
    drafted_BT: torch.Tensor,
    parents_BT: torch.Tensor,
    counts: Sequence[int],
    depth: int,
) -> DraftTree:
    """Trees of the counts[b] best drafted nodes of each row b. Ties go to the earlier node.

    Args:
        values_BT: a child comes after its parent and never has a higher value.
        drafted_BT: draft ids.
        parents_BT: 1 + index of each node's parent among the T, 0 for the root's children.
        depth: an upper bound on every node's depth.
    """
    rows, drafted_nodes = values_BT.shape
    most, device = max(counts), values_BT.device
    kept = values_BT.argsort(dim=1, descending=True, stable=True)[:, :most]
    sizes = None
    if min(counts) < most:
        sizes = torch.tensor(counts, device=device) + 1
        padding = torch.arange(1, most + 1, device=device) >= sizes[:, None]
        kept = kept.masked_fill(padding, drafted_nodes)  # sorts after all nodes
    kept = kept.sort(dim=1).values  # [B, N - 1] drafted order: parents first, shallower nodes first
    # Each drafted node's index in the tree: the root at 0, and a last entry for the padding.
    place = kept.new_zeros(rows, drafted_nodes + 2)
    place.scatter_(1, kept + 1, torch.arange(1, most + 1, device=device).expand(rows, -1))
    if sizes is not None:
        kept = kept.clamp(max=drafted_nodes - 1)
    parents = place.gather(1, parents_BT.gather(1, kept))
    tokens = drafting.vocab.to_target(drafted_BT.gather(1, kept))
    return DraftTree(
        torch.cat((roots_B[:, None], tokens), dim=1), functional.pad(parents, (1, 0), value=-1), depth, sizes
    )


@dataclass(frozen=True)
class Eagle2:
    """EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): expand the best `top_k` nodes of each level, keep the best
    `nodes` - 1 of all proposed ones.

    Args:
        nodes: most of the tree, the root included.
        draft_calls: most calls, which equals the greatest depth.
        top_k: children proposed per node, and width of the beam.
        stop: ends the search earlier.
        watch: called with each call's children before any is cut: values [B, b, K], log-probabilities [B, b, Vd] and
            depth. If `nodes` cuts none, the tree holds its nodes in this order.
    """

    nodes: int
    draft_calls: int
    top_k: int
    stop: Ddd | SvipTree | None = None
    watch: Callable[[torch.Tensor, torch.Tensor, int], object] | None = field(default=None, repr=False, compare=False)

    def grow(self, drafting: Drafting, roots_B: torch.Tensor, draws: Sequence[Draws] | None = None) -> Grown:
        rows, device = len(roots_B), roots_B.device
        log_probs = drafting.root_log_probs()[:, None]  # [B, b, Vd]
        width = min(self.top_k, log_probs.shape[-1])  # K
        values_Bb = log_probs.new_zeros(rows, 1)  # of the expanded nodes: the root's is 1
        # All proposed nodes, call by call. The K children of an expanded node are adjacent, so slot t // K holds the
        # parent of node t. Slot 0 is the root; the others fill up in the order in which nodes are expanded.
        values, drafted = [], []
        in_slots = [torch.full((rows, 1), -1, device=device)]  # [B, S] index of each slot's node; -1 is the root
        proposed = [0]  # nodes after so many calls
        calls = Calls(rows, self.draft_calls)
        for call in range(1, self.draft_calls + 1):
            children, ids = _children(values_Bb, log_probs, width)
            if self.watch is not None:
                self.watch(children, log_probs, call)
            children, ids = children.flatten(1), ids.flatten(1)  # [B, b * K]
            if rows > 1 and not all(calls.going):
                # Ranks after all earlier nodes of a row that has stopped: ties go to the earlier node.
                assert calls.stopped_B is not None
                children.masked_fill_(calls.stopped_B[:, None], -math.inf)
            values.append(children)
            drafted.append(ids)
            proposed.append(proposed[-1] + children.shape[1])
            if call == self.draft_calls:
                break
            beam, chosen = children.topk(min(self.top_k, children.shape[1]))  # [B, K]
            if self.stop is not None:
                stopping_B = self.stop.stops(call, values_Bb, log_probs, beam)
                if stopping_B is not None and calls.stop(stopping_B, call):
                    break
            tokens = drafting.vocab.to_target(ids.gather(1, chosen))
            in_slots.append(chosen + proposed[-2])
            log_probs = drafting.expand(in_slots[-1] // width, tokens, call)
            values_Bb = beam
        parents = (torch.cat(in_slots, dim=1) + 1)[..., None].expand(-1, -1, width).flatten(1)  # [B, T]
        counts = [min(self.nodes - 1, proposed[made]) for made in calls.of_row]
        tree = _best_nodes(
            drafting, roots_B, torch.cat(values, dim=1), torch.cat(drafted, dim=1), parents, counts, max(calls.of_row)
        )
        return tree, calls.of_row


@dataclass(frozen=True)
class C2T:
    """C2T's growth (arXiv 2502.13652, section 3.3): of each frontier node's `top_k` children keep those with a
    confidence of at least `beta`, at most `beam` per level. The kept nodes are verified and form the next frontier.

    Args:
        beta: least confidence. A good value depends on the classifier.
        beam: most nodes kept per level, by confidence (K2); None: all. Ties go to children of better parents, then to
            the likelier sibling.
        top_k: children considered per node (K).
        draft_calls: most calls (d_max).
        nodes: most nodes of the tree, the root included: the most probable of the kept ones; None: all. It also limits
            each level.

    A path ends where no child is kept, so a tree may be its root alone. Behind a NaN no child is kept.
    """

    classifier: C2tClassifier
    beta: float
    beam: int | None
    top_k: int
    draft_calls: int
    nodes: int | None = None

    def grow(self, drafting: Drafting, roots_B: torch.Tensor, draws: Sequence[Draws] | None = None) -> Grown:
        rows, device = len(roots_B), roots_B.device
        if self.classifier.output.weight.device != device:
            self.classifier.to(device)
        log_probs = drafting.root_log_probs()[:, None]  # [B, b, Vd]
        width = min(self.top_k, log_probs.shape[-1])  # K
        values_Bb = log_probs.new_zeros(rows, 1)  # of the frontier
        real_Bb: torch.Tensor | None = None  # [B, b] false on its padding; None: no padding
        # All kept nodes, level by level. Each is expanded in turn, so node t fills slot t + 1.
        values, drafted, parents = [], [], []
        first_slot = 0  # of the frontier
        calls, counts = [0] * rows, [0] * rows
        going = [True] * rows
        for call in range(1, self.draft_calls + 1):
            calls = [call if goes else made for made, goes in zip(calls, going, strict=True)]
            children, ids = _children(values_Bb, log_probs, width)  # [B, b, K]
            confidence = self.classifier.confidence(node_features(children, log_probs, call))
            passed = confidence >= self.beta
            if real_Bb is not None:
                passed &= real_Bb[..., None]
            # Passing children first, by confidence.
            order = torch.where(passed, confidence, -1.0).flatten(1).argsort(dim=1, descending=True, stable=True)
            count_B = passed.flatten(1).sum(1)
            if self.beam is not None:
                count_B = count_B.clamp(max=self.beam)
            kept = count_B.tolist()  # the one wait for the device
            if not any(kept):
                break
            chosen = order[:, : max(kept)]
            children, ids = children.flatten(1), ids.flatten(1)
            values_Bb = children.gather(1, chosen)
            if self.nodes is not None:  # as many as the tree may hold; if all fit, sorted as beside neighbours'
                ranked = _padding_last(values_Bb, count_B)
                best = ranked.argsort(dim=1, descending=True, stable=True)[:, : self.nodes - 1]
                chosen, values_Bb = chosen.gather(1, best), values_Bb.gather(1, best)
                count_B = count_B.clamp(max=self.nodes - 1)
                kept = [min(count, self.nodes - 1) for count in kept]
            real_Bb = None
            if min(kept) < chosen.shape[1]:
                real_Bb = torch.arange(chosen.shape[1], device=device) < count_B[:, None]
            counts = [count + more for count, more in zip(counts, kept, strict=True)]
            going = [more > 0 for more in kept]
            parents.append(chosen // width + first_slot)
            first_slot = sum(level.shape[1] for level in values) + 1
            drafted.append(ids.gather(1, chosen))
            values.append(_padding_last(values_Bb, count_B))
            if call < self.draft_calls:
                log_probs = drafting.expand(parents[-1], drafting.vocab.to_target(drafted[-1]), call)
        if not values:
            return DraftTree(roots_B[:, None], torch.full((rows, 1), -1, device=device), 0), calls
        if self.nodes is not None:
            counts = [min(count, self.nodes - 1) for count in counts]
        tree = _best_nodes(
            drafting,
            roots_B,
            torch.cat(values, dim=1),
            torch.cat(drafted, dim=1),
            torch.cat(parents, dim=1),
            counts,
            len(values),
        )
        return tree, calls


def _padding_last(values_Bb: torch.Tensor, count_B: torch.Tensor) -> torch.Tensor:
    """Values to rank by: those after the first count_B[b] of a row come last, even after nodes of probability zero."""
    padding = torch.arange(values_Bb.shape[1], device=values_Bb.device) >= count_B[:, None]
    return values_Bb.clamp(min=torch.finfo(values_Bb.dtype).min).masked_fill(padding, -math.inf)


TreePolicy = Chain | StaticTree | Eagle2 | C2T


def policy_of(tree: TreeSection, sampling: Sampling = GREEDY) -> TreePolicy:
    """The policy that a recipe's section describes, for answers drawn by `sampling`; `auto` must be resolved before.

    Raises:
        UserError: c2t.classifier is not a classifier.
    """
    drawn = sampling if tree.draw == "sampled" else GREEDY
    if tree.policy in ("chain", "svip"):
        return Chain(tree.calls, Svip(tree.svip.c, tree.svip.h) if tree.policy == "svip" else None, drawn)
    if tree.policy == "static":
        return StaticTree(tuple(map(tuple, tree.static_paths)), drawn)
    if tree.policy == "c2t":
        section = tree.c2t
        assert section.classifier is not None  # the schema sees to it
        nodes = tree.nodes if section.beam else tree.most
        return C2T(C2tClassifier.load(section.classifier), section.beta, section.beam, tree.width, tree.calls, nodes)
    at = tuple(tree.ddd.at) if isinstance(tree.ddd.at, list) else tree.ddd.at
    stops: dict[str, Ddd | SvipTree | None] = {"eagle2": None}
    stops |= {"ddd": Ddd(tree.ddd.threshold, at), "svip_tree": SvipTree(tree.svip.c, tree.svip.h)}
    return Eagle2(tree.most, tree.calls, tree.width, stops[tree.policy])


class PolicyProposer:
    """A drafter and a policy together: a `models.draft_tree.Proposer`."""

    def __init__(self, drafting: Drafting, policy: TreePolicy):
        self.drafting, self.policy = drafting, policy
        self.capture_layers = drafting.capture_layers
        self.draws: list[Draws] = []  # of each row, if given
        self.roots_B: torch.Tensor  # of the round that the last `observe` began

    def set_rows(self, kept: Sequence[int], new: int = 0, draws: Sequence[Draws] | None = None) -> None:
        self.drafting.set_rows(kept, new)
        self.draws = [*(self.draws[row] for row in kept if self.draws), *(draws or ())]

    def rollback(self, lengths: Sequence[int]) -> None:
        self.drafting.rollback(lengths)

    def observe(self, committed: Committed) -> None:
        # Copy to the device while it is idle: a copy waits for all earlier work.
        roots = [tokens[-1] for tokens in committed.tokens]
        self.roots_B = torch.tensor(roots, device=self.drafting.vocab.target_ids.device)
        self.drafting.observe(committed)

    def propose(self) -> tuple[DraftTree, list[int]]:
        tree, tree.tried = self.policy.grow(self.drafting, self.roots_B, self.draws or None)
        return tree, [self.drafting.passes(levels) for levels in tree.tried]
