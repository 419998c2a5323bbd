"""How a draft tree grows: policies over any `models.draft_tree.Drafting`.

A policy asks the drafter for log-probabilities and decides which nodes to expand and which to keep. The number of
drafter calls includes the first, which reads the newly committed tokens and drafts the root's children.
"""

from collections.abc import Sequence

import torch

from draftsmith.models.draft_tree import Drafting, DraftTree
from draftsmith.models.sampling import GREEDY, Draws, Sampling


def grow_chain(drafting: Drafting, root: int, nodes: int) -> DraftTree:
    """The likeliest token after the likeliest token: `nodes` - 1 draft calls."""
    log_probs = drafting.root_log_probs()
    tokens = [torch.tensor([root], device=log_probs.device)]
    for depth in range(1, nodes):
        tokens.append(drafting.vocab.to_target(log_probs.argmax(-1, keepdim=True)))
        if depth + 1 < nodes:
            parent = torch.tensor([depth - 1], device=log_probs.device)
            log_probs = drafting.expand(parent, tokens[-1], depth)[0]
    parents = torch.arange(-1, nodes - 1, device=log_probs.device)
    return DraftTree(torch.cat(tokens), parents)


def grow_sampled_chain(drafting: Drafting, root: int, nodes: int, sampling: Sampling, draws: Draws) -> DraftTree:
    """Each token drawn from the drafter's distribution after the one before it: `nodes` - 1 draft calls.

    The drafter's log-probabilities pass through the same temperature, top-k and top-p as the target's logits, which
    brings the two closest; any distribution would be lossless.
    """
    log_probs = drafting.root_log_probs()
    tokens = [torch.tensor([root], device=log_probs.device)]
    q_NV = log_probs.new_zeros(nodes, drafting.vocab.target_vocab_size)
    for depth in range(1, nodes):
        q_V = sampling.probabilities(log_probs)  # over the draft vocabulary
        q_NV[depth - 1, drafting.vocab.target_ids] = q_V
        tokens.append(drafting.vocab.to_target(draws.token(q_V)[None]))
        if depth + 1 < nodes:
            parent = torch.tensor([depth - 1], device=log_probs.device)
            log_probs = drafting.expand(parent, tokens[-1], depth)[0]
    return DraftTree(torch.cat(tokens), torch.arange(-1, nodes - 1, device=log_probs.device), q_NV)


def grow_eagle2(drafting: Drafting, root: int, nodes: int, draft_calls: int, top_k: int) -> DraftTree:
    """EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): expand the best `top_k` nodes of each level, keep the best
    `nodes` - 1 of all that were proposed.

    The value of a node is the product of draft probabilities along its path (temperature 1, over the draft vocabulary).
    A child never exceeds its parent, and ties go to the shallower node, so what is kept is connected.
    """
    log_probs = drafting.root_log_probs()
    width = min(top_k, len(log_probs))
    scores, drafted = log_probs.topk(width)
    tokens = drafting.vocab.to_target(drafted)  # [k] the beam: nodes of the current level
    device = tokens.device
    # Every proposed node, level by level: all children of a beam stand together, in the order of their parents.
    history_tokens, history_scores = [tokens], [scores]
    history_parents = [torch.full((width,), -1, device=device)]  # index in the history; -1 is the root
    beam = torch.arange(width, device=device)  # [k] history index of each beam node
    slots = torch.zeros(width, dtype=torch.long, device=device)  # [k] slot of each beam node's parent
    proposed, next_slot = width, 1
    for depth in range(1, draft_calls):
        log_probs = drafting.expand(slots, tokens, depth)  # [k, Vd]
        best, drafted = log_probs.clamp(max=0).topk(width)  # [k, k]
        child_scores = (scores[:, None] + best).flatten()
        child_tokens = drafting.vocab.to_target(drafted).flatten()
        history_tokens.append(child_tokens)
        history_scores.append(child_scores)
        history_parents.append(beam.repeat_interleave(width))
        scores, chosen = child_scores.topk(min(top_k, len(child_scores)))
        tokens, beam = child_tokens[chosen], proposed + chosen
        slots = next_slot + chosen // width
        proposed, next_slot = proposed + len(child_tokens), next_slot + len(log_probs)

    all_scores = torch.cat(history_scores)
    # A stable sort leaves equal scores in history order, which is by depth.
    kept = all_scores.argsort(descending=True, stable=True)[: nodes - 1].sort().values  # [N - 1]
    place = torch.zeros(proposed + 1, dtype=torch.long, device=device)
    place[kept] = torch.arange(1, len(kept) + 1, device=device)  # the last entry is the root's: index -1 leads to 0
    parents = place[torch.cat(history_parents)[kept]]
    return DraftTree(
        torch.cat((torch.tensor([root], device=device), torch.cat(history_tokens)[kept])),
        torch.cat((torch.tensor([-1], device=device), parents)),
    )


class PolicyProposer:
    """A drafter and a policy together: a `models.draft_tree.Proposer`.

    Args:
        sampling: draws the tokens of a chain from the drafter by this; greedy takes the likeliest ones.
    """

    reads_features = True

    def __init__(
        self,
        drafting: Drafting,
        policy: str,
        nodes: int,
        draft_calls: int,
        top_k: int,
        sampling: Sampling = GREEDY,
    ):
        self.drafting = drafting
        self.policy, self.nodes, self.draft_calls, self.top_k = policy, nodes, draft_calls, top_k
        self.sampling = sampling
        self.draws: Draws | None = None

    def reset(self, draws: Draws | None = None) -> None:
        self.drafting.reset()
        self.draws = draws

    def observe(self, tokens: Sequence[int], features: torch.Tensor | None) -> None:
        assert features is not None
        self.drafting.observe(tokens, features)

    def propose(self, root: int) -> tuple[DraftTree, int]:
        if self.policy == "chain" and not self.sampling.greedy:
            assert self.draws is not None
            return grow_sampled_chain(self.drafting, root, self.nodes, self.sampling, self.draws), self.draft_calls
        if self.policy == "chain":
            return grow_chain(self.drafting, root, self.nodes), self.draft_calls
        return grow_eagle2(self.drafting, root, self.nodes, self.draft_calls, self.top_k), self.draft_calls
