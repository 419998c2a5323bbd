"""The decoding loop is lossless, stops exactly, and counts what it says; a decoder drafts for another; the Python API.

That rows come, go and roll back as if each were alone is tests/eval/test_rounds.py's matter.
"""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.eval.decoding import decode as decode_module
from draftsmith.eval.decoding.accept import GreedyAcceptance
from draftsmith.eval.decoding.decode import Request, TargetVerifier, decode_stream
from draftsmith.eval.decoding.hierarchical import HierarchicalProposer
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.decoding.speculator import Speculator
from draftsmith.models.chat import decode_answer, render_prompt
from draftsmith.models.draft_tree import Committed, DraftTree
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import TargetSession
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import TargetSection
from tests import reference
from tests.clock import Clock, slowed
from tests.conftest import make_target
from tests.decoding import CPU, decode, decode_batch
from tests.evaluation_cases import save_untrained
from tests.pairs import PROMPTS, blurred_copy, greedy, pair_of, untaught
from tests.scripted_drafting import unasked_target
from tests.thinning import effort

STOP = 4
Nodes = tuple[list[int], list[int]]  # tokens and parents
Spoil = Callable[[int, list[int]], Nodes]


class Oracle:
    """Drafts what it was told the target will say, spoiled by `spoil` (an adversary's hand)."""

    capture_layers: tuple[int, ...] = (2, 3, 4)

    def __init__(self, answers: list[list[int]], prompts: list[list[int]], nodes: int, spoil: Spoil) -> None:
        self.answers, self.prompts, self.nodes, self.spoil = answers, prompts, nodes, spoil
        self.features: list[list[torch.Tensor]] = []  # of each row, those that are done included

    def set_rows(self, kept: Sequence[int], new: int = 0, draws: object = None) -> None:
        if new:
            assert not kept, "no answer waits for another's row"
            self.features, self.live = [[] for _ in range(new)], list(range(new))
        else:
            self.live = [self.live[row] for row in kept]

    def observe(self, committed: Committed) -> None:
        assert committed.features is not None
        self.committed = committed.tokens
        told = committed.tokens, committed.features, committed.counts
        for row, tokens, states, count in zip(self.live, *told, strict=True):
            self.features[row].append(states[:count])
            assert sum(map(len, self.features[row])) == len(tokens) - 1  # every position once, but for the root

    def propose(self) -> tuple[DraftTree, list[int]]:
        trees = []
        for row, tokens in zip(self.live, self.committed, strict=True):
            seen = len(tokens) - len(self.prompts[row])
            trees.append(self.spoil(tokens[-1], self.answers[row][seen : seen + self.nodes]))
        return side_by_side(trees), [1] * len(trees)


def side_by_side(trees: list[Nodes]) -> DraftTree:
    """Trees of different sizes, padded; a single one is not."""
    widest = max(len(tokens) for tokens, _ in trees)
    depths = [len(reference.draft_tree_ancestors(parents)[i]) - 1 for _, parents in trees for i in range(len(parents))]
    return DraftTree(
        torch.tensor([tokens + [0] * (widest - len(tokens)) for tokens, _ in trees]),
        torch.tensor([parents + [0] * (widest - len(parents)) for _, parents in trees]),
        max(depths),
        sizes=None if len(trees) == 1 else torch.tensor([len(tokens) for tokens, _ in trees]),
    )


def chain(tokens: list[int]) -> Nodes:
    return tokens, list(range(-1, len(tokens) - 1))


def duplicated_siblings(root: int, future: list[int]) -> Nodes:
    token, after, *_ = [*future, 7, 8]
    return [root, token, token, 9, after, after], [-1, 0, 0, 0, 1, 2]


def right_path_behind_wrong_ones(root: int, future: list[int]) -> Nodes:
    token, after, *_ = [*future, 7, 8]
    return [root, (token + 1) % 320, (token + 2) % 320, token, 9, after], [-1, 0, 0, 0, 1, 3]


SPOILS: dict[str, Spoil] = {
    "right twice, then wrong": lambda root, future: chain([root, *future[:2], *[(t + 1) % 320 for t in future[2:]]]),
    "right behind wrong ones": right_path_behind_wrong_ones,
    "a stop in the middle": lambda root, future: chain([root, *future[:1], STOP, *future[2:]]),
    "duplicated siblings": duplicated_siblings,
    "longer than the budget": lambda root, future: chain([root, *future, *range(10, 60)]),
    "another size every time": lambda root, future: chain([root, *future[: root % 5]]),
}
SHORT = itertools.product(("right twice, then wrong", "duplicated siblings", "longer than the budget"), (1, 2), (1,))
ASKED = [[11, 12, 13], [21, 22, 23, 24, 25, 26], [7]]


@cache
def target_and_futures() -> tuple[Target, list[list[int]]]:
    """A target and what it says to each of `ASKED`, without an end."""
    target = Target(make_target("llama"))
    return target, [greedy(target, prompt, 80) for prompt in ASKED]


@pytest.mark.parametrize(("name", "max_new_tokens", "rows"), [*((name, 23, 3) for name in SPOILS), *SHORT])
def test_adversarial_drafts_change_nothing(name: str, max_new_tokens: int, rows: int) -> None:
    """The proposer sees the target's own states of what was committed, whatever stood beside the path in the tree."""
    target, futures = target_and_futures()
    prompts, expected = ASKED[:rows], [cut(future, STOP, max_new_tokens) for future in futures[:rows]]
    oracle = Oracle(futures[:rows], prompts, 6, SPOILS[name])
    answers = decode_batch(target, oracle, prompts, {STOP}, max_new_tokens)
    assert [answer.token_ids for answer in answers] == expected
    for prompt, future, answer, features in zip(prompts, futures, answers, oracle.features, strict=False):
        assert sum(answer.accepted_per_round) + answer.rounds - answer.last_round_cut + 1 == len(answer.token_ids)
        if features:
            seen = torch.cat(features)
            states = target.states(torch.tensor([prompt + future])).captured[0, : len(seen)]
            torch.testing.assert_close(seen, states, rtol=1e-4, atol=1e-4)
        if name.startswith("right") and max_new_tokens == 23:
            assert set(answer.accepted_per_round[:-1]) == {2}  # right drafts are accepted


def cut(future: list[int], stop: int, most: int) -> list[int]:
    kept = future[:most]
    return kept[: kept.index(stop) + 1] if stop in kept else kept


class Waits(TorchDispatchMode):
    """Collects what makes the host wait for the device: a number or a shape that hangs on data."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put_") else ()
        if name in self.NAMES or any(each is not None and each.dtype == torch.bool for each in indices):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Event:
    """In an accelerator's queue, half a second behind the one before."""

    now = 0.0

    def __init__(self, device: torch.device, enable_timing: bool) -> None: ...

    def record(self, stream: str) -> None:
        Event.now = self.at = Event.now + 0.5

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "Event") -> float:
        return 1000 * (other.at - self.at)


def test_time_on_an_accelerator_is_asked_of_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", str)
    clock = decode_module.Clock(torch.device("cuda"))
    first, _, third = clock.mark(), clock.mark(), clock.mark()
    assert clock.seconds(first, third) == 1.0


def test_neither_prefills_nor_what_is_done_with_answers_is_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, target = Clock(), target_and_futures()[0]
    monkeypatch.setattr(decode_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    slowed(monkeypatch, clock, TargetSession, "prefill", lambda session, prompts: 5 * len(prompts))
    slowed(monkeypatch, clock, TargetSession, "verify", lambda session, tree: 2 * tree.rows)
    slowed(monkeypatch, clock, DraftTree, "chains", lambda tokens, device: len(tokens))
    requests = [Request(i, [11, 12 + i], 1 + 2 * i) for i in range(5)]
    for key, answer in decode_stream(TargetVerifier(target, None), None, iter(requests), (), 2):
        clock.now += 100
        assert len(answer.token_ids) == 1 + 2 * key
        assert answer.prefill_seconds == pytest.approx(5)
        assert answer.verify_seconds == pytest.approx(2 * answer.rounds)
        assert answer.decode_seconds == pytest.approx(3 * answer.rounds)
        assert answer.draft_seconds == 0  # a root alone is no draft: making it is the loop's own work


@pytest.mark.parametrize(("tree", "rows"), [("chain", 1), ("static", 3), ("eagle2", 3)])
def test_a_round_waits_for_the_device_once(rows: int, tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one wait is the list of accepted tokens (`tolist`, which is counted by itself)."""
    target = Target(make_target())
    drafter = untaught("eagle3", target, DraftVocab(torch.arange(0, 320, 8), 320))
    lists, tolist = list[torch.Tensor](), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor) or tolist(tensor))
    policy = policy_of(TreeSection.model_validate({"policy": tree} | ({"nodes": 12} if tree == "eagle2" else {})))
    proposer = PolicyProposer(FeatureDrafting(drafter), policy)
    with Waits() as waits:
        answers = decode_batch(target, proposer, [[5, 6, 7], [8, 9], [10]][:rows], {-1}, 12)
    assert len(lists) == max(answer.rounds for answer in answers) + 1  # the prefill's token, too
    assert waits.seen == []


TREES: st.SearchStrategy[Nodes] = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 5)), max_size=13).map(
    lambda nodes: ([0, *(t for _, t in nodes)], [-1, *sorted(p % (i + 1) for i, (p, _) in enumerate(nodes))])
)


@given(trees=st.lists(TREES, min_size=1, max_size=3), seed=st.integers(0, 10**6))
@effort(60)
def test_tree_ancestors_depths_and_acceptance_against_slow_twins(trees: list[Nodes], seed: int) -> None:
    """Chains take a short cut."""
    tree = side_by_side(trees)
    logits = torch.randn(len(trees), tree.nodes, 6, generator=torch.Generator().manual_seed(seed))
    accepted = GreedyAcceptance().accept(tree, logits)
    assert accepted.path is not None
    for row, (tokens, parents) in enumerate(trees):
        nodes = len(tokens)
        ancestors = reference.draft_tree_ancestors(parents)
        found = [set(marks.nonzero().flatten().tolist()) for marks in tree.ancestors[row, :nodes]]
        assert found == ancestors
        assert tree.depths[row, :nodes].tolist() == [len(a) - 1 for a in ancestors]
        path, bonus = accepted.path[row, : int(accepted.length[row])].tolist(), int(accepted.bonus[row])
        best = logits[row].argmax(-1).tolist()
        twin, twin_bonus = reference.greedy_path(tokens, parents, best)
        # Repeated siblings: the twin may take another copy, and a shorter path below it; ours is never shorter.
        assert len(path) >= len(twin)
        if len({(p, t) for p, t in zip(parents, tokens, strict=True)}) == nodes:
            assert (path, bonus) == (twin, twin_bonus)
        assert all(best[a] == tokens[b] for a, b in itertools.pairwise(path))
        assert bonus == best[path[-1]]
    chains = side_by_side([chain(tokens) for tokens, _ in trees])
    short = GreedyAcceptance().accept(replace(chains, is_chain=True), logits)
    whole = GreedyAcceptance().accept(chains, logits)
    assert short.path is None
    assert (short.length.tolist(), short.bonus.tolist()) == (whole.length.tolist(), whole.bonus.tolist())


@given(trees=st.lists(TREES, min_size=1, max_size=3), limits=st.tuples(*[st.integers(0, 4)] * 3))
@effort(60)
def test_pruning_leaves_the_shallower_nodes(trees: list[Nodes], limits: tuple[int, ...]) -> None:
    depths = [[len(a) - 1 for a in reference.draft_tree_ancestors(parents)] for _, parents in trees]
    order = [sorted(range(len(d)), key=lambda i, d=d: d[i]) for d in depths]
    trees = [
        ([tokens[i] for i in o], [-1 if parents[i] < 0 else o.index(parents[i]) for i in o])
        for (tokens, parents), o in zip(trees, order, strict=True)
    ]
    pruned = side_by_side(trees).pruned(limits[: len(trees)])
    sizes = [pruned.nodes] * len(trees) if pruned.sizes is None else pruned.sizes.tolist()
    for row, ((tokens, parents), size) in enumerate(zip(trees, sizes, strict=True)):
        assert size == sum(d <= limits[row] for d in depths[row])
        assert pruned.tokens[row, :size].tolist() == tokens[:size]
        assert pruned.parents[row, :size].tolist() == parents[:size]


@pytest.mark.parametrize(("parents", "leaves", "limit"), [([-1, 0, 1, 2], [3], 2), ([-1, 0, 0, 2], [1, 3], 1)])
def test_nothing_is_drawn_from_new_leaves(parents: list[int], leaves: list[int], limit: int) -> None:
    q = torch.rand(1, 4, 6)
    q[:, leaves] = 0
    left = DraftTree(torch.tensor([[1, 2, 3, 4]]), torch.tensor([parents]), 3, drawn_from=q).pruned([limit]).drawn_from
    assert left is not None and left.shape == (1, 3, 6)
    assert torch.equal(left[:, :limit], q[:, :limit]) and not left[:, limit:].any()


def test_prompt_lookup_continues_the_latest_longest_match() -> None:
    for text, chain in (
        ([1, 2, 3, 50, 9, 2, 3, 60, 61, 62, 1, 2, 3], [3, 50, 9, 2]),  # (1, 2, 3) beats the later (2, 3)
        ([1, 2, 3, 3, 1, 2, 4, 4, 1, 2, 5, 5, 1, 2], [2, 5, 5, 1]),  # the latest of the same length
        ([5, 6, 7], [7]),  # nothing to copy: a round of plain decoding
    ):
        lookup = PromptLookup(3, CPU)
        lookup.set_rows([], 1)
        lookup.observe(Committed(unasked_target(99), [text], None, [len(text) - 1]))
        tree, calls = lookup.propose()
        assert (tree.tokens.tolist(), calls) == ([chain], [0])


# A small model with its own drafter proposes chains to a larger target.

LENGTH, CALLS = 5, 3


class Recording(HierarchicalProposer):
    """Keeps each text with the chain proposed below it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.chains: list[tuple[list[int], list[int]]] = []

    def propose(self) -> tuple[DraftTree, list[int]]:
        before = [list(text) for text in self.texts]
        tree, calls = super().propose()
        assert tree.sources is not None
        for row, old in enumerate(before):
            size = tree.nodes if tree.sizes is None else int(tree.sizes[row])
            self.chains.append((old, tree.tokens[row, 1:size].tolist()))
            inner = tree.sources[row].inner_accepted
            assert calls[row] == len(inner) * (CALLS + 1) and sum(inner) + len(inner) == size - 1
        return tree, calls


def test_a_small_target_with_its_drafter_proposes_to_a_larger_one() -> None:
    small, drafter = pair_of("llama", None)
    large = blurred_copy("llama", 0.007)  # it mostly agrees with the small one
    inner = PolicyProposer(FeatureDrafting(drafter), policy_of(TreeSection(nodes=8, draft_calls=CALLS, top_k=3)))
    decoder = Recording(small, inner, LENGTH)
    budgets = (36, 9, 30, 30)  # the second ends early, and the fourth takes its row
    requests = [Request(i, prompt, budgets[i]) for i, prompt in enumerate(PROMPTS)]
    with torch.inference_mode():
        answers = dict(decode_stream(TargetVerifier(large, decoder), decoder, iter(requests), (), 3))
    for i, prompt in enumerate(PROMPTS):
        assert answers[i].token_ids == greedy(large, prompt, budgets[i])
        assert len(answers[i].inner_accepted) > len(answers[i].accepted_per_round) and answers[i].drafted_by == []
    accepted = [count for answer in answers.values() for count in answer.accepted_per_round[:-1]]
    assert 0 in accepted and max(accepted) > 3  # it drafts wrong and right tokens
    for text, chain in decoder.chains[::3]:
        assert chain == greedy(small, text, len(chain))
    lengths = {len(chain) for _, chain in decoder.chains}
    assert len(lengths) > 1 and min(lengths) == LENGTH and max(lengths) <= LENGTH + CALLS


# The Python API: a target and a drafter by their places, answers by `answer`.

MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def drafter_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("run") / "drafter", target_dir)


def test_an_answer_is_the_target_s_own(target_dir: Path, drafter_dir: Path) -> None:
    speculator = Speculator.load(str(target_dir), drafter_dir)
    answer = speculator.answer(MESSAGES, max_new_tokens=40)
    prompt = render_prompt(speculator.tokenizer, MESSAGES)
    plain = decode(speculator.target, None, prompt, speculator.stop_ids, 40)
    assert answer.generation.token_ids == plain.token_ids
    assert answer.text == decode_answer(speculator.tokenizer, plain.token_ids)
    assert answer.tau is not None and answer.tau >= 1
    assert speculator.answer("the cat", max_new_tokens=40).text == answer.text

    sampling, tree = Sampling(1.0, top_p=0.9), TreeSection(policy="chain", nodes=4, draw="sampled")
    drawn = [speculator.answer(MESSAGES, 30, sampling, seed, tree).generation.token_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]

    speculator.proposer(TreeSection(nodes=512, top_k=100))  # trees and answers may fill all positions
    prompt = render_prompt(speculator.tokenizer, [{"role": "user", "content": "x" * 500}])
    speculator.answer("x" * 500, 512 - len(prompt))


def test_the_page_s_example_runs_and_is_token_identical(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With a target whose weights are bfloat16 on disk, as the demo's are."""
    shutil.copytree(target_dir, tmp_path / "target")
    model = TargetFiles(TargetSection(model=str(target_dir), dtype="bfloat16")).load_model()
    model.save_pretrained(tmp_path / "target")
    assert not Speculator.load(str(tmp_path / "target"), drafter_dir).token_identical
    page = (Path(__file__).parents[2] / "docs/decoding.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    code = code.replace("200", "40")  # first, since the folders that follow may hold a 200 too
    places = {'"recipes/demo_target"': repr(str(tmp_path / "target")), '"runs/demo/drafter"': repr(str(drafter_dir))}
    for written, here in places.items():
        assert code.count(written) == 1
        code = code.replace(written, here)
    names: dict[str, Any] = {}
    exec(compile(code, "example", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert names["speculator"].token_identical


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("auto .* `draftsmith plan-tree`", {"tree": TreeSection(policy="auto")}),
    ("700 nodes, .* 512 positions", {"tree": TreeSection(nodes=700, top_k=100)}),
    ("tree.vocab_size: .* token_counts", {"tree": TreeSection(vocab_size=9)}),
    ("max_new_tokens: ", {"max_new_tokens": 0}),
    ("512 positions", {"max_new_tokens": 600}),
    ("cannot be asked", {"question": [{"role": "user", "content": [{"type": "image"}]}]}),
    *(("question: .* end with a question", {"question": q}) for q in ([], [{"role": "assistant", "content": "x"}])),
]


def test_what_cannot_be_asked_or_loaded_is_said(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    speculator = Speculator.load(str(target_dir), drafter_dir)
    for message, arguments in REFUSED:
        with pytest.raises(UserError, match=message):
            speculator.answer(**{"question": MESSAGES, "max_new_tokens": 4} | arguments)
    with pytest.raises(UserError, match="no drafter here"):
        Speculator.load(str(target_dir), tmp_path)
