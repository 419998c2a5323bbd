"""Chains drawn from the drafter's distribution: their law, and the distributions that they report."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from draftsmith.eval.decoding.policies import Chain
from draftsmith.eval.decoding.stopping import Svip
from draftsmith.models.sampling import Sampling, SeededDraws
from draftsmith.models.vocab import DraftVocab
from tests import reference
from tests.scripted_drafting import Nodes, Scripted, Table, paths_of, roots


@pytest.mark.parametrize("stop", [None, Svip(0.15, 0.4)], ids=["chain", "svip"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.9, top_p=0.95), Sampling(1.3, top_k=3)])
def test_a_drawn_chain_has_the_drafter_s_law(sampling: Sampling, stop: Svip | None) -> None:
    """All chains of three tokens, each given as the outcome of the draws: their weights are the product of q."""

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


def test_a_drawn_chain_says_what_each_token_was_drawn_from() -> None:
    table, sampling = Table(5, vocab_size=5), Sampling(0.7)
    tree, _ = Chain(3, None, sampling).grow(Scripted([table]), roots(1), [SeededDraws(0, 0)])
    paths = paths_of(tree, 0)
    assert tree.is_chain
    assert tree.drawn_from is not None
    assert tree.drawn_from.shape == (1, 4, 12)
    for node, path in enumerate(paths[:-1]):
        over_target = torch.zeros(12)
        over_target[1:10:2] = torch.tensor(reference.processed(table(path), 0.7, 1.0, 0))
        torch.testing.assert_close(tree.drawn_from[0, node], over_target)
    assert (tree.drawn_from[0, 3] == 0).all()


def test_a_chain_over_the_whole_vocabulary_says_the_same() -> None:
    drafting = Scripted([Table(5, vocab_size=5)])
    cut, _ = Chain(3, None, Sampling(1.0)).grow(drafting, roots(1), [SeededDraws(0, 0)])
    drafting.vocab = DraftVocab.full(5)
    whole, _ = Chain(3, None, Sampling(1.0)).grow(drafting, roots(1), [SeededDraws(0, 0)])
    assert whole.tokens[0, 1:].tolist() == [token // 2 for token in cut.tokens[0, 1:].tolist()]
    assert cut.drawn_from is not None
    assert whole.drawn_from is not None
    assert torch.equal(whole.drawn_from, cut.drawn_from[..., 1:10:2])


def test_a_row_that_has_stopped_uses_up_no_random_numbers() -> None:
    policy = Chain(6, Svip(0.15, 0.45), Sampling(1.0))
    draws = [SeededDraws(0, row) for row in range(6)]
    _, calls = policy.grow(Scripted([Table(row) for row in range(6)]), roots(6), draws)
    assert len(set(calls)) > 2
    for row, made in enumerate(calls):
        fresh = SeededDraws(0, row)
        fresh.uniforms(made)
        assert torch.equal(draws[row].uniforms(3), fresh.uniforms(3))


def test_a_drawn_chain_needs_draws() -> None:
    with pytest.raises(ValueError, match="needs draws"):
        Chain(3, None, Sampling(1.0)).grow(Scripted([Table(0)]), roots(1))
