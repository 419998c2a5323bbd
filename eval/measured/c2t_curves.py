"""tau against candidates of C2T's and EAGLE-2's trees, behind eval/c2t_sweep.py."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftsmith.eval.decoding.contenders import Contender, Lineup, check_contenders, contender_named, describe
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured.benchmarks import PLAIN
from draftsmith.eval.measured.metrics import bootstrap, conversation_numbers
from draftsmith.eval.page.drawing import Colours, Plot, Series, banded_lines, set_axis_titles, write_png
from draftsmith.eval.page.files import interval_text, print_written
from draftsmith.eval.recorded.answers import Recording, answer_tokens
from draftsmith.eval.recorded.replay import Agreement
from draftsmith.eval.recorded.replay_contenders import recording_of, replay_contenders
from draftsmith.models.c2t import read_c2t_config
from draftsmith.models.formats.named_drafters import with_measured_drafters
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path
from draftsmith.recipes.schema import C2tSection, Recipe, TreeSection

BETAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NODES = (4, 8, 16, 24, 32, 48, 60, 100, 180, 300)
EAGLE2 = "eagle2"
COLUMNS = ("tokens", "rounds", "nodes", "calls")  # sums of each point
BeamSetting = tuple[int | None, tuple[float, ...] | None]  # K2 (None: all), and betas of its own
FAR_APART = 3  # times the nodes: a curve between points farther apart is a guess


@dataclass(frozen=True)
class Point:
    """One setting of one curve."""

    curve: str
    value: float  # beta, or nodes
    contender: Contender


def main(command: Command) -> None:
    recipe = with_measured_drafters(command.recipe, command.plan)
    points = points_of(recipe, command.betas or BETAS, command.nodes, command.beams, command.contender)
    contenders = [point.contender for point in points]
    check_contenders(recipe, contenders)
    recording = recording_of(recipe, contenders)
    answers = recording.of(contenders[0].name, PLAIN)
    if recording.note:
        print(f"note: {recording.note}")
    if command.plan:
        print(f"replays      {len(answers):,} answers, {answer_tokens(answers):,} tokens, of {recording.path}")
        for curve in dict.fromkeys(point.curve for point in points):
            print(f"{curve:<12} {', '.join(repr(point.value) for point in points if point.curve == curve)}")
        print(f"writes       {recipe.eval_out / 'c2t_sweep.json'}, c2t_sweep.png")
        return
    lineup = Lineup(recipe.target)
    agreement = Agreement.of(lineup.target)
    found = replay_contenders(lineup, contenders, recording, recipe.eval.replay_batch_size, agreement)
    print(f"answers of {recording.path}: {agreement}")
    numbers = sweep_numbers(points, found, recipe.eval.bootstrap_samples, recipe.eval.seed)
    print_numbers(numbers)
    print_written(write_sweep(recipe, contenders[0], recording, numbers, str(agreement)))


def points_of(
    recipe: Recipe,
    betas: Sequence[float],
    nodes: Sequence[int] | None = None,
    beams: Sequence[BeamSetting] | None = None,
    contender: str | None = None,
) -> list[Point]:
    """C2T's curves over beta, one for each beam, then EAGLE-2's over nodes.

    Args:
        betas: for beams without betas of their own.
        nodes: default: the possible ones of NODES.
        contender: name of a contender under eval.also, to use its drafter and tree.

    Raises:
        UserError: an impossible beta, beam or number of nodes; fewer than two points of a curve.
    """
    main = contender_named(recipe, contender)
    if not main.has_distributions:
        raise UserError(f"--contender: {main.proposer} has no probabilities that a tree could grow by")
    base = main.tree
    section = base.c2t if base.policy == "c2t" else C2tSection()
    if section.classifier is None:
        section = section.model_copy(update={"classifier": str(recipe.classifier_dir)})
    assert section.classifier is not None
    section = section.model_copy(update={"entropy_over": read_c2t_config(section.classifier)[0].entropy_over})
    own = base if base.policy == "c2t" else TreeSection(policy="c2t", c2t=section)
    # Explicit sizes count even if the recipe's tree has another policy.
    calls, width = base.draft_calls or own.calls, base.top_k or own.width
    possible = 1 + width + (calls - 1) * width**2
    nodes = sorted(set([count for count in NODES if count <= possible] if nodes is None else nodes))
    curves = {beam: sorted(set(own or betas), reverse=True) for beam, own in beams or [(section.beam, None)]}
    problems = []
    if any(len(own) < 2 or not all(0 <= beta <= 1 for beta in own) for own in curves.values()):
        problems.append("--betas: give two or more numbers from 0 to 1")
    if any(beam is not None and beam < 1 for beam in curves):
        problems.append("--beams: give numbers above 0, or all")
    if len(nodes) < 2 or not all(2 <= count <= possible for count in nodes):
        problems.append(
            f"--nodes: give two or more numbers from 2 to {possible:,}, which is all that {calls} draft calls with "
            f"top_k {width} propose"
        )
    if problems:
        raise UserError(problems)

    def point(curve: str, value: float, tree: TreeSection) -> Point:
        return Point(curve, value, replace(main, name=f"{curve} {value!r}", tree=tree))

    cut = {"vocab_size": base.vocab_size, "draft_calls": calls, "top_k": width}
    limit = base.nodes if base.policy == "c2t" else None
    c2t = [
        point(
            "c2t" if len(curves) == 1 else f"c2t, beam {beam or 'all'}",
            beta,
            TreeSection(policy="c2t", nodes=limit, c2t=section.model_copy(update={"beta": beta, "beam": beam}), **cut),
        )
        for beam, own_betas in curves.items()
        for beta in own_betas
    ]
    return [*c2t, *(point(EAGLE2, count, TreeSection(policy="eagle2", nodes=count, **cut)) for count in nodes)]


# Numbers.


def sweep_numbers(
    points: Sequence[Point], found: dict[str, list[Generation]], bootstrap_samples: int, seed: int
) -> dict[str, Any]:
    """{points: [...], at_equal_tau: [...]}, as c2t_sweep.json holds them.

    `share` is None if EAGLE-2's tau lies beyond a curve's end. `beyond` is then "below" or "above" the curve's taus,
    and `share_at_end` the share of the curve's last point there. Below, that point has more than EAGLE-2's tau.
    `share_interval` is None beyond a curve's end, between points that are `far_apart`, and if an end lies beyond.

    Args:
        found: of every point's contender, one generation per answer, in the same order.
    """
    sums = _sums([found[point.contender.name] for point in points])
    interval = bootstrap(sums, bootstrap_samples, seed)
    total = sums.sum(0)[None]
    rows = [
        {
            "curve": point.curve,
            "value": point.value,
            "tau": round(float(_tau(total)[0, i]), 4),
            "tau_interval": interval(lambda s, i=i: _tau(s)[:, i]),
            "candidates": int(_column(total, "nodes")[0, i]),
            "nodes_per_round": round(float(_per_round(total, "nodes")[0, i]), 4),
            "nodes_per_round_interval": interval(lambda s, i=i: _per_round(s, "nodes")[:, i]),
            "calls_per_round": round(float(_per_round(total, "calls")[0, i]), 4),
        }
        for i, point in enumerate(points)
    ]
    curves: dict[str, list[int]] = {}
    for i, point in enumerate(points):
        curves.setdefault(point.curve, []).append(i)
    equal = []
    for name, members in curves.items():
        if name == EAGLE2:
            continue
        by_tau = sorted(members, key=lambda member: rows[member]["tau"])
        for i in curves[EAGLE2]:
            share = math.exp(_log_share(total, members, i)[0])
            reached = 0 < share < math.inf
            end = None if reached else by_tau[0] if rows[i]["tau"] < rows[by_tau[0]]["tau"] else by_tau[-1]
            guessed = not reached or far_apart([rows[member] for member in members], rows[i]["tau"])
            logs = None if guessed else interval(lambda s, m=members, i=i: _log_share(s, m, i))
            equal.append(
                {
                    "curve": name,
                    "eagle2_nodes": int(points[i].value),
                    "tau": rows[i]["tau"],
                    "eagle2_candidates": rows[i]["candidates"],
                    "candidates": round(share * rows[i]["candidates"]) if reached else None,
                    "share": round(share, 4) if reached else None,
                    "share_interval": logs and [round(math.exp(log), 4) for log in logs],
                    "beyond": None if end is None else "below" if end == by_tau[0] else "above",
                    "share_at_end": None if end is None else round(rows[end]["candidates"] / rows[i]["candidates"], 4),
                }
            )
    answers = len(found[points[0].contender.name])
    return {"conversations": len(sums), "answers": answers, "points": rows, "at_equal_tau": equal}


def far_apart(curve: Iterable[Mapping[str, Any]], tau: float) -> bool:
    """Whether a curve's next points below and above `tau` differ so much in nodes that what lies between them is a
    guess, of which an interval over prompts knows nothing.

    Args:
        curve: points with `tau` and `candidates`, in any order.
    """
    by_tau = sorted((point["tau"], point["candidates"]) for point in curve)
    fewer = [nodes for at, nodes in by_tau if at <= tau][-1:]
    more = [nodes for at, nodes in by_tau if at > tau][:1]
    return bool(fewer and more) and more[0] > FAR_APART * fewer[0]


def _sums(of_points: Sequence[Sequence[Generation]]) -> np.ndarray:
    """[conversations, points * COLUMNS]: rows that are resampled together."""
    row_of = conversation_numbers(of_points[0])
    sums = np.zeros((max(row_of) + 1, len(of_points), len(COLUMNS)))
    for point, generations in enumerate(of_points):
        for row, g in zip(row_of, generations, strict=True):
            sums[row, point] += (len(g.token_ids) - 1, g.rounds, sum(g.tree_nodes), sum(g.draft_calls))
    return sums.reshape(len(sums), -1)


def _column(sums: np.ndarray, name: str) -> np.ndarray:
    """[samples, points] of sums [samples, points * COLUMNS]."""
    return sums[:, COLUMNS.index(name) :: len(COLUMNS)]


def _per_round(sums: np.ndarray, name: str) -> np.ndarray:
    return _column(sums, name) / _column(sums, "rounds")


def _tau(sums: np.ndarray) -> np.ndarray:
    return _per_round(sums, "tokens")


def _log_share(sums: np.ndarray, curve: Sequence[int], point: int) -> np.ndarray:
    """[samples] logarithm of the candidates of `curve` at `point`'s tau over those of `point`; -inf where the curve
    begins above that tau, inf where it ends below."""
    taus, candidates = _tau(sums), _column(sums, "nodes")
    order = taus[:, curve].argsort(axis=1, kind="stable")
    by_tau = np.take_along_axis(taus[:, curve], order, axis=1)
    logs = np.take_along_axis(np.log(candidates[:, curve]), order, axis=1)
    needed = [
        np.interp(tau, its_taus, its_logs, left=-np.inf, right=np.inf)
        for tau, its_taus, its_logs in zip(taus[:, point], by_tau, logs, strict=True)
    ]
    return np.array(needed) - np.log(candidates[:, point])


# What is printed and written.


def print_numbers(numbers: dict[str, Any]) -> None:
    """Prints C2T's candidates at the taus of EAGLE-2's trees. The JSON has the points of the curves."""
    print(f"\nAt equal tau, by {numbers['answers']:,} answers of {numbers['conversations']:,} conversations")
    print(f"{'curve':<16}{'eagle2 nodes':>13}{'tau':>8}{'its candidates':>16}{'c2t':>11}{'share':>8}  95 %")
    for row in numbers["at_equal_tau"]:
        if row["share"] is not None:
            reached = f"{row['candidates']:>11,}{row['share']:>8.2f}"
        else:
            share = f"< {row['share_at_end']:.2f}" if row["beyond"] == "below" else "not reached"
            reached = f"{share:>19}"
        print(
            f"{row['curve']:<16}{row['eagle2_nodes']:>13}{row['tau']:>8.3f}{row['eagle2_candidates']:>16,}{reached}"
            f"  {interval_text(row['share_interval'])}"
        )
    if any(row["share"] is not None and row["share_interval"] is None for row in numbers["at_equal_tau"]):
        print(
            f"note: a share without an interval lies near an end of its curve, or between trees of which one has more "
            f"than {FAR_APART} times the nodes; --betas beyond or between these would tell"
        )


def write_sweep(
    recipe: Recipe, contender: Contender, recording: Recording, numbers: dict[str, Any], agreement: str
) -> list[Path]:
    """Writes c2t_sweep.json and c2t_sweep.png; returns their paths."""
    folder = recipe.eval_out
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "drafter": describe(contender)["drafter"],
        "recorded_answers": recording.described(agreement),
        **numbers,
        "recipe": recipe.model_dump(mode="json"),
    }
    paths = folder / "c2t_sweep.json", folder / "c2t_sweep.png"
    with atomic_path(paths[0]) as numbers_file, atomic_path(paths[1]) as plot_file:
        numbers_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_png(sweep_plot(numbers), plot_file)
    return list(paths)


def sweep_plot(numbers: dict[str, Any]) -> Plot:
    """Every curve with its intervals of tau."""
    words = "; ".join(
        f"{row['curve']} {row['value']!r}: tau {row['tau']:.2f}, {row['candidates']:,} candidates"
        for row in numbers["points"]
    )
    return Plot("c2t_sweep", "tau against candidates", f"{words}.", lambda colours: _draw(colours, numbers["points"]))


def _draw(colours: Colours, rows: Sequence[dict[str, Any]]) -> Figure:
    series: list[Series] = []
    for i, name in enumerate(dict.fromkeys(row["curve"] for row in rows)):
        curve = sorted((row for row in rows if row["curve"] == name), key=lambda row: row["candidates"])
        taus = [row["tau"] for row in curve]
        bounds = [row["tau_interval"] or (row["tau"], row["tau"]) for row in curve]
        role = "plain" if name == EAGLE2 else f"s{i + 1}"
        series.append((name, role, [row["candidates"] for row in curve], taus, bounds))
    figure = banded_lines(colours, series, log=True)
    set_axis_titles(
        figure.axes[0], colours, "candidates verified in all, roots included", "tau: tokens per verification"
    )
    return figure
