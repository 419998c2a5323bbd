"""Acceptance rules: which path of a verified draft tree is kept, and which token follows it.

Both rules say for every node whether it is *right* given its parent; the deepest node whose whole path is right wins,
and one token of the target, the bonus, follows it.

Greedy      a node is right iff it is the target's likeliest token after its parent; the bonus is the likeliest token
            after the last one.
Sampling    with p the target's processed distribution after a node (`models.sampling`) and q what its children were
            drawn from, the children x1, x2, ... are tried in order:

                accept x with probability min(1, p(x) / q(x)), else  p <- norm(max(p - q, 0))  and try the next

            The bonus is drawn from what p has become: the residual where all children were rejected, p itself where
            the last node has none. So every token has the target's law (Leviathan et al., arXiv 2211.17192, appendix
            A.1; several children: Miao et al., arXiv 2305.09781, section 4.3).

Two kinds of trees are sampled from:
- chosen by rank (chains of likeliest tokens, EAGLE-2 trees, copies): q is one on the node's own token, so x is accepted
  with what p has left for it, p(x) / (1 - the earlier siblings' p), and a rejection takes x out of p;
- chains drawn from the drafter (`DraftTree.drawn_from`): q is the drafter's distribution, which is zero outside a cut
  draft vocabulary. p - q is formed over the target's whole vocabulary.

Shapes: N nodes, V tokens.
"""

import torch

from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.sampling import Draws, Sampling


def accept_greedy(tree: DraftTree, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Path (ascending node indices, the root first) and bonus token (scalar)."""
    best = logits_NV.argmax(-1)  # [N]
    last = _deepest(tree, tree.tokens == best[tree.parents.clamp(min=0)])
    return tree.ancestors[last].nonzero().flatten(), best[last]


def accept_sampled(
    tree: DraftTree, logits_NV: torch.Tensor, sampling: Sampling, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Path (ascending node indices, the root first) and bonus token (scalar), drawn by the target's law.

    All nodes are tried at once: a node that its walk never reaches is tried for nothing.
    """
    p_NV = sampling.probabilities(logits_NV)
    parents = tree.parents.clamp(min=0)  # the root's own entry means nothing
    of_node = p_NV[parents, tree.tokens]  # [N] p(x) after the node's parent
    if tree.drawn_from is None:
        chances, earlier = _chances_by_rank(tree, of_node)
        accepted = draws.events(chances)
        last = _deepest(tree, accepted & ~(earlier & accepted).any(1))  # an earlier sibling goes before
        rest_V = p_NV[last].clone()
        children = (tree.parents == last).nonzero().flatten()
        rest_V[tree.tokens[children]] = 0
    else:
        q_NV = tree.drawn_from
        last = _deepest(tree, draws.events((of_node / q_NV[parents, tree.tokens]).clamp(max=1)))
        rest_V = (p_NV[last] - q_NV[last]).clamp(min=0)
    # A rejection that rounding alone allowed leaves nothing over.
    bonus = draws.token(torch.where(rest_V.sum() > 0, rest_V, p_NV[last]))
    return tree.ancestors[last].nonzero().flatten(), bonus


def _chances_by_rank(tree: DraftTree, of_node: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] chance of each node once its earlier siblings are rejected, [N, N] row i marks the earlier siblings of i).

    A token that an earlier sibling has holds nothing more: its chance is zero.
    """
    earlier = (tree.parents[:, None] == tree.parents[None]).tril(diagonal=-1)
    repeated = (earlier & (tree.tokens[:, None] == tree.tokens[None])).any(1)
    mass = torch.where(repeated, 0.0, of_node.double())
    left = 1 - earlier.double() @ mass
    return torch.where(mass > 0, mass / left.clamp(min=torch.finfo(torch.float64).tiny), 0.0), earlier


def _deepest(tree: DraftTree, right: torch.Tensor) -> torch.Tensor:
    """The deepest node whose whole path is right, the root aside: the first such node where siblings repeat a token."""
    wrong = ~right
    wrong[0] = False
    path_right = ~(tree.ancestors & wrong).any(1)
    return torch.where(path_right, tree.depths, -1).argmax()
