"""Trees, drafters and a classifier that the planner's tests share."""

from typing import Any

from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.models.eagle3 import Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import GREEDY
from draftsmith.models.target import Target
from draftsmith.recipes.sections.eval import TreeSection

CHAIN = TreeSection(policy="chain", nodes=5)


def tree_of(**said: Any) -> TreeSection:
    return TreeSection.model_validate(said)


KINDS = [
    {"policy": "chain", "nodes": 4},
    {"policy": "svip", "draft_calls": 9},
    {"policy": "static"},
    {"policy": "eagle2", "nodes": 60},
    {"policy": "eagle2", "nodes": 8, "draft_calls": 3, "top_k": 3},
    {"policy": "ddd", "nodes": 100},
    {"policy": "svip_tree", "nodes": 24, "top_k": 4},
    {"policy": "eagle2", "nodes": 24, "vocab_size": 64},
    {"policy": "c2t", "draft_calls": 6, "top_k": 3, "c2t": {"classifier": "SURE", "beam": 4, "beta": 0.3}},
    {"policy": "c2t", "nodes": 12, "draft_calls": 3, "top_k": 4, "c2t": {"classifier": "SURE", "beam": None}},
    {"policy": "c2t", "draft_calls": 12, "c2t": {"classifier": "SURE", "beam": None}},  # as large as it likes
]


def proposer_of(target: Target, drafter: Eagle3Drafter, tree: TreeSection) -> PolicyProposer:
    return PolicyProposer(FeatureDrafting(drafter), policy_of(tree, GREEDY))
