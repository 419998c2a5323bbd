"""Neighbours do not matter: beside others, of other lengths, every answer takes the rounds that it takes alone.

Tokens alone would hide most of it. So the nodes, the draft calls and the count of random numbers are compared, too, for
whatever proposes, grows trees, accepts and draws; any two of them meet. Some neighbours end at once, some near the
target's last position, and some copy while others need a drafter.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding.accept import Acceptance, acceptance_of
from draftsmith.eval.decoding.decode import Request, TargetVerifier, decode_stream
from draftsmith.eval.decoding.hierarchical import HierarchicalProposer
from draftsmith.eval.decoding.lantern import LanternAcceptance, Relaxation
from draftsmith.eval.decoding.policies import C2T, PolicyProposer, TreePolicy, policy_of
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.draft_tree import Committed, Drafting, Proposer
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.sections.eval import TreeSection
from tests.conftest import make_target
from tests.pairs import untaught
from tests.sam_cases import CPU, beside, corpus_of, sam_alone
from tests.scripted_drafting import Scripted, Table, linear_classifier
from tests.thinning import meeting

VOCAB, POSITIONS = 9, 32
# Prompts and new tokens. The first ends before it is drafted for; the fourth and the last end at the last position.
ASKED = (
    ([5, 2], 1),
    ([7, 8], 10),
    ([1, 2, 3, 1, 2, 3, 1, 2], 7),
    ([5, 1, 2, 6, 4, 4, 0, 3, 2, 1, 7, 8, 6, 5, 3, 0, 1, 2, 4, 6, 8, 7, 3], POSITIONS - 23),
    ([1, 2, 1, 2, 1, 2], 10),
    ([3, 0, 5], 2),
    ([4] * 26, POSITIONS - 26),
)


@cache
def target_of(seed: int) -> Target:
    """Learned positions: a forward behind the last one would fail."""
    settings = {"n_positions": POSITIONS, "max_position_embeddings": POSITIONS, "initializer_range": 0.6}
    small = {"vocab_size": VOCAB, "hidden_size": 16, "pad_token_id": None}
    return Target(make_target("gpt2", 2, seed, **small, **settings), [0, 1])


class ByRoot(Scripted):
    """It has another table for each root."""

    capture_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.of_root = [Table(root, VOCAB, (0.5, 2.0, 4.0)) for root in range(VOCAB)]
        super().__init__(self.of_root)
        self.vocab = DraftVocab.full(VOCAB)

    def observe(self, committed: Committed) -> None:
        self.tables = [self.of_root[tokens[-1]] for tokens in committed.tokens]


class CountedDraws(SeededDraws):
    count = 0

    def uniforms(self, count: int) -> torch.Tensor:
        self.count += count
        return super().uniforms(count)


NEAR = torch.tensor([[(token + step) % VOCAB for step in (1, 3, 4)] for token in range(VOCAB)])
RULES: dict[str, tuple[Sampling, Callable[[Sampling], Acceptance]]] = {
    "greedy": (GREEDY, acceptance_of),
    "sampled": (Sampling(0.9, top_p=0.95), acceptance_of),
    "relaxed, greedy": (GREEDY, lambda sampling: LanternAcceptance(sampling, Relaxation(NEAR, factor=3.0))),
    "relaxed": (Sampling(1.0), lambda sampling: LanternAcceptance(sampling, Relaxation(NEAR, delta=0.3))),
}
TREES: dict[str, dict[str, Any]] = {
    "chain": {"nodes": 5},
    "drawn chain": {"nodes": 5, "draw": "sampled"},
    "svip": {"draft_calls": 6, "svip": {"h": 0.45}},
    "drawn svip": {"draft_calls": 6, "svip": {"h": 0.45}, "draw": "sampled"},
    "static": {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    "drawn static": {"paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]], "draw": "sampled"},
    "eagle2": {"nodes": 9, "draft_calls": 3, "top_k": 3},
    "ddd": {"nodes": 9, "draft_calls": 4, "top_k": 3, "ddd": {"at": "every", "threshold": -0.5}},
    "svip_tree": {"nodes": 9, "draft_calls": 4, "top_k": 3, "svip": {"h": 0.45}},
}
POLICIES = (*TREES, "c2t", "c2t of few nodes")
TRIED = ("chain", "eagle2")  # by proposers with models: a policy reads distributions and nothing else
PROPOSERS: dict[str, Sequence[str]] = {  # with the trees of each
    "prompt lookup": ("its own",),
    "sam": ("its own",),
    "scripted": POLICIES,
    "routed": POLICIES,
    "fused": [name for name in POLICIES if "drawn" not in name],
    "eagle3": TRIED,
    "causal lm": TRIED,
    "hierarchy": ("chain",),
    "hierarchy, routed": ("eagle2",),
}
EVERYTHING = [each for kind, trees in PROPOSERS.items() for each in product([kind], trees, RULES)]
# Where one row copies and another draws, the rule sees both kinds of trees at once.
MIXED = [each for each in EVERYTHING if each[0] == "routed" and "drawn" in each[1]]
PAIRS = [*MIXED, *meeting([each for each in EVERYTHING if each not in MIXED])]
FEW = {*(each for each in MIXED if each[2] == "sampled"), *meeting(PAIRS, 1)}
COMBINATIONS = [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in PAIRS]


def policy(name: str, sampling: Sampling) -> TreePolicy:
    if name.startswith("c2t"):
        nodes = {"beam": 3} if name == "c2t" else {"beam": None, "nodes": 7}
        return C2T(linear_classifier(3.0, 1.0, 0.0, -1.2), 0.5, top_k=4, draft_calls=4, **nodes)
    return policy_of(TreeSection.model_validate({"policy": name.removeprefix("drawn "), **TREES[name]}), sampling)


def proposer_of(kind: str, tree: str, sampling: Sampling) -> Proposer:
    corpus = corpus_of([[1, 2, 1, 2, 1, 3, 1, 2], [2, 6, 4, 4, 4, 2]], VOCAB)
    if kind == "prompt lookup":
        return PromptLookup(4, CPU)
    if kind == "sam":
        return sam_alone(corpus, nodes=6)
    if kind.startswith("hierarchy"):
        inner = PolicyProposer(FeatureDrafting(untaught("eagle3", target_of(1))), policy(tree, GREEDY))
        hierarchy = HierarchicalProposer(target_of(1), inner, 4)
        return hierarchy if kind == "hierarchy" else beside(hierarchy, corpus, 3, False)
    drafting: Drafting = ByRoot()
    if kind == "eagle3":
        drafting = FeatureDrafting(untaught("eagle3", target_of(0)))
    if kind == "causal lm":
        drafting = CausalLMDrafting(target_of(1))
    drafter = PolicyProposer(drafting, policy(tree, sampling))
    return beside(drafter, corpus, 3, kind == "fused") if kind in ("routed", "fused") else drafter


@pytest.mark.parametrize("combination", COMBINATIONS, ids=", ".join)
def test_every_answer_takes_the_rounds_that_it_takes_alone(combination: tuple[str, str, str]) -> None:
    kind, tree, rule = combination
    target, (sampling, acceptance) = target_of(0), RULES[rule]
    proposer = proposer_of(kind, tree, sampling)

    def decoded(rows: int) -> dict[int, dict[str, Any]]:
        """So many side by side; the next ones take the rows of those that ended."""
        draws = [CountedDraws(3, i) for i in range(len(ASKED))]
        requests = (Request(i, *asked, draws[i]) for i, asked in enumerate(ASKED))
        verifier = TargetVerifier(target, proposer, acceptance(sampling))
        with torch.inference_mode():
            answers = dict(decode_stream(verifier, proposer, requests, {0}, rows))
        untimed = {i: {key: v for key, v in vars(a).items() if "seconds" not in key} for i, a in answers.items()}
        return {i: told | {"random numbers": draws[i].count} for i, told in sorted(untimed.items())}

    alone, together = decoded(1), decoded(4)
    moved = [[told.pop("moved") for told in each.values()] for each in (alone, together)]
    assert together == alone
    assert moved[1] == [pytest.approx(each, abs=1e-5) for each in moved[0]]
