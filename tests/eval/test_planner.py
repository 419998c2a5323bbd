"""The planner: costs, probes and the speed-up that follows; candidates, what is chosen, the script. No test looks at a
clock."""

import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.eval import plan_tree as plan_script
from draftsmith.eval.decoding.contenders import Contender, main_contender
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.metrics import summarise
from draftsmith.eval.planner import planning as planner
from draftsmith.eval.planner import round_costs
from draftsmith.eval.planner.planning import DEFAULT_CANDIDATES, Plan, as_yaml, candidates_of, ranked, recipe_keys
from draftsmith.eval.planner.round_costs import Costs, Parts, costs_of, family, measure_costs, predicted, probe_trees
from draftsmith.eval.replay.recorded_answers import RecordedAnswer, Recording
from draftsmith.eval.replay.replay import plain_rounds
from draftsmith.models.draft_tree import Committed, DraftTree
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.sampling import GREEDY, Draws, Sampling
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import TargetSession
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.eval import TreeSection
from tests.clock import Clock, slowed
from tests.conftest import make_target
from tests.data_gen.test_c2t import place as place
from tests.training_runs import run_main


def tree_of(**said: Any) -> TreeSection:
    return TreeSection.model_validate(said)


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


def test_costs_are_medians_and_straight_lines_between_them() -> None:
    trees = {"a": tree_of(policy="chain", nodes=2), "b": tree_of(policy="chain", nodes=4)}
    trees |= {str(n): tree_of(nodes=n, draft_calls=2, top_k=4) for n in (8, 16)}
    parts = {round_costs.PLAIN_PROBE: Parts(1, 0, 0.1, 1.0, 0.5)}
    parts |= {"a": Parts(2, 1, 1.0, 2.0, 0.5, 3.0), "b": Parts(4, 3, 3.0, 6.0, 0.7, 5.0)}
    parts |= {"8": Parts(8, 2, 4.0, 8.0, 1.0, 5.0), "16": Parts(16, 2, 6.0, 12.0, 1.0, 9.0)}
    costs = costs_of(trees, parts, 10, 1)
    assert (costs.plain, costs.prompt) == (1.6, 0.5)
    assert [round_costs.seconds_at(costs.verify["chain"], [x]) for x in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 6.0]
    assert round_costs.seconds_at(costs.verify["tree"], [1, 8, 10, 16]) == 1.0 + 8.0 + 9.0 + 12.0
    assert costs.draft["chain"] == ((1.0, 1.0), (3.0, 3.0))
    assert costs.draft["eagle2, top_k 4"] == ((2.0, 5.0),)  # of two probes with as many calls
    parts[round_costs.PLAIN_PROBE] = Parts(1, 0, 0, 1, 0, 0, 0.3)
    assert costs_of(trees, parts, 10, 1).busy and not costs.busy


def line(at_one: float, slope: float) -> round_costs.Curve:
    return (1.0, at_one), (101.0, at_one + 100 * slope)


@pytest.mark.parametrize("tree", [{"policy": "chain", "nodes": 5}, {"policy": "ddd", "nodes": 20, "top_k": 4}])
def test_the_speed_up_is_the_formula_s(tree: dict[str, Any]) -> None:
    chance, asked = random.Random(0), tree_of(**tree)
    shape, calls = round_costs.shape_of(asked), {family(asked): line(0.4, 0.2)}
    costs = Costs(1.5, {"chain": line(9, 9), shape: line(1, 0.1)}, {shape: line(0.3, 0.01)}, calls, 0.0, 10)
    generations, tokens, seconds = [], 0, 0.0
    for _ in range(5):
        accepted = [chance.randrange(4) for _ in range(chance.randrange(1, 9))]
        nodes, calls_made = ([chance.randint(1, most) for _ in accepted] for most in (20, 5))
        answer = list(range(1 + sum(accepted) + len(accepted)))
        generations.append(Generation([1, 2], answer, accepted, False, nodes, calls_made, calls_made))
        tokens += len(answer) - 1
        seconds += sum(1 + 0.1 * (n - 1) + 0.3 + 0.01 * (n - 1) for n in nodes)
        seconds += sum(0.4 + 0.2 * (d - 1) for d in calls_made)
    expected = predicted(costs, asked, generations)
    plain = predicted(costs, None, [plain_rounds(RecordedAnswer(g.prompt_token_ids, g.token_ids)) for g in generations])
    assert summarise(expected, plain, 0, sampled=True)["speedup"] == pytest.approx(1.5 * tokens / seconds, abs=1e-4)
    # A drafter that reads the prompt pays for it once an answer.
    for before, after in zip(expected, predicted(replace(costs, prompt=7.0), asked, generations), strict=True):
        assert after.decode_seconds - before.decode_seconds == pytest.approx(14.0)


@pytest.mark.parametrize("kinds", [[2], [1, 4], [0, 3, 4], [2, 5], [8, 9], list(range(10))], ids=str)
def test_probes_cover_every_round_that_candidates_may_lead_to(kinds: list[int]) -> None:
    trees = [tree_of(**KINDS[kind]) for kind in kinds]
    probes = list(probe_trees(trees).values())
    calls: dict[str, set[int]] = {}
    nodes: dict[str, set[int]] = {"chain": {1}, "tree": {1}}  # plain decoding is always probed
    for probe in probes:
        # A tree that could be asked for, but that DDD's tests may lie behind its last call.
        said = probe.model_dump(exclude_unset=True) | ({"ddd": {"at": "every"}} if probe.policy == "ddd" else {})
        checked = TreeSection.model_validate(said)
        calls.setdefault(family(probe), set()).add(checked.calls)
        nodes[round_costs.shape_of(probe)].add(checked.most)
    for tree in trees:
        found = calls[family(tree)]
        assert max(found) == tree.calls and (1 in found or tree.policy == "static")
        assert max(nodes[round_costs.shape_of(tree)]) >= tree.most
    assert set(calls) == {family(tree) for tree in trees} and len(probes) == len({p.model_dump_json() for p in probes})
    most = max((tree.most for tree in trees if tree.policy in round_costs.BEAMS), default=0)
    assert {n for n in round_costs.PROBED_NODES if n < most} <= nodes["tree"]  # between them, lines are short


def test_drawn_chains_have_costs_of_their_own() -> None:
    trees = [tree_of(policy="chain", nodes=4, draw=draw) for draw in ("likeliest", "sampled")]
    assert [probe.draw for probe in probe_trees(trees).values()] == ["likeliest"] * 3 + ["sampled"] * 3


class Clocked:
    """A root and a child: 2 s to read what was committed, 5 more for a prompt, 50 more until it has settled; 3 s for
    drafting."""

    capture_layers = ()

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def set_rows(self, kept: Sequence[int], new: int = 0, draws: Sequence[Draws] | None = None) -> None:
        assert not kept, "no answer begins beside others, or ends before them, while costs are measured"
        self.rows, self.reads, self.rounds = new, 7.0, 0

    def rollback(self, lengths: Sequence[int]) -> None:
        raise AssertionError("nothing is rolled back while costs are measured")

    def observe(self, committed: Committed) -> None:
        self.clock.now += self.reads + 50 * (0 < self.rounds < round_costs.SETTLING)
        self.reads = 2.0
        self.rounds += 1
        self.roots = [tokens[-1] for tokens in committed.tokens]

    def propose(self) -> tuple[DraftTree, list[int]]:
        self.clock.now += 3
        return DraftTree.chains([[root, 0] for root in self.roots], torch.device("cpu")), [1] * self.rows


@pytest.mark.parametrize(("rows", "sampling"), [(1, GREEDY), (2, Sampling(1.0))], ids=["greedy", "sampled"])
def test_each_second_is_charged_where_it_passes(rows: int, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, target = Clock(), Target(make_target())
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(round_costs, "ROUNDS", round_costs.SETTLING + 1)
    slowed(monkeypatch, clock, TargetSession, "verify", lambda session, tree: 10 * tree.nodes)
    slowed(monkeypatch, clock, TargetSession, "commit", lambda *_: 1)
    tree = tree_of(policy="chain", nodes=2)
    costs = measure_costs(target, lambda tree: Clocked(clock), [tree], [[11, 12, 13, 14]], 3, sampling, rows)
    assert (costs.plain, costs.busy) == (11, False)
    assert costs.verify["chain"] == ((1.0, 10.0), (2.0, 20.0))
    assert costs.rest["chain"] == ((1.0, 1.0), (2.0, 1.0))
    assert costs.draft == {"chain": ((1.0, 5.0),)}
    assert costs.prompt == pytest.approx(5 / 3)  # of three tokens
    assert (costs.context, costs.rows) == (3, rows)


def test_what_was_measured_here_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []
    target, clock, pace = Target(make_target()), Clock(), itertools.count(1)

    def rounds(at: Target, proposer: Any, prompts: Any, sampling: Any) -> list[Parts]:
        timed.append("plain" if proposer is None else "probe")
        nodes = 1 if proposer is None else 2
        return [Parts(nodes, nodes - 1, 0.1 / next(pace), 1.0, 0.1) for _ in range(round_costs.ROUNDS)]

    def measured(known: dict[str, Parts], *nodes: int, **settings: Any) -> Costs:
        timed.clear()
        trees = [tree_of(policy="chain", nodes=n) for n in nodes]
        return measure_costs(target, lambda _: Clocked(clock), trees, [[11, 12, 13]], 3, known=known, **settings)

    monkeypatch.setattr(round_costs, "timed_rounds", rounds)
    path, known = tmp_path / "costs.json", dict[str, Parts]()
    costs = measured(known, 2)
    assert timed == ["plain", "probe"] * round_costs.PASSES and len(known) == 2
    round_costs.keep_known(path, "a", known)
    again = round_costs.read_known(path, "a")
    assert measured(again, 2) == costs and not timed  # to the last digit
    measured(again, 2, 9, deadline=0.0)  # chains of 1, 2, 5 and 8 tokens; the first is known
    assert timed == ["probe"] * 3 and len(again) == 5  # one pass, however little time there is
    for key in map(str, range(round_costs.KEPT)):
        round_costs.keep_known(path, key, again)
    assert round_costs.read_known(path, "0") == again and not round_costs.read_known(path, "a")  # the oldest goes
    path.write_text(path.read_text()[:-9])
    assert not round_costs.read_known(path, "0")


@pytest.mark.parametrize(("node", "call", "gains"), [(20.0, 1.0, False), (0.0, 0.0, True)])
def test_plain_decoding_wins_where_nothing_beats_it(
    node: float, call: float, gains: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = [tree_of(policy="chain", nodes=5), tree_of(policy="chain", nodes=3)]
    contenders = [Contender(as_yaml(tree), "drafter", tree, "test", "eagle3") for tree in trees]
    answers = [RecordedAnswer([1, 2], [*range(9)], GREEDY, conversation_id=str(i)) for i in range(3)]
    rounds: dict[str, list[Generation]] = {}
    for contender, most, count in zip(contenders, (4, 2), (2, 4), strict=True):
        accepted, nodes = [most - 1] * count, [most] * count
        one = Generation([1, 2], [*range(9)], accepted, False, nodes, [1] * count, accepted)
        rounds[contender.name] = [one for _ in answers]
    verify, rest = {"chain": line(1, node)}, {"chain": line(0, 0)}
    costs = Costs(1.0, verify, rest, {family(tree): line(call, call) for tree in trees}, prompt=0.0, context=10)
    rows = ranked(costs, contenders, rounds, answers, 0)
    plan = Plan(costs, rows, Recording(Path("x")), answers, "all")
    planner.print_choice(plan)
    said = capsys.readouterr().out
    if gains:
        assert plan.best is rows[0] and rows[0].contender.tree == trees[0] and said.startswith("Fastest: ")
        assert tree_of(**yaml.safe_load(said.partition("In the recipe:")[2])["eval"]["tree"]) == trees[0]
    else:
        assert plan.best is None and rows[0].speedup < 1 and "Nothing is expected to beat plain" in said


def test_a_line_of_a_recipe_means_the_tree() -> None:
    said = [
        *DEFAULT_CANDIDATES,
        *KINDS,
        {"policy": "static", "paths": [[0], [1], [0, 0]]},
        {"policy": "ddd", "ddd": {"threshold": -0.5, "at": "every"}},
        {"policy": "chain", "draft_calls": 3},
    ]
    for tree in (tree_of(**each) for each in said):
        cut = tree.model_copy(update={"vocab_size": 40})
        assert tree_of(**yaml.safe_load(f"{{{as_yaml(tree)}}}")) == tree and tree_of(**recipe_keys(cut)) == cut
        assert tree_of(**recipe_keys(tree_of(**tree.model_dump()))) == tree  # a resolved recipe names every key


@pytest.fixture
def recipe_path(place: Path, tmp_path: Path) -> Path:
    """Over a taught drafter and recorded answers, of which the planner takes four."""
    recipe = yaml.safe_load((place / "recipe.yaml").read_text())
    candidates = [{"policy": "chain", "nodes": 3}, {"nodes": 8, "draft_calls": 3, "top_k": 4}]
    candidates += [{"policy": "svip", "draft_calls": 4}]
    planner = {"answers": str(place / "answers.jsonl"), "max_answers": 4, "candidates": candidates}
    recipe["eval"] = {"max_new_tokens": 12, "out": str(tmp_path / "out"), "planner": planner}
    recipe["eval"]["prompts"] = str(tmp_path / "prompts.jsonl")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "the dog"}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.mark.slow
def test_a_plan_from_recorded_answers_to_measured_ones(
    recipe_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(plan_script, recipe_path, "--plan")
    assert "4 answers" in capsys.readouterr().out and not (tmp_path / "out").exists()
    run_main(plan_script, recipe_path, "--measure", "2")
    said = capsys.readouterr().out
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert plan["answers"]["answers"] == 4 and plan["answers"]["agreement"].startswith("0 of ")
    rows, costs = plan["candidates"], plan["costs"]
    assert [row["speedup"] for row in rows] == sorted((row["speedup"] for row in rows), reverse=True)
    assert [("measured" in row) for row in rows] == [True, True, False]
    assert all(row["measured"]["matches_target"] for row in rows[:2])
    first = rows[0]
    assert plan["chosen"] == ({"name": first["name"], "tree": first["tree"]} if first["speedup"] > 1 else None)
    assert set(costs["draft_by_calls"]) == {"chain", "eagle2, top_k 4", "svip"}
    assert [calls for calls, _ in costs["draft_by_calls"]["svip"]] == [1, 2, 4]
    assert [nodes for nodes, _ in costs["verify_by_nodes"]["tree"]][-1] == 8
    written = yaml.safe_load(said.partition("In the recipe:")[2].partition("written:")[0])
    tree = yaml.safe_dump(written["eval"]["tree"], default_flow_style=True)
    assert recipe_keys(load_recipe(recipe_path, [f"eval.tree={tree}"]).eval.tree) == first["tree"]


def planned(recipe_path: Path, lineup: LoadedModels, *settings: str) -> Plan:
    recipe = load_recipe(recipe_path, settings)
    found = planner.prepared(recipe, TargetFiles.read(recipe.target), main_contender(recipe), candidates_of(recipe))
    return planner.make_plan(lineup, recipe, *found)


def test_the_slow_are_dropped_as_far_as_there_is_time(
    recipe_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few timed rounds on a machine that is never busy, and nothing known yet."""
    monkeypatch.setattr(round_costs, "ROUNDS", round_costs.SETTLING + 1)
    monkeypatch.setattr(round_costs, "BUSY", float("inf"))
    (place / "run/planner_costs.json").unlink(missing_ok=True)
    monkeypatch.setattr(planner, "LOOK", 2)
    monkeypatch.setattr(planner, "SHOWN_ROWS", 2)
    monkeypatch.setattr(planner, "CLOSE", 1.0)
    lineup = LoadedModels(TargetFiles(load_recipe(recipe_path).target))
    plan = planned(recipe_path, lineup, "eval.planner.seconds=1e9")
    assert [len(row.rounds) for row in plan.rows] == [4, 4, 2]  # answers
    assert "2 of 3 candidates along 4 answers" in plan.effort
    planner.print_result(plan, load_recipe(recipe_path))
    assert plan.effort in capsys.readouterr().out
    hasty = planned(recipe_path, lineup, "eval.planner.seconds=1e-9")
    assert [len(row.rounds) for row in hasty.rows] == [2, 2, 2] and len(hasty.answers) == 2  # a first look is taken
    assert plan.rows[2].contender.name == hasty.rows[2].contender.name  # the slowest
