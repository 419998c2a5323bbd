"""Drafting with a cut of the drafter's vocabulary (FR-Spec): the probabilities, and the law of sampled answers.

A drafter is trained for the target's vocabulary or for a draft vocabulary (EAGLE-3), and drafts its most frequent
tokens. Greedy answers are tests/test_lossless.py's matter.
"""

import random
from collections.abc import Hashable

import pytest
import torch

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.policies import Chain, Eagle2, PolicyProposer, TreePolicy
from draftsmith.models.draft_tree import Committed
from draftsmith.models.feature_drafter import FeatureDrafter, FeatureDrafting
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab, cut_vocab
from tests.conftest import make_target
from tests.decoding import decode
from tests.pairs import untaught
from tests.test_sampling import EnumeratedDraws, answers_of, assert_same_law, enumerate_law, small_pair
from tests.thinning import EXHAUSTIVE, pairwise

STOP = 4


def make_pair(trained: int | None, drafted: int) -> tuple[Target, FeatureDrafter, DraftVocab]:
    """A target, a drafter of `trained` tokens (None: all of the target's) and its cut to `drafted` of them."""
    target = Target(make_target())
    size = target.vocab_size
    chance = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 50, (size,), generator=chance)
    vocab = DraftVocab.full(size)
    if trained is not None:
        vocab = DraftVocab(torch.randperm(size, generator=chance)[:trained].sort().values, size)
    return target, untaught("eagle3", target, vocab), cut_vocab(vocab, counts, drafted, [STOP])


@pytest.mark.parametrize(("trained", "rows"), [(None, 1), (90, 3)])
def test_a_cut_drafts_from_the_cut_logits_renormalised(trained: int | None, rows: int) -> None:
    """Over a whole round: the root's children, two of them expanded, and one child of each."""
    target, drafter, part = make_pair(trained, 40)
    torch.manual_seed(0)
    counts = [6, 3, 5][:rows]
    features = torch.randn(rows, max(counts), 3 * target.hidden_size)
    chance = random.Random(1)
    committed = [[chance.randrange(5, 320) for _ in range(count + 1)] for count in counts]
    drafting, whole = FeatureDrafting(drafter, part), FeatureDrafting(drafter)
    for each in (drafting, whole):
        each.reset(rows)
        each.observe(Committed(target, committed, features, counts))
    assert drafting.vocab.same_as(part)

    # By a walk over the drafter's own vocabulary: where each token of the cut stands in it.
    own = drafter.vocab.target_ids.tolist()
    places = [own.index(token) for token in part.target_ids.tolist()]

    def compare(got: torch.Tensor, over_all: torch.Tensor) -> None:
        left = over_all[..., places].double()
        expected = left - left.exp().sum(-1, keepdim=True).log()  # what is left of the mass becomes all of it
        assert got.shape[-1] == part.size
        # Float32 over 32 channels; a row of the head that is another token's is off by more than 0.1.
        torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=0)

    got, over_all = drafting.root_log_probs(), whole.root_log_probs()
    compare(got, over_all)
    tokens = drafting.vocab.to_target(got.topk(2).indices)  # [B, 2]
    slots = torch.zeros(rows, 2, dtype=torch.long)
    for depth in (1, 2):
        got, over_all = drafting.expand(slots, tokens, depth), whole.expand(slots, tokens, depth)
        compare(got, over_all)
        slots = torch.tensor([[1, 2]]).expand(rows, 2)
        tokens = drafting.vocab.to_target(got.argmax(-1))


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


@pytest.mark.parametrize("length", [2, pytest.param(3, marks=EXHAUSTIVE)])
@pytest.mark.parametrize(
    ("policy", "temperature", "own"), pairwise(["chain", "drawn chain", "tree"], [0.5, 1.0], [None, (0, 1, 3, 4)])
)
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
