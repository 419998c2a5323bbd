"""Greedy decoding gives the target's own tokens, whoever drafts, however trees grow, whatever is draftable.

A combination is (target, proposer, policy, vocabulary, answers side by side). The slow test runs all of them with a
Llama, the exhaustive ones with each other family as many as it takes for any three of the other values to meet. `make
test` runs a few, in which every proposer and every policy occurs. A policy reads distributions and nothing else of its
proposer. Sampling is tested in tests/eval/test_sampling.py, families of targets in tests/models/test_targets.py, and
that the rounds of an answer are those that it takes alone in tests/eval/test_rounds.py.
"""

import itertools
import math
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.hierarchical import HierarchicalProposer
from draftsmith.eval.decoding.policies import C2T, PolicyProposer, TreePolicy, policy_of
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.draft_tree import Drafting, Proposer
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.vocab import DraftVocab, cut_vocab
from draftsmith.recipes.sections.eval import TreeSection
from tests.decoding import beside, decode_batch, misleading, sam_alone
from tests.pairs import PROMPTS, blurred_copy, greedy, pair_of
from tests.scripted_drafting import linear_classifier
from tests.thinning import a_few, meeting

NEW_TOKENS = 24
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8},  # windows roll back
    "gpt2": {"n_positions": 64, "max_position_embeddings": 64, "seed": 1},  # learnt positions
    "mixtral": {"num_local_experts": 4},
}
DRAFTERS = ("eagle3", "eagle3.1", "eagle", "poss", "poss over eagle3")
HEADS_OF_THE_TARGET = ("eagle", "poss")  # draft from the whole vocabulary, and from cuts of it
BESIDE_SAM = ("eagle3 routed with sam", "eagle3 fused with sam", "causal_lm fused with sam")
HALF = tuple(f"{kind} in bfloat16" for kind in DRAFTERS)  # as on a GPU, here for a target in float32
PROPOSERS = (*DRAFTERS, *HALF, "eagle3 with NaN", "causal_lm", "hierarchy", "prompt lookup", "sam", *BESIDE_SAM)
POLICIES: dict[str, dict[str, Any]] = {
    "chain": {"nodes": 5},
    "static": {},
    "eagle2": {"nodes": 14, "draft_calls": 4, "top_k": 4},
    "ddd": {"nodes": 14, "draft_calls": 6, "top_k": 4, "ddd": {"at": [2, 4], "threshold": -0.5}},
    "svip": {"svip": {"c": 0.15, "h": 0.5}, "draft_calls": 8},
    "svip_tree": {"nodes": 14, "draft_calls": 6, "top_k": 4, "svip": {"c": 0.15, "h": 0.6}},
}
VOCABULARIES = ("full", "draft", "cut of full", "cut of draft")
ROWS = (1, 3)
TRIED = ("chain", "eagle2")  # with every proposer
blurred = cache(blurred_copy)


class BrokenNow(FeatureDrafting):
    """Every third distribution is NaN in places or throughout, as of a drafter in a precision too low for it."""

    calls = 0

    def _log_probs(self, outputs: torch.Tensor) -> torch.Tensor:
        log_probs = super()._log_probs(outputs)
        self.calls += 1
        if self.calls % 3 == 0:
            return torch.full_like(log_probs, math.nan)
        if self.calls % 3 == 1:
            return log_probs.masked_fill(torch.arange(log_probs.shape[-1]) % 5 == self.calls % 5, math.nan)
        return log_probs


def possible(combination: Sequence[Any]) -> bool:
    _, proposer, policy, vocabulary, _ = combination
    if proposer == "prompt lookup":
        return policy == "chain" and vocabulary == "full"
    if proposer == "sam":
        return policy in TRIED and vocabulary == "full"
    if proposer in BESIDE_SAM:
        return vocabulary == "full"
    if proposer in HALF:
        return policy in TRIED and vocabulary == "full"
    return proposer not in ("causal_lm", *HEADS_OF_THE_TARGET) or vocabulary in ("full", "cut of full")


EVERYTHING = [
    each for each in itertools.product(FAMILIES, PROPOSERS, (*POLICIES, "c2t"), VOCABULARIES, ROWS) if possible(each)
]


@cache
def expected_of(family: str) -> list[list[int]]:
    target, _ = pair_of(family, None, **FAMILIES[family])
    answers = [greedy(target, prompt, NEW_TOKENS) for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = target.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        first, second = logits.topk(2).values.unbind(-1)
        assert float((first - second).min()) > 1e-4, "two tokens so alike that rounding decides: choose another seed"
    return answers


def policy_called(name: str) -> TreePolicy:
    if name == "c2t":  # likes what is likely, certain, and deep
        return C2T(linear_classifier(20.0, -0.5, 0.25, 1.0), beta=0.5, beam=4, top_k=4, draft_calls=5)
    return policy_of(TreeSection.model_validate({"policy": name, **POLICIES[name]}))


def decoded(*combination: Any) -> list[Generation]:
    *made_of, rows = combination
    target, _ = pair_of(made_of[0], None, **FAMILIES[made_of[0]])
    return decode_batch(target, proposer_of(*made_of), PROMPTS[:rows], {-1}, NEW_TOKENS)


def proposer_of(family: str, kind: str, policy: str, vocabulary: str = "full") -> Proposer:
    drafter_kind = kind.removesuffix(" in bfloat16")
    drafter_kind = drafter_kind if drafter_kind in DRAFTERS else "eagle3"
    target, drafter = pair_of(family, 120 if "draft" in vocabulary else None, drafter_kind, **FAMILIES[family])
    if kind in HALF:
        drafter = deepcopy(drafter)
        drafter.round_weights(torch.bfloat16)
    smaller = None
    if vocabulary.startswith("cut"):
        counts = torch.bincount(torch.tensor(expected_of(family)).flatten(), minlength=target.vocab_size)
        whole = drafter.vocab if kind != "causal_lm" else DraftVocab.full(target.vocab_size)
        smaller = cut_vocab(whole, counts, 48, ())
    if kind == "prompt lookup":
        return PromptLookup(5, target.device)
    if kind == "sam":
        return sam_alone(misleading(expected_of(family), target.vocab_size), width=1 if policy == "chain" else 3)
    if kind.startswith("causal_lm"):
        drafting: Drafting = CausalLMDrafting(blurred(family, **FAMILIES[family]), smaller)
    else:
        drafting = (BrokenNow if "NaN" in kind else FeatureDrafting)(drafter, smaller)
    proposer = PolicyProposer(drafting, policy_called(policy))
    if kind == "hierarchy":
        return HierarchicalProposer(blurred(family, **FAMILIES[family]), proposer, 4)
    if kind not in BESIDE_SAM:
        return proposer
    return beside(proposer, misleading(expected_of(family), target.vocab_size), 2, "fused" in kind)


def is_fast(family: str, proposer: str, policy: str, vocabulary: str, rows: int) -> bool:
    """Another target and another draft vocabulary need a drafter of their own, which takes seconds to teach."""
    return family == "llama" and (
        proposer == "eagle3" or (policy in TRIED and ("NaN" in proposer or "draft" not in vocabulary))
    )


FEW = list(meeting([each for each in EVERYTHING if is_fast(*each)], 1))


@pytest.mark.parametrize("combination", FEW, ids=lambda each: ", ".join(map(str, each)))
def test_a_few_combinations(combination: tuple[Any, ...]) -> None:
    answers = decoded(*combination)
    assert [answer.token_ids for answer in answers] == expected_of(combination[0])[: len(answers)]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_rounded_weights_draft_nearly_as_well(kind: str) -> None:
    rounded, whole = (
        sum(sum(answer.accepted_per_round) for answer in decoded("llama", proposer, "eagle2", "full", 3))
        for proposer in (f"{kind} in bfloat16", kind)
    )
    assert rounded > 0.9 * whole > 36


@cache
def many_of(family: str) -> list[tuple[Any, ...]]:
    own = [combination for combination in EVERYTHING if combination[0] == family]
    return own if family == "llama" else list(meeting(own, 3))


PARTS = 7  # of the combinations of a family, which workers share; odd, so that each has both of `ROWS`


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", a_few(FAMILIES, "llama"))
def test_many_combinations(family: str, part: int) -> None:
    wrong, accepted = [], 0
    for combination in many_of(family)[part::PARTS]:
        answers = decoded(*combination)
        accepted += sum(sum(answer.accepted_per_round) for answer in answers)
        if [answer.token_ids for answer in answers] != expected_of(family)[: len(answers)]:
            wrong.append(combination)
    assert not wrong
    assert accepted > 1000 / PARTS  # the drafters are right often enough for this to mean something
