"""The policy that a recipe's `tree` section describes."""

from pathlib import Path

import pytest

from draftsmith.eval.decoding.policies import C2T, Chain, Eagle2, StaticTree, TreePolicy, policy_of
from draftsmith.eval.decoding.stopping import Ddd, Svip, SvipTree
from draftsmith.models.sampling import GREEDY, Sampling
from draftsmith.recipes.schema import C2tSection, DddSection, SvipSection, TreeSection
from tests.scripted_drafting import linear_classifier

TREES: dict[str, tuple[TreeSection, TreePolicy]] = {
    "default": (TreeSection(), Eagle2(60, 8, 10)),
    "chain": (TreeSection(policy="chain", nodes=4), Chain(3)),
    "svip": (TreeSection(policy="svip", svip=SvipSection(c=0.2, h=0.4)), Chain(40, Svip(0.2, 0.4))),
    "static": (TreeSection(policy="static", paths=[[0], [0, 1]]), StaticTree(((0,), (0, 1)))),
    "eagle2": (TreeSection(nodes=20, draft_calls=4, top_k=5), Eagle2(20, 4, 5)),
    "ddd": (TreeSection(policy="ddd"), Eagle2(60, 11, 10, Ddd(-0.3, (5, 7, 9)))),
    "ddd every": (
        TreeSection(policy="ddd", ddd=DddSection(threshold=-1.0, at="every")),
        Eagle2(60, 11, 10, Ddd(-1.0, "every")),
    ),
    "svip_tree": (TreeSection(policy="svip_tree"), Eagle2(60, 11, 10, SvipTree(0.15, 0.3))),
}


@pytest.mark.parametrize(("tree", "policy"), TREES.values(), ids=TREES)
def test_a_recipe_s_section_becomes_its_policy(tree: TreeSection, policy: TreePolicy) -> None:
    assert policy_of(tree) == policy


def test_chains_are_drawn_only_where_the_recipe_says_so() -> None:
    sampling = Sampling(0.7)
    assert policy_of(TreeSection(policy="chain"), sampling) == Chain(5)
    assert policy_of(TreeSection(policy="chain", draw="sampled"), sampling) == Chain(5, None, sampling)
    assert policy_of(TreeSection(policy="svip", draw="sampled"), sampling) == Chain(40, Svip(), sampling)
    assert policy_of(TreeSection(policy="chain", draw="sampled"), GREEDY) == Chain(5)


def test_c2t_of_a_recipe(tmp_path: Path) -> None:
    linear_classifier(1, 2, 3, 4, entropy_over=70).save(tmp_path)
    policy = policy_of(TreeSection(policy="c2t", c2t=C2tSection(classifier=str(tmp_path), beta=0.4)))
    assert isinstance(policy, C2T)
    assert (policy.beta, policy.beam, policy.top_k, policy.draft_calls, policy.nodes) == (0.4, 15, 15, 10, None)
    assert (policy.classifier.config.entropy_over, policy.classifier.output.bias.tolist()) == (70, [4.0])
