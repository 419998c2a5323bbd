"""The planner: costs of rounds, the speed-up that follows from them, what is chosen. No test looks at a clock."""

import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.eval.decoding.contenders import Contender, Lineup, main_contender, named
from draftsmith.eval.decoding.decode import Generation, decode
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.measured.metrics import summarise
from draftsmith.eval.plan import main as plan_main
from draftsmith.eval.planner import cost_model
from draftsmith.eval.planner import search as planner
from draftsmith.eval.planner.command import choose_tree, lean, line_of, print_choice
from draftsmith.eval.planner.cost_model import (
    BEAMS,
    NODES,
    ROUNDS,
    SETTLING,
    Costs,
    Curve,
    family,
    measure_costs,
    predicted,
    probe_trees,
    shape_of,
    timed_rounds,
)
from draftsmith.eval.planner.search import (
    DEFAULT_CANDIDATES,
    Plan,
    candidates_of,
    planner_answers,
    ranked,
    sweep_of,
)
from draftsmith.eval.recorded.answers import RecordedAnswer, Recording, read_answers
from draftsmith.eval.recorded.replay import plain_rounds, replay_all
from draftsmith.models.c2t import C2tClassifier, C2tConfig
from draftsmith.models.chat import load_tokenizer, tokenizer_fingerprint
from draftsmith.models.checkpoint import save_drafter, target_identity
from draftsmith.models.draft_tree import DraftTree, Proposer
from draftsmith.models.eagle3 import Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import GREEDY, Draws, Sampling
from draftsmith.models.target import Target, TargetSession
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe, TargetSection, TreeSection
from draftsmith.train.run.inputs import read_rows
from tests import reference
from tests.clock import Clock
from tests.conftest import make_target
from tests.pairs import PROMPTS, greedy, pair_of

ROOT = Path(__file__).parents[1]
CHAIN = TreeSection(policy="chain", nodes=5)
BUDGET = 40


def tree_of(**said: Any) -> TreeSection:
    return TreeSection.model_validate(said)


# Curves and the formula.


def test_a_curve_is_medians_and_straight_lines_between_them() -> None:
    curve = Curve.of({1: [3.0, 1.0, 2.0, 2.0], 9: [10.0] * 4, 5: [4.0, 4.0, 4.0, 90.0], 7: [1000.0]})
    assert curve.points == ((1.0, 2.0), (5.0, 4.0), (9.0, 10.0))  # one sample tells nothing beside points with more
    assert curve([1, 2, 5, 8, 9]).tolist() == [2.0, 2.5, 4.0, 8.5, 10.0]
    assert Curve.of({3: [1.0]})([1, 3, 9]).tolist() == [1.0, 1.0, 1.0]
    # The ends stay, however little is known of them.
    assert Curve.of({1: [2.0], 5: [4.0] * 4, 9: [12.0]}).points == ((1.0, 2.0), (5.0, 4.0), (9.0, 12.0))


def test_beyond_its_ends_a_curve_goes_on_and_never_falls() -> None:
    curve = Curve(((2.0, 3.0), (4.0, 4.0), (8.0, 12.0)))
    assert curve([0, 1, 9, 10]).tolist() == [2.0, 2.5, 14.0, 16.0]
    assert Curve(((4.0, 1.0), (5.0, 9.0)))([1]).tolist() == [0.0]  # no time is below 0
    assert Curve(((1.0, 5.0), (4.0, 3.0)))([0, 1, 4, 9]).tolist() == [5.0, 5.0, 3.0, 3.0]


def made_up_costs(tree: TreeSection, seed: int = 0) -> Costs:
    draw = random.Random(seed)

    def curve(xs: Sequence[int]) -> Curve:
        return Curve(tuple((float(x), draw.uniform(0.5, 3)) for x in xs))

    shape = shape_of(tree)
    return Costs(
        plain=draw.uniform(1, 2),
        plain_spread=(1.0, 1.0),
        verify={"chain": Curve(((1.0, 1.0),)), shape: curve([1, 3, 8, 20])},
        rest={shape: curve([1, 6, 20])},
        draft={family(tree): curve([1, 2, 5])},
        prompt=0.0,
        context=10,
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_speed_up_is_the_formula_s(seed: int) -> None:
    draw = random.Random(seed)
    tree = [CHAIN, tree_of(policy="ddd", nodes=20, top_k=4)][seed % 2]
    costs = made_up_costs(tree, seed)
    generations = []
    for _ in range(5):
        accepted = [draw.randrange(4) for _ in range(draw.randrange(1, 9))]
        tokens = list(range(1 + sum(accepted) + len(accepted)))
        nodes, calls = ([draw.randint(1, most) for _ in accepted] for most in (20, 5))
        generations.append(
            Generation([1, 2], tokens, accepted, last_round_cut=False, tree_nodes=nodes, draft_calls=calls)
        )
    expected = predicted(costs, tree, generations)
    plain = predicted(costs, None, [plain_rounds(RecordedAnswer(g.prompt_token_ids, g.token_ids)) for g in generations])
    wanted = reference.planned_speedup(
        costs.plain,
        list(costs.draft[family(tree)].points),
        list(costs.verify[shape_of(tree)].points),
        list(costs.rest[shape_of(tree)].points),
        [(len(g.token_ids), g.tree_nodes, g.draft_calls) for g in generations],
    )
    assert summarise(expected, plain, 100, 0, sampled=True)["speedup"] == pytest.approx(wanted, abs=1e-4)
    # A drafter that reads the prompt pays for it once an answer.
    reading = predicted(replace(costs, prompt=7.0), tree, generations)
    assert [b.decode_seconds - a.decode_seconds for a, b in zip(expected, reading, strict=True)] == pytest.approx(
        [14.0] * 5
    )


def test_an_answer_of_one_token_costs_nothing() -> None:
    alone = Generation([1, 2], [4], [], last_round_cut=False)
    costs = replace(made_up_costs(CHAIN), prompt=1.0)
    assert [predicted(costs, tree, [alone])[0].decode_seconds for tree in (CHAIN, None)] == [0.0, 0.0]


# What is probed, and how it is timed.

KINDS = [
    {"policy": "chain", "nodes": 4},
    {"policy": "svip", "draft_calls": 9},
    {"policy": "static"},
    {"policy": "eagle2", "nodes": 60},
    {"policy": "eagle2", "nodes": 8, "draft_calls": 3, "top_k": 3},
    {"policy": "ddd", "nodes": 100},
    {"policy": "svip_tree", "nodes": 24, "top_k": 4},
    {"policy": "eagle2", "nodes": 24, "vocab_size": 64},
    {"policy": "c2t", "draft_calls": 6, "top_k": 3, "c2t": {"classifier": "SURE", "beam": 4, "beta": 0.3}},
    {"policy": "c2t", "nodes": 12, "draft_calls": 3, "top_k": 4, "c2t": {"classifier": "SURE", "beam": None}},
    {"policy": "c2t", "draft_calls": 12, "c2t": {"classifier": "SURE", "beam": None}},  # as large as it likes
]


@pytest.mark.parametrize("kinds", [[0], [4], [2], [1, 4], [0, 3, 4], [2, 5], [8], [8, 9], list(range(10))], ids=str)
def test_probes_cover_every_round_that_candidates_may_lead_to(kinds: list[int]) -> None:
    trees = [tree_of(**KINDS[kind]) for kind in kinds]
    probes = probe_trees(trees)
    calls: dict[str, set[int]] = {}
    nodes: dict[str, set[int]] = {"chain": {1}, "tree": {1}}  # plain decoding is always probed
    for probe in probes:
        # A tree that could be asked for, but that DDD's tests may lie behind its last call.
        said = probe.model_dump(exclude_unset=True) | ({"ddd": {"at": "every"}} if probe.policy == "ddd" else {})
        checked = TreeSection.model_validate(said)
        calls.setdefault(family(probe), set()).add(checked.calls)
        nodes[shape_of(probe)].add(checked.most)
    for tree in trees:
        assert max(calls[family(tree)]) == tree.calls
        assert max(nodes[shape_of(tree)]) >= tree.most
        if tree.policy != "static":
            assert 1 in calls[family(tree)]
    assert set(calls) == {family(tree) for tree in trees}
    most = max((tree.most for tree in trees if tree.policy in BEAMS), default=0)
    assert {n for n in NODES if n < most} <= nodes["tree"]  # between them, lines are short
    assert len(probes) == len({probe.model_dump_json() for probe in probes})


def test_probes_of_trees_without_a_limit_have_one() -> None:
    probes = probe_trees([tree_of(**KINDS[10])])
    assert max(probe.most for probe in probes) == NODES[-1]
    assert set(NODES) <= {probe.most for probe in probes}


def proposer_of(target: Target, drafter: Eagle3Drafter, tree: TreeSection) -> PolicyProposer:
    return PolicyProposer(FeatureDrafting(drafter), policy_of(tree, GREEDY))


@pytest.mark.parametrize("kind", [{"policy": "chain", "nodes": 5}, *KINDS[1:7], *KINDS[8:10]], ids=str)
def test_probes_never_stop_early(kind: dict[str, Any], doubter: Path) -> None:
    target, drafter = pair_of("llama")
    tree = tree_of(**kind)
    strict = tree.model_copy(
        update={
            "svip": tree.svip.model_copy(update={"h": 1e-6}),
            "ddd": tree.ddd.model_copy(update={"threshold": 0.0}),
            "c2t": tree.c2t.model_copy(update={"classifier": str(doubter), "beta": 1.0}),
        }
    )
    for probe in probe_trees([strict]):
        rounds = list(timed_rounds(target, proposer_of(target, drafter, probe), [PROMPTS[0]]))
        assert [r.number for r in rounds] == list(range(ROUNDS))
        assert {r.calls for r in rounds} == {probe.calls}
        assert {r.nodes for r in rounds} == {probe.most}


@pytest.fixture(scope="module")
def doubter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A C2T classifier that trusts no node of the fourth level, unless it is likely, and nothing wholly."""
    classifier = C2tClassifier(C2tConfig(hidden=3))
    with torch.no_grad():
        classifier.hidden.weight.copy_(torch.eye(3))
        classifier.hidden.bias.zero_()
        classifier.output.weight.copy_(torch.tensor([[3.0, 0.0, -1.0]]))
        classifier.output.bias.fill_(2.0)
    classifier.save(directory := tmp_path_factory.mktemp("classifier"))
    return directory


def test_costs_are_those_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    verify = TargetSession.verify

    def watched(self: TargetSession, tree: DraftTree) -> Any:
        seen.append(torch.is_inference_mode_enabled())
        return verify(self, tree)

    monkeypatch.setattr(TargetSession, "verify", watched)
    target, drafter = pair_of("llama")
    for proposer in (None, proposer_of(target, drafter, CHAIN)):
        list(timed_rounds(target, proposer, [PROMPTS[0]]))
    assert seen == [True] * 2 * ROUNDS
    assert not torch.is_inference_mode_enabled()


class SlowProposer:
    """A root and a child: 2 s to read what was committed, 5 more for a prompt, 50 more until it has settled; 3 s for
    drafting."""

    capture_layers = ()

    def __init__(self, clock: Clock):
        self.clock = clock

    def reset(self, rows: int, draws: Sequence[Draws] | None = None) -> None:
        self.rows, self.reads, self.rounds = rows, 7.0, 0

    def admit(self, rows: int, draws: Sequence[Draws] | None = None) -> None:
        raise AssertionError("no answer begins while costs are measured")

    def keep(self, rows: Sequence[int]) -> None:
        raise AssertionError("no answer ends while costs are measured")

    def observe(self, committed: Sequence[Sequence[int]], features: object, counts: Sequence[int]) -> None:
        self.clock.now += self.reads
        self.clock.now += 50 * (0 < self.rounds < SETTLING)
        self.reads = 2.0
        self.rounds += 1
        self.roots = [tokens[-1] for tokens in committed]

    def propose(self) -> tuple[DraftTree, list[int]]:
        self.clock.now += 3
        return DraftTree.chains([[root, 0] for root in self.roots], torch.device("cpu")), [1] * self.rows


class QuickProposer(SlowProposer):
    """Takes no time."""

    def observe(self, committed: Sequence[Sequence[int]], features: object, counts: Sequence[int]) -> None:
        self.roots = [tokens[-1] for tokens in committed]

    def propose(self) -> tuple[DraftTree, list[int]]:
        return DraftTree.chains([[root, 0] for root in self.roots], torch.device("cpu")), [1] * self.rows


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "sampled"])
def test_each_second_is_charged_where_it_passes(rows: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, target = Clock(), Target(make_target())
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(cost_model, "ROUNDS", SETTLING + 1)
    verify, commit = TargetSession.verify, TargetSession.commit

    def slow_verify(self: TargetSession, tree: DraftTree) -> Any:
        clock.now += 10 * tree.nodes
        return verify(self, tree)

    def slow_commit(self: TargetSession, *arguments: Any) -> None:
        clock.now += 1
        commit(self, *arguments)

    monkeypatch.setattr(TargetSession, "verify", slow_verify)
    monkeypatch.setattr(TargetSession, "commit", slow_commit)
    tree = tree_of(policy="chain", nodes=2)
    costs = measure_costs(
        target, lambda tree: SlowProposer(clock), [tree], [[11, 12, 13, 14]], 3, sampling, rows, repeats=2
    )
    assert (costs.plain, costs.plain_spread, costs.busy) == (11, (11, 11), False)
    assert costs.verify["chain"].points == ((1.0, 10.0), (2.0, 20.0))
    assert costs.rest["chain"].points == ((1.0, 1.0), (2.0, 1.0))
    assert costs.draft == {"chain": Curve(((1.0, 5.0),))}
    assert costs.prompt == pytest.approx(5 / 3)  # of three tokens
    assert (costs.context, costs.rows) == (3, rows)


def test_a_machine_s_pace_cancels_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes three times as long in some repeats, and grows slower within one: a probe's plain rounds do."""
    clock, target = Clock(), Target(make_target())
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(cost_model, "ROUNDS", SETTLING + 1)
    pace, probes = [1.0], itertools.count()
    verify, rounds = TargetSession.verify, timed_rounds

    def slow_verify(self: TargetSession, tree: DraftTree) -> Any:
        clock.now += pace[0] * (10 if tree.nodes == 1 else 20)
        return verify(self, tree)

    def slower(*arguments: Any) -> Any:
        repeat, place = divmod(next(probes), 3)  # plain, the probe, plain
        pace[0] = (1, 1, 3, 1, 3)[repeat] * (1 + place / 10)
        return rounds(*arguments)

    monkeypatch.setattr(TargetSession, "verify", slow_verify)
    monkeypatch.setattr(cost_model, "timed_rounds", slower)
    made = QuickProposer(clock)
    costs = measure_costs(target, lambda tree: made, [tree_of(policy="chain", nodes=2)], [[11, 12, 13]], 3, repeats=4)
    assert costs.probes == {"chain, 2 nodes, 1 calls": pytest.approx((2.0,) * 4)}
    assert costs.verify["chain"]([2]) / costs.verify["chain"]([1]) == pytest.approx(2.0, rel=0.05)
    assert len(costs.repeats) == 4
    assert costs.busy  # it is told all the same
    assert costs.to_dict()["probes_in_plain_rounds_by_repeat"] == {"chain, 2 nodes, 1 calls": [2.0] * 4}


def test_contexts_are_of_the_length_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(make_target(max_position_embeddings=64))
    read: list[list[int]] = []
    prefill = TargetSession.prefill
    monkeypatch.setattr(
        TargetSession, "prefill", lambda self, prompts: read.extend(map(list, prompts)) or prefill(self, prompts)
    )
    measure_costs(target, lambda tree: SlowProposer(Clock()), [], [[11, 12], [13, 14, 15]], 8, repeats=2)
    assert {tuple(tokens) for tokens in read} == {(11, 12, 13, 14, 15, 11, 12, 13), (13, 14, 15, 11, 12, 13, 14, 15)}
    costs = measure_costs(
        target, lambda tree: SlowProposer(Clock()), [tree_of(policy="chain", nodes=4)], [[11, 12]], 1000, repeats=1
    )
    assert costs.context == 64 - 1 - ROUNDS * 4  # what is left beside the rounds that are decoded
    with pytest.raises(UserError, match="leave no context in the target's 64 positions"):
        measure_costs(
            target, lambda tree: SlowProposer(Clock()), [tree_of(policy="chain", nodes=40)], [[11, 12]], 9, repeats=1
        )


def test_a_busy_machine_is_noticed() -> None:
    costs = made_up_costs(CHAIN)
    assert not replace(costs, plain=1.0, plain_spread=(0.97, 1.05)).busy
    assert replace(costs, plain=1.0, plain_spread=(0.9, 1.4)).busy


# What is chosen, by costs that are made up and real rounds.


def recorded(target: Target) -> list[RecordedAnswer]:
    return [
        RecordedAnswer(prompt, greedy(target, prompt, BUDGET), GREEDY, conversation_id=str(i))
        for i, prompt in enumerate(PROMPTS)
    ]


def linear_costs(trees: Sequence[TreeSection], node: float, call: float) -> Costs:
    """A forward over n nodes takes 1 + node * (n - 1) seconds, a draft call `call`."""
    nodes = Curve(((1.0, 1.0), (101.0, 1 + node * 100)))
    free = Curve(((1.0, 0.0), (101.0, 0.0)))
    calls = Curve(((1.0, call), (101.0, call * 101)))
    both = ("chain", "tree")
    return Costs(
        plain=1.0,
        plain_spread=(1.0, 1.0),
        verify=dict.fromkeys(both, nodes),
        rest=dict.fromkeys(both, free),
        draft={family(tree): calls for tree in trees},
        prompt=0.0,
        context=10,
    )


@pytest.fixture(scope="module")
def replayed() -> tuple[list[Contender], dict[str, list[Generation]], list[RecordedAnswer]]:
    """Chains and trees in several sizes, and their rounds along the answers of a pair that knows them by heart."""
    target, drafter = pair_of("llama")
    trees = [tree_of(policy="chain", nodes=n) for n in (2, 3, 5, 9)]
    trees += [
        tree_of(policy="eagle2", nodes=n, draft_calls=d, top_k=4)
        for n, d in itertools.product((8, 16, 32), (2, 4, 7))
        if n <= 5 + (d - 1) * 16
    ]
    contenders = named([Contender("", "drafter", tree, "test", "eagle3") for tree in trees])
    answers = recorded(target)
    proposers: dict[str, Proposer] = {c.name: proposer_of(target, drafter, c.tree) for c in contenders}
    return contenders, replay_all(target, proposers, answers, 4), answers


def best(replayed: Any, node: float, call: float) -> planner.Row:
    contenders, rounds, answers = replayed
    costs = linear_costs([c.tree for c in contenders], node, call)
    return ranked(costs, contenders, rounds, answers, 100, 0)[0]


def test_dear_verification_makes_small_trees_and_cheap_drafting_deep_ones(replayed: Any) -> None:
    free, dear = best(replayed, node=0.0, call=0.05), best(replayed, node=0.15, call=0.05)
    assert dear.tree.most < free.tree.most
    assert dear.speedup < free.speedup
    cheap, costly = best(replayed, node=0.01, call=0.01), best(replayed, node=0.01, call=0.6)
    assert costly.tree.calls < cheap.tree.calls
    contenders, rounds, _ = replayed
    # With costs of rounds alone, whoever takes the fewest rounds is the fastest.
    fewest = min(sum(g.rounds for g in rounds[c.name]) for c in contenders)
    assert sum(g.rounds for g in best(replayed, node=0.0, call=0.0).rounds) == fewest


def plan_of(replayed: Any, node: float, call: float) -> Plan:
    contenders, rounds, answers = replayed
    costs = linear_costs([c.tree for c in contenders], node, call)
    return Plan(costs, ranked(costs, contenders, rounds, answers, 100, 0), Recording(Path("x")), answers, "all")


def test_plain_decoding_wins_where_nothing_beats_it(replayed: Any, capsys: pytest.CaptureFixture) -> None:
    dear = plan_of(replayed, node=20.0, call=1.0)
    assert dear.rows[0].speedup < 1
    assert dear.best is None
    print_choice(dear)
    assert "Nothing is expected to beat plain decoding" in capsys.readouterr().out
    fine = plan_of(replayed, node=0.0, call=0.0)
    assert fine.best is fine.rows[0]
    print_choice(fine)
    said = capsys.readouterr().out
    assert said.startswith("Fastest: ")
    assert yaml.safe_load(said.partition("In the recipe:")[2])["eval"]["tree"] == lean(fine.rows[0].tree)


def test_what_cannot_be_told_from_plain_decoding_is_not_called_the_fastest(
    replayed: Any, capsys: pytest.CaptureFixture
) -> None:
    """Repeats of which one knows dear trees and another free ones: the interval holds both, and 1."""
    contenders, rounds, answers = replayed
    trees = [contender.tree for contender in contenders]
    costs = linear_costs(trees, node=0.05, call=0.1)
    sure = ranked(costs, contenders, rounds, answers, 100, 0)
    assert not sure[0].as_fast_as_plain
    repeats = (linear_costs(trees, node=2.0, call=3.0), linear_costs(trees, node=0.0, call=0.0))
    rows = ranked(replace(costs, repeats=repeats), contenders, rounds, answers, 100, 0)
    assert [row.name for row in rows] == [row.name for row in sure]
    for row, known in zip(rows, sure, strict=True):
        slow, fast = (ranked(one, [row.contender], rounds, answers, 100, 0)[0].speedup for one in repeats)
        assert row.by_repeat == pytest.approx([slow, fast], abs=1e-3)
        (low, high), (least, most) = row.numbers["speedup_interval"], known.numbers["speedup_interval"]
        assert low == pytest.approx(least * slow / row.speedup, rel=2e-3)
        assert high == pytest.approx(most * fast / row.speedup, rel=2e-3)
    assert rows[0].as_fast_as_plain
    print_choice(Plan(costs, rows, Recording(Path("x")), answers, "all"))
    said = capsys.readouterr().out
    assert said.startswith("Not clearly faster than plain decoding: ")
    assert "Fastest" not in said and "In the recipe:" in said


def test_rows_are_sorted_and_their_numbers_are_the_rounds_own(replayed: Any) -> None:
    plan = plan_of(replayed, node=0.05, call=0.1)
    assert [row.speedup for row in plan.rows] == sorted((row.speedup for row in plan.rows), reverse=True)
    for row in plan.rows:
        rounds = sum(g.rounds for g in row.rounds)
        tau = sum(len(g.token_ids) - 1 for g in row.rounds) / rounds
        nodes, calls = (sum(sum(getattr(g, key)) for g in row.rounds) / rounds for key in ("tree_nodes", "draft_calls"))
        assert row.numbers["tau"] == pytest.approx(tau, abs=1e-4)
        assert row.speedup == pytest.approx(tau / (1 + 0.05 * (nodes - 1) + 0.1 * calls), abs=1e-3)


# Candidates and recipes.


def test_a_line_of_a_recipe_means_the_tree(tmp_path: Path) -> None:
    said = [
        *DEFAULT_CANDIDATES,
        *KINDS,
        {"policy": "static", "paths": [[0], [1], [0, 0]]},
        {"policy": "ddd", "ddd": {"threshold": -0.5, "at": "every"}},
        {"policy": "chain", "draft_calls": 3},
        {"policy": "c2t", "c2t": {"classifier": "x"}},
    ]
    for tree in (tree_of(**each) for each in said):
        again = tree_of(**yaml.safe_load(line_of(tree)))
        for key in ("policy", "most", "calls", "width", "vocab_size", "ddd", "svip", "c2t", "static_paths"):
            assert getattr(again, key) == getattr(tree, key)


def recipe_of(tmp_path: Path, target: str | Path, **eval_keys: Any) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "output_dir": str(tmp_path),
                "target": {"model": str(target), "dtype": "float32", "device": "cpu"},
                "eval": eval_keys,
            }
        )
    )
    return load_recipe(path)


def test_candidates_share_the_vocabulary_of_auto(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "x", tree={"policy": "auto", "vocab_size": 40})
    assert {tree.vocab_size for tree in candidates_of(recipe)} == {40}
    named_one = [{"policy": "chain"}, {"policy": "chain", "vocab_size": 9}]
    recipe = recipe_of(tmp_path, "x", tree={"policy": "auto", "vocab_size": 40}, planner={"candidates": named_one})
    assert [tree.vocab_size for tree in candidates_of(recipe)] == [40, 9]
    assert {tree.vocab_size for tree in candidates_of(recipe_of(tmp_path, "x"))} == {None}


def test_candidates_that_cannot_be_are_named_together(tmp_path: Path) -> None:
    given = [{"policy": "chain"}, {"policy": "auto"}, {"policy": "chain"}, {"policy": "chain", "draw": "sampled"}]
    with pytest.raises(UserError) as caught:
        candidates_of(recipe_of(tmp_path, "x", planner={"candidates": given}))
    wanted = ["candidates.1: auto is what", "candidates.2: stands there twice", "candidates.3: .* drawn chain"]
    assert len(caught.value.problems) == 3
    for problem, words in zip(caught.value.problems, wanted, strict=True):
        assert re.search(words, problem)


def test_a_sweep_changes_the_threshold_alone(tmp_path: Path) -> None:
    own = {"policy": "svip", "draft_calls": 7, "svip": {"c": 0.2, "h": 0.4}}
    trees = sweep_of(recipe_of(tmp_path, "x", tree=own), "svip")
    assert {(tree.calls, tree.svip.c) for tree in trees} == {(7, 0.2)}
    assert len({tree.svip.h for tree in trees}) == len(trees) > 5
    trees = sweep_of(recipe_of(tmp_path, "x", planner={"candidates": [{"policy": "ddd", "nodes": 9}]}), "ddd")
    assert {tree.most for tree in trees} == {9}
    assert len({tree.ddd.threshold for tree in trees}) == len(trees) > 5
    assert {tree.policy for tree in sweep_of(recipe_of(tmp_path, "x"), "svip_tree")} == {"svip_tree"}


# Recorded answers, and the script.


@pytest.fixture(scope="module")
def run_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as training leaves it: a drafter, and regenerated conversations of the target, most of them one turn."""
    folder = tmp_path_factory.mktemp("run")
    section = TargetSection(model=str(target_dir), dtype="float32", device="cpu")
    target, drafter = pair_of("llama")
    fingerprint = tokenizer_fingerprint(load_tokenizer(section))
    identity = target_identity(target, section.model, None, fingerprint)
    save_drafter(folder / "drafter", drafter, identity, "", {})
    generator = {"tokenizer_fingerprint": fingerprint, "embedding_digest": identity["embedding_digest"]}
    lines = []
    for i, prompt in enumerate(PROMPTS * 5):
        answer = greedy(target, [*prompt, 11 + i], 12 + i % 5)
        turns = [{"prompt_token_ids": [*prompt, 11 + i], "output_token_ids": answer}]
        messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
        lines.append({"id": f"c{i}", "messages": messages, "turns": turns, "generator": generator | {"temperature": 0}})
    (folder / "conversations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = [{"id": f"q{i}", "messages": [{"role": "user", "content": f"the cat {i}"}]} for i in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    return folder


@pytest.fixture
def recipe_path(run_dir: Path, target_dir: Path, tmp_path: Path) -> Path:
    recipe = {
        "output_dir": str(run_dir),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "eval": {
            "prompts": str(run_dir / "prompts.jsonl"),
            "max_new_tokens": 12,
            "out": str(tmp_path / "out"),
            "bootstrap_samples": 100,
            "planner": {
                "max_answers": 4,
                "candidates": [
                    {"policy": "chain", "nodes": 3},
                    {"policy": "eagle2", "nodes": 8, "draft_calls": 3, "top_k": 4},
                    {"policy": "svip", "draft_calls": 4},
                ],
            },
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def plan_script(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "eval/plan.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_plan_from_recorded_answers_to_measured_ones(recipe_path: Path, tmp_path: Path) -> None:
    done = plan_script(recipe_path, "--plan")
    assert done.returncode == 0, done.stderr
    assert "4 answers" in done.stdout and "3: " in done.stdout
    assert not (tmp_path / "out").exists()

    done = plan_script(recipe_path, "--measure", "2")
    assert done.returncode == 0, done.stderr
    assert "measured" in done.stdout and "The best 3 of 3 candidates" in done.stdout
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert plan["answers"]["answers"] == 4
    assert plan["answers"]["agreement"].startswith("0 of ")
    rows = plan["candidates"]
    assert len(rows) == 3
    assert [row["speedup"] for row in rows] == sorted((row["speedup"] for row in rows), reverse=True)
    assert [("measured" in row) for row in rows] == [True, True, False]
    assert all(row["measured"]["matches_target"] for row in rows[:2])
    first = rows[0]
    assert plan["chosen"] == ({"name": first["name"], "tree": first["tree"]} if first["speedup"] > 1 else None)
    costs = plan["costs"]
    assert set(costs["draft_by_calls"]) == {"chain", "eagle2, top_k 4", "svip"}
    assert [calls for calls, _ in costs["draft_by_calls"]["svip"]] == [1, 2, 4]
    assert [nodes for nodes, _ in costs["verify_by_nodes"]["tree"]][-1] == 8
    milliseconds = [
        each for curves in ("draft_by_calls", "verify_by_nodes") for c in costs[curves].values() for each in c
    ]
    assert all(each > 0 for _, each in milliseconds)
    said = yaml.safe_load(done.stdout.partition("In the recipe:")[2].partition("written:")[0])
    again = load_recipe(recipe_path, [f"eval.tree={yaml.safe_dump(said['eval']['tree'], default_flow_style=True)}"])
    assert lean(again.eval.tree) == first["tree"]


@pytest.mark.slow
def test_c2t_is_planned_like_any_other(recipe_path: Path, doubter: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        recipe_path,
        [f"eval.planner.candidates=[{{policy: c2t, draft_calls: 6, c2t: {{classifier: {doubter}, beta: 0.3}}}}]"],
    )
    recording, answers = planner_answers(recipe)
    contenders = planner.contenders_from(recipe, main_contender(recipe), candidates_of(recipe))
    plan = planner.make_plan(Lineup(recipe.target), recipe, contenders, recording, answers)
    (row,) = plan.rows
    assert row.speedup > 0
    seen = max(nodes for generation in row.rounds for nodes in generation.tree_nodes)
    assert 1 < seen < row.tree.most  # the classifier stopped it
    assert [calls for calls, _ in plan.costs.draft[family(row.tree)].points] == [1, 2, 4, 6]
    assert plan.costs.verify["tree"].points[-1][0] == seen


def test_calibration_takes_the_fastest_threshold(recipe_path: Path, tmp_path: Path) -> None:
    done = plan_script(recipe_path, "--calibrate", "svip")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "out/calibration.json").read_text())
    thresholds = planner.SWEEPS["svip"][2]
    rows = plan["candidates"]
    assert sorted(row["tree"].get("svip", {"h": 0.3}).get("h", 0.3) for row in rows) == sorted(thresholds)
    assert rows[0]["speedup"] == max(row["speedup"] for row in rows)
    # A looser threshold drafts more and never less.
    by_h = sorted(rows, key=lambda row: row["tree"].get("svip", {"h": 0.3}).get("h", 0.3))
    calls = [row["draft_calls_per_round"] for row in by_h]
    assert calls[0] < calls[-1] <= 4
    assert not (tmp_path / "out/plan.json").exists()


def test_auto_chooses_for_small_models_too(recipe_path: Path, target_dir: Path) -> None:
    """A small model that is the target itself: everything is accepted, and the bonus comes on top."""
    recipe = load_recipe(recipe_path)
    small = TargetSection(model=str(target_dir), dtype="float32", device="cpu")
    base = Contender("", "causal_lm", tree_of(policy="auto"), "test", draft_model=small)
    recording, answers = planner_answers(recipe)
    contenders = planner.contenders_from(recipe, base, [tree_of(policy="chain", nodes=n) for n in (2, 4)])
    plan = planner.make_plan(Lineup(recipe.target), recipe, contenders, recording, answers)
    for row in plan.rows:
        rounds = sum(-(-(len(answer.tokens) - 1) // row.tree.most) for answer in answers)
        assert sum(g.rounds for g in row.rounds) == rounds


def test_answers_that_were_sampling_note_are_noted(recipe_path: Path) -> None:
    _, answers = planner_answers(load_recipe(recipe_path))
    assert planner.sampling_note(load_recipe(recipe_path), answers) is None
    warm = load_recipe(recipe_path, ["eval.temperature=0.7"])
    assert "drawn otherwise (greedy)" in str(planner.sampling_note(warm, answers))
    drawn = [replace(answer, sampling=Sampling(0.7)) for answer in answers]
    assert planner.sampling_note(warm, drawn) is None
    assert "(temperature 0.7)" in str(planner.sampling_note(load_recipe(recipe_path), drawn))
    assert planner.sampling_note(warm, [replace(answer, sampling=None) for answer in answers]) is None


def test_auto_is_the_first_of_the_plan(recipe_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = load_recipe(recipe_path, ["eval.tree={policy: auto}"])
    tree = choose_tree(Lineup(recipe.target), recipe, main_contender(recipe))
    assert tree in recipe.eval.planner.candidates
    assert line_of(tree) in capsys.readouterr().out


def test_a_loaded_plan_s_rounds_are_those_of_decoding(recipe_path: Path) -> None:
    """Predicted tau is exactly decoding's own where it decodes what was recorded."""
    recipe = load_recipe(recipe_path)
    recording, answers = planner_answers(recipe)
    lineup = Lineup(recipe.target)
    trees = candidates_of(recipe)
    contenders = planner.contenders_from(recipe, main_contender(recipe), trees)
    plan = planner.make_plan(lineup, recipe, contenders, recording, answers)
    for row in plan.rows:
        for answer, replayed_answer in zip(answers, row.rounds, strict=True):
            proposer = lineup.proposer(row.contender)
            decoded = decode(lineup.target, proposer, answer.prompt, (), len(answer.tokens))
            assert decoded.token_ids == answer.tokens
            for key in ("accepted_per_round", "tree_nodes", "draft_calls"):
                assert getattr(replayed_answer, key) == getattr(decoded, key)


def test_held_out_conversations_are_those_that_training_keeps_for_validation(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path, ["train.validation_conversations=4"])
    _recording, answers = planner_answers(recipe)
    tokenizer = load_tokenizer(recipe.target)
    training, validation = read_rows(recipe, tokenizer, Rejects())
    assert len(validation) == len(answers) == 4
    assert {answer.conversation_id for answer in answers} == {row.id for row in validation}
    assert {answer.conversation_id for answer in answers}.isdisjoint(row.id for row in training)


def test_answers_of_a_file_are_spread_over_it(recipe_path: Path, run_dir: Path) -> None:
    everything = list(read_answers(run_dir / "conversations.jsonl"))
    recipe = load_recipe(recipe_path, [f"eval.planner.answers={run_dir / 'conversations.jsonl'}"])
    _, answers = planner_answers(recipe)
    assert answers == [everything[i] for i in (0, 5, 10, 15)]


def logged(run_dir: Path, tmp_path: Path, names: Sequence[str], temperature: float | None) -> Path:
    """A generations.jsonl with the answers of `names`, and how they were drawn beside it (None: unknown)."""
    lines = []
    for name, answer in itertools.product(names, read_answers(run_dir / "conversations.jsonl")):
        whose = {"benchmark": "", "category": None, "conversation_id": answer.conversation_id, "turn": answer.turn}
        lines.append({"contender": name, **whose, "prompt_token_ids": answer.prompt, "token_ids": answer.tokens})
    (tmp_path / "generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if temperature is not None:
        drawn = {"temperature": temperature, "top_p": 1.0, "top_k": 0}
        (tmp_path / "acceptance.json").write_text(json.dumps(drawn))
    return tmp_path / "generations.jsonl"


def test_anyone_s_greedy_answers_serve(recipe_path: Path, run_dir: Path, tmp_path: Path) -> None:
    path = logged(run_dir, tmp_path, ["tree", "chain"], 0)
    recording, answers = planner_answers(load_recipe(recipe_path, [f"eval.planner.answers={path}"]))
    assert answers == [recording.answers["tree"][i] for i in (0, 5, 10, 15)]


@pytest.mark.parametrize(("temperature", "words"), [(0.7, "were drawn, so"), (None, "may have been drawn")])
def test_drawn_answers_of_several_are_nobody_s(
    temperature: float | None, words: str, recipe_path: Path, run_dir: Path, tmp_path: Path
) -> None:
    path = logged(run_dir, tmp_path, ["tree", "chain"], temperature)
    wanted = f"eval.planner.answers: .* holds answers of 'tree', 'chain', which {words}.* and none of plain decoding"
    with pytest.raises(UserError, match=wanted):
        planner_answers(load_recipe(recipe_path, [f"eval.planner.answers={path}"]))
    path = logged(run_dir, tmp_path, ["tree", "chain", "plain decoding"], temperature)
    recording, answers = planner_answers(load_recipe(recipe_path, [f"eval.planner.answers={path}"]))
    assert answers[0] is recording.answers["plain decoding"][0]


def changed(run_dir: Path, tmp_path: Path, change: Any) -> Path:
    lines = [json.loads(line) for line in (run_dir / "conversations.jsonl").read_text().splitlines()]
    for line in lines:
        change(line)
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def other_words(line: dict[str, Any]) -> None:
    tokens = line["turns"][0]["output_token_ids"]
    line["turns"][0]["output_token_ids"] = [(token + 1) % 300 for token in tokens]


def other_tokenizer(line: dict[str, Any]) -> None:
    line["generator"]["tokenizer_fingerprint"] = "0" * 64


def other_vocabulary(line: dict[str, Any]) -> None:
    line["turns"][0]["output_token_ids"] = [9999, 4]


def one_token(line: dict[str, Any]) -> None:
    line["turns"][0]["output_token_ids"] = [4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_tokenizer, "eval.planner.answers: .*recorded from another target: tokenizer_fingerprint"),
        (other_vocabulary, "eval.planner.answers: .*token 9999 is outside the target's vocabulary"),
        (one_token, "holds no answer of two tokens or more"),
    ],
)
def test_answers_that_cannot_serve_are_refused_before_anything_is_loaded(
    change: Any, words: str, recipe_path: Path, run_dir: Path, tmp_path: Path
) -> None:
    path = changed(run_dir, tmp_path, change)
    with pytest.raises(UserError, match=words):
        planner_answers(load_recipe(recipe_path, [f"eval.planner.answers={path}"]))


def test_another_target_s_words_are_noticed_while_it_reads_them(
    recipe_path: Path, run_dir: Path, tmp_path: Path
) -> None:
    done = plan_script(recipe_path, f"eval.planner.answers={changed(run_dir, tmp_path, other_words)}")
    assert done.returncode == 2
    assert "error: eval.planner.answers: recorded from another target: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval.planner.answers=nowhere.jsonl"], "nowhere.jsonl"),
        (["data.conversations=nowhere.jsonl"], "eval.planner.answers: not given, and there are no conversations in"),
        (["eval.planner.candidates=[{nodes: 600}]"], "600 nodes"),
        (["--measure", "-1"], "--measure -1: .* or 0 for none"),
        (
            ["eval.planner.context=5000"],
            "eval.planner.context: 5,000 tokens, but the target has 512 positions.* to 451 or",
        ),
        (["--measure", "1", "eval.prompts=null"], "--measure decodes eval.prompts, which is not given"),
        (["eval.drafter=nowhere"], "no drafter here"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_end_in_a_sentence(
    arguments: list[str], words: str, recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval/plan.py", str(recipe_path), *arguments])
    monkeypatch.setattr("draftsmith.eval.planner.command.Lineup", lambda section: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=words):
        plan_main()
