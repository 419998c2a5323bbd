"""A decoder drafts for another: a small model with its own drafter proposes chains to a larger target.

That rows come, go and roll back as if each were alone is tests/eval/test_rounds.py's matter.
"""

import copy
from typing import Any

import torch

from draftsmith.eval.decoding.decode import Request, TargetVerifier, decode_stream
from draftsmith.eval.decoding.hierarchical import HierarchicalProposer
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.target import Target
from draftsmith.recipes.sections.eval import TreeSection
from tests.conftest import make_target
from tests.decoding import decode_batch
from tests.pairs import PROMPTS, greedy, pair_of, untaught

LENGTH, CALLS = 5, 3


class Recording(HierarchicalProposer):
    """Keeps each text with the chain proposed below it, and counts how its small model went on."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.chains: list[tuple[list[int], list[int]]] = []
        self.resumed = self.followed = 0

    def _resume(self, lengths: Any) -> None:
        self.resumed += 1
        super()._resume(lengths)

    def _follow(self, texts: Any) -> None:
        self.followed += 1
        super()._follow(texts)

    def propose(self) -> tuple[DraftTree, list[int]]:
        before = [list(text) for text in self.texts]
        tree, calls = super().propose()
        assert tree.sources is not None
        for row, old in enumerate(before):
            size = tree.nodes if tree.sizes is None else int(tree.sizes[row])
            self.chains.append((old, tree.tokens[row, 1:size].tolist()))
            inner = tree.sources[row].inner_accepted
            assert calls[row] == len(inner) * (CALLS + 1) and sum(inner) + len(inner) == size - 1
        return tree, calls


def larger_than(small: Target) -> Target:
    """A target that mostly agrees with `small`."""
    model = copy.deepcopy(small.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.008 * weight.abs().mean() * torch.randn(weight.shape, generator=generator)
    return Target(model, small.capture_layers)


def test_a_small_target_with_its_drafter_proposes_to_a_larger_one() -> None:
    small, drafter = pair_of("llama", None)
    large = larger_than(small)
    inner = PolicyProposer(FeatureDrafting(drafter), policy_of(TreeSection(nodes=8, draft_calls=CALLS, top_k=3)))
    decoder = Recording(small, inner, LENGTH)
    budgets = (36, 9, 30, 30)  # the second ends early, and the fourth takes its row
    requests = [Request(i, prompt, budgets[i]) for i, prompt in enumerate(PROMPTS)]
    with torch.inference_mode():
        answers = dict(decode_stream(TargetVerifier(large, decoder), decoder, iter(requests), (), 3))
    for i, prompt in enumerate(PROMPTS):
        assert answers[i].token_ids == greedy(large, prompt, budgets[i])
        assert len(answers[i].inner_accepted) > len(answers[i].accepted_per_round) and answers[i].drafted_by == []
    accepted = [count for answer in answers.values() for count in answer.accepted_per_round[:-1]]
    assert 0 in accepted and max(accepted) > 3  # it drafts wrong and right tokens
    for text, chain in decoder.chains[::3]:
        assert chain == greedy(small, text, len(chain))
    lengths = {len(chain) for _, chain in decoder.chains}
    assert len(lengths) > 1 and min(lengths) == LENGTH and max(lengths) <= LENGTH + CALLS
    # Where the target accepts part of a chain, the small model has read all of it: no pass is needed to go on.
    assert 0 < decoder.resumed < decoder.followed


def test_chains_end_where_the_small_model_s_positions_end() -> None:
    """Learned positions: a forward behind the last one would fail."""
    small = Target(make_target("gpt2", n_positions=64, max_position_embeddings=64, seed=1))
    large, prompt = larger_than(small), list(range(40, 75))
    inner = PolicyProposer(FeatureDrafting(untaught("eagle3", small)), policy_of(TreeSection(policy="chain", nodes=4)))
    proposer = HierarchicalProposer(small, inner, 6)
    with torch.no_grad():
        answers = decode_batch(large, proposer, [prompt, prompt[:5]], (), [64 - len(prompt), 40])
    assert answers[0].token_ids == greedy(large, prompt, 64 - len(prompt))
    assert answers[1].token_ids == greedy(large, prompt[:5], 40)
