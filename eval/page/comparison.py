"""tau and speed-up of all contenders against the verified nodes per round, with intervals.

The legend below names the coloured dots. Dots and intervals that would hide each other move sideways by a few pixels.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftsmith.eval.page.drawing import Colours, Plot, new_figure, octaves, set_axis_titles
from draftsmith.eval.page.legend import ROW, Legend

# Lengths are in pixels.
PANEL = 190
DOT = 6
LINES_APART = 4  # of two overlapping intervals; three times that if there are few contenders


def comparison_plot(legend: Legend) -> Plot | None:
    """None if there is nothing to compare: one contender, or answers of a single token."""
    shown = {name: row for name, row in legend.drafting.items() if row["rounds"]}
    if len(shown) < 2:
        return None
    measured = {"tau": "tau: tokens per verification"}
    if all(row["speedup"] is not None for row in shown.values()):
        measured["speedup"] = "speed-up over plain decoding"
    titles = {"tau": "tau", "speedup": "speed-up"}
    words = "; ".join(
        f"{name}: {row['tree_nodes_per_round']:.3g} nodes, "
        + ", ".join(f"{titles[key]} {row[key]:.2f}" for key in measured)
        for name, row in shown.items()
    )
    return Plot(
        "comparison",
        " and ".join(titles[key] for key in measured) + " by verified nodes",
        f"With 95 % intervals; nodes on a logarithmic scale. {words}.",
        lambda colours: _draw(colours, legend, shown, measured),
    )


def _draw(colours: Colours, legend: Legend, shown: dict[str, Any], measured: dict[str, str]) -> Figure:
    named = [name for name in legend.coloured if name in shown]
    heights = [*[PANEL] * len(measured), ROW * len(named)]
    figure, (*axes, below) = new_figure(colours, heights, more=40)
    nodes = [bound for row in shown.values() for bound in _bounds(row, "tree_nodes_per_round")]
    for ax, (key, title) in zip(axes, measured.items(), strict=True):
        octaves(ax, 12, "g")
        ax.set_xlim(min(nodes) / 1.4, max(nodes) * 1.4)
        bounds = [_bounds(row, key) for row in shown.values()]
        low, high = min(1.0, *(b[0] for b in bounds)), max(1.0, *(b[1] for b in bounds))
        margin = 0.06 * (high - low) or 0.1
        ax.set_ylim(low - margin, high + margin)
        ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        ax.axhline(1, color=colours("plain"), linewidth=1, linestyle=(0, (4, 3)))  # plain decoding
        set_axis_titles(ax, colours, y=title)
    for ax in axes[:-1]:
        ax.tick_params(labelbottom=False)
    set_axis_titles(axes[-1], colours, "nodes verified a round, the root included")
    legend.draw(below, colours, named)

    figure.draw_without_rendering()  # places the axes, which defines pixel positions
    marks = {key: _Mark.all_of(ax, key, shown) for ax, key in zip(axes, measured, strict=True)}
    apart = LINES_APART if legend.many else 3 * LINES_APART
    _spread([[marks[key][name] for key in measured] for name in _by_nodes(shown)], apart)
    for ax, key in zip(axes, measured, strict=True):
        _join_families(ax, colours, legend, shown, marks[key])
        for name, mark in marks[key].items():
            mark.draw(ax, colours(legend.roles[name]), name == legend.main, legend.markers[name])
    return figure


def _bounds(row: dict[str, Any], key: str) -> tuple[float, float]:
    """The interval, widened to hold the value. Without an interval, the value twice."""
    low, high = row[f"{key}_interval"] or (row[key], row[key])
    return min(low, row[key]), max(high, row[key])


def _by_nodes(shown: dict[str, Any]) -> list[str]:
    return sorted(shown, key=lambda name: (shown[name]["tree_nodes_per_round"], shown[name]["tau"]))


@dataclass
class _Mark:
    """A contender's dot and intervals in one panel, in pixels from the figure's lower left."""

    x: float
    y: float
    low: float
    high: float
    left: float
    right: float

    @classmethod
    def all_of(cls, ax: Axes, key: str, shown: dict[str, Any]) -> dict[str, "_Mark"]:
        def mark(row: dict[str, Any]) -> "_Mark":
            points = [(row["tree_nodes_per_round"], y) for y in (row[key], *_bounds(row, key))]
            points += [(nodes, row[key]) for nodes in _bounds(row, "tree_nodes_per_round")]
            (x, y), (_, low), (_, high), (left, _), (right, _) = ax.transData.transform(points)
            return cls(x, y, low, high, left, right)

        return {name: mark(row) for name, row in shown.items()}

    def moved(self, by: float) -> "_Mark":
        return _Mark(self.x + by, self.y, self.low, self.high, self.left + by, self.right + by)

    def clashes(self, other: "_Mark", apart: float) -> bool:
        if math.hypot(self.x - other.x, self.y - other.y) < DOT + 1:
            return True
        return abs(self.x - other.x) < apart and self.low < other.high and other.low < self.high

    def draw(self, ax: Axes, colour: str, is_main: bool, marker: str) -> None:
        line: Any = {"color": colour, "linewidth": 1.4, "alpha": 0.6, "solid_capstyle": "butt", "zorder": 2}
        plot_pixels(ax, [(self.x, self.low), (self.x, self.high)], **line)
        plot_pixels(ax, [(self.left, self.y), (self.right, self.y)], **line)
        size = DOT + 2 if is_main else DOT
        plot_pixels(ax, [(self.x, self.y)], marker=marker, markersize=size, color=colour, markeredgewidth=0, zorder=3)


def plot_pixels(ax: Axes, points: Sequence[tuple[float, float]], **style: Any) -> None:
    """Plots points given in pixels. It converts them to data coordinates, which follow the axes if those move."""
    x, y = ax.transData.inverted().transform(points).T
    ax.plot(x, y, **style)


def _spread(contenders: list[list[_Mark]], apart: float) -> None:
    """Moves each contender's marks to the nearest free x, the same in all panels. In place."""
    placed: list[list[_Mark]] = []
    for marks in contenders:
        for shift in _outwards():
            tried = [mark.moved(shift) for mark in marks]
            if not any(a.clashes(b, apart) for other in placed for a, b in zip(tried, other, strict=True)):
                break
        else:
            raise AssertionError("there is always room farther out")
        for mark, moved in zip(marks, tried, strict=True):
            vars(mark).update(vars(moved))
        placed.append(marks)


def _outwards() -> Iterator[int]:
    for step in itertools.count():
        yield step
        yield -step


def _join_families(ax: Axes, colours: Colours, legend: Legend, shown: dict[str, Any], marks: dict[str, _Mark]) -> None:
    """Draws thin lines from the smaller trees of a family to the larger ones, but not between equal sizes."""
    for names in legend.grouped(_by_nodes(shown)).values():
        for one, other in itertools.pairwise(names):
            if shown[other]["tree_nodes_per_round"] > 1.05 * shown[one]["tree_nodes_per_round"]:
                ends = [(marks[name].x, marks[name].y) for name in (one, other)]
                plot_pixels(ax, ends, color=colours(legend.roles[one]), linewidth=0.9, alpha=0.4, zorder=1)
