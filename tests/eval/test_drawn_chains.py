"""Chains and static trees drawn from the drafter's distribution: their law, and the distributions that they report."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from draftsmith.eval.decoding.policies import Chain, StaticTree, TreePolicy
from draftsmith.eval.decoding.stopping import Svip
from draftsmith.models.sampling import Sampling, SeededDraws
from tests import reference
from tests.scripted_drafting import Nodes, Scripted, Table, paths_of, roots


class Given:
    """Draws the tokens it is told to."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.weight = list(tokens), 1.0

    def events(self, chances_N: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a draft needs none")

    def token(self, weights_V: torch.Tensor) -> torch.Tensor:
        token = self.tokens.pop(0)
        self.weight *= float(weights_V[token] / weights_V.sum())
        return torch.tensor(token)


@pytest.mark.parametrize("stop", [None, Svip(0.15, 0.4)], ids=["chain", "svip"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.9, top_p=0.95)])
def test_a_drawn_chain_has_the_drafter_s_law(sampling: Sampling, stop: Svip | None) -> None:
    """All chains of three tokens, each given as the outcome of the draws: their weights are the product of q."""

    table = Table(19, vocab_size=5)
    law: dict[Nodes, float] = defaultdict(float)
    for outcome in itertools.product(range(5), repeat=3):
        draws = Given(outcome)
        tree, _ = Chain(3, stop, sampling).grow(Scripted([table]), roots(1), [draws])
        if draws.weight > 0:
            path = paths_of(tree, 0)[-1]
            assert path == outcome[: 3 - len(draws.tokens)]
            law[path] = draws.weight
    expected: dict[Nodes, float] = {}
    open_paths: list[tuple[Nodes, float]] = [((), 1.0)]
    while open_paths:
        path, weight = open_paths.pop()
        q = reference.processed(table(path), sampling.temperature, sampling.top_p, sampling.top_k)
        ends = len(path) == 2 or (stop and stop.c * reference.entropy_in_nats(table(path), 5) > stop.h**2)
        for token in range(5):
            if q[token] > 0:
                (expected.update if ends else lambda more: open_paths.extend(more.items()))(
                    {(*path, token): weight * q[token]}
                )
    assert law.keys() == expected.keys()
    assert sum(expected.values()) == pytest.approx(1)
    for path, weight in expected.items():
        assert law[path] == pytest.approx(weight, rel=1e-4)
    if stop is not None:
        assert len({len(path) for path in law}) > 1


@pytest.mark.parametrize("policy", [Chain(3, None, Sampling(1.0)), StaticTree(((0,),), Sampling(1.0))])
def test_drawn_tokens_need_draws(policy: TreePolicy) -> None:
    with pytest.raises(ValueError, match="need draws"):
        policy.grow(Scripted([Table(0)]), roots(1))


#        root
#       /    \
#      0      1         drawn in this order: 0, 1, then 00, then 10 and 11
#      |     / \
#     00   10   11
SIBLINGS = ((0,), (1,), (1, 0), (1, 1), (0, 0))


@pytest.mark.parametrize("sampling", [Sampling(0.9), Sampling(1.3, top_k=2)])
def test_siblings_are_drawn_without_replacement(sampling: Sampling) -> None:
    table, policy = Table(19, vocab_size=4), StaticTree(SIBLINGS, sampling)
    total = 0.0
    for a, b, below_a, c, d in itertools.product(range(4), repeat=5):
        draws = Given([a, b, below_a, c, d])
        if len({a, b}) < 2 or len({c, d}) < 2:  # drawn already
            continue
        tree, calls = policy.grow(Scripted([table]), roots(1), [draws])
        assert calls == [2]
        assert paths_of(tree, 0)[1:] == [(a,), (b,), (a, below_a), (b, c), (b, d)]

        def law(*path: int) -> list[float]:
            return reference.processed(table(path), sampling.temperature, sampling.top_p, sampling.top_k)

        expected = law(a)[below_a]
        for q, first, second in ((law(), a, b), (law(b), c, d)):
            expected *= q[first] * q[second] / (1 - q[first])
        assert draws.weight == pytest.approx(expected, rel=1e-4, abs=1e-9)
        total += draws.weight
        assert tree.drawn_from is not None
        for node, path in enumerate([(), (a,), (b,)]):
            torch.testing.assert_close(tree.drawn_from[0, node, 1:8:2], torch.tensor(law(*path)))
        assert not tree.drawn_from[0, 3:].any()
    assert total == pytest.approx(1)


def test_a_row_that_has_stopped_draws_nothing_more() -> None:
    policy = Chain(6, Svip(0.15, 0.45), Sampling(1.0))
    draws = [SeededDraws(0, row) for row in range(6)]
    tree, calls = policy.grow(Scripted([Table(row) for row in range(6)]), roots(6), draws)
    assert len(set(calls)) > 2 and tree.drawn_from is not None
    drawn = tree.drawn_from.sum(-1) > 0  # below each node
    for row, made in enumerate(calls):
        assert drawn[row].tolist() == [node < made for node in range(drawn.shape[1])]
        fresh = SeededDraws(0, row)
        fresh.uniforms(made)
        assert torch.equal(draws[row].uniforms(3), fresh.uniforms(3))
