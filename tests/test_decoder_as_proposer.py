"""A decoder drafts for another: a small model with its own drafter proposes chains to a larger target."""

import copy
from typing import Any

import torch

from draftsmith.eval.decoding.decode import Request, TargetVerifier, decode_stream
from draftsmith.eval.decoding.hierarchical import HierarchicalProposer
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.decoding.sam import DYNAMIC, SamDraft, SamProposer, SamRouter
from draftsmith.models.draft_tree import Committed, Drafting, DraftTree
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.target import Target
from draftsmith.recipes.schema import TreeSection
from tests.conftest import make_target
from tests.decoding import decode_batch
from tests.pairs import PROMPTS, greedy, pair_of, untaught

LENGTH, CALLS = 5, 3


class Recorded(PolicyProposer):
    """Keeps the tokens of each tree."""

    trees: list[list[list[int]]]

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.trees = []

    def propose(self) -> tuple[DraftTree, list[int]]:
        tree, calls = super().propose()
        self.trees.append(tree.tokens.tolist())
        return tree, calls


class Recording(HierarchicalProposer):
    """Keeps each text, the chain proposed below it, and the trees of the rounds that made the chain."""

    def __init__(self, small: Target, drafting: Drafting):
        self.recorded = Recorded(drafting, policy_of(TreeSection(nodes=8, draft_calls=CALLS, top_k=3)))
        super().__init__(small, self.recorded, LENGTH)
        self.proposed: list[tuple[list[int], list[int], list[list[int]]]] = []
        self.resumed = self.read = 0

    def _resume(self, lengths: list[int]) -> None:
        self.resumed += 1
        super()._resume(lengths)

    def rollback(self, lengths: Any) -> None:
        self.read += 1
        super().rollback(lengths)

    def propose(self) -> tuple[DraftTree, list[int]]:
        before = [list(text) for text in self.texts]
        earlier = len(self.recorded.trees)
        tree, calls = super().propose()
        assert tree.sources is not None
        sizes = [tree.nodes] * tree.rows if tree.sizes is None else tree.sizes.tolist()
        for row, (old, size) in enumerate(zip(before, sizes, strict=True)):
            rounds = len(tree.sources[row].inner_accepted)  # of the chain; other rows may need more
            trees = [trees[row] for trees in self.recorded.trees[earlier : earlier + rounds]]
            self.proposed.append((old, tree.tokens[row, 1:size].tolist(), trees))
            assert calls[row] == rounds * (CALLS + 1) and sum(tree.sources[row].inner_accepted) + rounds == size - 1
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

    decoder = Recording(small, FeatureDrafting(drafter))
    budgets = (36, 9, 30, 30)  # the second ends early, and the fourth takes its row
    requests = [Request(i, prompt, budgets[i]) for i, prompt in enumerate(PROMPTS)]
    with torch.inference_mode():
        answers = dict(decode_stream(TargetVerifier(large, decoder), decoder, iter(requests), (), 3))
    for i, prompt in enumerate(PROMPTS):
        assert answers[i].token_ids == greedy(large, prompt, budgets[i])
    accepted = [count for answer in answers.values() for count in answer.accepted_per_round[:-1]]
    assert 0 in accepted and max(accepted) > 3  # it drafts wrong and right tokens
    for text, chain, trees in decoder.proposed:
        # The small target's own tokens, and the trees of a drafter that was never rolled back.
        assert chain == greedy(small, text, len(chain))
        alone = Recording(small, FeatureDrafting(drafter))
        alone.set_rows([], 1)
        alone.observe(Committed(large, [text], None, [len(text) - 1]))
        alone.propose()
        assert alone.proposed == [(text, chain, trees)]
    lengths = {len(chain) for _, chain, _ in decoder.proposed}
    assert len(lengths) > 1 and min(lengths) == LENGTH and max(lengths) <= LENGTH + CALLS
    rounds = [len(trees) for *_, trees in decoder.proposed]
    assert min(rounds) < max(rounds)
    for answer in answers.values():
        assert len(answer.inner_accepted) > len(answer.accepted_per_round) and answer.drafted_by == []
    # Where the target accepts part of a chain, the small model has read all of it: no pass is needed to go on.
    assert decoder.resumed and decoder.read


class Copies(SamProposer):
    """Drafts wrong tokens for all rows in every round from `first` on."""

    def __init__(self, target: Target, first: int):
        super().__init__(target.device, 16, None, width=1)
        self.first, self.round = first, -1

    def drafts(self) -> list[SamDraft]:
        self.round += 1
        found = SamDraft(DYNAMIC, 9, [7, 7], [0, 1]) if self.round >= self.first else SamDraft(DYNAMIC, 0, [], [])
        return [found] * len(self.texts)


def test_beside_a_router_rows_end_before_the_small_model_has_read_them() -> None:
    """SAM drafts every round from the first one on, or from one in which new rows came."""
    small, drafter = pair_of("llama", None)
    large = larger_than(small)
    budgets = (6, 9, 30, 30)

    for first in (0, 1, 3, 6):
        inner = PolicyProposer(FeatureDrafting(drafter), policy_of(TreeSection(nodes=8, draft_calls=CALLS, top_k=3)))
        router = SamRouter(Copies(large, first), HierarchicalProposer(small, inner, LENGTH), 5)
        requests = [Request(i, prompt, budgets[i]) for i, prompt in enumerate(PROMPTS)]
        with torch.inference_mode():
            answers = dict(decode_stream(TargetVerifier(large, router), router, iter(requests), (), 3))
        for i, prompt in enumerate(PROMPTS):
            assert answers[i].token_ids == greedy(large, prompt, budgets[i])


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
