"""Drafting with a cut of the drafter's vocabulary (FR-Spec): the probabilities, and that decoding stays lossless.

case           the drafter was trained for      and drafts
full           the target's vocabulary          all of it
full, cut      the target's vocabulary          its most frequent tokens
own            a draft vocabulary (EAGLE-3)     all of it
own, cut       a draft vocabulary (EAGLE-3)     its most frequent tokens
"""

import random
from collections.abc import Hashable

import pytest
import torch

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.policies import Chain, Eagle2, PolicyProposer, TreePolicy, policy_of
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.draft_tree import Committed
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab, cut_vocab
from draftsmith.recipes.schema import SvipSection, TreeSection
from tests.conftest import make_target
from tests.decoding import decode, decode_batch
from tests.pairs import greedy
from tests.test_sampling import EnumeratedDraws, answers_of, assert_same_law, enumerate_law, small_pair
from tests.thinning import pairwise, thinned

STOP = 4
CASES = {"full": (None, None), "full, cut": (None, 40), "own": (90, None), "own, cut": (90, 40)}
CUTS = {name: sizes for name, sizes in CASES.items() if sizes[1] is not None}


def make_pair(trained: int | None, drafted: int | None, **overrides) -> tuple[Target, Eagle3Drafter, DraftVocab | None]:
    """A target, a drafter of `trained` tokens (None: all of the target's) and its cut to `drafted` of them."""
    target = Target(make_target(**overrides))
    size = target.vocab_size
    chance = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 50, (size,), generator=chance)
    vocab = DraftVocab.full(size)
    if trained is not None:
        vocab = DraftVocab(torch.randperm(size, generator=chance)[:trained].sort().values, size)
    torch.manual_seed(3)
    config = Eagle3Config.for_target(target.config, size, target.capture_layers, vocab.size)
    drafter = Eagle3Drafter(config, vocab).eval()
    return target, drafter, None if drafted is None else cut_vocab(vocab, counts, drafted, [STOP])


@pytest.mark.parametrize("case", CUTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cut_drafts_from_the_cut_logits_renormalised(case: str, rows: int) -> None:
    """Over a whole round: the root's children, two of them expanded, and one child of each."""
    target, drafter, part = make_pair(*CUTS[case])
    assert part is not None
    torch.manual_seed(0)
    counts = [6, 3, 5][:rows]
    features = torch.randn(rows, max(counts), drafter.fc.in_features)
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


TREES = {
    "chain": TreeSection(policy="chain", nodes=5),
    "static": TreeSection(policy="static"),
    "eagle2": TreeSection(policy="eagle2", nodes=20, draft_calls=4, top_k=4),
    "wider than the cut": TreeSection(policy="eagle2", nodes=60, draft_calls=3, top_k=10),
    "svip tree": TreeSection(policy="svip_tree", nodes=20, draft_calls=4, top_k=4, svip=SvipSection(c=1.0, h=1.2)),
}


@pytest.mark.parametrize(
    ("tree", "case", "family"),
    thinned(TREES, ["full", "full, cut", "own", "own, cut"], ["llama"]),
)
def test_greedy_answers_are_the_target_s_whatever_is_cut(case: str, tree: str, family: str) -> None:
    """Few tokens, so that an untrained drafter is right now and then."""
    sizes = {"full": (None, None), "full, cut": (None, 8), "own": (16, None), "own, cut": (16, 8)}
    target, drafter, part = make_pair(*sizes[case], vocab_size=24, family=family, seed=2)
    chance = random.Random(5)
    prompts = [[chance.randrange(5, 24) for _ in range(length)] for length in (1, 9, 30, 4, 12, 3)]
    proposer = PolicyProposer(FeatureDrafting(drafter, part), policy_of(TREES[tree]))
    draftable = set((drafter.vocab if part is None else part).target_ids.tolist())
    accepted = []
    for generation, prompt in zip(decode_batch(target, proposer, prompts, {STOP}, 30), prompts, strict=True):
        assert generation.token_ids == greedy(target, prompt, 30, STOP)
        accepted += accepted_tokens(generation)
    assert accepted and set(accepted) <= draftable


@pytest.mark.parametrize("tree", TREES)
def test_a_cut_that_leaves_nothing_out_drafts_as_before(tree: str) -> None:
    target, drafter, part = make_pair(16, 16, vocab_size=24)
    rounds = []
    for each in (part, None):
        proposer = PolicyProposer(FeatureDrafting(drafter, each), policy_of(TREES[tree]))
        generation = decode(target, proposer, [7, 9, 11], {STOP}, 60)
        rounds.append((generation.accepted_per_round, generation.tree_nodes, generation.draft_calls))
    assert rounds[0] == rounds[1]


def policy_for(name: str, sampling: Sampling) -> TreePolicy:
    if name == "tree":
        return Eagle2(nodes=4, draft_calls=2, top_k=2)
    return Chain(2, sampling=sampling) if name == "drawn chain" else Chain(2)


def test_an_answer_that_ends_with_its_first_token_leaves_the_others_alone() -> None:
    target, drafter, part = make_pair(None, 8, vocab_size=24)
    small = Target(make_target(vocab_size=24, seed=1))
    chance = random.Random(5)
    prompts = [[chance.randrange(5, 24) for _ in range(length)] for length in (5, 2, 7)]
    stop = greedy(target, prompts[1], 1)[0]
    expected = [greedy(target, prompt, 12, stop) for prompt in prompts]
    assert [len(answer) == 1 for answer in expected] == [False, True, False]
    for drafting in (FeatureDrafting(drafter, part), CausalLMDrafting(small, part)):
        generations = decode_batch(target, PolicyProposer(drafting, Chain(3)), prompts, {stop}, 12)
        assert [generation.token_ids for generation in generations] == expected


@pytest.mark.parametrize("length", [2, pytest.param(3, marks=pytest.mark.slow)])
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
