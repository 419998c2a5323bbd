"""How draft trees grow: every policy against a slow twin, alone and beside others, and on whatever a drafter gives."""

import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.eval.decoding.policies import (
    C2T,
    LARGE,
    Chain,
    Eagle2,
    PolicyProposer,
    StaticTree,
    TreePolicy,
    likeliest,
    policy_of,
)
from draftsmith.eval.decoding.stopping import Ddd, Svip, SvipTree
from draftsmith.models.c2t import C2tClassifier, C2tConfig, entropy, node_features, read_config
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import C2tSection, DddSection, SvipSection, TreeSection
from tests import reference

VOCAB = 12
Nodes = tuple[int, ...]  # draft tokens from below the root to a node


class Table:
    """Log-probabilities after each path, the same however often and in whatever order they are asked for.

    Args:
        sharpness: standard deviations of the logits, one drawn for each path; 0 makes all tokens equally likely.
    """

    def __init__(self, seed: int, vocab_size: int = VOCAB, sharpness: Sequence[float] = (0.5, 3.0, 6.0)) -> None:
        self.seed, self.vocab_size, self.sharpness = seed, vocab_size, sharpness
        self.known: dict[Nodes, torch.Tensor] = {}

    def logits(self, path: Nodes) -> list[float]:
        chance = random.Random(f"{self.seed} {path}")
        width = chance.choice(self.sharpness)
        return [chance.gauss(0, 1) * width for _ in range(self.vocab_size)]

    def row(self, path: Nodes) -> torch.Tensor:
        if path not in self.known:
            self.known[path] = torch.tensor(self.logits(path)).log_softmax(-1)
        return self.known[path]

    def __call__(self, path: Nodes) -> list[float]:
        return self.row(path).tolist()


class Scripted:
    """A `Drafting` that reads its log-probabilities off tables, one for each row; draft token i is target token 2i + 1.

    The roots are even tokens.
    """

    capture_layers: tuple[int, ...] = (1, 2)

    def __init__(self, tables: Sequence[Table]) -> None:
        size = tables[0].vocab_size
        self.tables, self.calls = list(tables), 0
        self.vocab = DraftVocab(torch.arange(size) * 2 + 1, size * 2 + 2)
        self.seen: list[Any] = []

    def reset(self, rows: int) -> None:
        self.seen.append(("reset", rows))

    def admit(self, rows: int) -> None:
        self.seen.append(("admit", rows))

    def keep(self, rows: Sequence[int]) -> None:
        self.tables = [self.tables[row] for row in rows]

    def observe(self, committed: Sequence[Sequence[int]], features: torch.Tensor | None, counts: Sequence[int]) -> None:
        self.seen.append((committed, features, counts))

    def root_log_probs(self) -> torch.Tensor:
        self.slots: list[list[Nodes]] = [[()] for _ in self.tables]
        self.calls += 1
        return torch.stack([table.row(()) for table in self.tables])

    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        self.calls += 1
        assert parent_slots.shape == tokens.shape == (len(self.tables), tokens.shape[1])
        drafted = self.vocab.to_draft(tokens)
        assert (drafted >= 0).all()
        rows = []
        for table, slots, parents, ids in zip(
            self.tables, self.slots, parent_slots.tolist(), drafted.tolist(), strict=True
        ):
            paths = [(*slots[parent], token) for parent, token in zip(parents, ids, strict=True)]
            assert all(len(path) == depth for path in paths)
            slots.extend(paths)
            rows.append(torch.stack([table.row(path) for path in paths]))
        return torch.stack(rows)


def roots(rows: int) -> torch.Tensor:
    return torch.arange(rows) * 2


def paths_of(tree: DraftTree, row: int) -> list[Nodes]:
    """The draft tokens that lead to each node of a tree; whatever must hold for every tree is checked."""
    size = tree.nodes if tree.sizes is None else int(tree.sizes[row])
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    assert tokens[0] == 2 * row
    assert parents[0] == -1
    paths: list[Nodes] = [()]
    for i in range(1, tree.nodes):
        assert 0 <= parents[i] < i  # on padding, too
        assert tokens[i] % 2 == 1 or i >= size
        if i < size:
            paths.append((*paths[parents[i]], tokens[i] // 2))
    depths = [len(path) for path in paths]
    assert depths == sorted(depths)  # shallower nodes first
    assert max(depths) <= tree.depth
    assert len(set(paths)) == size  # unique siblings
    assert tree.depths[row, :size].tolist() == depths
    return paths


def linear_classifier(p: float, h: float, d: float, bias: float, entropy_over: int = 1000) -> C2tClassifier:
    """C = sigmoid(p P + h H + d depth + bias + relu(P - 0.3)): the first three units pass the features through."""
    classifier = C2tClassifier(C2tConfig(entropy_over=entropy_over)).requires_grad_(False)
    for parameter in classifier.parameters():
        parameter.zero_()
    classifier.hidden.weight[:3] = torch.eye(3)
    classifier.hidden.weight[3, 0], classifier.hidden.bias[3] = 1.0, -0.3
    classifier.output.weight[0, :4] = torch.tensor([p, h, d, 1.0])
    classifier.output.bias[0] = bias
    return classifier


def linear_confidence(p: float, h: float, d: float, bias: float) -> Callable[[float, float, int], float]:
    """The same, written out."""
    return lambda P, H, depth: 1 / (1 + math.exp(-(p * P + h * H + d * depth + bias + max(0.0, P - 0.3))))


# Each policy with its slow twin, in random sizes.

Twin = Callable[[Table], tuple[list[Nodes], int]]


def chain_case(chance: random.Random) -> tuple[TreePolicy, Twin]:
    tokens = chance.randint(1, 7)
    return Chain(tokens), lambda table: reference.likeliest_chain(table, tokens)


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


def beam_sizes(chance: random.Random) -> tuple[int, int, int]:
    return chance.choice([2, 6, 15, 40, 500]), chance.randint(1, 5), chance.choice([1, 2, 3, 5, VOCAB, VOCAB + 3])


def eagle2_case(chance: random.Random) -> tuple[TreePolicy, Twin]:
    sizes = beam_sizes(chance)
    return Eagle2(*sizes), lambda table: reference.eagle2_tree(table, *sizes)


def ddd_case(chance: random.Random) -> tuple[TreePolicy, Twin]:
    sizes, threshold = beam_sizes(chance), -chance.uniform(0.01, 1.5)
    at = chance.choice([None, (1, 3), (2, 4)])
    stop = Ddd(threshold, "every" if at is None else at)
    return Eagle2(*sizes, stop), lambda table: reference.eagle2_tree(
        table, *sizes, reference.ddd_ends(table, threshold, at)
    )


def svip_tree_case(chance: random.Random) -> tuple[TreePolicy, Twin]:
    sizes, c, h = beam_sizes(chance), chance.uniform(0.1, 0.3), chance.uniform(0.1, 0.7)
    return Eagle2(*sizes, SvipTree(c, h)), lambda table: reference.eagle2_tree(
        table, *sizes, reference.svip_tree_ends(table, c, h)
    )


def c2t_case(chance: random.Random) -> tuple[TreePolicy, Twin]:
    weights = 5.0, -0.4, -0.2, chance.uniform(-1, 1)
    beta, beam, top_k = chance.uniform(0.3, 0.7), chance.choice([None, 1, 3, 8]), chance.choice([1, 2, 4, VOCAB + 1])
    calls, nodes, over = chance.randint(1, 4), chance.choice([None, 2, 7, 30]), chance.choice([4, VOCAB, 1000])
    policy = C2T(linear_classifier(*weights), beta, beam, top_k, calls, nodes, over)
    confidence = linear_confidence(*weights)
    return policy, lambda table: reference.c2t_tree(table, confidence, beta, beam, top_k, calls, nodes, over)


CASES = {
    "chain": chain_case,
    "svip": svip_case,
    "static": static_case,
    "eagle2": eagle2_case,
    "ddd": ddd_case,
    "svip_tree": svip_tree_case,
    "c2t": c2t_case,
}
STOPPING = ("svip", "ddd", "svip_tree", "c2t")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 4])
def test_every_policy_grows_the_tree_of_its_slow_twin(name: str, rows: int) -> None:
    different_calls = different_sizes = 0
    for seed in range(40):
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
    if rows > 1 and name in STOPPING:
        assert different_calls > 5
        assert different_sizes > 5


class Odd(Table):
    """What no drafter should give, in some of its rows, and plain rows beside."""

    KINDS = ("plain", "plain", "nan", "one nan", "many nans", "zeros", "nothing", "uniform", "certain")

    def __init__(self, seed: int, vocab_size: int = VOCAB, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(seed, vocab_size)
        self.kinds = kinds

    def row(self, path: Nodes) -> torch.Tensor:
        if path in self.known:
            return self.known[path]
        chance = random.Random(f"odd {self.seed} {path}")
        kind = chance.choice(self.kinds)
        row = super().row(path).clone()
        somewhere = chance.randrange(self.vocab_size)
        if kind == "nan":
            row[:] = math.nan
        elif kind == "one nan":
            row[somewhere] = math.nan
        elif kind == "many nans":
            row[: (self.vocab_size + 1) // 2] = math.nan
        elif kind == "zeros":
            row[: (self.vocab_size + 1) // 2] = -math.inf
        elif kind == "nothing":
            row[:] = -math.inf
        elif kind == "uniform":
            row[:] = -math.log(self.vocab_size)
        elif kind == "certain":
            row[:], row[somewhere] = -math.inf, 0.0
        self.known[path] = row
        return row


ODD = {
    "mixed": Odd.KINDS,
    "all nan": ("nan",),
    "no token is possible": ("nothing",),
    "ties everywhere": ("uniform",),
    "certain tokens": ("certain",),
    "zeros": ("zeros",),
}


@pytest.mark.parametrize("vocab_size", [1, 2, VOCAB])
@pytest.mark.parametrize("kinds", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", [*CASES, "drawn", "drawn svip"])
def test_whatever_the_drafter_gives_trees_are_connected_and_those_of_each_row_alone(
    name: str, kinds: Sequence[str], vocab_size: int
) -> None:
    for seed in range(12):
        chance = random.Random(f"{name} {seed}")
        if name.startswith("drawn"):
            stop = Svip(0.15, 0.4) if name == "drawn svip" else None
            policy: TreePolicy = Chain(chance.randint(1, 5), stop, Sampling(0.8, top_p=0.9))
        elif name == "static" and vocab_size < VOCAB:
            policy = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)))
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
                mass = together.drawn_from[row].sum(-1)
                torch.testing.assert_close(mass[: len(paths) - 1], torch.ones(len(paths) - 1))
                assert (mass[len(paths) - 1 :] == 0).all()


@pytest.mark.parametrize("vocab_size", [1, 2, VOCAB])
@pytest.mark.parametrize("kinds", ODD.values(), ids=ODD)
def test_c2t_stays_connected_where_children_tie(kinds: Sequence[str], vocab_size: int) -> None:
    for seed in range(12):
        policy, _ = c2t_case(random.Random(seed))
        for tables in ([Odd(seed * 4 + row, vocab_size, kinds) for row in range(rows)] for rows in (1, 3)):
            tree, calls = policy.grow(Scripted(tables), roots(len(tables)))
            for row, made in enumerate(calls):
                assert len(paths_of(tree, row)[-1]) in (made - 1, made)  # the last call's children were kept, or none


@pytest.mark.parametrize("size", [LARGE - 1, LARGE, LARGE + 1, 4 * LARGE + 100])
@pytest.mark.parametrize("count", [1, 10, 31, 64, 500])
def test_the_likeliest_of_many_tokens_are_those_of_a_plain_top_k(size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(size + count)
    log_probs = torch.randn(2, 3, size, generator=generator)
    log_probs[0, 0, -1] = 50.0  # behind the last whole block
    log_probs[0, 1, 256 : 256 + count] += 50.0  # all in a block
    log_probs[0, 2] = -math.inf
    log_probs[1, 0, 5000] = log_probs[1, 0, -1] = math.nan
    log_probs[1, 1] = math.nan
    log_probs[1, 2, :4000] = -math.inf
    values, tokens = likeliest(log_probs, count)
    expected = log_probs.topk(count)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(log_probs.gather(-1, tokens), values, rtol=0, atol=0, equal_nan=True)
    distinct = tokens.sort(-1).values
    assert (distinct[..., 1:] > distinct[..., :-1]).all()
    assert torch.equal(tokens[0, :2], expected.indices[0, :2])


# One policy at a time.


def test_uncut_histories_have_the_published_numbers_of_nodes() -> None:
    """k = 10: 10 + 5 * 100 proposed nodes in 6 calls, C2T's 1,011 with the root in 11."""
    tree, _ = Eagle2(10_000, 6, 10).grow(Scripted([Table(0)]), roots(1))
    assert tree.nodes == 1 + 510
    tree, _ = Eagle2(10_000, 11, 10).grow(Scripted([Table(0)]), roots(1))
    assert tree.nodes == 1011
    paths_of(tree, 0)


@pytest.mark.parametrize(("nodes", "calls", "top_k"), [(60, 6, 10), (12, 3, 4), (2, 1, 3), (30, 8, 4), (8, 2, 9)])
def test_eagle2_keeps_the_best_nodes_where_everything_ties(nodes: int, calls: int, top_k: int) -> None:
    table = Table(0, sharpness=(0.0,))
    tree, _ = Eagle2(nodes, calls, top_k).grow(Scripted([table]), roots(1))
    kept = sorted((reference.path_value(table, path) for path in paths_of(tree, 0)[1:]), reverse=True)
    expected, _ = reference.eagle2_tree(table, nodes, calls, top_k)
    assert kept == pytest.approx([reference.path_value(table, path) for path in expected], abs=1e-5)


def test_a_certain_child_does_not_lose_its_parent() -> None:
    """Children with probability 1 tie with their parents: the shallower one must be kept first."""

    class Certain(Table):
        def row(self, path: Nodes) -> torch.Tensor:
            values = torch.full((self.vocab_size,), -math.inf)
            values[len(path)] = 0.0  # another token at every depth
            values[7] = -20.0
            return values

    tree, _ = Eagle2(5, 6, 2).grow(Scripted([Certain(0, 8)]), roots(1))
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert tree.tokens.tolist() == [[0, 1, 3, 5, 7]]


def test_log_probabilities_that_round_above_zero_do_not_lift_a_child_above_its_parent() -> None:
    class Rounded(Table):
        def row(self, path: Nodes) -> torch.Tensor:
            return super().row(path) + 0.5

    for seed in range(20):
        tree, _ = Eagle2(6, 4, 3).grow(Scripted([Rounded(seed)]), roots(1))
        paths_of(tree, 0)


def test_ddd_runs_to_the_end_on_a_peaked_beam_and_stops_at_its_first_test_on_a_spread_one() -> None:
    """The paper's setting: tests after calls 5, 7 and 9, at most 11 calls."""
    peaked, spread = Table(0, sharpness=(40.0,)), Table(1, sharpness=(0.5,))
    policy = Eagle2(60, 11, 10, Ddd())
    assert policy.grow(Scripted([peaked, spread]), roots(2))[1] == [11, 5]


def test_svip_stops_above_six_tenths_of_a_nat_and_keeps_the_uncertain_token() -> None:
    """c = 0.15, h = 0.3: the boundary lies at 0.6 nats, which two tokens have at p = 0.71239; at most 40 tokens."""

    class Coin(Table):
        def row(self, path: Nodes) -> torch.Tensor:
            p = (0.9, 0.9, 0.7129, 0.7119, 0.5)[len(path)]  # 0.5995 nats before the third token, 0.6005 after it
            return torch.tensor([p, 1 - p]).log()

    boundary = [reference.entropy_in_nats(Coin(0, 2)((0,) * depth), 2) for depth in (2, 3)]
    assert 0.599 < boundary[0] < 0.6 < boundary[1] < 0.601
    tree, calls = Chain(40, Svip()).grow(Scripted([Coin(0, 2)]), roots(1))
    assert calls == [4]
    assert tree.nodes == 5
    assert Chain(40, Svip()).grow(Scripted([Table(0, sharpness=(0.1,))]), roots(1))[1] == [1]
    assert Chain(40, Svip()).grow(Scripted([Table(0, sharpness=(1e5,))]), roots(1))[1] == [40]


def test_svip_on_a_beam_of_one_node_is_svip_on_a_chain() -> None:
    for seed in range(30):
        rule = 0.15, random.Random(seed).uniform(0.1, 0.6)
        tables = [Table(seed * 3 + row) for row in range(3)]
        chain, chain_calls = Chain(6, Svip(*rule)).grow(Scripted(tables), roots(3))
        tree, tree_calls = Eagle2(7, 6, 1, SvipTree(*rule)).grow(Scripted(tables), roots(3))
        assert tree_calls == chain_calls
        for row in range(3):
            assert paths_of(tree, row) == paths_of(chain, row)


def test_c2t_drafts_nothing_where_no_child_is_confident() -> None:
    policy = C2T(linear_classifier(0, 0, 0, -4.0), 0.5, 15, 15, 10)
    tree, calls = policy.grow(Scripted([Table(0), Table(1)]), roots(2))
    assert calls == [1, 1]
    assert tree.tokens.tolist() == [[0], [2]]
    assert tree.parents.tolist() == [[-1], [-1]]
    assert tree.ancestors.shape == (2, 1, 1)


def test_c2t_verifies_what_it_kept_even_of_probability_zero() -> None:
    """A row with fewer nodes at a level has a gap there, which must not be taken for an improbable node."""

    class Sure(Table):
        """After the first token another one is certain; `self.seed` tokens may be the first."""

        def row(self, path: Nodes) -> torch.Tensor:
            shares = torch.zeros(self.vocab_size)
            shares[: self.seed if not path else 1] = 1
            return (shares / shares.sum()).log()

    weights = 10.0, 0.0, 20.0, -2.0  # at depth 0 only what is probable, at depth 1 everything
    policy = C2T(linear_classifier(*weights), 0.6, None, 4, 2)
    tables = [Sure(1), Sure(3)]
    tree, _ = policy.grow(Scripted(tables), roots(2))
    for row, table in enumerate(tables):
        expected, _ = reference.c2t_tree(table, linear_confidence(*weights), 0.6, None, 4, 2, None, 1000)
        assert sorted(path[:1] for path in paths_of(tree, row)[1:]) == sorted(path[:1] for path in expected)
        assert len(expected) == table.seed * 5


def test_c2t_with_one_child_a_node_drafts_chains() -> None:
    policy = C2T(linear_classifier(6, 0, 0, -2.0), 0.6, None, 1, 8)
    tables = [Table(seed) for seed in range(6)]
    tree, calls = policy.grow(Scripted(tables), roots(6))
    assert len(set(calls)) > 2
    for row, table in enumerate(tables):
        paths = paths_of(tree, row)
        assert paths[-1] == reference.likeliest_chain(table, 8)[0][7][: len(paths) - 1]
        assert calls[row] == min(len(paths), 8)  # the call whose token was not kept, too


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


@pytest.mark.parametrize("paths", [((0,), (0,)), ((0,), (1, 0)), ((0, 0),)])
def test_a_static_tree_refuses_paths_that_are_no_tree(paths: tuple[Nodes, ...]) -> None:
    with pytest.raises(ValueError, match="paths"):
        StaticTree(paths).grow(Scripted([Table(0)]), roots(1))


def test_a_static_tree_makes_its_indices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, drafting = StaticTree(((0,), (1,), (0, 0))), Scripted([Table(0)])
    first, _ = policy.grow(drafting, roots(1))
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a tensor was made from a list"))
    again, _ = policy.grow(drafting, roots(1))
    assert torch.equal(first.tokens, again.tokens)


# Waiting for the device.


class OnMeta:
    """A `Drafting` without numbers: whoever asks for one gets an error."""

    capture_layers: tuple[int, ...] = ()

    def __init__(self, rows: int) -> None:
        self.rows, self.calls = rows, 0
        ids = torch.empty(VOCAB, dtype=torch.long, device="meta")
        self.vocab: Any = SimpleNamespace(target_ids=ids, to_target=lambda drafted: ids[drafted], is_full=False)

    def root_log_probs(self) -> torch.Tensor:
        return torch.empty(self.rows, VOCAB, device="meta")

    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        assert parent_slots.shape == tokens.shape
        self.calls += 1
        return torch.empty(*tokens.shape, VOCAB, device="meta")


EAGLE1 = StaticTree(tuple(map(tuple, TreeSection(policy="static").static_paths)))


@pytest.mark.parametrize("policy", [Chain(5), EAGLE1, Eagle2(30, 6, 10), Eagle2(9, 3, 2, Ddd(-0.3, (5, 7)))], ids=repr)
@pytest.mark.parametrize("rows", [1, 3])
def test_trees_of_a_known_shape_grow_without_a_number_from_the_device(policy: TreePolicy, rows: int) -> None:
    tree, calls = policy.grow(OnMeta(rows), torch.empty(rows, dtype=torch.long, device="meta"))  # type: ignore[arg-type]
    assert tree.tokens.shape == tree.parents.shape
    assert tree.tokens.device.type == tree.parents.device.type == "meta"
    assert calls == [tree.depth] * rows
    assert tree.sizes is None


@pytest.mark.parametrize(
    ("policy", "waits"),
    [
        (Chain(6, Svip(0.15, 99.0)), 5),  # not after the last call
        (Eagle2(30, 6, 4, Ddd(-99.0, (2, 4, 6))), 2),
        (Eagle2(30, 6, 4, Ddd(-99.0, "every")), 5),
        (Eagle2(30, 6, 4, SvipTree(0.15, 99.0)), 5),
        (C2T(linear_classifier(0, 0, 0, 9.0), 0.5, 3, 3, 6), 6),
    ],
    ids=["svip", "ddd at", "ddd every", "svip_tree", "c2t"],
)
def test_policies_that_stop_by_what_they_see_wait_once_a_test(
    policy: TreePolicy, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Numbers(Scripted):
        """Given without asking a tensor."""

        def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
            return self.root_log_probs()[:, None].expand(-1, tokens.shape[1], -1)

    drafting, roots_B = Numbers([Table(0), Table(1)]), roots(2)
    drafting.root_log_probs()
    seen = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: seen.append("tolist") or tolist(tensor))
    for name in ("item", "__bool__", "__int__", "__float__", "nonzero", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits for the device"))
    policy.grow(drafting, roots_B)
    assert len(seen) == waits


# The classifier.


def test_features_equal_their_slow_twin() -> None:
    table = Table(1)
    log_probs = torch.stack([table.row((token,)) for token in range(3)])  # [3, Vd]
    values = torch.tensor([[-0.5, -1.0, -math.inf], [0.0, -3.0, -9.0], [-2.0, -2.0, -2.5]])
    for over in (1, 4, VOCAB, 1000):
        features = node_features(values, log_probs, 3, over)
        assert features.shape == (3, 3, 3)
        for i, j in itertools.product(range(3), repeat=2):
            H = reference.entropy_in_nats(table((i,)), over)
            assert features[i, j].tolist() == pytest.approx([math.exp(values[i, j]), H, 2.0], abs=1e-6)


def test_a_root_s_children_have_depth_0_for_the_classifier() -> None:
    seen = []

    class Watching(C2tClassifier):
        def confidence(self, features: torch.Tensor) -> torch.Tensor:
            seen.append(sorted(set(features[..., 2].flatten().tolist())))
            return torch.ones(features.shape[:-1])

    C2T(Watching(C2tConfig()), 0.5, 2, 2, 4).grow(Scripted([Table(0)]), roots(1))
    assert seen == [[0.0], [1.0], [2.0], [3.0]]


def test_entropy_of_certain_and_of_broken_distributions() -> None:
    certain = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    assert entropy(certain).tolist() == [0.0, 0.0]
    assert entropy(torch.full((4,), -math.log(4))).item() == pytest.approx(math.log(4))
    assert entropy(torch.full((4,), -math.log(4)), over=3).item() == pytest.approx(math.log(4) * 3 / 4)
    assert math.isnan(entropy(torch.tensor([0.0, math.nan])).item())
    assert math.isnan(entropy(torch.tensor([0.0, -1.0, math.nan]), over=2).item())


def test_the_published_size_has_241_parameters() -> None:
    assert sum(parameter.numel() for parameter in C2tClassifier(C2tConfig()).parameters()) == 241


def test_a_classifier_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    config = C2tConfig(hidden=7, entropy_over=50, negative_ratio=3.5, drafter={"hidden_size": 64, "kind": "eagle3"})
    classifier = C2tClassifier(config)
    features = torch.rand(4, 5, 3)
    for _ in range(2):  # over an older one, too
        classifier.save(tmp_path / "c2t")
    assert sorted(path.name for path in (tmp_path / "c2t").iterdir()) == ["config.json", "model.safetensors"]
    again = C2tClassifier.load(tmp_path / "c2t")
    assert again.config == config == read_config(tmp_path / "c2t")[0]
    assert torch.equal(again.confidence(features), classifier.confidence(features))
    assert again.confidence(features).shape == (4, 5)
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_a_tree_without_a_second_pruning_ends_somewhere(tmp_path: Path) -> None:
    """A classifier that lets everything pass would ask for 15^10 nodes; limits of its own are kept."""
    C2tClassifier(C2tConfig()).save(tmp_path / "c2t")
    for own, nodes in (
        ({}, None),
        ({"beam": None}, 1024),
        ({"beam": None, "draft_calls": 2, "top_k": 3}, 1 + 3 + 9),
        ({"beam": None, "nodes": 5000}, 5000),
    ):
        c2t = {"classifier": str(tmp_path / "c2t"), "beam": own.pop("beam", 15)}
        policy = policy_of(TreeSection.model_validate({"policy": "c2t", "c2t": c2t} | own))
        assert isinstance(policy, C2T) and policy.nodes == nodes


def change_config(directory: Path, **words: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | words))


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def spoil_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["output.bias"][0] = math.nan


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "not a readable safetensors file"),
    "cut weights": (lambda d: (d / "model.safetensors").write_bytes(b"12345678"), "not a readable safetensors file"),
    "no json": (lambda d: (d / "config.json").write_text("{"), "malformed JSON"),
    "no text": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "malformed JSON"),
    "a list": (lambda d: (d / "config.json").write_text("[]"), "not a C2T classifier"),
    "a drafter": (lambda d: change_config(d, kind="eagle3"), "not a C2T classifier"),
    "depths from 1": (lambda d: change_config(d, depth_convention="root's children 1"), "would read wrong depths"),
    "no convention": (lambda d: change_config(d, depth_convention=None), "would read wrong depths"),
    "deep json": (lambda d: (d / "config.json").write_text("[" * 100_000), "nested too deeply"),
    "a huge width": (lambda d: change_config(d, hidden=10**9), r"hidden: 1000000000\) asks for hidden.bias \[10"),
    "no number of rows": (lambda d: change_config(d, hidden=10**23), "hidden: 10+ must be a whole number from 1 to"),
    "another width": (lambda d: change_config(d, hidden=47), r"hidden.weight \[48, 3\].*asks for.*\[47, 3\]"),
    "no width": (lambda d: change_config(d, hidden="48"), "hidden: '48' must be a whole number from 1 to"),
    "no M": (lambda d: change_config(d, entropy_over=0), "entropy_over: 0 must be a whole number from 1 to"),
    "no ratio": (lambda d: change_config(d, negative_ratio="3"), "negative_ratio: '3' must be a number above 0"),
    "no drafter": (lambda d: change_config(d, drafter="eagle3"), "drafter: 'eagle3' must be an object"),
    "missing tensor": (lambda d: change_weights(d, lambda t: t.pop("output.bias")), "copy both files"),
    "not finite": (lambda d: change_weights(d, spoil_bias), "output.bias is not finite"),
    "other weights": (
        lambda d: change_weights(d, lambda t: t["output.bias"].add_(1)),
        "not the weights that config.json was written for",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_classifiers_are_refused(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    C2tClassifier(C2tConfig()).save(tmp_path)
    C2tClassifier.load(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        C2tClassifier.load(tmp_path)
    assert str(tmp_path) in str(error.value)


# From a recipe to the decoding loop.

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
    section = C2tSection(classifier=str(tmp_path), beta=0.4, entropy_over=70)
    policy = policy_of(TreeSection(policy="c2t", c2t=section))
    assert isinstance(policy, C2T)
    assert (policy.beta, policy.beam, policy.top_k) == (0.4, 15, 15)
    assert (policy.draft_calls, policy.nodes, policy.entropy_over) == (10, None, 70)
    assert policy.classifier.output.bias.tolist() == [4.0]
    with pytest.raises(UserError, match=r"entropy_over: 1000, but .* over 70 tokens"):
        policy_of(TreeSection(policy="c2t", c2t=C2tSection(classifier=str(tmp_path))))


def test_auto_is_resolved_by_whoever_measures() -> None:
    with pytest.raises(ValueError, match="auto"):
        policy_of(TreeSection(policy="auto"))


def test_the_proposer_drafts_below_the_last_tokens_of_the_rows_that_go_on() -> None:
    tables = [Table(row) for row in range(3)]
    drafting = Scripted(tables)
    policy = Chain(3, None, Sampling(1.0))
    proposer = PolicyProposer(drafting, policy)
    assert proposer.capture_layers == (1, 2)
    proposer.reset(1, [SeededDraws(0, 2)])
    proposer.admit(1, [SeededDraws(0, 0)])
    drafting.tables = [tables[2], tables[0]]
    features = torch.zeros(2, 4, 1)
    proposer.observe([[9, 8, 4], [7, 0]], features, [2, 1])
    assert drafting.seen == [("reset", 1), ("admit", 1), ([[9, 8, 4], [7, 0]], features, [2, 1])]
    tree, calls = proposer.propose()
    assert calls == [3, 3]
    assert tree.tokens[:, 0].tolist() == [4, 0]
    proposer.keep([1])
    again, _ = proposer.propose()
    assert again.tokens[:, 0].tolist() == [0]
    draws = SeededDraws(0, 0)  # of the row that was admitted
    for drawn in (tree.tokens[1], again.tokens[0]):
        alone, _ = policy.grow(Scripted([tables[0]]), roots(1), [draws])
        assert torch.equal(alone.tokens[0], drawn)
