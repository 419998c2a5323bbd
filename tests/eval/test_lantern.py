"""LANTERN's relaxed acceptance: against its slow twin, with its bound, and down to exact acceptance."""

import itertools
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding import lantern
from draftsmith.eval.decoding.accept import Acceptance
from draftsmith.eval.decoding.decode import TargetVerifier, decode
from draftsmith.eval.decoding.lantern import LanternAcceptance, Relaxation, nearest
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.sampling import GREEDY, Sampling
from tests import reference
from tests.eval.test_sampling import (
    PROPOSERS,
    SAMPLINGS,
    STOP,
    VOCAB,
    EnumeratedDraws,
    Law,
    all_drawn,
    answers_of,
    assert_same_law,
    enumerate_law,
    one_tree,
    path_of,
    random_tree,
    small_pair,
    uneven_tree,
)
from tests.thinning import a_few, thinned

# Of each token; one stands for itself alone.
NEAR = [[1, 2, 4], [4, 2, 0], [1, 4, 0], [], [2, 1, 0]]
TABLE = torch.tensor([row + [-1] * (3 - len(row)) for row in NEAR])
SHAPES = {"random": lambda chance: random_tree(chance, 6, VOCAB), "uneven": uneven_tree}
BUDGETS = {"delta 0.3": ("delta", 0.3), "delta 0.05": ("delta", 0.05), "lambda 2": ("lambda", 2.0)}


def relaxed(budget: tuple[str, float], k: int = 3) -> Relaxation:
    kind, value = budget
    return Relaxation(TABLE[:, :k], **({"delta": value} if kind == "delta" else {"factor": value}))


def law_of(rule: Acceptance, tree: DraftTree, logits: torch.Tensor) -> tuple[Law, dict[int, float]]:
    """(the law of (path, bonus), what was moved at each node)."""
    moved: dict[int, float] = {}

    def round_of(draws: EnumeratedDraws) -> Hashable:
        accepted = rule.accept(tree, logits[None], [draws])
        path = path_of(accepted)
        assert accepted.moved is not None
        moved.update(zip(path, accepted.moved[0].tolist(), strict=False))
        return tuple(path), int(accepted.bonus)

    return enumerate_law(round_of), moved


@pytest.mark.parametrize(
    ("shape", "seed", "drawn_as", "bound"),
    thinned(SHAPES, range(3), ["T=1", "T=0.5, top-k, top-p"], BUDGETS, together=2),
)
def test_a_ranked_tree_equals_the_slow_walk(shape: str, seed: int, drawn_as: str, bound: str) -> None:
    sampling, budget = SAMPLINGS[drawn_as], BUDGETS[bound]
    chance = torch.Generator().manual_seed(seed)
    tree = SHAPES[shape](chance)
    logits = torch.randn(tree.nodes, VOCAB, generator=chance) * 2
    p = [reference.processed(row.tolist(), sampling.temperature, sampling.top_p, sampling.top_k) for row in logits]
    expected, variation = reference.lantern_walk(tree.tokens[0].tolist(), tree.parents[0].tolist(), p, NEAR, budget)
    law, moved = law_of(LanternAcceptance(sampling, relaxed(budget)), tree, logits)
    assert_same_law(law, expected)
    assert moved == pytest.approx({node: variation[node] for node in moved}, abs=1e-6)
    if budget[0] == "delta":
        assert max(moved.values()) <= budget[1] + 1e-9


def test_siblings_share_one_budget() -> None:
    """Each has a neighbour of its own with a tenth of the mass; the budget is enough for two of them."""
    near, p, tree = [[3], [4], [5], [], [], [], []], [0.2] * 3 + [0.1] * 4, one_tree([6, 0, 1, 2], [-1, 0, 0, 0])
    relaxation = Relaxation(torch.tensor([each or [-1] for each in near]), delta=0.25)
    law, moved = law_of(LanternAcceptance(Sampling(1.0), relaxation), tree, torch.tensor([p] * 4).log())
    assert_same_law(law, reference.lantern_walk([6, 0, 1, 2], [-1, 0, 0, 0], [p] * 4, near, ("delta", 0.25))[0])
    assert moved[0] == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_drawn_children_equal_the_slow_walk_and_stay_within_their_bound(
    budget: Any, siblings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lantern, "FIRST", 1)  # neighbours one by one
    chance, parents = torch.Generator().manual_seed(1), [-1, *[0] * siblings]
    logits = torch.randn(siblings + 1, VOCAB, generator=chance) * 2
    q = torch.zeros(siblings + 1, VOCAB)
    q[0] = torch.tensor([0.05, 0.4, 0.35, 0.1, 0.1])
    p = logits[0].softmax(-1).tolist()
    first: Law = defaultdict(float)
    mean = 0.0
    for nodes, weight in all_drawn(parents, q.tolist()):
        chances, rest, expected = reference.lantern_drawn(p, q[0].tolist(), NEAR, budget, nodes[1:])
        law, moved = law_of(LanternAcceptance(Sampling(1.0), relaxed(budget)), one_tree(nodes, parents, q), logits)
        assert moved[0] == pytest.approx(expected, abs=1e-6)
        mean += weight * expected
        reached = 1.0
        for child, accepted in enumerate(chances, start=1):
            got = sum(w for (path, _), w in law.items() if path == (0, child))
            assert got == pytest.approx(reached * accepted, abs=1e-6)
            reached *= 1 - accepted
        for (path, bonus), w in law.items():
            first[nodes[path[1]] if len(path) == 2 else bonus] += weight * w
            if len(path) == 1:
                assert w == pytest.approx(reached * rest[bonus], abs=1e-6)
    found = sum(abs(first[token] - p[token]) for token in range(VOCAB)) / 2
    assert 0.02 < found <= mean + 1e-6
    if siblings == 1:
        assert found == pytest.approx(mean, abs=1e-6)
    if budget[0] == "delta":
        assert mean <= budget[1] + 1e-6
    else:
        assert all(first[token] <= budget[1] * p[token] + 1e-6 for token in range(VOCAB))


@pytest.mark.slow
@pytest.mark.parametrize("proposer", a_few(["chain", "drawn chain", "drawn siblings", "tree"], "drawn siblings"))
def test_the_law_of_first_tokens_stays_within_delta(proposer: str) -> None:
    """The first token is the prefill's. The two behind it may each move by delta."""
    delta, sampling, length = 0.1, SAMPLINGS["T=1"], 2 if proposer.startswith("drawn") else 3  # of many outcomes
    target, drafter = small_pair(None)
    prompt = [0, 2, 1, 2, 1]

    def answer(draws: EnumeratedDraws) -> Hashable:
        drafting = PROPOSERS[proposer](drafter, sampling)
        rule = LanternAcceptance(sampling, relaxed(("delta", delta)))
        [done] = decode(TargetVerifier(target, drafting, rule), drafting, [prompt], {STOP}, length, [draws])
        moved.append(draws.weight * sum(done.moved))
        return tuple(done.token_ids)

    moved: list[float] = []
    law, exact = enumerate_law(answer), answers_of(target, prompt, length, sampling)

    def variation(first: int) -> float:
        between: Law = defaultdict(float)
        for tokens, weight in itertools.chain(law.items(), ((tokens, -w) for tokens, w in exact.items())):
            between[tokens[:first]] += weight  # type: ignore[index]
        return sum(map(abs, between.values())) / 2

    assert variation(1) < 1e-5
    assert variation(length) <= sum(moved) + 1e-5 <= delta * (length - 1) + 2e-5
    assert 0.005 < variation(2) <= delta + 1e-5
    assert variation(3) <= 2 * delta + 1e-5


def test_greedy_takes_a_near_token_that_with_its_neighbours_reaches_the_likeliest() -> None:
    """Token 2 has 0.30 and, with 1 and 4, 0.50: as much as the likeliest, 3, has. Without 4 it falls short."""
    p = torch.tensor([[0.0, 0.15, 0.30, 0.48, 0.07], [0.9, 0.025, 0.025, 0.025, 0.025]])
    tree = one_tree([0, 2], [-1, 0])
    for k, budget, length in ((3, 0.3, 2), (1, 0.3, 1), (3, 0.2, 1)):
        rule = LanternAcceptance(GREEDY, relaxed(("delta", budget), k))
        accepted = rule.accept(tree, p.clamp(min=1e-30).log()[None])
        assert int(accepted.length) == length
        assert int(accepted.bonus) == (0 if length == 2 else 3)
        assert accepted.moved is not None
        assert accepted.moved[0, 0] == pytest.approx(0.22 if length == 2 else 0, abs=1e-6)


def test_nearest_is_an_exact_search() -> None:
    vectors = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)) + 1000  # far from the origin
    table = nearest(vectors, 7).tolist()
    for x, row in enumerate(table):
        others = sorted((y for y in range(50) if y != x), key=lambda y: float((vectors[x] - vectors[y]).norm()))
        assert row == others[:7]
