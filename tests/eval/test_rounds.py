"""Rounds in any order: rows come, draft, are rolled back, change places and go, beside each other; and every answer
takes the rounds that it takes alone.

hypothesis chooses what happens. The twin of a row is the list of its tokens: a drafter must say what the unroll, or a
plain forward, says of that text, and a proposer must draft what a fresh one drafts for it alone.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from draftsmith.eval.decoding.accept import Acceptance, acceptance_of
from draftsmith.eval.decoding.decode import Request, TargetVerifier, decode_stream
from draftsmith.eval.decoding.hierarchical import HierarchicalProposer
from draftsmith.eval.decoding.lantern import LanternAcceptance, Relaxation
from draftsmith.eval.decoding.policies import C2T, PolicyProposer, TreePolicy, policy_of
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.draft_tree import Committed, Drafting, DraftTree, Proposer
from draftsmith.models.feature_drafter import FeatureDrafter, FeatureDrafting
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.train.loss.unroll import unroll
from tests.conftest import make_target
from tests.decoding import CPU, beside, corpus_of, sam_alone
from tests.drafter_cases import CASES, STRUCTURES, VOCAB_SIZE, column_alone, drafter_of, embedder_of, inputs_of
from tests.pairs import untaught
from tests.scripted_drafting import Scripted, Table, linear_classifier
from tests.thinning import effort, efforts, meeting

LONGEST = 60  # tokens; longer rows are rolled back or go
SEEDS = st.integers(0, 10**6)


def features_of(text: Sequence[int], width: int) -> torch.Tensor:
    """[tokens, width] made-up states of a target, one for each token and position."""
    table = _states(width)
    return table[torch.tensor(text) % len(table), torch.arange(len(text))]


@cache
def _states(width: int) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, 2 * LONGEST, width, generator=torch.Generator().manual_seed(8))


class Rows(RuleBasedStateMachine):
    """What happens to the rows of `subject`, a `Drafting` or a `Proposer`.

    Args:
        width: of the target's states that it reads; 0: none.
        tokens: texts are of the tokens 1 to this number.
    """

    def __init__(self, subject: Any, target: Any, width: int, tokens: int) -> None:
        super().__init__()
        self.subject, self.target, self.width, self.tokens = subject, target, width, tokens
        self.texts: list[list[int]] = []  # the root, which nobody has read, last
        self.read: list[int | None] = []  # tokens of each that were observed with what follows them; None: a new row

    def change(self, kept: Sequence[int], new: int) -> None:
        """These rows stay, in this order, and so many come."""
        self.subject.set_rows(kept, new)
        self.texts, self.read = [self.texts[row] for row in kept], [self.read[row] for row in kept]

    def some(self, chance: random.Random, count: int) -> list[int]:
        return [chance.randint(1, self.tokens) for _ in range(count)]

    def observe(self, subject: Any, texts: Sequence[list[int]], begins: Sequence[int]) -> None:
        counts = [len(text) - 1 - begin for text, begin in zip(texts, begins, strict=True)]
        features = None
        if self.width:
            features = torch.full((len(texts), max(counts), self.width), 1e3)  # nobody reads the padding
            for row, (text, begin, count) in enumerate(zip(texts, begins, counts, strict=True)):
                features[row, :count] = features_of(text, self.width)[begin : begin + count]
        subject.observe(Committed(self.target, [list(text) for text in texts], features, counts))

    def observed(self) -> None:
        self.observe(self.subject, self.texts, [read or 0 for read in self.read])
        self.read = [len(text) - 1 for text in self.texts]

    @precondition(lambda self: None not in self.read)
    @rule(lengths=st.lists(st.sampled_from([2, 3, 9, 20]), min_size=1, max_size=2), stay=st.booleans(), seed=SEEDS)
    def admit(self, lengths: list[int], stay: bool, seed: int) -> None:
        """Behind all rows, or behind some of them, in any order, while the others go."""
        chance, count = random.Random(seed), len(self.texts)
        staying = list(range(count)) if stay else chance.sample(range(count), chance.randint(0, count))
        self.change(staying[:3], len(lengths))
        self.texts += [self.some(random.Random(seed + i), length) for i, length in enumerate(lengths)]
        self.read += [None] * len(lengths)

    @precondition(lambda self: len(self.texts) > 1 and None not in self.read)
    @rule(seed=SEEDS)
    def keep(self, seed: int) -> None:
        chance, count = random.Random(seed), len(self.texts)
        self.change(chance.sample(range(count), chance.randint(1, count)), 0)

    @precondition(lambda self: hasattr(self.subject, "rollback") and self.texts and None not in self.read)
    @rule(seed=SEEDS)
    def rollback(self, seed: int) -> None:
        """Rows lose nothing, a few positions, or all, and go on otherwise."""
        chance = random.Random(seed)
        lengths = [chance.choice([read, read, max(0, read - 2), 0]) for read in self.read if read is not None]
        self.subject.rollback(lengths)
        self.texts = [
            text[: length + 1] + self.some(chance, chance.randint(1, 3))
            for text, length in zip(self.texts, lengths, strict=True)
        ]
        self.read = list(lengths)

    @precondition(lambda self: self.texts and max(map(len, self.texts)) < LONGEST - 8)
    @rule(seed=SEEDS)
    def round(self, seed: int) -> None:
        chance = random.Random(seed)
        self.observed()
        for row, accepted in enumerate(self.drafted(chance)):
            # Behind what the target accepted stands a token of its own, or several where another one drafted.
            self.texts[row] += [*accepted, *self.some(chance, chance.randint(1, 2))]

    def drafted(self, chance: random.Random) -> list[list[int]]:
        """Drafts once below each row, and checks it; of each row the tokens of a drafted path."""
        raise NotImplementedError


class Distributions(Rows):
    """Log-probabilities along every path of random trees.

    Args:
        expected: [1 + drafted, Vd] log-probabilities below a text and behind each drafted token.
    """

    def __init__(
        self, drafting: Any, target: Any, width: int, expected: Callable[[list[int], list[int]], torch.Tensor]
    ) -> None:
        super().__init__(drafting, target, width, VOCAB_SIZE - 1)
        self.expected = expected

    def drafted(self, chance: random.Random) -> list[list[int]]:
        """Chains at first, or wide; nodes of one depth in one call, or each in its own; siblings repeat some tokens."""
        shape = [1] * chance.randint(0, 2) + [chance.randint(1, 3) for _ in range(chance.randint(0, 3))]
        rows, together = range(len(self.texts)), chance.random() < 0.7
        found = {0: self.subject.root_log_probs()}
        paths: list[dict[int, list[int]]] = [{0: [0]} for _ in rows]  # of each slot: the slots from the root to it
        said: list[dict[int, int]] = [{} for _ in rows]  # the token of each slot
        above, slots = [0], 1
        for depth, count in enumerate(shape, start=1):
            level = list(range(slots, slots + count))
            parents = [[chance.choice(above) for _ in level] for _ in rows]
            for row in rows:
                for slot, parent in zip(level, parents[row], strict=True):
                    paths[row][slot] = [*paths[row][parent], slot]
                    said[row][slot] = chance.randint(1, 4)
            for call in [level] if together else [[slot] for slot in level]:
                wanted = torch.tensor([[paths[row][slot][-2] for slot in call] for row in rows])
                tokens = torch.tensor([[said[row][slot] for slot in call] for row in rows])
                log_probs = self.subject.expand(wanted, tokens, depth)
                found |= {slot: log_probs[:, place] for place, slot in enumerate(call)}
            above, slots = level, slots + count
        accepted = []
        for row, text in enumerate(self.texts):
            path = paths[row][chance.choice(above)]
            mine = torch.stack([found[slot][row] for slot in path]).double()
            wanted = self.expected(text, [said[row][slot] for slot in path[1:]])
            # Float32 in one go against float32 alone; another row's or another node's key is off by far more.
            torch.testing.assert_close(mine, wanted.double(), atol=5e-5, rtol=5e-5)
            chosen = paths[row][chance.randrange(slots)]
            accepted.append([said[row][slot] for slot in chosen[1:]])
        return accepted


def by_features(name: str) -> Distributions:
    drafter = drafter_of(CASES[name])
    width = len(drafter.config.capture_layers) * drafter.config.hidden_size
    return Distributions(FeatureDrafting(drafter), embedder_of(drafter), width, partial(unrolled, drafter, width))


@torch.no_grad()
def unrolled(drafter: FeatureDrafter, width: int, text: list[int], drafted: list[int]) -> torch.Tensor:
    """By the unroll of training. Of what is drafted, no state is ever read."""
    captured, steps = torch.full((1, len(text) + len(drafted), width), 1e3), len(drafted) + 1
    captured[0, : len(text) - 1] = features_of(text, width)[:-1]
    inputs = inputs_of(drafter, torch.tensor([[*text, *drafted]]))
    outputs = unroll(drafter, captured, inputs, column_alone(len(text) - 2, steps), steps)
    return torch.cat([torch.log_softmax(drafter.logits(output[0]), -1) for output in outputs])


def by_lm(family: str, cut: bool) -> Distributions:
    sliding = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    settings = sliding if family == "gemma3_text" else {}
    lm = Target(make_target(family, 2, 11, vocab_size=VOCAB_SIZE, **settings), (0,))
    ids = torch.arange(0, VOCAB_SIZE, 3) if cut else torch.arange(VOCAB_SIZE)

    @torch.no_grad()
    def read_whole(text: list[int], drafted: list[int]) -> torch.Tensor:
        logits = lm.model(torch.tensor([[*text, *drafted]]), use_cache=False).logits[0, len(text) - 1 :]
        return torch.log_softmax(logits[:, ids].double(), dim=-1)

    return Distributions(CausalLMDrafting(lm, DraftVocab(ids, VOCAB_SIZE) if cut else None), lm, 0, read_whole)


def check(machine: Any, examples: int) -> None:  # any callable serves, not types alone
    run_state_machine_as_test(machine, settings=effort(examples))


DRAFTERS: dict[str, Callable[[], Distributions]] = {
    **{name: partial(by_features, name) for name in STRUCTURES},
    "llama": partial(by_lm, "llama", False),
    "gemma3, cut": partial(by_lm, "gemma3_text", True),
}


@pytest.mark.parametrize(
    ("name", "examples"), efforts(DRAFTERS, "eagle, two layers", "eagle3.1", "poss3-1", "gemma3, cut")
)
def test_distributions_are_those_of_the_text_alone(name: str, examples: int) -> None:
    check(DRAFTERS[name], examples)


# Proposers.

TOKENS = 8  # few, so that texts repeat themselves
VOCAB = TOKENS + 1
CORPUS = corpus_of([[1, 2, 1, 2, 1, 3, 1, 2], [2, 6, 4, 4, 4, 2]], VOCAB)
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


@cache
def small_target(seed: int) -> Target:
    return Target(make_target("llama", 2, seed, vocab_size=VOCAB, pad_token_id=None), (0, 1))


class ByRoot(Scripted):
    """It has another table for each root."""

    capture_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.of_root = [Table(root, VOCAB, (0.5, 2.0, 4.0)) for root in range(VOCAB)]
        super().__init__(self.of_root)
        self.vocab = DraftVocab.full(VOCAB)

    def observe(self, committed: Committed) -> None:
        self.tables = [self.of_root[tokens[-1]] for tokens in committed.tokens]


def policy(name: str, sampling: Sampling) -> TreePolicy:
    if name.startswith("c2t"):
        nodes = {"beam": 3} if name == "c2t" else {"beam": None, "nodes": 7}
        return C2T(linear_classifier(3.0, 1.0, 0.0, -1.2), 0.5, top_k=4, draft_calls=4, **nodes)
    return policy_of(TreeSection.model_validate({"policy": name.removeprefix("drawn "), **TREES[name]}), sampling)


class Proposals(Rows):
    """Trees, draft calls and sources, against those of a new proposer."""

    def __init__(self, make: Callable[[], Proposer]) -> None:
        self.make, subject = make, make()
        target = small_target(0)
        super().__init__(subject, target, len(subject.capture_layers) * target.hidden_size, TOKENS)

    def drafted(self, chance: random.Random) -> list[list[int]]:
        tree, calls = self.subject.propose()
        accepted = []
        for row, text in enumerate(self.texts):
            alone = self.make()
            alone.set_rows([], 1)
            self.observe(alone, [text], [0])
            its, its_calls = alone.propose()
            tokens, parents = nodes_of(tree, row)
            assert (tokens, parents) == nodes_of(its, 0)
            assert [calls[row]] == its_calls
            assert (tree.sources is None) == (its.sources is None)
            assert tree.sources is None or its.sources is None or tree.sources[row] == its.sources[0]
            node, path = chance.randrange(len(tokens)), []
            while node:
                path, node = [tokens[node], *path], parents[node]
            accepted.append(path)
        return accepted


def nodes_of(tree: DraftTree, row: int) -> tuple[list[int], list[int]]:
    size = tree.nodes if tree.sizes is None else int(tree.sizes[row])
    return tree.tokens[row, :size].tolist(), tree.parents[row, :size].tolist()


def proposer_of(
    kind: str,
    target_of: Callable[[int], Target],
    tree: str = "eagle2",
    sampling: Sampling = GREEDY,
    drafter: str = "eagle3",
    l_threshold: int = 3,
) -> Proposer:
    """`target_of`: target 0 is drafted for, target 1 is a small LM; `drafter` drafts beside SAM."""
    if kind == "prompt lookup":
        return PromptLookup(4, CPU)
    if kind == "sam":
        return sam_alone(CORPUS)
    if kind in ("routed", "fused"):
        return beside(proposer_of(drafter, target_of, tree, sampling), CORPUS, l_threshold, kind == "fused")
    if kind == "hierarchy, routed":
        return beside(proposer_of("hierarchy", target_of, tree), CORPUS, l_threshold, fuse=False)
    if kind == "hierarchy":
        inner = PolicyProposer(FeatureDrafting(untaught("eagle3", target_of(1))), policy(tree, GREEDY))
        return HierarchicalProposer(target_of(1), inner, 4)
    if kind in ("scripted", "causal lm"):
        drafting: Drafting = ByRoot() if kind == "scripted" else CausalLMDrafting(target_of(1))
    else:
        drafting = FeatureDrafting(untaught(kind, target_of(0)))
    return PolicyProposer(drafting, policy(tree, sampling))


PROPOSERS = ("prompt lookup", "sam", "eagle3", "poss", "causal lm", "hierarchy", "routed", "fused", "hierarchy, routed")


@pytest.mark.parametrize(
    ("name", "examples"), efforts(PROPOSERS, "prompt lookup", "sam", "poss", "causal lm", "hierarchy", "routed")
)
def test_proposals_are_those_for_the_text_alone(name: str, examples: int) -> None:
    l_threshold = 1 if name == "routed" else 3  # the former for all rows at once, now and then
    check(lambda: Proposals(lambda: proposer_of(name, small_target, l_threshold=l_threshold)), examples)


# Answers of the whole loop. Tokens alone would hide most of what neighbours change. So the nodes, the draft calls and
# the count of random numbers are compared, too, for whatever proposes, grows trees, accepts and draws; any two of them
# meet. Some neighbours end at once, some near the target's last position, and some copy while others need a drafter.

POSITIONS = 32
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
def positioned_target(seed: int) -> Target:
    """Learned positions: a forward behind the last one would fail."""
    settings = {"n_positions": POSITIONS, "max_position_embeddings": POSITIONS, "initializer_range": 0.6}
    small = {"vocab_size": VOCAB, "hidden_size": 16, "pad_token_id": None}
    return Target(make_target("gpt2", 2, seed, **small, **settings), [0, 1])


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
POLICIES = (*TREES, "c2t", "c2t of few nodes")
TRIED = ("chain", "eagle2")  # by proposers with models: a policy reads distributions and nothing else
TREES_OF: dict[str, Sequence[str]] = {  # with the trees of each
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
EVERYTHING = [each for kind, trees in TREES_OF.items() for each in product([kind], trees, RULES)]
# Where one row copies and another draws, the rule sees both kinds of trees at once.
MIXED = [each for each in EVERYTHING if each[0] == "routed" and "drawn" in each[1]]
PAIRS = [*MIXED, *meeting([each for each in EVERYTHING if each not in MIXED])]
FEW = {*(each for each in MIXED if each[2] == "sampled"), *meeting(PAIRS, 1)}
COMBINATIONS = [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in PAIRS]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=", ".join)
def test_every_answer_takes_the_rounds_that_it_takes_alone(combination: tuple[str, str, str]) -> None:
    kind, tree, rule = combination
    target, (sampling, acceptance) = positioned_target(0), RULES[rule]
    proposer = proposer_of(kind, positioned_target, tree, sampling, drafter="scripted")

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
