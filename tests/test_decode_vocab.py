"""Drafting with a cut of the drafter's vocabulary (FR-Spec): the probabilities, and the law of sampled answers.

A drafter is trained for the target's vocabulary or for a draft vocabulary (EAGLE-3), and drafts its most frequent
tokens. Greedy answers are tests/test_lossless.py's matter.
"""

from collections.abc import Hashable

import pytest
import torch

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.policies import Chain, Eagle2, PolicyProposer, TreePolicy
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import Sampling
from draftsmith.models.vocab import cut_vocab
from tests.decoding import decode
from tests.test_sampling import EnumeratedDraws, answers_of, assert_same_law, enumerate_law, small_pair
from tests.thinning import a_few, pairwise

STOP = 4


# Decoding.


def accepted_tokens(generation: Generation) -> list[int]:
    """The drafted tokens that stand in the answer: of each round all but the bonus."""
    tokens, place = [], 1  # the first token comes from the prefill
    for accepted in generation.accepted_per_round:
        tokens += generation.token_ids[place : place + accepted]
        place += accepted + 1
    return tokens


def policy_for(name: str, sampling: Sampling) -> TreePolicy:
    if name == "tree":
        return Eagle2(nodes=4, draft_calls=2, top_k=2)
    return Chain(2, sampling=sampling) if name == "drawn chain" else Chain(2)


CUTS = pairwise(["chain", "drawn chain", "tree"], [0.5, 1.0], [None, (0, 1, 3, 4)])
LAWS = [(*each, length) for each in CUTS for length in (2, 3)]  # tokens


@pytest.mark.parametrize(("policy", "temperature", "own", "length"), a_few(LAWS, LAWS[0], LAWS[4], LAWS[8]))
def test_sampled_answers_have_the_target_s_law_whatever_is_cut(
    policy: str, temperature: float, own: tuple[int, ...] | None, length: int
) -> None:
    """Enumerated: q is zero outside the cut, the residual is formed over the target's whole vocabulary."""
    target, drafter = small_pair(None if own is None else list(own))
    part = cut_vocab(drafter.vocab, torch.tensor([0, 3, 9, 7, 1]), 2, [])
    assert part.target_ids.tolist() == ([1, 3] if own else [2, 3])
    prompt, sampling = [1, 3, 0, 1, 3], Sampling(temperature)
    accepted: set[int] = set()

    def answer(draws: EnumeratedDraws) -> Hashable:
        proposer = PolicyProposer(FeatureDrafting(drafter, part), policy_for(policy, sampling))
        generation = decode(target, proposer, prompt, {STOP}, length, sampling, draws)
        accepted.update(accepted_tokens(generation))
        return tuple(generation.token_ids)

    assert_same_law(enumerate_law(answer), answers_of(target, prompt, length, sampling))
    assert accepted and accepted <= set(part.target_ids.tolist())
    assert policy == "chain" or len(accepted) == 2
