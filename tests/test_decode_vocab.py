"""Drafting with a cut of the drafter's vocabulary (FR-Spec): the probabilities, and that decoding stays lossless.

case           the drafter was trained for      and drafts
full           the target's vocabulary          all of it
full, cut      the target's vocabulary          its most frequent tokens
own            a draft vocabulary (EAGLE-3)     all of it
own, cut       a draft vocabulary (EAGLE-3)     its most frequent tokens
"""

import random

import pytest
import torch

from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Drafting
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab, cut
from tests.conftest import make_target

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
    drafter = Eagle3Drafter(config, vocab, target.embedding_table).eval()
    return target, drafter, None if drafted is None else cut(vocab, counts, drafted, [STOP])


@pytest.mark.parametrize("case", CUTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cut_drafts_from_the_cut_logits_renormalised(case: str, rows: int) -> None:
    """Over a whole round: the root's children, two of them expanded, and one child of each."""
    _, drafter, part = make_pair(*CUTS[case])
    assert part is not None
    torch.manual_seed(0)
    counts = [6, 3, 5][:rows]
    features = torch.randn(rows, max(counts), drafter.fc.in_features)
    chance = random.Random(1)
    committed = [[chance.randrange(5, 320) for _ in range(count + 1)] for count in counts]
    drafting, whole = Eagle3Drafting(drafter, part), Eagle3Drafting(drafter)
    for each in (drafting, whole):
        each.reset(rows)
        each.observe(committed, features, counts)
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
