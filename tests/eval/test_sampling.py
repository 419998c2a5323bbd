"""Sampling is lossless: what the decoding loop draws has exactly the target's law.

Laws are enumerated, not estimated: `enumerate_law` runs the product's code once for every outcome of its random draws
and adds up the probabilities. What remains is float32 rounding of the target's forwards, far below TOLERANCE; every
defect named here moves a law by more than 0.01. So are the laws of chains and static trees that a drafter draws.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from draftsmith.data_gen.answers.generators import resolve_sampling
from draftsmith.eval.decoding.accept import Accepted, SampledAcceptance
from draftsmith.eval.decoding.hierarchical import HierarchicalProposer
from draftsmith.eval.decoding.policies import Chain, Eagle2, PolicyProposer, StaticTree, TreePolicy
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.decoding.stopping import Svip
from draftsmith.models.draft_tree import DraftTree, Proposer
from draftsmith.models.feature_drafter import FeatureDrafter, FeatureDrafting
from draftsmith.models.sampling import GREEDY, Draws, Sampling, SeededDraws, pick
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from tests import reference
from tests.conftest import make_target
from tests.decoding import CPU, beside, corpus_of, decode, decode_batch, sam_alone
from tests.pairs import untaught
from tests.scripted_drafting import Nodes, Scripted, Table, paths_of, roots
from tests.thinning import a_few, thinned

TOLERANCE = 2e-5
STOP = 4
VOCAB = 5
SAMPLINGS = {
    "T=1": Sampling(1.0),
    "T=0.5": Sampling(0.5),
    "top-p": Sampling(1.0, top_p=0.8),
    "T=0.5, top-k, top-p": Sampling(0.5, top_p=0.9, top_k=3),
}
Law = dict[Any, float]  # by outcome
Path = tuple[int, ...]  # nodes from the root


class EnumeratedDraws:
    """Takes the outcomes that `script` names; behind its end the first possible ones, noting the others."""

    def __init__(self, script: list[int]):
        self.script, self.taken, self.weight = script, [], 1.0
        self.others: list[list[int]] = []  # scripts still to be run

    def _choose(self, weights: list[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice = possible[0]
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= weights[choice]
        return choice

    def events(self, chances_N: torch.Tensor) -> torch.Tensor:
        assert ((chances_N >= 0) & (chances_N <= 1 + 1e-6)).all(), chances_N
        chosen = [bool(self._choose([1 - min(chance, 1.0), min(chance, 1.0)])) for chance in chances_N.tolist()]
        return torch.tensor(chosen, dtype=torch.bool)

    def token(self, weights_V: torch.Tensor) -> torch.Tensor:
        weights = weights_V.double() / weights_V.double().sum()
        return torch.tensor(self._choose(weights.tolist()))


def enumerate_law(run: Callable[[EnumeratedDraws], Hashable]) -> Law:
    """The law of what `run` returns, over all outcomes of its draws."""
    law: Law = defaultdict(float)
    scripts: list[list[int]] = [[]]
    while scripts:
        draws = EnumeratedDraws(scripts.pop())
        law[run(draws)] += draws.weight
        scripts += draws.others
    assert abs(sum(law.values()) - 1) < 1e-6
    return law


def assert_same_law(law: Law, expected: Law) -> None:
    for outcome in law.keys() | expected.keys():
        got, wanted = law.get(outcome, 0.0), expected.get(outcome, 0.0)
        assert abs(got - wanted) < TOLERANCE, f"{outcome}: {got:.6f} instead of {wanted:.6f}"


# The distribution itself.


@pytest.mark.parametrize("sampling", [*SAMPLINGS.values(), Sampling(1.3, top_k=1)], ids=str)
def test_processed_probabilities_equal_their_slow_twin(sampling: Sampling) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 11) * 3
    ours = sampling.probabilities(logits)
    assert ours.shape == logits.shape
    for row, got in zip(logits.flatten(0, 1), ours.flatten(0, 1), strict=True):
        wanted = reference.processed(row.tolist(), sampling.temperature, sampling.top_p, sampling.top_k)
        torch.testing.assert_close(got, torch.tensor(wanted), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-4, 1e-40, 5e-324])
@pytest.mark.parametrize("others", [{}, {"top_p": 0.9, "top_k": 4}], ids=["alone", "top-p and top-k"])
def test_temperatures_towards_0_leave_the_best_tokens(temperature: float, others: dict[str, Any]) -> None:
    logits = torch.tensor([[-50.0, 3e4, 7.0, -1e-3], [2.0, 9.0, 9.0, -torch.inf], [-3.0, -2e4, -2.9, -9.0]])
    expected = [[0, 1, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 1, 0]]
    assert Sampling(temperature, **others).probabilities(logits).tolist() == expected
    assert GREEDY.probabilities(logits)[1].tolist() == [0, 1, 0, 0]  # the first of the best
    assert torch.equal(Sampling(2).probabilities(logits), Sampling(2.0).probabilities(logits))


def test_numbers_out_of_range_are_refused() -> None:
    nan, inf = float("nan"), float("inf")
    wrong = {"temperature": (-1.0, nan, inf), "top_p": (0.0, -0.5, 1.5, nan), "top_k": (-1, 2.5)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}: "):
                Sampling(**{name: value})
    assert Sampling(1e300).probabilities(torch.tensor([[3.0, -9.0]])).tolist() == [[0.5, 0.5]]
    # Those of a generation config, too.
    with pytest.raises(UserError, match=r"generation_config\.json has top_p: 0\.0 .* set data\.generator\.top_p"):
        resolve_sampling(None, None, None, GenerationConfig(top_p=0.0))
    assert resolve_sampling(None, 0.5, None, GenerationConfig(top_p=0.0, top_k=-1)) == Sampling(1.0, 0.5, 0)


def test_pick_is_the_inverse_of_the_distribution_function() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]]).expand(5, -1)
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 0.75, 1 - 1e-17], dtype=torch.float64)
    assert pick(weights, uniforms).tolist() == [1, 1, 3, 4, 4]


def test_seeded_draws_have_the_probabilities_they_are_given() -> None:
    draws = SeededDraws(0, "law")
    chances = torch.tensor([0.0, 0.1, 0.5, 1.0])
    share = torch.stack([draws.events(chances) for _ in range(4000)]).double().mean(0)
    assert share[0] == 0 and share[3] == 1
    assert (share - chances).abs().max() < 0.035  # four standard deviations of 4,000 fair coins
    tokens = torch.bincount(torch.stack([draws.token(torch.tensor([1.0, 0.0, 3.0])) for _ in range(4000)]), minlength=3)
    assert tokens[1] == 0 and abs(float(tokens[2]) / 4000 - 0.75) < 0.03


# One round: the acceptance rule against a walk node by node, and against the law it must have.


def random_tree(chance: torch.Generator, nodes: int) -> DraftTree:
    """Any shape, siblings may repeat a token."""
    parents = sorted(int(torch.randint(i, (1,), generator=chance)) for i in range(1, nodes))
    return one_tree(torch.randint(VOCAB, (nodes,), generator=chance).tolist(), [-1, *parents])


def one_tree(tokens: list[int], parents: list[int], drawn_from: torch.Tensor | None = None) -> DraftTree:
    q = None if drawn_from is None else drawn_from[None]
    return DraftTree(torch.tensor([tokens]), torch.tensor([parents]), len(tokens) - 1, drawn_from=q)


def accept_one(tree: DraftTree, logits: torch.Tensor, sampling: Sampling, draws: Draws) -> tuple[Path, int]:
    """Path and bonus of a single tree."""
    accepted = SampledAcceptance(sampling).accept(tree, logits[None], [draws])
    return path_of(accepted), int(accepted.bonus)


def path_of(accepted: Accepted) -> Path:
    length = int(accepted.length)
    return tuple(range(length) if accepted.path is None else accepted.path[0, :length].tolist())


SHAPES: dict[str, Callable[[torch.Generator], DraftTree]] = {
    "random": lambda chance: random_tree(chance, 6),
    # Behind the second sibling the tree goes deeper: the first one must still go before.
    "uneven": lambda chance: one_tree([0, 1, 2, 3, 1], [-1, 0, 0, 2, 3]),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_on_a_ranked_tree_equals_the_walk(shape: str, seed: int, sampling: Sampling) -> None:
    chance = torch.Generator().manual_seed(seed)
    tree = SHAPES[shape](chance)
    logits = torch.randn(tree.nodes, VOCAB, generator=chance) * 2

    p = [reference.processed(row.tolist(), sampling.temperature, sampling.top_p, sampling.top_k) for row in logits]
    walk = reference.sampled_walk(tree.tokens[0].tolist(), tree.parents[0].tolist(), p, None)
    assert_same_law(enumerate_law(lambda draws: accept_one(tree, logits, sampling, draws)), walk)


CUT = [0, 2, 3]  # the draft vocabulary where it is not full
DRAWN = {"chain": [-1, 0, 1], "siblings": [-1, 0, 0, 1]}  # parents


def all_drawn(parents: list[int], q: list[list[float]]) -> Iterator[tuple[list[int], float]]:
    """(tokens, probability) of all trees of this shape, drawn node by node, siblings without replacement."""
    open_trees = [([0], 1.0)]
    while open_trees:
        tokens, weight = open_trees.pop()
        if len(tokens) == len(parents):
            yield tokens, weight
            continue
        parent = parents[len(tokens)]
        taken = [tokens[i] for i in range(1, len(tokens)) if parents[i] == parent]
        left = [0.0 if token in taken else share for token, share in enumerate(q[parent])]
        open_trees += [([*tokens, x], weight * share / sum(left)) for x, share in enumerate(left) if share > 0]


@pytest.mark.parametrize(("shape", "drawn_as", "vocab"), thinned(DRAWN, SAMPLINGS, ["full", "cut"], together=2))
def test_a_round_on_a_drawn_tree_equals_the_walk_and_has_the_target_s_law(
    shape: str, drawn_as: str, vocab: str
) -> None:
    """The tree is drawn too: over all draws, the first token has the law of the target alone."""
    chance, parents, sampling = torch.Generator().manual_seed(1), DRAWN[shape], SAMPLINGS[drawn_as]
    draftable = list(range(VOCAB)) if vocab == "full" else CUT
    logits = torch.randn(len(parents), VOCAB, generator=chance) * 2
    q = torch.zeros(len(parents), VOCAB)
    for row in {*parents[1:]}:
        q[row, draftable] = torch.rand(len(draftable), generator=chance).softmax(-1)
    p = [reference.processed(row.tolist(), sampling.temperature, sampling.top_p, sampling.top_k) for row in logits]
    first: Law = defaultdict(float)
    for nodes, weight in all_drawn(parents, q.tolist()):
        tree = one_tree(nodes, parents, q)
        law = enumerate_law(lambda draws, tree=tree: accept_one(tree, logits, sampling, draws))
        assert_same_law(law, reference.sampled_walk(nodes, parents, p, q.tolist()))
        for (path, bonus), w in law.items():
            first[nodes[path[1]] if len(path) > 1 else bonus] += weight * w
    assert_same_law(first, dict(enumerate(p[0])))


# The whole loop: the law of the first tokens of an answer. That trees are accepted beside others as they are alone is
# tests/eval/test_rounds.py's matter.


def small_pair(draft_ids: list[int] | None, seed: int = 2) -> tuple[Target, FeatureDrafter]:
    """A target of VOCAB tokens and two layers with an untrained drafter."""
    model = make_target(
        num_layers=2, vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.6, seed=seed,
    )  # fmt: skip
    target = Target(model, [0, 1])
    return target, untaught("eagle3", target, None if draft_ids is None else DraftVocab(torch.tensor(draft_ids), VOCAB))


@torch.no_grad()
def answers_of(target: Target, prompt: list[int], length: int, sampling: Sampling) -> Law:
    """The law of the first `length` tokens by the target alone: one forward of transformers for every prefix."""
    law: Law = defaultdict(float)
    open_answers: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_answers:
        answer, weight = open_answers.pop()
        if len(answer) == length or STOP in answer:
            law[answer] += weight
            continue
        row = target.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].tolist()
        p = reference.processed(row, sampling.temperature, sampling.top_p, sampling.top_k)
        open_answers += [((*answer, token), weight * p[token]) for token in range(VOCAB) if p[token] > 0]
    return law


def decoded_law(
    target: Target, make: Callable[[], Proposer | None], prompt: list[int], length: int, sampling: Sampling
) -> Law:
    """The law of the same tokens as the loop decodes them; `make`: a proposer."""

    def answer(draws: EnumeratedDraws) -> Hashable:
        return tuple(decode(target, make(), prompt, {STOP}, length, sampling, draws).token_ids)

    return enumerate_law(answer)


def grown(drafter: FeatureDrafter, policy: TreePolicy, cut: DraftVocab | None = None) -> PolicyProposer:
    return PolicyProposer(FeatureDrafting(drafter, cut), policy)


CORPUS = corpus_of([[2, 0, 0, 3], [2, 0, 0, 1], [3, 2, 0, 0, 0], [0, 3, STOP]], VOCAB)
PROPOSERS: dict[str, Callable[[FeatureDrafter, Sampling], Any]] = {
    "plain": lambda drafter, sampling: None,
    "chain": lambda drafter, sampling: grown(drafter, Chain(2)),
    "drawn chain": lambda drafter, sampling: grown(drafter, Chain(2, sampling=sampling)),
    "drawn siblings": lambda drafter, sampling: grown(drafter, StaticTree(((0,), (1,)), sampling)),
    "tree": lambda drafter, sampling: grown(drafter, Eagle2(nodes=4, draft_calls=2, top_k=2)),
    "prompt lookup": lambda drafter, sampling: PromptLookup(2, CPU),
    "hierarchy": lambda drafter, sampling: HierarchicalProposer(
        small_pair(None, seed=3)[0], grown(drafter, Eagle2(nodes=3, draft_calls=1, top_k=2)), 2
    ),
    "sam": lambda drafter, sampling: sam_alone(CORPUS, nodes=4, width=2),
    "routed": lambda drafter, sampling: beside(grown(drafter, Chain(2)), CORPUS, 2, False, nodes=3),
    "fused": lambda drafter, sampling: beside(
        grown(drafter, Eagle2(nodes=3, draft_calls=1, top_k=2)), CORPUS, 1, True, nodes=3
    ),
}
LAWS = list(itertools.product(PROPOSERS, SAMPLINGS, ("full", "cut")))
FEW = [  # of few outcomes
    *((proposer, "T=1", "full") for proposer in ("plain", "sam", "routed", "fused")),
    *((proposer, "T=1", "cut") for proposer in ("drawn chain", "drawn siblings")),
    *((proposer, "top-p", "full") for proposer in ("chain", "tree", "prompt lookup", "hierarchy")),
    *((proposer, "T=0.5, top-k, top-p", "cut") for proposer in ("chain", "tree")),
]


@pytest.mark.parametrize(("proposer", "drawn_as", "vocab"), a_few(LAWS, *FEW))
def test_decoded_answers_have_the_target_s_law(proposer: str, drawn_as: str, vocab: str) -> None:
    sampling = SAMPLINGS[drawn_as]
    target, drafter = small_pair(None if vocab == "full" else CUT)
    copies = proposer in ("sam", "routed", "fused")
    prompt = [2, 0, 3, 2, 0] if copies else [1, 3, 0, 1, 3]  # after the former, SAM knows what may follow
    # These have so many outcomes that three tokens are enumerated only where top-p leaves few of them.
    length = 2 if (copies or proposer in ("drawn chain", "drawn siblings", "hierarchy")) and sampling.top_p == 1 else 3
    law = decoded_law(target, lambda: PROPOSERS[proposer](drafter, sampling), prompt, length, sampling)
    assert_same_law(law, answers_of(target, prompt, length, sampling))


def test_rows_that_copy_beside_a_drawn_chain_have_the_target_s_law() -> None:
    """In one batch, chains of SAM's, of two lengths, have one possible token at each place; a drafter draws others."""
    sampling, prompts = SAMPLINGS["top-p"], ([2, 0, 3, 2, 0], [2, 2, 0, 4, 1], [2, 0, 3, 2, 0])
    target, drafter = small_pair(None)
    proposer = beside(grown(drafter, Chain(1, sampling=sampling)), CORPUS, 2, False, nodes=3)
    rounds = set()

    def answer(draws: EnumeratedDraws) -> Hashable:
        rows: list[Draws] = [draws, SeededDraws(0, "beside"), SeededDraws(1, "beside")]
        answers = decode_batch(target, proposer, prompts, {STOP}, 3, sampling, rows)
        rounds.add(tuple((*answer.drafted_by[0], *answer.tree_nodes[:1]) for answer in answers if answer.rounds))
        return tuple(answers[0].token_ids)

    assert_same_law(enumerate_law(answer), answers_of(target, prompts[0], 3, sampling))
    assert (("sam static", 2), ("drafter", 2), ("sam dynamic", 3)) in rounds


def test_in_bfloat16_answers_have_the_law_of_the_rounded_logits() -> None:
    """Not float32's. How a forward over several tokens rounds may depend on the machine, hence the half."""
    sampling, prompt = SAMPLINGS["T=1"], [1, 3, 0, 1, 3]
    target, drafter = small_pair(None)
    exact = answers_of(target, prompt, 2, sampling)
    target = Target(target.model.to(torch.bfloat16), [0, 1])
    rounded = answers_of(target, prompt, 2, sampling)
    law = decoded_law(target, lambda: PROPOSERS["tree"](drafter, sampling), prompt, 2, sampling)

    def farthest(one: Law, other: Law) -> float:
        return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one.keys() | other.keys())

    assert farthest(exact, rounded) > 10 * TOLERANCE
    assert farthest(law, rounded) < 0.5 * farthest(exact, rounded)


@pytest.mark.parametrize("kind", ["eagle", "poss", "poss over eagle3"])
@pytest.mark.parametrize("proposer", ["chain", "drawn chain", "tree"])
def test_answers_drafted_by_every_kind_have_the_target_s_law(proposer: str, kind: str) -> None:
    """Deep enough for a change of specialists in a round; and with the target's head cut, where it is the head."""
    target, _ = small_pair(None)
    drafter = untaught(kind, target)
    cut = DraftVocab(torch.tensor(CUT), VOCAB) if proposer != "chain" else None
    sampling = SAMPLINGS["T=0.5, top-k, top-p"]
    drawn, tree = Chain(3, sampling=sampling), Eagle2(nodes=5, draft_calls=3, top_k=2)
    policy = {"chain": Chain(3), "drawn chain": drawn, "tree": tree}[proposer]
    prompt, length = [1, 3, 0, 1, 3], 3 if proposer == "drawn chain" else 4
    law = decoded_law(target, lambda: grown(drafter, policy, cut), prompt, length, sampling)
    assert_same_law(law, answers_of(target, prompt, length, sampling))


# Chains and static trees that are drawn from the drafter's distribution.


@pytest.mark.parametrize("stop", [None, Svip(0.15, 0.4)], ids=["chain", "svip"])
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.9, top_p=0.95)])
def test_a_drawn_chain_has_the_drafter_s_law(sampling: Sampling, stop: Svip | None) -> None:
    """All chains of three tokens: their weights are the product of q."""
    table = Table(19, vocab_size=5)

    def drawn(draws: EnumeratedDraws) -> Nodes:
        tree, _ = Chain(3, stop, sampling).grow(Scripted([table]), roots(1), [draws])
        return paths_of(tree, 0)[-1]

    law = enumerate_law(drawn)
    expected: dict[Nodes, float] = {}
    open_paths: dict[Nodes, float] = {(): 1.0}
    while open_paths:
        path, weight = open_paths.popitem()
        q = reference.processed(table(path), sampling.temperature, sampling.top_p, sampling.top_k)
        ends = len(path) == 2 or (stop and stop.c * reference.entropy_in_nats(table(path), 5) > stop.h**2)
        (expected if ends else open_paths).update({(*path, x): weight * q[x] for x in range(5) if q[x] > 0})
    assert law == {path: pytest.approx(weight, rel=1e-4) for path, weight in expected.items()}
    assert sum(expected.values()) == pytest.approx(1)
    if stop is not None:
        assert len({len(path) for path in law}) > 1


#        root
#       /    \
#      0      1         drawn in this order: 0, 1, then 00, then 10 and 11
#      |     / \
#     00   10   11
SIBLINGS = ((0,), (1,), (1, 0), (1, 1), (0, 0))


@pytest.mark.parametrize("sampling", [Sampling(0.9), Sampling(1.3, top_k=2)])
def test_siblings_are_drawn_without_replacement(sampling: Sampling) -> None:
    table, policy = Table(19, vocab_size=4), StaticTree(SIBLINGS, sampling)

    def below(*path: int) -> list[float]:
        return reference.processed(table(path), sampling.temperature, sampling.top_p, sampling.top_k)

    def drawn(draws: EnumeratedDraws) -> tuple[Nodes, ...]:
        tree, calls = policy.grow(Scripted([table]), roots(1), [draws])
        paths = paths_of(tree, 0)
        assert calls == [2] and tree.drawn_from is not None
        for node, path in enumerate(paths[:3]):
            torch.testing.assert_close(tree.drawn_from[0, node, 1:8:2], torch.tensor(below(*path)))
        assert not tree.drawn_from[0, 3:].any()
        return tuple(paths[1:])

    for ((a,), (b,), (first, below_a), (second, c), (third, d)), weight in enumerate_law(drawn).items():
        assert (first, second, third) == (a, b, b)
        expected = below(a)[below_a]
        for q, one, other in ((below(), a, b), (below(b), c, d)):
            expected *= q[one] * q[other] / (1 - q[one])
        assert weight == pytest.approx(expected, rel=1e-4, abs=1e-9)
