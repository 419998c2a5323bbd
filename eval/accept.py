"""Acceptance rules: which path of a verified draft tree is kept, and which token follows it.

Greedy: a node is right iff it is the target's likeliest token after its parent. The deepest node whose whole path is
right wins (the first such node where siblings repeat a token); the bonus is the target's likeliest token after it.
"""

import torch

from draftsmith.models.draft_tree import DraftTree


def accept_greedy(tree: DraftTree, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Path (ascending node indices, the root first) and bonus token (scalar)."""
    best = logits_NV.argmax(-1)  # [N]
    right = tree.tokens == best[tree.parents.clamp(min=0)]
    right[0] = True
    path_right = ~(tree.ancestors & ~right).any(1)
    last = torch.where(path_right, tree.depths, -1).argmax()
    return tree.ancestors[last].nonzero().flatten(), best[last]
