"""The report's figures: acceptance by position, accepted tokens, time, parts of a benchmark, and the training's curves.

The comparison (`eval.page.comparison`) shows all contenders. The other figures show at most `legend.FEW` of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from draftsmith.eval.page.comparison import comparison_plot
from draftsmith.eval.page.drawing import Colours, Plot, line_legend, new_figure, percent, set_axis_titles
from draftsmith.eval.page.legend import ROW as LEGEND_ROW
from draftsmith.eval.page.legend import Legend, shortened

LINES = 345  # pixels of the lines by position, without their legend
TIMED_ROW = 54  # pixels of a contender's name, bar and time shares


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
    """Plots of the comparison, acceptance by position, histogram, time, and tau by part, as far as they apply."""
    legend = Legend.of(acceptance)
    if not any(row["rounds"] for row in legend.drafting.values()):
        return []
    main, shown = legend.main, [legend.plain, *legend.coloured]
    drafting = {name: legend.drafting[name] for name in legend.coloured if legend.drafting[name]["rounds"]}
    timed = {name: legend.contenders[name] for name in shown if legend.contenders[name]["tokens_per_second"]}
    shares = "; ".join(
        f"{name}: {', '.join(f'{share:.0%}' for share in row['acceptance_by_position']) or 'nothing accepted'}"
        for name, row in drafting.items()
    )
    counts = "; ".join(f"{name}: {row['accepted_per_round']:.2f} a round" for name, row in drafting.items())
    times = "; ".join(
        f"{name}: {_milliseconds(row):.3g} ms a token, {_time_shares_text(row)}" for name, row in timed.items()
    )
    compared = comparison_plot(legend)
    plots = [compared] if compared is not None else []
    if drafting:
        plots += [
            Plot(
                "acceptance_by_position",
                "Acceptance by position",
                f"How often a drafted token is accepted when all before it were. {shares}.",
                lambda colours: _by_position(colours, legend, drafting),
            ),
            Plot(
                "accepted_histogram",
                "Drafted tokens accepted in a round, share of rounds",
                f"Shares of rounds, a panel for each contender. {counts}.",
                lambda colours: _histograms(colours, legend, drafting),
            ),
        ]
    if timed:
        plots.append(
            Plot(
                "time_per_token",
                "Where the time of a token goes",
                f"{times}.",
                lambda colours: _times(colours, timed),
            )
        )
    relaxed = {name: row["total_variation"] for name, row in legend.drafting.items() if row.get("total_variation")}
    if relaxed:
        words = "; ".join(f"{name}: {x:.3f}, {legend.drafting[name]['tau']:.2f}" for name, x in relaxed.items())
        plots.append(
            Plot(
                "tau_by_total_variation",
                "What relaxed acceptance gains, and what it moves",
                f"tau by total variation, with 95 % intervals; lossless rows at 0. {words}.",
                lambda colours: _by_total_variation(colours, legend, relaxed),
            )
        )
    parts = {
        f"{benchmark} / {name}" if kind == "category" and len(acceptance["benchmarks"]) > 1 else name: row
        for kind, benchmark, name, row in parts_of(acceptance)
        if kind in ("benchmark", "category")
    }
    if len(parts) > 1:
        words = "; ".join(f"{name}: {row[main]['tau']}" for name, row in parts.items())
        plots.append(
            Plot(
                "tau_by_part",
                "tau by benchmark",
                f"{main}, with 95 % intervals. {words}.",
                lambda colours: _by_part(colours, legend, list(drafting), parts),
            )
        )
    return plots


def _by_position(colours: Colours, legend: Legend, drafting: dict[str, Any]) -> Figure:
    """One line per contender, with a legend below."""
    heights = [LINES] if len(drafting) == 1 else [LINES, LEGEND_ROW * len(drafting)]
    figure, (ax, *below) = new_figure(colours, heights)
    longest = max([1, *(len(row["acceptance_by_position"]) for row in drafting.values())])
    for name, row in drafting.items():
        shares = row["acceptance_by_position"]
        positions = range(1, len(shares) + 1)
        bounds = [b or [share, share] for b, share in zip(row["acceptance_by_position_interval"], shares, strict=True)]
        colour = colours(legend.roles[name])
        if name == legend.main and shares:  # more bands would hide the lines
            ax.fill_between(positions, *zip(*bounds, strict=True), color=colour, alpha=0.13, linewidth=0)  # type: ignore[arg-type]
        marker = legend.markers[name]
        ax.plot(positions, shares, color=colour, linewidth=1.8, marker=marker, markersize=4, clip_on=False)
    ax.set_ylim(0, 1)
    ax.set_xlim(0.7, longest + 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(min(longest, 10), integer=True))
    percent(ax)
    set_axis_titles(ax, colours, "position in the draft", "accepted, where all before were")
    for legend_ax in below:
        legend.draw(legend_ax, colours, list(drafting))
    return figure


def _by_total_variation(colours: Colours, legend: Legend, relaxed: dict[str, float]) -> Figure:
    """A dot for each contender, with a legend below; the table has the names of the grey ones."""
    figure, (ax, below) = new_figure(colours, [LINES, LEGEND_ROW * len(legend.coloured)])
    for name, row in legend.drafting.items():
        low, high = row["tau_interval"] or (row["tau"], row["tau"])
        ax.errorbar(
            relaxed.get(name, 0.0),
            row["tau"],
            [[max(0.0, row["tau"] - low)], [max(0.0, high - row["tau"])]],
            color=colours(legend.roles[name]),
            marker=legend.markers[name],
            markersize=6 if name == legend.main else 4.5,
            linewidth=1.4,
            clip_on=False,
        )
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=1)
    ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    set_axis_titles(
        ax, colours, "total variation from the target's distribution, a token", "tau: tokens per verification"
    )
    legend.draw(below, colours, list(legend.coloured))
    return figure


def _histograms(colours: Colours, legend: Legend, drafting: dict[str, Any]) -> Figure:
    figure, axes = new_figure(colours, [88] * len(drafting), more=46, sharex=True)
    deepest = max(len(row["accepted_histogram"]) for row in drafting.values())
    tallest = max(max(row["accepted_histogram"]) / row["rounds"] for row in drafting.values())
    for ax, (name, row) in zip(axes, drafting.items(), strict=True):
        shares = [count / row["rounds"] for count in row["accepted_histogram"]]
        ax.bar(range(len(shares)), shares, width=0.82, color=colours(legend.roles[name]))
        ax.set_ylim(0, tallest * 1.08)
        ax.set_xlim(-0.6, max(deepest, 4) - 0.4)
        ax.yaxis.set_major_locator(MaxNLocator(2))
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        percent(ax)
        words = f"{shortened(name, 40)}: {row['accepted_per_round']:.2f} a round"
        ax.set_title(words, color=colours(legend.roles[name]), fontsize=11, loc="left")
    set_axis_titles(axes[-1], colours, "drafted tokens accepted in a round")
    return figure


def _milliseconds(row: dict[str, Any]) -> float:
    return 1000 / row["tokens_per_second"]


def _time_shares(row: dict[str, Any]) -> dict[str, float]:
    """Time shares by part. Plain decoding's `draft` in older files is the loop's own work and counts as `other`."""
    shares = {part: share for part, share in row["time_share"].items() if share is not None}
    if row["proposer"] is None and "draft" in shares:
        shares["other"] = shares.get("other", 0.0) + shares.pop("draft")
    return shares


def _time_shares_text(row: dict[str, Any]) -> str:
    return " · ".join(f"{part} {100 * share:.0f} %" for part, share in _time_shares(row).items())


def _times(colours: Colours, timed: dict[str, Any]) -> Figure:
    """One bar per contender, with its name above and its shares below."""
    figure, (ax,) = new_figure(colours, [64 + TIMED_ROW * len(timed)])
    longest = max(map(_milliseconds, timed.values()))
    for place, (name, row) in enumerate(timed.items()):
        left = 0.0
        for part, share in _time_shares(row).items():
            width = share * _milliseconds(row)
            ax.barh(place, width, left=left, height=0.24, color=colours(part), linewidth=0)
            left += width
        above: Any = {"fontsize": 11, "color": colours("ink"), "va": "bottom"}
        ax.text(0, place - 0.19, shortened(name, 44), **above)
        ax.text(longest, place - 0.19, f"{_milliseconds(row):.3g} ms", ha="right", **above)
        ax.text(0, place + 0.19, _time_shares_text(row), fontsize=10, color=colours("muted"), va="top")
    ax.set_ylim(len(timed) - 0.45, -0.5)
    ax.set_yticks([])
    ax.set_xlim(0, longest)
    ax.grid(visible=False)
    set_axis_titles(ax, colours, "milliseconds per token")
    keys = [Patch(color=colours(part), label=part) for part in ("draft", "verify", "other")]
    line_legend(ax, colours, keys, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _by_part(colours: Colours, legend: Legend, drafting: list[str], parts: dict[str, Any]) -> Figure:
    figure, (ax,) = new_figure(colours, [60 + 20 * len(parts)])
    main = legend.main
    for place, row in enumerate(parts.values()):
        if (bounds := row[main]["tau_interval"]) is not None:
            colour = colours(legend.roles[main])
            ax.plot(bounds, [place, place], color=colour, linewidth=2, alpha=0.5, solid_capstyle="round")
        for name in sorted(drafting, key=lambda name: name == main):
            if (value := row[name]["tau"]) is not None:
                colour, marker = colours(legend.roles[name]), legend.markers[name]
                ax.plot(value, place, marker, markersize=6 if name == main else 4, color=colour)
    ax.set_yticks(range(len(parts)), [shortened(name, 24) for name in parts])
    ax.set_ylim(len(parts) - 0.5, -0.5)
    ax.set_xlim(1, None)
    ax.grid(axis="x", color=colours("grid"), linewidth=0.8)
    set_axis_titles(ax, colours, "tau: tokens per verification")
    return figure


# Training.


def training_plots(metrics: Sequence[dict[str, Any]]) -> list[Plot]:
    """Loss, accuracy per unroll step, simulated tau and learning rate over the lines of metrics.jsonl."""
    lines = _thinned(metrics)
    if len(lines) < 2:
        return []
    last = lines[-1]

    def words(name: str) -> str:
        value = next((line[f"validation_{name}"] for line in reversed(lines) if f"validation_{name}" in line), None)
        tail = f", {value:.3g} in validation" if value is not None else ""
        return f"{last[name]:.3g} after {last['step']} steps{tail}."

    accuracy = ", ".join(f"{share:.0%}" for share in last["accuracy"])
    return [
        Plot("loss", "Loss", words("loss"), lambda colours: _curve(colours, lines, "loss")),
        Plot(
            "accuracy",
            "Accuracy by unroll step",
            f"Steps 1 to {len(last['accuracy'])} at the end: {accuracy}.",
            lambda colours: _accuracy(colours, lines),
        ),
        Plot(
            "simulated_tau",
            "Simulated tau",
            words("simulated_tau"),
            lambda colours: _curve(colours, lines, "simulated_tau"),
        ),
        Plot(
            "learning_rate",
            "Learning rate",
            f"At most {max(line['lr'] for line in lines):.2g}.",
            lambda colours: _curve(colours, lines, "lr"),
        ),
    ]


def _thinned(metrics: Sequence[dict[str, Any]], most: int = 240) -> list[dict[str, Any]]:
    """About `most` evenly spaced lines, as many lines with validation, and the last line."""
    every = max(1, len(metrics) // most)
    validated = [i for i, line in enumerate(metrics) if "validation_loss" in line]
    kept = {*range(0, len(metrics), every), *validated[:: max(1, len(validated) // most)], *range(len(metrics))[-1:]}
    return [metrics[i] for i in sorted(kept)]


def _curve(colours: Colours, lines: list[dict[str, Any]], name: str) -> Figure:
    figure, (ax,) = new_figure(colours, [220])
    steps = [line["step"] for line in lines]
    ax.plot(steps, [line[name] for line in lines], color=colours("s1"), linewidth=1.4, label="training")
    checked = [(line["step"], line[f"validation_{name}"]) for line in lines if f"validation_{name}" in line]
    if checked:
        style: Any = {"marker": "o", "markersize": 3.5, "linewidth": 1.4}
        ax.plot(*zip(*checked, strict=True), color=colours("s2"), label="validation", **style)
        line_legend(ax, colours, ax.lines)
    _over_steps(ax, colours)
    return figure


def _accuracy(colours: Colours, lines: list[dict[str, Any]]) -> Figure:
    figure, (ax,) = new_figure(colours, [220])
    count = len(lines[-1]["accuracy"])
    steps = [line["step"] for line in lines]
    for i in range(count):
        fade = 1 - 0.6 * i / max(1, count - 1)
        style: Any = {"color": colours("s1"), "alpha": fade, "linewidth": 1.3}
        ax.plot(steps, [line["accuracy"][i] for line in lines], label=f"step {i + 1}", **style)
    ax.set_ylim(0, 1)
    percent(ax)
    _over_steps(ax, colours)
    line_legend(ax, colours, ax.lines, ncols=2)
    return figure


def _over_steps(ax: Axes, colours: Colours) -> None:
    ax.autoscale_view()
    ax.set_xlim(0, ax.dataLim.x1)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_ylim(0, None)
    set_axis_titles(ax, colours, "optimiser steps")
