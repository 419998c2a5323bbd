"""How draft trees grow: every policy against a slow twin, alone and beside other rows, whatever the drafter gives."""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding import policies
from draftsmith.eval.decoding.policies import C2T, Chain, Eagle2, StaticTree, TreePolicy, policy_of
from draftsmith.eval.decoding.stopping import Ddd, Svip, SvipTree
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.recipes.sections.eval import C2tSection, TreeSection
from tests import reference
from tests.scripted_drafting import VOCAB, Nodes, Scripted, Table, linear_classifier, paths_of, roots

# Each policy with its slow twin, in random sizes.

Twin = Callable[[Table], tuple[list[Nodes], int]]


def svip_case(chance: random.Random) -> tuple[TreePolicy, Twin]:
    tokens, c, h = chance.randint(1, 8), chance.uniform(0.1, 0.3), chance.uniform(0.1, 0.7)
    return Chain(tokens, Svip(c, h)), lambda table: reference.likeliest_chain(table, tokens, c, h)


def static_case(chance: random.Random) -> tuple[TreePolicy, Twin]:
    paths: list[Nodes] = [(chance.randrange(3),)]
    for _ in range(chance.randint(0, 14)):
        path = (*chance.choice([(), *paths]), chance.randrange(VOCAB + 2))  # ranks that no token has, too
        if path not in paths:
            paths.append(path)
    return StaticTree(tuple(paths)), lambda table: reference.ranked_tree(table, paths)


def beam_case(kind: str, chance: random.Random) -> tuple[TreePolicy, Twin]:
    sizes = chance.choice([2, 6, 15, 40, 500]), chance.randint(1, 5), chance.choice([1, 2, 3, 5, VOCAB, VOCAB + 3])
    threshold, at = -chance.uniform(0.01, 1.5), chance.choice([None, (1, 3), (2, 4)])
    c, h = chance.uniform(0.1, 0.3), chance.uniform(0.1, 0.7)
    stop, ends = {
        "eagle2": (None, lambda table: None),
        "ddd": (Ddd(threshold, at or "every"), lambda table: reference.ddd_ends(table, threshold, at)),
        "svip_tree": (SvipTree(c, h), lambda table: reference.svip_tree_ends(table, c, h)),
    }[kind]
    return Eagle2(*sizes, stop), lambda table: reference.eagle2_tree(table, *sizes, ends(table))


def c2t_case(chance: random.Random) -> tuple[TreePolicy, Twin]:
    weights = 5.0, -0.4, -0.2, chance.uniform(-1, 1)
    beta, beam, top_k = chance.uniform(0.3, 0.7), chance.choice([None, 1, 3, 8]), chance.choice([1, 2, 4, VOCAB + 1])
    calls, nodes = chance.randint(1, 4), chance.choice([None, 2, 7, 30])
    classifier = linear_classifier(*weights)
    confidence = reference.c2t_confidence(classifier.state_dict())
    policy = C2T(classifier, beta, beam, top_k, calls, nodes)
    return policy, lambda table: reference.c2t_tree(table, confidence, beta, beam, top_k, calls, nodes)


CASES = {
    "chain": lambda chance: (
        Chain(tokens := chance.randint(1, 7)),
        lambda table: reference.likeliest_chain(table, tokens),
    ),
    "svip": svip_case,
    "static": static_case,
    **{kind: partial(beam_case, kind) for kind in ("eagle2", "ddd", "svip_tree")},
    "c2t": c2t_case,
}
STOPPING = ("svip", "ddd", "svip_tree", "c2t")


@pytest.mark.parametrize("name", CASES)
def test_every_policy_grows_the_tree_of_its_slow_twin(name: str) -> None:
    rows, different_calls, different_sizes = 4, 0, 0
    for seed in range(25):
        policy, twin = CASES[name](random.Random(f"{name} {seed}"))
        tables = [Table(seed * rows + row) for row in range(rows)]
        drafting = Scripted(tables)
        tree, calls = policy.grow(drafting, roots(rows), None)
        assert drafting.calls == max(calls)
        sizes = []
        for row, table in enumerate(tables):
            expected, expected_calls = twin(table)
            assert calls[row] == expected_calls
            drafted = paths_of(tree, row)[1:]
            assert sorted(drafted) == sorted(expected)
            sizes.append(1 + len(expected))
        assert tree.nodes == max(sizes)
        assert (tree.sizes is None) == (min(sizes) == max(sizes))  # a batch of equal trees is not padded
        different_calls += len(set(calls)) > 1
        different_sizes += len(set(sizes)) > 1
    if name in STOPPING:
        assert different_calls > 3
        assert different_sizes > 3


class Odd(Table):
    """What no drafter should give, in some of its rows, and plain rows beside."""

    KINDS = ("plain", "plain", "nan", "one nan", "many nans", "zeros", "nothing", "uniform", "certain")

    def __init__(self, seed: int, vocab_size: int = VOCAB, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(seed, vocab_size)
        self.kinds = kinds

    def made(self, path: Nodes) -> torch.Tensor:
        chance, row, half = random.Random(f"odd {self.seed} {path}"), super().made(path), (self.vocab_size + 1) // 2
        kind, somewhere = chance.choice(self.kinds), chance.randrange(self.vocab_size)
        of_all = {"nan": math.nan, "nothing": -math.inf, "certain": -math.inf, "uniform": -math.log(self.vocab_size)}
        row[:] = torch.full_like(row, of_all[kind]) if kind in of_all else row
        if kind in ("one nan", "certain"):
            row[somewhere] = math.nan if kind == "one nan" else 0.0
        elif kind in ("many nans", "zeros"):
            row[:half] = math.nan if kind == "many nans" else -math.inf
        return row


# All kinds mixed; NaN alone; no possible token; ties everywhere; certain tokens; zeros.
ODD = (Odd.KINDS, ("nan",), ("nothing",), ("uniform",), ("certain",), ("zeros",))


@pytest.mark.parametrize("vocab_size", [1, VOCAB])
@pytest.mark.parametrize("name", [*CASES, "drawn", "drawn svip", "drawn static"])
def test_whatever_the_drafter_gives_trees_are_connected_and_those_of_each_row_alone(name: str, vocab_size: int) -> None:
    for seed in range(12):
        chance, kinds = random.Random(f"{name} {seed}"), ODD[seed % len(ODD)]
        drawn = name.startswith("drawn")
        sampling = Sampling(0.8, top_p=0.9) if drawn else GREEDY
        if name == "drawn static" or (name == "static" and vocab_size < VOCAB):
            policy: TreePolicy = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)), sampling)
        elif drawn:
            policy = Chain(chance.randint(1, 5), Svip(0.15, 0.4) if name == "drawn svip" else None, sampling)
        else:
            policy = CASES[name](chance)[0]
        if name == "c2t":  # equal features may differ in their last bit by their place in a matrix: no ties
            kinds = [kind for kind in kinds if kind in ("plain", "nan", "one nan", "many nans")] or ["nan"]
        tables = [Odd(seed * 4 + row, vocab_size, kinds) for row in range(3)]
        together, calls = policy.grow(Scripted(tables), roots(3), [SeededDraws(seed, row) for row in range(3)])
        for row, table in enumerate(tables):
            paths = paths_of(together, row)
            drafting = Scripted([table])
            alone, calls_alone = policy.grow(drafting, roots(3)[row : row + 1], [SeededDraws(seed, row)])
            assert alone.sizes is None
            assert calls_alone == [calls[row]]
            assert drafting.calls == calls[row]
            assert torch.equal(alone.tokens[0], together.tokens[row, : len(paths)])
            assert torch.equal(alone.parents[0], together.parents[row, : len(paths)])
            if together.drawn_from is not None:
                assert alone.drawn_from is not None
                torch.testing.assert_close(alone.drawn_from[0], together.drawn_from[row, : len(paths)])
                have_children = torch.zeros(together.nodes)
                have_children[together.parents[row, 1 : len(paths)]] = 1
                torch.testing.assert_close(together.drawn_from[row].sum(-1), have_children)


@pytest.mark.parametrize("size", [policies.LARGE - 1, policies.LARGE, 2 * policies.LARGE + 100])
@pytest.mark.parametrize("count", [1, 31])
def test_the_likeliest_of_many_tokens_are_those_of_a_plain_top_k(size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(size + count)
    log_probs = torch.randn(2, 3, size, generator=generator)
    log_probs[0, 0, -1] = 50.0  # behind the last whole block
    log_probs[0, 1, 256 : 256 + count] += 50.0  # all in a block
    log_probs[0, 2] = -math.inf
    log_probs[1, 0, 5000] = log_probs[1, 0, -1] = math.nan
    log_probs[1, 1] = math.nan
    log_probs[1, 2, :4000] = -math.inf
    values, tokens = policies.top_tokens(log_probs, count)
    expected = log_probs.topk(count)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(log_probs.gather(-1, tokens), values, rtol=0, atol=0, equal_nan=True)
    distinct = tokens.sort(-1).values
    assert (distinct[..., 1:] > distinct[..., :-1]).all()
    assert torch.equal(tokens[0, :2], expected.indices[0, :2])


# What a recipe's `tree` section describes.


DRAWN = Sampling(0.7)  # of the answers; chains are drawn only where the recipe says so
TREES: list[tuple[dict[str, Any], TreePolicy]] = [
    ({}, Eagle2(60, 8, 10)),
    ({"policy": "chain", "nodes": 4}, Chain(3)),
    ({"policy": "chain", "draw": "sampled"}, Chain(5, None, DRAWN)),
    ({"policy": "svip", "svip": {"c": 0.2, "h": 0.4}}, Chain(40, Svip(0.2, 0.4))),
    ({"policy": "svip", "draw": "sampled"}, Chain(40, Svip(0.15, 0.3), DRAWN)),
    ({"policy": "static", "paths": [[0], [0, 1]]}, StaticTree(((0,), (0, 1)))),
    ({"policy": "ddd"}, Eagle2(60, 11, 10, Ddd(-0.3, (5, 7, 9)))),
    ({"policy": "ddd", "ddd": {"threshold": -1.0, "at": "every"}}, Eagle2(60, 11, 10, Ddd(-1.0, "every"))),
    ({"policy": "svip_tree"}, Eagle2(60, 11, 10, SvipTree(0.15, 0.3))),
]


def test_a_recipe_s_section_becomes_its_policy(tmp_path: Path) -> None:
    for tree, policy in TREES:
        assert policy_of(TreeSection.model_validate(tree), DRAWN) == policy
    linear_classifier(1, 2, 3, 4).save(tmp_path)
    policy = policy_of(TreeSection(policy="c2t", c2t=C2tSection(classifier=str(tmp_path), beta=0.4)))
    assert isinstance(policy, C2T)
    assert (policy.beta, policy.beam, policy.top_k, policy.draft_calls, policy.nodes) == (0.4, 15, 15, 10, None)
    assert policy.classifier.output.bias.tolist() == [4.0]
