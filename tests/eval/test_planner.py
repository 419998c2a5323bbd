"""The planner: what is chosen from predicted speed-ups, its candidates, its recorded answers and its script."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.eval import plan as plan_script
from draftsmith.eval.decoding.contenders import Contender, loaded_proposer, main_contender
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.planner import command as planner_command
from draftsmith.eval.planner import costs as measuring
from draftsmith.eval.planner import search as planner
from draftsmith.eval.planner.command import print_choice, recipe_keys
from draftsmith.eval.planner.costs import SETTLING, Costs, family
from draftsmith.eval.planner.search import DEFAULT_CANDIDATES, Plan, as_yaml, candidates_of, ranked
from draftsmith.eval.replay.answers import RecordedAnswer, Recording
from draftsmith.eval.replay.replay import replay_all
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.sampling import GREEDY
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.eval import TreeSection
from tests.c2t_cases import place as place
from tests.eval.planner_cases import KINDS, tree_of
from tests.training_runs import run_main

# What is chosen, by costs that are made up and real rounds.


def linear_costs(trees: Sequence[TreeSection], node: float, call: float) -> Costs:
    """A forward over n nodes takes 1 + node * (n - 1) seconds, a draft call `call`."""
    nodes, free = ((1.0, 1.0), (101.0, 1 + node * 100)), ((1.0, 0.0), (101.0, 0.0))
    verify, rest = ({"chain": each, "tree": each} for each in (nodes, free))
    calls = (1.0, call), (101.0, call * 101)
    return Costs(1.0, verify, rest, {family(tree): calls for tree in trees}, prompt=0.0, context=10)


@pytest.mark.parametrize(("node", "call", "gains"), [(20.0, 1.0, False), (0.0, 0.0, True)])
def test_plain_decoding_wins_where_nothing_beats_it(
    node: float, call: float, gains: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = [tree_of(policy="chain", nodes=5), tree_of(policy="chain", nodes=3)]
    contenders = [Contender(as_yaml(tree), "drafter", tree, "test", "eagle3") for tree in trees]
    answers = [RecordedAnswer([1, 2], [*range(9)], GREEDY, conversation_id=str(i)) for i in range(3)]
    rounds = {
        contender.name: [
            Generation(
                [1, 2],
                [*range(9)],
                [most - 1] * count,
                False,
                tree_nodes=[most] * count,
                draft_calls=[1] * count,
                tried=[most - 1] * count,
            )
            for _ in answers
        ]
        for contender, most, count in zip(contenders, (4, 2), (2, 4), strict=True)
    }
    costs = linear_costs(trees, node, call)
    rows = ranked(costs, contenders, rounds, answers, 0)
    plan = Plan(costs, rows, Recording(Path("x")), answers, "all")
    print_choice(plan)
    said = capsys.readouterr().out
    if gains:
        assert plan.best is rows[0] and rows[0].tree == trees[0] and said.startswith("Fastest: ")
        assert tree_of(**yaml.safe_load(said.partition("In the recipe:")[2])["eval"]["tree"]) == trees[0]
    else:
        assert plan.best is None and rows[0].speedup < 1 and "Nothing is expected to beat plain" in said


# Candidates and recipes.


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


# Recorded answers, and the script.


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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Few timed rounds on a machine that is never busy, and nothing known yet."""
    monkeypatch.setattr(measuring, "ROUNDS", SETTLING + 1)
    monkeypatch.setattr(measuring, "BUSY", float("inf"))
    (place / "run/planner_costs.json").unlink(missing_ok=True)


def test_the_slow_are_dropped_as_far_as_there_is_time(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner, "LOOK", 2)
    monkeypatch.setattr(planner, "SHOWN_ROWS", 2)
    monkeypatch.setattr(planner, "CLOSE", 1.0)
    lineup = LoadedModels(TargetFiles(load_recipe(recipe_path).target))
    plan = planned(recipe_path, lineup, "eval.planner.seconds=1e9")
    assert [len(row.rounds) for row in plan.rows] == [4, 4, 2]  # answers
    assert "2 of 3 candidates along 4 answers" in plan.effort
    planner_command.print_result(plan, load_recipe(recipe_path), main_contender(load_recipe(recipe_path)))
    assert plan.effort in capsys.readouterr().out
    hasty = planned(recipe_path, lineup, "eval.planner.seconds=1e-9")
    assert [len(row.rounds) for row in hasty.rows] == [2, 2, 2] and len(hasty.answers) == 2  # a first look is taken


@pytest.mark.slow
def test_dropping_the_slow_costs_no_speed(recipe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is within 2 % of the best of all candidates along all answers, whatever nodes and calls cost."""
    monkeypatch.setattr(planner, "LOOK", 3)
    monkeypatch.setattr(planner, "SHOWN_ROWS", 1)
    candidates = [{"policy": "chain", "nodes": n} for n in (2, 3, 5, 9)] + [{"policy": "svip", "draft_calls": 6}]
    candidates += [{"nodes": n, "draft_calls": d, "top_k": 4} for n, d in itertools.product((8, 24), (3, 5))]
    settings = "eval.planner.max_answers=8", f"eval.planner.candidates={json.dumps(candidates)}"
    recipe, lineup = load_recipe(recipe_path, settings), LoadedModels(TargetFiles(load_recipe(recipe_path).target))
    contenders, recording, answers = planner.prepared(
        recipe, TargetFiles.read(recipe.target), main_contender(recipe), candidates_of(recipe)
    )
    proposers = {contender.name: loaded_proposer(lineup, contender) for contender in contenders}
    known = replay_all(lineup.target, proposers, answers, 8)
    place = {id(answer): i for i, answer in enumerate(answers)}

    def replayed_before(target: Any, proposers: Any, answers: Any, *rest: Any) -> dict[str, list[Generation]]:
        return {name: [known[name][place[id(answer)]] for answer in answers] for name in proposers}

    monkeypatch.setattr(planner, "replay_all", replayed_before)
    dropped = 0
    for node, call in itertools.product((0.0, 0.02, 0.1, 0.3), (0.02, 0.1, 0.3)):
        costs = linear_costs([contender.tree for contender in contenders], node, call)
        monkeypatch.setattr(planner, "_costs", lambda *_, costs=costs: costs)
        plan = planner.make_plan(lineup, recipe, contenders, recording, answers)
        everyone = ranked(costs, contenders, known, answers, 0)
        chosen = next(row for row in everyone if row.name == plan.rows[0].name)
        assert len(plan.answers) == 8 and chosen.speedup >= 0.98 * everyone[0].speedup
        dropped += sum(len(row.rounds) < 8 for row in plan.rows)
    assert dropped > 12
