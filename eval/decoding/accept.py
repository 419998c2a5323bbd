"""Acceptance rules: which path of a verified draft tree is kept, and which token follows it.

Both rules decide for every node whether it is *right* given its parent. The deepest node with an entirely right path
wins, and one token of the target, the bonus, follows it.

Greedy      a node is right iff it is the target's likeliest token after its parent; the bonus is the likeliest token
            after the last node.
Sampling    with p the target's processed distribution after a node (`models.sampling`) and q the distribution that its
            children were drawn from, the children x1, x2, ... are tried in order:

                accept x with probability min(1, p(x) / q(x)), else  p <- norm(max(p - q, 0))  and try the next

            The bonus is drawn from the final p: the residual if all children were rejected, p itself if the last node
            has none. So every token has the target's law (Leviathan et al., arXiv 2211.17192, appendix A.1; several
            children: Miao et al., arXiv 2305.09781, section 4.3).

Two kinds of trees are sampled from:
- chosen by rank (chains of likeliest tokens, EAGLE-2 trees, copies): q is one on the node's own token, so x is accepted
  with probability p(x) / (1 - the earlier siblings' p), and a rejection removes x from p;
- drawn from the drafter (`DraftTree.drawn_from`): q is the drafter's distribution, zero outside a cut draft vocabulary.
  p - q is formed over the target's whole vocabulary. Siblings were drawn without replacement, so a rejection also
  removes x from q, which is normalised again (EAGLE, arXiv 2401.15077; LANTERN++, arXiv 2502.06352):

      q   a .5  b .3  c .2      a rejected:   q   b .6  c .4      p   norm(max(p - q, 0))

Shapes: B trees, N nodes, V tokens, A = depth of the deepest node + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.sampling import Draws, Sampling, drawn_tokens


@dataclass(frozen=True)
class Accepted:
    """The accepted paths of B trees, on the device."""

    # [B, A] node indices, ascending, the root first; undefined after the end of a path. None: a chain's 0, 1, 2, ...
    path: torch.Tensor | None
    length: torch.Tensor  # [B] nodes of the path, the root included
    bonus: torch.Tensor  # [B] the target's token after it
    # [B, A] of a relaxed rule: for the token behind each node of the path, the probability that was moved onto drafted
    # tokens when it was chosen (`eval.decoding.lantern`); undefined after the end of a path
    moved: torch.Tensor | None = None


class Acceptance(Protocol):
    """Decides from the target's logits which tokens are the answer."""

    def first(self, logits_BV: torch.Tensor, draws: Sequence[Draws] | None) -> torch.Tensor:
        """[B] the first token of each answer, behind its prompt."""
        ...

    def accept(self, tree: DraftTree, logits_BNV: torch.Tensor, draws: Sequence[Draws]) -> Accepted:
        """A path and a bonus token of each tree; `draws` is empty if none were given."""
        ...


class GreedyAcceptance:
    """The target's likeliest tokens."""

    def first(self, logits_BV: torch.Tensor, draws: Sequence[Draws] | None) -> torch.Tensor:
        return logits_BV.argmax(-1)

    def accept(self, tree: DraftTree, logits_BNV: torch.Tensor, draws: Sequence[Draws] = ()) -> Accepted:
        best = logits_BNV.max(-1).indices  # [B, N]; argmax, but several times faster on a CPU
        if tree.is_chain:
            right = tree.tokens[:, 1:] == best[:, :-1]
            if tree.real is not None:
                right = right & tree.real[:, 1:]
            length = 1 + right.cumprod(1).sum(1)
            return Accepted(None, length, best.gather(1, length[:, None] - 1)[:, 0])
        last = deepest(tree, tree.tokens == best.gather(1, tree.parents.clamp(min=0)))
        return accepted_path(tree, last, best.gather(1, last[:, None])[:, 0])


@dataclass(frozen=True)
class SampledAcceptance:
    """Tokens of the target's law."""

    sampling: Sampling

    def first(self, logits_BV: torch.Tensor, draws: Sequence[Draws] | None) -> torch.Tensor:
        return drawn_tokens(self.sampling.probabilities(logits_BV), draws or ())

    def accept(self, tree: DraftTree, logits_BNV: torch.Tensor, draws: Sequence[Draws]) -> Accepted:
        p_BNV = self.sampling.probabilities(logits_BNV)
        if tree.nodes == 1:  # plain decoding: one random number a token
            return accepted_path(tree, torch.zeros_like(tree.tokens[:, 0]), drawn_tokens(p_BNV[:, 0], draws))
        each = torch.arange(tree.rows, device=p_BNV.device)
        parents = tree.parents.clamp(min=0)  # the root's own entry means nothing
        of_node = p_BNV[each[:, None], parents, tree.tokens]  # [B, N] p(x) after the node's parent
        if tree.drawn_from is None:
            last = deepest(tree, first_accepted(tree, events(tree, _chances_by_rank(tree, of_node), draws)))
            p_BV = p_BNV[each, last]
            child = tree.parents == last[:, None] if tree.real is None else (tree.parents == last[:, None]) & tree.real
            rest_BV = p_BV.scatter_reduce(1, tree.tokens, (~child).to(p_BV.dtype), "prod")  # zero for children's tokens
            # If only rounding allowed a rejection, no mass is left.
            rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)
        else:
            q_BNV = tree.drawn_from
            chances = of_node / q_BNV[each[:, None], parents, tree.tokens]
            if not tree.is_chain:
                chances, p_BNV, q_BNV = _chances_of_siblings(tree, chances, p_BNV, q_BNV)
            accepted = events(tree, chances.clamp(max=1), draws)
            last = deepest(tree, accepted if tree.is_chain else first_accepted(tree, accepted))
            rest_BV = _residual(p_BNV[each, last], q_BNV[each, last])
        return accepted_path(tree, last, drawn_tokens(rest_BV, draws))


def _residual(p_MV: torch.Tensor, q_MV: torch.Tensor) -> torch.Tensor:
    """norm(max(p - q, 0)); p where no mass is left, as then only rounding allowed a rejection."""
    rest = (p_MV - q_MV).clamp(min=0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p_MV)


def _chances_of_siblings(
    tree: DraftTree, chances_BN: torch.Tensor, p_BNV: torch.Tensor, q_BNV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([B, N] chance of each node once its earlier siblings are rejected, p and q with which the last child is tried).

    Args:
        chances_BN: right for first children.
    """
    chances, p, q = chances_BN.clone(), p_BNV.clone(), q_BNV.clone()
    rejected = torch.zeros_like(tree.tokens)  # of each node's children
    for turn, (rows, nodes) in enumerate(turns(tree)):
        parents, tokens = tree.parents[rows, nodes], tree.tokens[rows, nodes]
        at = rows, parents
        if turn > 0:
            p[at] = _residual(p[at], q[at])
            left = q[at].scatter(1, rejected[at][:, None], 0)
            q[at] = left / left.sum(-1, keepdim=True)
            chances[rows, nodes] = p[rows, parents, tokens] / q[rows, parents, tokens]
        rejected[at] = tokens
    return chances, p, q


def turns(tree: DraftTree) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """([M] rows, [M] nodes) of all first children, then of all second ones, ... Waits for the device each time."""
    rank = tree.earlier_siblings.sum(2)
    for turn in range(int(rank.max()) + 1):
        rows, nodes = (tree.drafted & (rank == turn)).nonzero(as_tuple=True)
        yield rows, nodes


def acceptance_of(sampling: Sampling) -> Acceptance:
    """The lossless rule for this sampling."""
    return GreedyAcceptance() if sampling.greedy else SampledAcceptance(sampling)


def events(tree: DraftTree, chances_BN: torch.Tensor, draws: Sequence[Draws]) -> torch.Tensor:
    """[B, N] bool: independent events of these chances at drafted nodes, false elsewhere.

    Roots and padding take no random numbers: a row's draws do not depend on its neighbours.
    """
    sizes = [tree.nodes] * tree.rows if tree.sizes is None else tree.sizes.tolist()
    rows = [draw.events(chances[1:size]) for draw, chances, size in zip(draws, chances_BN, sizes, strict=True)]
    return torch.stack([functional.pad(row, (1, tree.nodes - 1 - len(row))) for row in rows])


def _chances_by_rank(tree: DraftTree, of_node: torch.Tensor) -> torch.Tensor:
    """[B, N] chance of each node once its earlier siblings are rejected; 0 for a token that repeats one's."""
    mass = torch.where(tree.repeated, 0.0, of_node.double())
    left = 1 - (tree.earlier_siblings.double() @ mass[..., None])[..., 0]
    return torch.where(mass > 0, mass / left.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def first_accepted(tree: DraftTree, accepted: torch.Tensor) -> torch.Tensor:
    """[B, N] bool: accepted nodes without an accepted earlier sibling."""
    return accepted & ~(tree.earlier_siblings & accepted[:, None]).any(2)


def deepest(tree: DraftTree, right: torch.Tensor) -> torch.Tensor:
    """[B] the deepest node with an entirely right path; the first one if siblings repeat a token."""
    wrong = ~right if tree.real is None else ~(right & tree.real)
    wrong[:, 0] = False
    path_right = ~(tree.ancestors & wrong[:, None]).any(2)
    return torch.where(path_right, tree.depths, -1).argmax(1)


def accepted_path(tree: DraftTree, last: torch.Tensor, bonus: torch.Tensor) -> Accepted:
    """The paths from the roots to the nodes `last` [B], each followed by its bonus token [B]."""
    if tree.is_chain:
        return Accepted(None, last + 1, bonus)
    each = torch.arange(tree.rows, device=last.device)
    on_path = tree.ancestors[each, last]  # [B, N]
    # A stable sort moves the path's nodes to the front, in order.
    path = on_path.logical_not().argsort(dim=1, stable=True)[:, : tree.depth + 1]
    return Accepted(path, on_path.sum(1), bonus)
