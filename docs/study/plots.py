"""The plots of docs/results.md."""

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from docs.study.cells import (
    ARMS,
    CUTS,
    LONG,
    LONGER,
    MANY_TREES,
    SEEDS,
    SIZES,
    STEPS,
    TREE,
    VALIDATION,
    many_trees_name,
)
from docs.study.numbers import Estimate, Found
from draftsmith.eval.page.drawing import Colours, Plot, Series, banded_lines, percent, set_axis_titles

OF_SIZES = (0,)  # seeds of all data sizes
C2T_CURVES = ("c2t, beam 15", "c2t, beam all")  # names in c2t_sweep.json, in the order of table columns
C2T_WORDS = ("15 a level", "no limit")
CORPORA = {"answers": "the target's answers", "library": "the library's text"}
# (file, title, arms): few arms each, because their intervals overlap.
DRAWN_POSITIONS = (
    ("positions", "Acceptance by draft position, chain of 6", ("eagle2", "hass", "eagle3", "eagle3.1")),
    ("positions_poss", "PosS vs. HASS, chain of 6", ("hass", "poss1", "poss2", "poss3")),
    ("positions_poss_eagle3", "PosS over EAGLE-3, chain of 6", ("eagle3", *(f"poss{n}-eagle3" for n in (1, 2, 3)))),
)
PLOTTED = tuple(dict.fromkeys(arm for _, _, arms in DRAWN_POSITIONS for arm in arms))
SCALES = ("longer", "data", "fr_spec", "c2t_few", "c2t_many")
PLOT_SECTIONS = tuple(f"plot-{name}" for name in (*(name for name, _, _ in DRAWN_POSITIONS), *SCALES))


def plots(found: Found) -> list[Plot]:
    """The plots with data."""
    steps = partial(_draw_growth, over="optimiser steps of 8 conversations")
    conversations = partial(_draw_growth, over="training conversations, at equal optimiser steps")
    made = [
        *(_plot(name, title, _position_series(found, arms), _draw_positions) for name, title, arms in DRAWN_POSITIONS),
        _plot("longer", "tau against optimiser steps", _longer_series(found), steps),
        _plot("data", "tau against training conversations", _data_series(found), conversations),
        _plot("fr_spec", "FR-Spec: tau by draft vocabulary", _fr_spec_series(found), _draw_cuts),
        _plot("c2t_few", f"C2T trained on {VALIDATION} conversations, seed 0", _c2t_few(found), _draw_c2t),
        _plot("c2t_many", f"C2T trained on {MANY_TREES} conversations, no limit", _c2t_many(found), _draw_c2t),
    ]
    return [plot for plot in made if plot is not None]


def _plot(name: str, title: str, series: list[Series], draw: Callable[[Colours, list[Series]], Figure]) -> Plot | None:
    if not series:
        return None
    words = "; ".join(f"{own}: {', '.join(f'{y:.2f}' for y in ys)}" for own, _, _, ys, _ in series)
    return Plot(name, title, f"{words}.", lambda colours: draw(colours, series))


def _series(name: str, role: str, points: Sequence[tuple[float, Estimate | None]]) -> list[Series]:
    there = [(x, found) for x, found in points if found is not None]
    if not there:
        return []
    ys, intervals = [found.value for _, found in there], [found.interval for _, found in there]
    return [(name, role, [x for x, _ in there], ys, intervals)]


def _position_series(found: Found, arms: Sequence[str]) -> list[Series]:
    return [
        series
        for i, arm in enumerate(arms, start=1)
        for series in _series(ARMS[arm].name, f"s{i}", list(enumerate(found.positions(arm), start=1)))
    ]


def _longer_series(found: Found) -> list[Series]:
    """Means over all seeds, of the arms with more than one number of steps."""
    result = []
    for i, arm in enumerate(LONG, start=1):
        taus = {steps: found.tau(arm, steps=steps) for steps in (STEPS, *LONGER)}
        points = [(steps, tau) for steps, tau in taus.items() if tau is not None and len(tau.by_seed) == len(SEEDS)]
        if len(points) > 1:
            result += _series(ARMS[arm].name, f"s{i}", points)
    return result


def _data_series(found: Found) -> list[Series]:
    counts = found.lines.get("data", {}).get("training_conversations", {})
    result = []
    for arm, role in (("eagle2", "s1"), ("eagle3", "s3")):
        points = [
            (counts[name], found.tau(arm, TREE, size, seeds=OF_SIZES)) for size, name in SIZES.items() if name in counts
        ]
        if sum(tau is not None for _, tau in points) > 1:
            result += _series(ARMS[arm].name, role, points)
    return result


def _fr_spec_series(found: Found) -> list[Series]:
    result = []
    for i, (corpus, words) in enumerate(CORPORA.items(), start=1):
        points = [(size, found.tau_of(f"fr-spec/{corpus}", str(size))) for size in CUTS]
        result += _series(words, f"s{i}", [*points, (1024, found.tau_of(f"fr-spec/{corpus}", TREE))])
    return result


def _c2t_few(found: Found) -> list[Series]:
    drawn = [("EAGLE-2 over N", "plain", "eagle2")]
    drawn += [(f"C2T over beta, {C2T_WORDS[i]}", f"s{i + 1}", curve) for i, curve in enumerate(C2T_CURVES)]
    return [s for name, role, curve in drawn for s in _series(name, role, _c2t_points(found, "c2t/eagle2", curve))]


def _c2t_many(found: Found) -> list[Series]:
    """EAGLE-2's trees of seed 0 (those of other seeds lie on them), and C2T's of each seed, without a limit."""
    result = _series("EAGLE-2 over N, seed 0", "plain", _c2t_points(found, many_trees_name("eagle2"), "eagle2"))
    for seed in SEEDS:
        points = _c2t_points(found, many_trees_name("eagle2", seed), C2T_CURVES[1])
        result += _series(f"C2T over beta, seed {seed}", f"s{seed + 1}", points)
    return result


def _c2t_points(found: Found, cell: str, curve: str) -> list[tuple[float, Estimate]]:
    rows = [row for row in found.lines.get(cell, {}).get("points", []) if row["curve"] == curve]
    rows.sort(key=lambda row: row["candidates"])
    return [(row["candidates"], Estimate(row["tau"], tuple(row["tau_interval"]), {})) for row in rows]


def _draw_positions(colours: Colours, series: list[Series]) -> Figure:
    figure = banded_lines(colours, series)
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    percent(figure.axes[0])
    set_axis_titles(figure.axes[0], colours, "draft position", "acceptance, given that all before were accepted")
    return figure


def _draw_growth(colours: Colours, series: list[Series], over: str) -> Figure:
    figure = banded_lines(colours, series, log=True)
    ax = figure.axes[0]
    ax.set_xticks(sorted({x for _, _, xs, _, _ in series for x in xs}))
    set_axis_titles(ax, colours, over, "tau, tree of 60")
    return figure


def _draw_cuts(colours: Colours, series: list[Series]) -> Figure:
    figure = banded_lines(colours, series, log=True)
    set_axis_titles(figure.axes[0], colours, "tokens to draft from", "tau, tree of 60")
    return figure


def _draw_c2t(colours: Colours, series: list[Series]) -> Figure:
    figure = banded_lines(colours, series, log=True)
    ax = figure.axes[0]
    short = FuncFormatter(lambda value, _: f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.0f} k")
    ax.xaxis.set_major_formatter(short)
    set_axis_titles(ax, colours, "nodes verified in all, roots included", "tau")
    return figure
