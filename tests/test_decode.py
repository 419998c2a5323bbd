"""The decoding loop is lossless, stops exactly, and counts what it says. Trees against slow twins."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from draftsmith.eval.accept import accept_greedy
from draftsmith.eval.decode import cut, decode
from draftsmith.eval.policies import PolicyProposer, grow_chain, grow_eagle2
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Drafting
from draftsmith.models.prompt_lookup import PromptLookup
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from tests import reference
from tests.conftest import make_target

STOP = 4
FAMILIES = ["llama", "qwen2", "qwen3"]


def make_pair(family: str, draft_tokens: int | None = None, **overrides) -> tuple[Target, Eagle3Drafter]:
    target = Target(make_target(family, **overrides))
    torch.manual_seed(3)
    if draft_tokens is None:
        vocab = DraftVocab.full(target.vocab_size)
    else:
        vocab = DraftVocab(torch.randperm(target.vocab_size)[:draft_tokens].sort().values, target.vocab_size)
    return target, Eagle3Drafter(
        Eagle3Config.for_target(target.config, target.vocab_size, target.capture_layers, vocab.size),
        vocab,
        target.embedding_table,
    )


def generate(target: Target, prompt: list[int], max_new_tokens: int, stop: int = STOP) -> list[int]:
    """transformers' own greedy decoding."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=stop,
    )
    return out[0, len(prompt) :].tolist()


class Oracle:
    """Drafts what it was told the target will say, spoiled by `spoil` (an adversary's hand)."""

    reads_features = True

    def __init__(self, answer: list[int], prompt_length: int, nodes: int, spoil) -> None:
        self.answer, self.prompt_length, self.nodes, self.spoil = answer, prompt_length, nodes, spoil
        self.features: list[torch.Tensor] = []

    def reset(self, draws: object = None) -> None:
        self.features, self.seen = [], 0

    def observe(self, tokens: Sequence[int], features: torch.Tensor | None) -> None:
        assert features is not None
        self.seen = len(tokens) - self.prompt_length
        self.features.append(features)
        assert sum(map(len, self.features)) == len(tokens) - 1  # every committed position, once, but for the root

    def propose(self, root: int) -> tuple[DraftTree, int]:
        return self.spoil(root, self.answer[self.seen : self.seen + self.nodes]), 1


def spoiled_chain(root: int, future: list[int]) -> DraftTree:
    """Right twice, then wrong."""
    return DraftTree.chain([root, *future[:2], *[(t + 1) % 320 for t in future[2:]]], torch.device("cpu"))


def always_token_zero(root: int, future: list[int]) -> DraftTree:
    return DraftTree.chain([root, 0, 0, 0], torch.device("cpu"))


def stop_in_the_middle(root: int, future: list[int]) -> DraftTree:
    return DraftTree.chain([root, *future[:1], STOP, *future[2:]], torch.device("cpu"))


def duplicated_siblings(root: int, future: list[int]) -> DraftTree:
    token = future[0] if future else 7
    after = future[1] if len(future) > 1 else 8
    tokens = torch.tensor([root, token, token, 9, after, after])
    return DraftTree(tokens, torch.tensor([-1, 0, 0, 0, 1, 2]))


def longer_than_the_budget(root: int, future: list[int]) -> DraftTree:
    return DraftTree.chain([root, *future, *range(10, 60)], torch.device("cpu"))


SPOILS = [spoiled_chain, always_token_zero, stop_in_the_middle, duplicated_siblings, longer_than_the_budget]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy", [("chain", 5, 4, 1), ("eagle2", 20, 4, 4), ("eagle2", 60, 6, 10)], ids=["chain", "tree20", "tree60"]
)
@pytest.mark.parametrize("draft_tokens", [None, 40], ids=["full", "cut"])
def test_greedy_decoding_equals_generate(family: str, policy: tuple, draft_tokens: int | None) -> None:
    target, drafter = make_pair(family, draft_tokens, tie_word_embeddings=family == "qwen2")
    chance = random.Random(5)
    for length in (1, 9, 30):
        prompt = [chance.randrange(5, 320) for _ in range(length)]
        expected = generate(target, prompt, 40)
        proposer = PolicyProposer(Eagle3Drafting(drafter), *policy)
        out = decode(target, proposer, prompt, {STOP}, 40)
        assert out.token_ids == expected
        assert sum(out.accepted_per_round) + out.rounds - out.last_round_cut + 1 == len(out.token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_lookup_and_plain_decoding_equal_generate(family: str) -> None:
    target = Target(make_target(family))
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    expected = generate(target, prompt, 40)
    assert decode(target, None, prompt, {STOP}, 40).token_ids == expected
    assert decode(target, PromptLookup(10, target.device), prompt, {STOP}, 40).token_ids == expected


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("max_new_tokens", [1, 2, 23])
def test_adversarial_drafts_change_nothing(spoil, max_new_tokens: int) -> None:
    target = Target(make_target())
    prompt = [11, 12, 13]
    expected = generate(target, prompt, max_new_tokens)
    oracle = Oracle(generate(target, prompt, 80, stop=-1), len(prompt), 6, spoil)
    out = decode(target, oracle, prompt, {STOP}, max_new_tokens)
    assert out.token_ids == expected
    if spoil is spoiled_chain and max_new_tokens == 23:
        assert set(out.accepted_per_round[:-1]) == {2}  # the right drafts are really accepted


def test_a_stop_token_inside_an_accepted_path_ends_the_answer_there() -> None:
    """The target's third token is declared the stop token: nothing behind it stands in the answer or in the counts."""
    target = Target(make_target())
    prompt = [11, 12, 13]
    future = generate(target, prompt, 30, stop=-1)
    stop = future[3]
    end = future.index(stop) + 1
    oracle = Oracle(future, len(prompt), 12, lambda root, rest: DraftTree.chain([root, *rest], torch.device("cpu")))
    out = decode(target, oracle, prompt, {stop}, 30)
    assert out.token_ids == future[:end]
    assert out.accepted_per_round == [end - 1]
    assert out.last_round_cut


def test_the_proposer_sees_the_target_s_own_states_of_what_was_committed() -> None:
    """Whatever stood beside the accepted path in the tree: never a drafted or a rejected node's state."""
    target = Target(make_target())
    prompt = [11, 12, 13]
    future = generate(target, prompt, 40, stop=-1)

    def right_path_behind_wrong_ones(root: int, rest: list[int]) -> DraftTree:
        tokens = [root, (rest[0] + 1) % 320, (rest[0] + 2) % 320, rest[0], 9, rest[1] if len(rest) > 1 else 8]
        return DraftTree(torch.tensor(tokens), torch.tensor([-1, 0, 0, 0, 1, 3]))

    oracle = Oracle(future, len(prompt), 6, right_path_behind_wrong_ones)
    out = decode(target, oracle, prompt, {-1}, 25)
    assert 2 in out.accepted_per_round
    seen = torch.cat(oracle.features)
    expected = target.states(torch.tensor([prompt + future])).captured[0, : len(seen)]
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "budget", "kept"),
    [([1, 2, 3], 9, 3), ([1, 9, 3], 9, 2), ([9], 5, 1), ([1, 2, 3], 2, 2), ([1, 2, 9], 2, 2), ([1, 9, 9], 3, 2)],
)
def test_cut(tokens: list[int], budget: int, kept: int) -> None:
    assert cut(tokens, {9}, budget) == kept


class Scripted:
    """A `Drafting` whose log-probabilities are given; remembers what was expanded. `ties` makes all equal."""

    def __init__(self, vocab_size: int, seed: int, ties: bool) -> None:
        self.vocab = DraftVocab(torch.arange(vocab_size) * 2 + 1, vocab_size * 2 + 2)
        self.generator, self.ties, self.size = torch.Generator().manual_seed(seed), ties, vocab_size
        self.paths: list[tuple[int, ...]] = [()]  # tokens from below the root to each slot
        self.values: dict[tuple[int, ...], torch.Tensor] = {}

    def _draw(self, path: tuple[int, ...]) -> torch.Tensor:
        logits = torch.zeros(self.size) if self.ties else 3 * torch.randn(self.size, generator=self.generator)
        self.values[path] = torch.log_softmax(logits, -1)
        return self.values[path]

    def reset(self) -> None: ...

    def observe(self, tokens: Sequence[int], features: torch.Tensor) -> None: ...

    def root_log_probs(self) -> torch.Tensor:
        return self._draw(())

    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        rows = []
        for slot, token in zip(parent_slots.tolist(), tokens.tolist(), strict=True):
            path = (*self.paths[slot], token)
            assert len(path) == depth
            rows.append(self._draw(path))
            self.paths.append(path)
        return torch.stack(rows)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    paths: list[tuple[int, ...]] = [()]
    for i in range(1, len(tokens)):
        assert 0 <= parents[i] < i
        paths.append((*paths[parents[i]], tokens[i]))
    return paths


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(("nodes", "calls", "top_k"), [(60, 6, 10), (12, 3, 4), (2, 1, 3), (30, 8, 4), (8, 2, 9)])
def test_eagle2_keeps_the_best_nodes_and_stays_connected(ties: bool, nodes: int, calls: int, top_k: int) -> None:
    drafting = Scripted(vocab_size=12, seed=nodes, ties=ties)
    tree = grow_eagle2(drafting, 7, nodes, calls, top_k)
    assert len(tree) == nodes
    paths = paths_of(tree)
    assert len(set(paths)) == nodes  # unique siblings
    assert tree.depths.tolist() == [len(p) for p in paths]
    assert int(tree.depths.max()) <= calls
    # Everything proposed: the top_k children of each expanded node. The kept ones are the best of them.
    scores: dict[tuple[int, ...], float] = {}
    for path, values in drafting.values.items():
        above = 0.0 if not path else scores_of(drafting, path)
        best = values.topk(min(top_k, len(values)))
        for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            scores[(*path, int(drafting.vocab.to_target(torch.tensor(index))))] = above + value
    kept = sorted((scores[p] for p in paths[1:]), reverse=True)
    best = sorted(scores.values(), reverse=True)[: nodes - 1]
    assert kept == pytest.approx(best, abs=1e-4)


def scores_of(drafting: Scripted, path: tuple[int, ...]) -> float:
    """Sum of log-probabilities along a path."""
    total = 0.0
    for i, token in enumerate(path):
        total += float(drafting.values[path[:i]][int(drafting.vocab.to_draft(torch.tensor(token)))])
    return total


def test_a_certain_child_does_not_lose_its_parent() -> None:
    """Children with probability 1 tie with their parents: the shallower one must be kept first."""

    class Certain(Scripted):
        def _draw(self, path: tuple[int, ...]) -> torch.Tensor:
            values = torch.full((self.size,), -math.inf)
            values[len(path)] = 0.0  # another token at every depth
            values[7] = -20.0
            self.values[path] = values
            return values

    tree = grow_eagle2(Certain(8, 0, ties=False), 0, nodes=5, draft_calls=6, top_k=2)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    assert tree.tokens.tolist() == [0, 1, 3, 5, 7]


def test_chain_follows_the_likeliest_token() -> None:
    drafting = Scripted(vocab_size=12, seed=1, ties=False)
    tree = grow_chain(drafting, 7, nodes=5)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    path = tuple(tree.tokens.tolist()[1:])
    for i, token in enumerate(path):
        assert token == 2 * int(drafting.values[path[:i]].argmax()) + 1
    assert len(drafting.values) == 4  # as many draft calls as drafted tokens


def random_tree(chance: random.Random, nodes: int) -> tuple[list[int], list[int]]:
    parents = [-1, *sorted(chance.randrange(i) for i in range(1, nodes))]
    return [chance.randrange(6) for _ in range(nodes)], parents


def test_tree_ancestors_depths_and_acceptance_against_slow_twins() -> None:
    chance = random.Random(0)
    for _ in range(200):
        nodes = chance.randint(1, 14)
        tokens, parents = random_tree(chance, nodes)
        tree = DraftTree(torch.tensor(tokens), torch.tensor(parents))
        ancestors = reference.draft_tree_ancestors(parents)
        assert [set(row.nonzero().flatten().tolist()) for row in tree.ancestors] == ancestors
        assert tree.depths.tolist() == [len(a) - 1 for a in ancestors]
        logits = torch.randn(nodes, 6, generator=torch.Generator().manual_seed(chance.randrange(10**6)))
        path, bonus = accept_greedy(tree, logits)
        best = logits.argmax(-1).tolist()
        twin, twin_bonus = reference.greedy_path(tokens, parents, best)
        walked = [tokens[i] for i in path.tolist()]
        # Repeated siblings: the twin may take another copy, and a shorter path below it; ours is never shorter.
        assert len(path) >= len(twin)
        if len({(p, t) for p, t in zip(parents, tokens, strict=True)}) == nodes:
            assert (path.tolist(), int(bonus)) == (twin, twin_bonus)
        assert all(best[a] == t for a, t in zip(path.tolist(), walked[1:], strict=False))


def test_prompt_lookup_continues_the_latest_longest_match() -> None:
    lookup = PromptLookup(3, torch.device("cpu"))
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 61, 62, 1, 2, 3]
    lookup.observe(tokens[:7], torch.empty(0))
    lookup.observe(tokens, torch.empty(0))
    assert lookup.propose(3)[0].tokens.tolist() == [3, 50, 9, 2]  # (1, 2, 3) beats the later (2, 3)
    lookup.reset()
    lookup.observe([5, 6, 7], torch.empty(0))
    assert len(lookup.propose(7)[0]) == 1  # nothing to copy: a round of plain decoding
