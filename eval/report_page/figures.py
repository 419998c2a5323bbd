"""The report's figures: all contenders by verified nodes, time, acceptance by position, and the training's curves.

The comparison shows all contenders by their numbers in the table, the other figures at most `legend.FEW` of them.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from draftsmith.eval.report_page.drawing import (
    Colours,
    Plot,
    harmless,
    line_legend,
    new_figure,
    octaves,
    percent,
    set_axis_titles,
)
from draftsmith.eval.report_page.legend import Legend

# Pixels.
PANEL = 190
LINES = 280  # of the lines by position, without their legend
LEGEND_ROW = 17
TIMED_ROW = 54  # of a contender's name, bar and time shares
MOST_POINTS = 240  # of a training curve


def parts_of(acceptance: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yields (kind, benchmark, name, numbers by contender) for every part of acceptance.json, if there are several.

    Kinds: benchmark, category (after its benchmark, if that has several), turn.
    """
    benchmarks, categories, turns = (acceptance[part] for part in ("benchmarks", "categories", "turns"))
    for benchmark, numbers in benchmarks.items():
        inside = {name: row for name, row in categories.items() if name.startswith(f"{benchmark}/")}
        if len(benchmarks) > 1:
            yield "benchmark", benchmark, benchmark, numbers
        for name, row in inside.items() if len(inside) > 1 else ():
            yield "category", benchmark, name.removeprefix(f"{benchmark}/"), row
    if len(turns) > 1:
        yield "turn", "", "first turns", turns["1"]
        yield "turn", "", "later turns", turns["2"]


def acceptance_plots(acceptance: dict[str, Any]) -> list[Plot]:
    """The comparison, time and acceptance by position, as far as there is something to show."""
    legend = Legend.of(acceptance)
    drafted = {name: row for name, row in legend.drafting.items() if row["rounds"]}
    if not drafted:
        return []
    best = {name: row for name, row in drafted.items() if name in legend.coloured}
    timed = {name: row for name, row in legend.contenders.items() if name in (legend.plain, *best)}
    timed = {name: row for name, row in timed.items() if row["tokens_per_second"]}
    measured = {"tau": "tau: tokens per verification"}
    if all(row["speedup"] is not None for row in drafted.values()):
        measured["speedup"] = "speed-up over plain decoding"
    shares = "; ".join(
        f"{name}: {', '.join(f'{share:.0%}' for share in row['acceptance_by_position']) or 'nothing accepted'}"
        for name, row in best.items()
    )
    times = "; ".join(f"{name}: {_milliseconds(row):.3g} ms, {_time_shares(row)}" for name, row in timed.items())
    plots = []
    if len(drafted) > 1:
        title = "tau and speed-up by verified nodes" if len(measured) > 1 else "tau by verified nodes"
        words = "The contenders' numbers are those of the table, which has the values."
        plots.append(Plot("comparison", title, words, lambda c: _comparison(c, legend, drafted, measured)))
    if timed:
        plots.append(Plot("time_per_token", "Where the time of a token goes", f"{times}.", lambda c: _times(c, timed)))
    if best:
        words = f"How often a drafted token is accepted when all before it were. {shares}."
        by_position = "acceptance_by_position", "Acceptance by position"
        plots.append(Plot(*by_position, words, lambda c: _by_position(c, legend, best)))
    return plots


def _comparison(colours: Colours, legend: Legend, drafted: dict[str, Any], measured: dict[str, str]) -> Figure:
    """A dot for each contender, beside it its number."""
    figure, axes = new_figure(colours, [PANEL] * len(measured), sharex=True)
    nodes = [row["tree_nodes_per_round"] for row in drafted.values()]
    for ax, (key, title) in zip(axes, measured.items(), strict=True):
        octaves(ax, 12, "g")
        ax.set_xlim(min(nodes) / 1.4, max(nodes) * 1.4)
        ax.margins(y=0.12)
        ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        ax.axhline(1, color=colours("plain"), linewidth=1, linestyle=(0, (4, 3)))  # plain decoding
        for name, row in drafted.items():
            at, colour = (row["tree_nodes_per_round"], row[key]), colours(legend.roles[name])
            ax.plot(*at, legend.markers[name], markersize=8 if name == legend.main else 6, color=colour)
            said: Any = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 10}
            ax.annotate(str(legend.numbers[name]), at, color=colour, **said)
        set_axis_titles(ax, colours, y=title)
    set_axis_titles(axes[-1], colours, "nodes verified a round, the root included")
    return figure


def _by_position(colours: Colours, legend: Legend, best: dict[str, Any]) -> Figure:
    """One line per contender, with a legend below."""
    figure, (ax,) = new_figure(colours, [LINES], more=LEGEND_ROW * len(best) if len(best) > 1 else 0)
    longest = max([1, *(len(row["acceptance_by_position"]) for row in best.values())])
    for name, row in best.items():
        shares = row["acceptance_by_position"]
        positions = range(1, len(shares) + 1)
        bounds = [b or [share, share] for b, share in zip(row["acceptance_by_position_interval"], shares, strict=True)]
        colour = colours(legend.roles[name])
        if name == legend.main and shares:  # more bands would hide the lines
            ax.fill_between(positions, *zip(*bounds, strict=True), color=colour, alpha=0.13, linewidth=0)  # type: ignore[arg-type]
        label = shortened(f"{legend.numbers[name]}  {name}", 50)
        style: Any = {"marker": legend.markers[name], "markersize": 4, "linewidth": 1.8, "clip_on": False}
        ax.plot(positions, shares, color=colour, label=label, **style)
    ax.set_ylim(0, 1)
    ax.set_xlim(0.7, longest + 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(min(longest, 10), integer=True))
    percent(ax)
    set_axis_titles(ax, colours, "position in the draft", "accepted, where all before were")
    if len(best) > 1:
        place: Any = {"loc": "outside lower left", "labelcolor": "linecolor", "frameon": False, "fontsize": 11}
        figure.legend(handles=ax.lines, labelspacing=0.2, handlelength=1.2, **place)
    return figure


def _milliseconds(row: dict[str, Any]) -> float:
    return 1000 / row["tokens_per_second"]


def _time_shares(row: dict[str, Any]) -> str:
    return " · ".join(f"{part} {100 * share:.0f} %" for part, share in row["time_share"].items() if share)


def _times(colours: Colours, timed: dict[str, Any]) -> Figure:
    """One bar per contender, with its name above and its shares below."""
    figure, (ax,) = new_figure(colours, [64 + TIMED_ROW * len(timed)])
    longest = max(map(_milliseconds, timed.values()))
    for place, (name, row) in enumerate(timed.items()):
        left = 0.0
        for part, share in row["time_share"].items():
            width = (share or 0) * _milliseconds(row)
            ax.barh(place, width, left=left, height=0.24, color=colours(part), linewidth=0)
            left += width
        above: Any = {"fontsize": 11, "color": colours("ink"), "va": "bottom"}
        ax.text(0, place - 0.19, shortened(name, 44), **above)
        ax.text(longest, place - 0.19, f"{_milliseconds(row):.3g} ms", ha="right", **above)
        ax.text(0, place + 0.19, _time_shares(row), fontsize=10, color=colours("muted"), va="top")
    ax.set_ylim(len(timed) - 0.45, -0.5)
    ax.set_yticks([])
    ax.set_xlim(0, longest)
    ax.grid(visible=False)
    set_axis_titles(ax, colours, "milliseconds per token")
    keys = [Patch(color=colours(part), label=part) for part in ("draft", "verify", "other")]
    line_legend(ax, colours, keys, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def shortened(text: str, most: int) -> str:
    """`text` in one row of at most `most` characters."""
    return textwrap.shorten(harmless(text), most, placeholder="…") or "?"


# Training.


def training_plots(metrics: Sequence[dict[str, Any]]) -> list[Plot]:
    """Loss and simulated tau over the lines of metrics.jsonl."""
    if len(metrics) < 2:
        return []
    last = metrics[-1]

    def words(name: str) -> str:
        checked = [line[f"validation_{name}"] for line in metrics if f"validation_{name}" in line]
        tail = f", {checked[-1]:.3g} in validation" if checked else ""
        return f"{last[name]:.3g} after {last['step']} steps{tail}."

    return [
        Plot("loss", "Loss", words("loss"), lambda c: _curve(c, metrics, "loss")),
        Plot("simulated_tau", "Simulated tau", words("simulated_tau"), lambda c: _curve(c, metrics, "simulated_tau")),
    ]


def _thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """About MOST_POINTS evenly spaced lines, the last one among them."""
    return [*lines[: -1 : max(1, len(lines) // MOST_POINTS)], *lines[-1:]]


def _curve(colours: Colours, metrics: Sequence[dict[str, Any]], name: str) -> Figure:
    figure, (ax,) = new_figure(colours, [220])
    style: Any = {"linewidth": 1.4}
    for key, label, role in ((name, "training", "s1"), (f"validation_{name}", "validation", "s2")):
        lines = _thinned([line for line in metrics if key in line])
        ax.plot([x["step"] for x in lines], [x[key] for x in lines], color=colours(role), label=label, **style)
        style = {"linewidth": 1.4, "marker": "o", "markersize": 3.5}
    if any(f"validation_{name}" in line for line in metrics):
        line_legend(ax, colours, ax.lines)
    ax.autoscale_view()
    ax.set_xlim(0, ax.dataLim.x1)
    ax.set_ylim(0, None)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    set_axis_titles(ax, colours, "optimiser steps")
    return figure
