"""The numbers and settings of a sweep over C2T's beta."""

import argparse
import math
import random
from pathlib import Path

import pytest

from draftsmith.eval import c2t_sweep
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured.c2t_curves import Point, points_of, print_numbers, sweep_numbers
from draftsmith.models.c2t import C2tClassifier, C2tConfig
from draftsmith.recipes.errors import UserError
from tests import reference
from tests.c2t_cases import place as place
from tests.c2t_cases import recipe_of


def rounds_of(chance: random.Random, tokens: int, tau: float, nodes: int) -> Generation:
    accepted = []
    while sum(accepted) + len(accepted) < tokens - 1:
        accepted.append(min(int(chance.expovariate(1 / (tau - 1))), tokens - 2 - sum(accepted) - len(accepted)))
    trees = [chance.randint(1, 2 * nodes) for _ in accepted]
    return Generation([1], list(range(tokens)), accepted, False, trees, [3] * len(accepted))


# Nodes of the curve's last point, tau of EAGLE-2's last tree, and whether that has no interval: its neighbours are more
# than three times apart, or the curve ends below it in more than a few resamples.
@pytest.mark.parametrize(("largest", "tau_of_last", "unknown"), [(30, 3.0, False), (60, 3.0, True), (30, 3.3, True)])
def test_a_share_is_what_the_curve_needs_for_the_same_tau(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    largest: int,
    tau_of_last: float,
    unknown: bool,
) -> None:
    C2tClassifier(C2tConfig()).save(tmp_path)
    recipe = recipe_of(place, f"classifier.out={tmp_path}")
    points = points_of(recipe, (0.2, 0.5, 0.8), (4, 9, 20))
    assert [(point.curve, point.value) for point in points] == [
        *(("c2t", beta) for beta in (0.8, 0.5, 0.2)),
        *(("eagle2", nodes) for nodes in (4, 9, 20)),
    ]
    assert {(p.contender.tree.width, p.contender.tree.calls) for p in points} == {(4, 4)}
    chance = random.Random(0)
    shapes = {"c2t 0.8": (2.0, 5), "c2t 0.5": (2.6, 9), "c2t 0.2": (3.4, largest)}
    shapes |= {"eagle2 4": (1.5, 3), "eagle2 9": (2.3, 12), "eagle2 20": (tau_of_last, 40)}
    found = {name: [rounds_of(chance, 40, *shape) for _ in range(60)] for name, shape in shapes.items()}
    numbers = sweep_numbers(points, found, 200, 0)

    def total(name: str) -> tuple[float, float]:
        rounds = sum(g.rounds for g in found[name])
        return sum(len(g.token_ids) - 1 for g in found[name]) / rounds, sum(sum(g.tree_nodes) for g in found[name])

    for row, name in zip(numbers["points"], shapes, strict=True):
        tau, candidates = total(name)
        assert (row["tau"], row["candidates"]) == (pytest.approx(tau, abs=1e-4), candidates)
        assert row["tau_interval"][0] < tau < row["tau_interval"][1]
    curve = sorted((tau, math.log(candidates)) for tau, candidates in (total(f"c2t {b}") for b in (0.8, 0.5, 0.2)))
    for row, name in zip(numbers["at_equal_tau"], ("eagle2 4", "eagle2 9", "eagle2 20"), strict=True):
        tau, candidates = total(name)
        if tau < curve[0][0]:  # nothing was measured there
            assert row["share"] is None and row["share_interval"] is None and row["candidates"] is None
            assert row["beyond"] == "below"
            assert row["share_at_end"] == pytest.approx(math.exp(curve[0][1]) / candidates, abs=1e-4)
            continue
        needed = math.exp(reference.on_a_line(curve, tau))
        assert row["share"] == pytest.approx(needed / candidates, abs=1e-4)
        if name == "eagle2 20" and unknown:
            assert row["share_interval"] is None
        else:
            assert row["share_interval"][0] < row["share"] < row["share_interval"][1]
        assert row["beyond"] is None and row["share_at_end"] is None
    assert [row["share"] is None for row in numbers["at_equal_tau"]] == [True, False, False]
    print_numbers(numbers)
    assert ("note: a share without an interval" in capsys.readouterr().out) is unknown


def test_a_sweep_s_settings_are_checked_and_the_recipe_s_own_tree_counts(place: Path, tmp_path: Path) -> None:
    C2tClassifier(C2tConfig(entropy_over=70)).save(tmp_path)
    recipe = recipe_of(place, f"classifier.out={tmp_path}")
    with pytest.raises(UserError) as error:
        points_of(recipe, (0.5,), (2, 4000), [(0, None)])
    assert [problem.split(":")[0] for problem in error.value.problems] == ["--betas", "--beams", "--nodes"]
    for text in ("wide", "15:0.1,", "all:x"):
        with pytest.raises(argparse.ArgumentTypeError, match="give K2 or all"):
            c2t_sweep._beam(text)
    with pytest.raises(UserError, match="from 0 to 1"):
        points_of(recipe, (0.5, 1.2), (4, 9))
    with pytest.raises(UserError, match="no C2T classifier here"):
        points_of(recipe_of(place, "classifier.out=/nowhere"), (0.2, 0.5), (4, 9))
    c2t_keys = f"c2t: {{classifier: {tmp_path}, beam: 7, entropy_over: 70}}"
    own = f"eval.tree={{policy: c2t, nodes: 30, draft_calls: 3, {c2t_keys}}}"
    point: Point = points_of(recipe_of(place, own), (0.2, 0.5), (4, 9))[0]
    tree = point.contender.tree
    assert (tree.nodes, tree.calls, tree.width, tree.c2t.beam, tree.c2t.beta) == (30, 3, 15, 7, 0.5)
    assert tree.c2t.entropy_over == 70
    assert points_of(recipe, (0.2, 0.5), (4, 9))[0].contender.tree.nodes is None
    small = recipe_of(place, f"classifier.out={tmp_path}", "eval.tree={policy: eagle2, draft_calls: 5, top_k: 4}")
    usual = [point.value for point in points_of(small, (0.2, 0.5)) if point.curve == "eagle2"]
    assert usual == [4, 8, 16, 24, 32, 48, 60]  # as far as the 1 + 4 + 4 * 16 nodes that are proposed
